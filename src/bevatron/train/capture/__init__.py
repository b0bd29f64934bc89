"""Steps and inference captured as CUDA graphs."""
