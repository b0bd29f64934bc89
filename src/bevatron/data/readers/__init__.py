"""Readers: files of structures as raw samples."""
