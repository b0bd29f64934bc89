"""Features of proteins: what the models of structures are given, from what the readers yield."""
