"""AlphaFold3."""
