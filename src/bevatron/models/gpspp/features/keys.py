"""Keys that find equal molecules among millions, and the canonical name that confirms a match.

A key hashes every atom's neighbourhood (Weisfeiler-Lehman refinement) and sums over the molecule:
equal molecules have equal keys however they are written; stereo-isomers, and occasionally
others, share one. `canonical` distinguishes these, a hundred times slower.
"""

from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt

from bevatron.errors import require
from bevatron.typing import Array, IntArray

_ROUNDS = 8
_BASIS = ("atomic_number", "degree", "num_hydrogens", "num_radical_electrons", "in_ring")
"""Features that every set has and that do not depend on the order of the atoms."""


def graph_keys(
    columns: Mapping[str, IntArray], num_atoms: IntArray, ends: Array, num_bonds: IntArray
) -> IntArray:
    """Compute a key for each of many molecules.

    Parameters
    ----------
    columns : features of the atoms of all molecules, [N] each
    num_atoms, num_bonds : [B]
    ends : [M, 2] atoms of each bond within its molecule

    Returns
    -------
    int64 [B], never 0.
    """
    start = np.cumsum(num_atoms) - num_atoms
    bonds = np.asarray(ends, dtype=np.int64) + np.repeat(start, num_bonds)[:, None]
    label = hashed([columns[name] for name in _BASIS], int(num_atoms.sum()))
    for _ in range(_ROUNDS):
        around = np.zeros_like(label)
        own = mixed(label)
        np.add.at(around, bonds[:, 0], own[bonds[:, 1]])
        np.add.at(around, bonds[:, 1], own[bonds[:, 0]])
        label = mixed(label * np.uint64(3) + around)
    key = np.zeros(len(num_atoms), dtype=np.uint64)
    np.add.at(key, np.repeat(np.arange(len(num_atoms)), num_atoms), mixed(label))
    return np.where(key == 0, np.uint64(1), key).view(np.int64)


def canonical(smiles: str) -> str:
    """Write a molecule as RDKit's canonical SMILES."""
    chem = require("rdkit.Chem", "molecules")
    with require("rdkit.rdBase", "molecules").BlockLogs():
        graph = chem.MolFromSmiles(smiles)
        return smiles if graph is None else str(chem.MolToSmiles(graph))


def scaffold(smiles: str) -> str:
    """Write the Bemis-Murcko scaffold: rings and their linkers; empty for a chain.

    Examples
    --------
    >>> scaffold("CCc1ccccc1"), scaffold("CCO")
    ('c1ccccc1', '')
    """
    chem = require("rdkit.Chem", "molecules")
    murcko = require("rdkit.Chem.Scaffolds.MurckoScaffold", "molecules")
    with require("rdkit.rdBase", "molecules").BlockLogs():
        graph = chem.MolFromSmiles(smiles)
        if graph is None:
            return ""
        return str(chem.MolToSmiles(murcko.GetScaffoldForMol(graph), isomericSmiles=False))


def hashed(columns: Iterable[IntArray], rows: int) -> npt.NDArray[np.uint64]:
    """Hash the entries of several columns row by row."""
    label = np.zeros(rows, dtype=np.uint64)
    for column in columns:
        label = mixed(label * np.uint64(31) + column.astype(np.uint64))
    return label


def mixed(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Hash by splitmix64's last steps."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (values ^ (values >> np.uint64(31))) + np.uint64(0x9E3779B97F4A7C15)
