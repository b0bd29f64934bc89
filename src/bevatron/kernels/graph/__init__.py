"""Operators of attention on one sparse graph."""
