"""A crop of an entry: its tokens and atoms, renumbered, and all references to them."""

from dataclasses import dataclass

import numpy as np

from bevatron.data.ragged import members, pointer
from bevatron.typing import Array, Arrays, IntArray

ABSENT = -1
"""New number of atoms and tokens outside the crop."""


@dataclass(frozen=True)
class Crop:
    """The tokens and atoms of a crop, and their new numbers.

    Attributes
    ----------
    tokens : int64 [n]
        Tokens of the entry, ascending.
    atoms : int64 [a]
        Atoms of these tokens.
    atom_to_token : int64 [a]
        Token of each atom, numbered anew.
    new_token, new_atom : int64 [N], [A]
        New number of each token and atom of the entry, or `ABSENT`.
    """

    tokens: IntArray
    atoms: IntArray
    atom_to_token: IntArray
    new_token: IntArray
    new_atom: IntArray


def crop_of(entry: Arrays, tokens: IntArray) -> Crop:
    """Collect the atoms of some tokens of an entry."""
    num_atoms = np.asarray(entry["num_atoms"], dtype=np.int64)
    atom_to_token = np.repeat(np.arange(len(tokens)), num_atoms[tokens])
    atoms, _ = members(pointer(num_atoms), tokens)
    return Crop(
        tokens,
        atoms,
        atom_to_token,
        _inverse(tokens, len(num_atoms)),
        _inverse(atoms, int(num_atoms.sum())),
    )


def _inverse(kept: IntArray, total: int) -> IntArray:
    new = np.full(total, ABSENT, dtype=np.int64)
    new[kept] = np.arange(len(kept))
    return new


def indices_of(entry: Arrays, crop: Crop) -> dict[str, Array]:
    """Return all references to tokens and atoms, renumbered.

    A frame with an atom outside the crop is dropped: ``has_frame`` is False, its atoms are 0.
    """
    frames = np.asarray(entry["frame_atoms"], dtype=np.int64)[crop.tokens]
    new_frames = np.where(frames >= 0, crop.new_atom[np.maximum(frames, 0)], ABSENT)
    listed = np.asarray(entry["has_frame"], dtype=np.bool_)[crop.tokens]
    has_frame = listed & (new_frames >= 0).all(axis=1)
    return {
        "centre_atom": crop.new_atom[np.asarray(entry["centre_atom"])[crop.tokens]],
        "representative_atom": crop.new_atom[np.asarray(entry["representative_atom"])[crop.tokens]],
        "frame_atoms": np.where(has_frame[:, None], new_frames, 0),
        "has_frame": has_frame,
        "token_bonds": _pairs(np.asarray(entry["token_bonds"]), crop.new_token),
        "polymer_ligand_bonds": _pairs(np.asarray(entry["polymer_ligand_bonds"]), crop.new_atom),
    }


def _pairs(pairs: Array, new: IntArray) -> IntArray:
    """Return the pairs that lie within the crop, renumbered."""
    numbered: IntArray = new[pairs].reshape(-1, 2)
    return numbered[(numbered >= 0).all(axis=1)]


def permutations_of(entry: Arrays, crop: Crop) -> dict[str, Array]:
    """Return the permutations of atoms that stay in the crop, and the residues' new numbers.

    A residue that the crop cuts keeps the permutations that map its atoms in the crop onto each
    other.

    Returns
    -------
    dict
        ``ref_space_uid`` int64 [a], from 0 to U - 1; ``permutation_ptr`` int64 [U + 1] and
        ``permutation_atoms`` int64, as in an entry.
    """
    residue_of_atom = np.asarray(entry["ref_space_uid"])
    used, uid, sizes = np.unique(
        residue_of_atom[crop.atoms], return_inverse=True, return_counts=True
    )
    ptr = np.asarray(entry["permutation_ptr"], dtype=np.int64)
    listed = np.asarray(entry["permutation_atoms"], dtype=np.int64)
    first = np.searchsorted(residue_of_atom, used)
    whole = np.searchsorted(residue_of_atom, used, side="right") - first
    counts = np.zeros(len(used), dtype=np.int64)
    parts = [np.empty(0, dtype=np.int64)]
    for place in np.flatnonzero(ptr[used + 1] > ptr[used]).tolist():
        part = listed[ptr[used[place]] : ptr[used[place] + 1]]
        if sizes[place] < whole[place]:
            kept = crop.atoms[uid == place] - first[place]
            part = _within(part.reshape(-1, whole[place]), kept)
        parts.append(part)
        counts[place] = len(part)
    return {
        "ref_space_uid": uid.astype(np.int64),
        "permutation_ptr": pointer(counts),
        "permutation_atoms": np.concatenate(parts),
    }


