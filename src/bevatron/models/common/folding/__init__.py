"""Equations that AlphaFold2 and AlphaFold3 share."""
