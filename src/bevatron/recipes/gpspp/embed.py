"""Embeddings of molecules in files, by a trained GPS++."""

from pathlib import Path
from typing import Any

import numpy as np

from bevatron.data.readers.molecules import MoleculeOptions
from bevatron.errors import DataError
from bevatron.files import atomic_write
from bevatron.recipes.gpspp.predict import open_source
from bevatron.recipes.gpspp.predictor import MoleculePredictor


def embed_file(
    predictor: MoleculePredictor,
    source: Path,
    out: Path,
    options: MoleculeOptions | None = None,
    *,
    atoms: bool = False,
) -> int:
    """Write embeddings of all rows of a file as npz.

    ``graph`` float32 [n, C], NaN for rows that are not molecules; ``smiles`` and ``reason`` [n];
    with ``atoms`` also ``nodes`` float32 [N, C] of the heavy atoms and their offsets ``atom_ptr``
    [n + 1]. Raises DataError if the file cannot be read or ``out`` cannot be written.

    Returns
    -------
    Number of rows.
    """
    if out.suffix != ".npz":
        raise DataError(f"{out}: expected a name that ends in .npz")
    found = predictor.embed(open_source(source, options), atoms=atoms)
    arrays: dict[str, Any] = {
        "graph": found.graph.astype(np.float32),
        "smiles": np.array(found.smiles, dtype=np.str_),
        "reason": np.array(found.reason, dtype=np.str_),
    }
    if found.nodes is not None:
        arrays |= {"nodes": found.nodes.astype(np.float32), "atom_ptr": found.atom_ptr}
    with atomic_write(out, DataError) as file:
        np.savez_compressed(file, **arrays)
    return len(found.graph)
