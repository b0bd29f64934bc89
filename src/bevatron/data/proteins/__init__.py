"""Features of proteins, nucleic acids and ligands, from structures to batches."""
