"""Pure mathematics on tensors: irreps, harmonics, radial bases."""
