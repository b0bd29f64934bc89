"""AlphaFold3: trunk, diffusion module, confidence head and losses."""