def _within(permutations: IntArray, kept: IntArray) -> IntArray:
    """Keep the permutations that map the kept places onto themselves, once, flat."""
    new = _inverse(kept, permutations.shape[1])
    rows = new[permutations[:, kept]]
    rows = rows[(rows >= 0).all(axis=1)]
    rows = rows[np.sort(np.unique(rows, axis=0, return_index=True)[1])]
    return rows.ravel() if len(rows) > 1 else np.empty(0, dtype=np.int64)


def copies_of(entry: Arrays, crop: Crop) -> dict[str, Array]:
    """Return the copies of the cropped molecules in the whole entry.

    A molecule is a chain, or several joined by bonds. Its copies are the molecules of the same
    entities, numbered as they follow each other; chains of two copies correspond in the order of
    their entities and then their own.

    Returns
    -------
    dict
        ``molecule`` int64 [n], of each token, from 0 to M - 1; ``molecule_entity``,
        ``molecule_copies`` (how many there are) and ``molecule_copy`` (which one it is) int64 [M];
        ``copy_position`` float32 [K, a, 3], Å, and ``copy_resolved`` bool [K, a] of each atom in
        copy k, K the largest number of copies.
    """
    chain_of_token = np.asarray(entry["asym_id"], dtype=np.int64) - 1
    molecule_of_chain = np.asarray(entry["molecule_id"], dtype=np.int64) - 1
    kind = np.asarray(entry["molecule_entity"], dtype=np.int64)
    entity = np.zeros(len(kind), dtype=np.int64)
    entity[chain_of_token] = np.asarray(entry["entity_id"])
    copy, copies, partner = _partners(molecule_of_chain, kind, entity)
    chains = chain_of_token[crop.tokens]
    present, molecule = np.unique(molecule_of_chain[chains], return_inverse=True)
    a_chain = _inverse_first(molecule_of_chain)[present]
    most = int(copies[a_chain].max())
    source = _source(entry, crop, chain_of_token, entity, partner[:, :most])
    found, place = source >= 0, np.maximum(source, 0)
    position = np.asarray(entry["position"])[place]
    position[~found] = 0.0
    return {
        "molecule": molecule.astype(np.int64),
        "molecule_entity": kind[a_chain],
        "molecule_copies": copies[a_chain],
        "molecule_copy": copy[a_chain],
        "copy_position": position,
        "copy_resolved": found & np.asarray(entry["resolved"])[place].astype(np.bool_),
    }


def _inverse_first(molecule_of_chain: IntArray) -> IntArray:
    """First chain of each molecule."""
    return np.unique(molecule_of_chain, return_index=True)[1].astype(np.int64)


def _partners(
    molecule: IntArray, kind: IntArray, entity: IntArray
) -> tuple[IntArray, IntArray, IntArray]:
    """Count the copies of molecules and find the chains that correspond.

    Returns
    -------
    copy, copies : [C]
        Which copy the molecule of a chain is, and how many there are.
    partner : [C, K]
        The chain that corresponds in copy k, or `ABSENT`.
    """
    # Chains of a molecule in the order in which they correspond.
    order = np.lexsort((np.arange(len(molecule)), entity, molecule))
    ordered = molecule[order]
    begins = np.searchsorted(ordered, ordered)
    slot = np.empty(len(order), dtype=np.int64)
    slot[order] = np.arange(len(order)) - begins
    first = _inverse_first(molecule)
    kind_of_molecule = kind[first]
    by_kind = np.argsort(kind_of_molecule, kind="stable")
    rank = np.empty(len(first), dtype=np.int64)
    sorted_kinds = kind_of_molecule[by_kind]
    rank[by_kind] = np.arange(len(first)) - np.searchsorted(sorted_kinds, sorted_kinds)
    number = np.unique(molecule, return_inverse=True)[1]
    copy = rank[number]
    copies = np.bincount(kind_of_molecule)[kind]
    table = np.full((int(kind.max()) + 1, int(slot.max()) + 1, int(copies.max())), ABSENT)
    table[kind, slot, copy] = np.arange(len(molecule))
    return copy, copies.astype(np.int64), table[kind, slot].astype(np.int64)


def _source(
    entry: Arrays, crop: Crop, chain_of_token: IntArray, entity: IntArray, partner: IntArray
) -> IntArray:
    """Find the atom that corresponds to each cropped atom in each copy, [K, a] or `ABSENT`."""
    chain_of_atom = np.repeat(chain_of_token, np.asarray(entry["num_atoms"]))
    number = np.asarray(entry["entity_atom"], dtype=np.int64)
    sizes = np.zeros(int(entity.max()) + 1, dtype=np.int64)
    np.maximum.at(sizes, entity[chain_of_atom], number + 1)
    size = sizes[entity]
    base = np.cumsum(size) - size
    table = np.full(int(size.sum()), ABSENT, dtype=np.int64)
    table[base[chain_of_atom] + number] = np.arange(len(number))
    own = chain_of_atom[crop.atoms]
    partners = partner[own].T
    source = table[base[np.where(partners >= 0, partners, own)] + number[crop.atoms]]
    return np.where(partners >= 0, source, ABSENT)
