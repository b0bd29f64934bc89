"""Prepared samples on disk: written once, read in microseconds."""
