"""Features of proteins, nucleic acids and ligands, from structures to batches.

`featurize` turns a structure into an entry of AlphaFold3, `chains` into those of AlphaFold2;
`sample` and `chain_samples` draw a training sample of an entry from a seed, `crop` its crop.
"""
