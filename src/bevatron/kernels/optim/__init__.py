"""Operators of the optimiser."""
