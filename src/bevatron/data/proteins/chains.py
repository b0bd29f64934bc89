"""A protein chain as AlphaFold2 is trained on: residue types and the atoms that are resolved.

Section 1.2.1 of the supplement. What can be computed from these is computed on the device
(`bevatron.data.proteins.chain_geometry`), so a chain is stored in 0.6 kB per residue.
"""

import numpy as np
import numpy.typing as npt

from bevatron.data.proteins.constants import ATOM37, CA, UNKNOWN
from bevatron.data.readers.proteins.alphabet import CLASSES, sequence_classes
from bevatron.data.readers.proteins.structure import Structure
from bevatron.data.samples import Field
from bevatron.errors import DataError
from bevatron.typing import Array, Arrays, BoolArray, IntArray

CHAIN_FIELDS: tuple[Field, ...] = (
    Field("aatype", "int8", (), True, "[L] residue type, 20 unknown"),
    Field("query", "int8", (), True, "[L] classes of the alphabet, by which alignments are found"),
    Field("residue_index", "int32", (), True, "[L] place in the sequence, from 0"),
    Field("all_atom_positions", "float32", (37, 3), True, "[L, 37, 3] Å, 0 where unresolved"),
    Field("all_atom_mask", "bool", (37,), True, "[L, 37] which atoms are resolved"),
    Field("resolution", "float32", (), False, "Å; NaN if unknown"),
)
"""Fields of a chain in a store."""

_SLOTS = {name: slot for slot, name in enumerate(ATOM37)}
_TYPES = {letter: number for number, letter in enumerate(CLASSES[:UNKNOWN])}


def chain_entry(structure: Structure, chain: int) -> Arrays:
    """Return the residues and atoms of a protein chain, missing residues included.

    Selenium of selenomethionine is the sulphur of methionine; NH1 of arginine is the one nearer CD.
    Raises DataError if the chain is not a protein or no CA of it is resolved.

    Parameters
    ----------
    chain : number of the chain in the structure

    Returns
    -------
    Arrays
        With `CHAIN_FIELDS`.
    """
    label = structure.chains.label[chain]
    if structure.chains.kind[chain] != "protein":
        raise DataError(
            f"{structure.name}, chain {label}: is {structure.chains.kind[chain]}; expected protein"
        )
    sequence = structure.sequence(chain)
    positions, mask = atoms37(structure, chain)
    if not mask[:, CA].any():
        raise DataError(f"{structure.name}, chain {label}: no CA atom is resolved")
    first, past = structure.chains.residue_ptr[chain : chain + 2]
    resolution = np.nan if structure.resolution is None else structure.resolution
    return {
        "aatype": residue_types(sequence),
        "query": sequence_classes("protein", sequence),
        "residue_index": structure.residues.number[first:past].astype(np.int32) - 1,
        "all_atom_positions": positions,
        "all_atom_mask": mask,
        "resolution": np.array(resolution, dtype=np.float32),
    }


def residue_types(sequence: str) -> Array:
    """Return the residue type of each letter, int8 [L]; a letter outside the 20 is unknown."""
    return np.array([_TYPES.get(letter, UNKNOWN) for letter in sequence], dtype=np.int8)


def atoms37(structure: Structure, chain: int) -> tuple[npt.NDArray[np.float32], BoolArray]:
    """Sort the atoms of a chain into the 37 slots: float32 [L, 37, 3] Å and bool [L, 37]."""
    first, past = structure.chains.residue_ptr[chain : chain + 2]
    atoms = slice(*structure.residues.atom_ptr[[first, past]])
    residue = structure.atoms.residue[atoms] - first
    slot = _slots(structure, atoms)
    known = slot >= 0
    positions = np.zeros((past - first, len(ATOM37), 3), dtype=np.float32)
    mask = np.zeros((past - first, len(ATOM37)), dtype=bool)
    positions[residue[known], slot[known]] = structure.atoms.position[atoms][known]
    mask[residue[known], slot[known]] = True
    _order_arginine(structure.residues.component[first:past] == "ARG", positions, mask)
    return positions, mask


def _slots(structure: Structure, atoms: slice) -> IntArray:
    """Slot of each atom, -1 if there is none."""
    names, place = np.unique(structure.atoms.name[atoms], return_inverse=True)
    slot = np.array([_SLOTS.get(name, -1) for name in names.tolist()], dtype=np.int64)[place]
    if "SE" in names:
        component = structure.residues.component[structure.atoms.residue[atoms]]
        selenium = (structure.atoms.name[atoms] == "SE") & (component == "MSE")
        slot[selenium] = _SLOTS["SD"]
    return slot


def _order_arginine(
    arginine: BoolArray, positions: npt.NDArray[np.float32], mask: BoolArray
) -> None:
    """Exchange NH1 and NH2 where NH2 is nearer CD; files often confuse them."""
    cd, nh1, nh2 = (_SLOTS[name] for name in ("CD", "NH1", "NH2"))
    whole = arginine & mask[:, cd] & mask[:, nh1] & mask[:, nh2]
    far, near = (np.linalg.norm(positions[:, x] - positions[:, cd], axis=-1) for x in (nh1, nh2))
    swap = np.flatnonzero(whole & (far > near))
    positions[swap[:, None], [nh1, nh2]] = positions[swap[:, None], [nh2, nh1]]
