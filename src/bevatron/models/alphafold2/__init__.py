"""AlphaFold2: structures of proteins from their alignments."""
