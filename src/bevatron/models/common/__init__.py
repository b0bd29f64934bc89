"""Shared by several models."""
