"""Operators of equivariant potentials."""
