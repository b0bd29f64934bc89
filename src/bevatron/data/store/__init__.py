"""Prepared samples on disk: written once, random access in microseconds."""
