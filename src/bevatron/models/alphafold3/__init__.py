"""AlphaFold3: structures of complexes of proteins, nucleic acids and ligands."""
