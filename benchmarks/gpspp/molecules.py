"""Featurises molecules for `gpspp_step.py`, which then needs no rdkit where it runs.

    python -m benchmarks.gpspp.molecules molecules.csv molecules.npz [--largest 20]

The table has SMILES in its first column, with coordinates (CXSMILES) or without, and a number in
its second. Molecules with more heavy atoms than PCQM4Mv2's training set has are left out.
"""

import argparse
import csv
import gzip
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bevatron.typing import Array

RAGGED = (
    *("atom_features", "bonds", "bond_features", "shortest_paths", "random_walk"),
    *("laplacian_vectors", "positions"),
)
FIXED = ("laplacian_values", "targets")


def save(samples: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write samples to one file: every field in one array, with lengths."""
    arrays = {name: np.concatenate([s[name] for s in samples]) for name in RAGGED}
    arrays |= {f"{name}_lengths": np.array([len(s[name]) for s in samples]) for name in RAGGED}
    np.savez_compressed(path, **arrays, **{n: np.stack([s[n] for s in samples]) for n in FIXED})


def load(path: Path) -> list[dict[str, Array]]:
    """Read what `save` wrote."""
    with np.load(path) as found:
        columns = {
            name: np.split(found[name], np.cumsum(found[f"{name}_lengths"])[:-1]) for name in RAGGED
        }
        columns |= {name: list(found[name]) for name in FIXED}
    names = list(columns)
    return [dict(zip(names, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("table", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--largest", type=int, default=20)
    arguments = parser.parse_args()
    from bevatron.models.gpspp import featurize

    opener = gzip.open if arguments.table.suffix == ".gz" else open
    with opener(arguments.table, "rt", newline="") as lines:
        rows = list(csv.reader(lines))[1:]
    samples = []
    for smiles, label, *_ in rows:
        sample = dict(featurize(smiles))
        if 0 < len(sample["atom_features"]) <= arguments.largest:
            samples.append(sample | {"targets": np.array([label], dtype=np.float32)})
    save(samples, arguments.out)
    atoms = np.mean([len(s["atom_features"]) for s in samples])
    edges = np.mean([len(s["bonds"]) for s in samples])
    print(f"{len(samples)} of {len(rows)} molecules, {atoms:.2f} atoms, {edges:.2f} edges")


if __name__ == "__main__":
    main()
