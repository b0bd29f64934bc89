"""Covalent bonds of an entry: of atoms, of tokens, and between polymers and ligands."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bevatron.data.proteins.layout import Layout
from bevatron.data.proteins.tokens import LIGAND, PROTEIN
from bevatron.data.readers.proteins.structure import POLYMERS
from bevatron.typing import Array, BoolArray

MAX_LENGTH = 2.4
"""Å; observed atoms of two residues that are farther apart are not bonded."""

_COVALENT = ("covale", "disulf", "modres")


@dataclass(frozen=True)
class Bonds:
    """Covalent bonds, each once, the smaller number first, sorted.

    Attributes
    ----------
    atoms : int32 [b, 2]
        All of them.
    between : bool [b]
        Whether it joins two residues.
    polymer_ligand : bool [b]
        Whether it joins a polymer and a ligand.
    tokens : int32 [E, 2]
        Pairs of tokens in both directions: within residues whose atoms are tokens, and between a
        ligand and another residue; a polymer's backbone bonds are not included.
    """

    atoms: npt.NDArray[np.int32]
    between: BoolArray
    polymer_ligand: BoolArray
    tokens: npt.NDArray[np.int32]


def find_bonds(layout: Layout, token_of_atom: Array) -> Bonds:
    """Collect the bonds of the components, of the chains of polymers and of the file's links.

    Metals that are coordinated are not bonded.
    """
    counts = [len(variant.bonds) for variant in layout.variants]
    inner = np.concatenate([variant.bonds for variant in layout.variants])
    inner = inner + np.repeat(layout.atom_ptr[:-1], counts)[:, None]
    outer = np.concatenate([_backbone(layout), _links(layout)])
    outer = _short(layout, np.sort(outer, axis=1))
    pairs = np.unique(np.concatenate([inner, outer]), axis=0).astype(np.int32).reshape(-1, 2)
    residue = layout.residue_of_atom[pairs]
    ligand = layout.molecule[residue] == LIGAND
    between = residue[:, 0] != residue[:, 1]
    tokens = token_of_atom[pairs]
    seen = (tokens[:, 0] != tokens[:, 1]) & (~between | ligand.any(axis=1))
    both = np.concatenate([tokens[seen], tokens[seen][:, ::-1]])
    return Bonds(
        atoms=pairs,
        between=between,
        polymer_ligand=ligand[:, 0] != ligand[:, 1],
        tokens=np.unique(both, axis=0).astype(np.int32).reshape(-1, 2),
    )


def polymer_ends(molecule: int) -> tuple[str, str]:
    """Return the atoms of a residue that bond to the next and to the previous one."""
    return ("C", "N") if molecule == PROTEIN else ("O3'", "P")


def _backbone(layout: Layout) -> Array:
    """Join residues that follow each other in a polymer's sequence."""
    residues = layout.structure.residues
    numbers = residues.number[layout.residue]
    chain = residues.chain[layout.residue]
    polymer = np.isin(layout.structure.chains.kind[chain], POLYMERS)
    follows = (np.diff(numbers) == 1) & (np.diff(chain) == 0) & polymer[1:]
    pairs = []
    for place in np.flatnonzero(follows).tolist():
        ends = polymer_ends(int(layout.molecule[place]))
        first = layout.variants[place].places.get(ends[0])
        second = layout.variants[place + 1].places.get(ends[1])
        if first is not None and second is not None:
            pairs.append((layout.atom_ptr[place] + first, layout.atom_ptr[place + 1] + second))
    return np.array(pairs, dtype=np.int64).reshape(-1, 2)


def _links(layout: Layout) -> Array:
    links = layout.structure.links
    place = np.full(len(layout.structure.atoms.residue), -1, dtype=np.int64)
    observed = np.flatnonzero(layout.source >= 0)
    place[layout.source[observed]] = observed
    covalent = [kind.startswith(_COVALENT) for kind in links.kind.tolist()]
    pairs = place[links.atoms[np.array(covalent, dtype=np.bool_)]]
    return pairs[(pairs >= 0).all(axis=1)].reshape(-1, 2)


def _short(layout: Layout, pairs: Array) -> Array:
    """Keep the pairs that are not known to be apart."""
    observed = layout.source >= 0
    position = np.zeros((layout.num_atoms, 3), dtype=np.float32)
    position[observed] = layout.structure.atoms.position[layout.source[observed]]
    length = np.linalg.norm(position[pairs[:, 0]] - position[pairs[:, 1]], axis=-1)
    kept: Array = pairs[~observed[pairs].all(axis=1) | (length < MAX_LENGTH)]
    return kept
