"""Operators on pairs, as AlphaFold2 and AlphaFold3 have them."""
