"""Entries of made-up residues, without a structure, and pools of poses for them."""

import json

import numpy as np

from bevatron.data.proteins.chain_index import INDEX_FIELDS, index_of
from bevatron.data.proteins.featurize import ENTRY_FIELDS
from bevatron.data.proteins.poses import collected

ATOMS = 8  # of a residue


def made_up_entry(lengths, seed=0, released="2020-02-03"):
    """Protein chains of that many residues, each of eight atoms in a line."""
    rng = np.random.default_rng(seed)
    tokens = sum(lengths)
    asym_id = np.repeat(np.arange(1, len(lengths) + 1), lengths).astype(np.int32)
    column = np.concatenate([np.arange(n) for n in lengths]).astype(np.int32)
    first = np.arange(tokens, dtype=np.int32) * ATOMS
    atoms = tokens * ATOMS
    restype = rng.integers(0, 20, tokens).astype(np.int8)
    letters = np.array(list("ARNDCQEGHILKMFPSTWYV"))
    chains = [
        {
            "label": chr(64 + number),
            "author": "A",
            "entity": str(number),
            "kind": "protein",
            "sequence": "".join(letters[restype[asym_id == number]]),
        }
        for number in range(1, len(lengths) + 1)
    ]
    words = {"name": "x", "methods": [], "released": released, "deposited": None}
    words |= {"components": ["X"], "left_out": [], "chains": chains}
    numbers = np.arange(1, len(lengths) + 1, dtype=np.int32)
    return {
        "restype": restype,
        "residue_index": column + 1,
        "asym_id": asym_id,
        "entity_id": asym_id,
        "sym_id": np.ones(tokens, dtype=np.int32),
        "molecule_type": np.zeros(tokens, dtype=np.int8),
        "num_atoms": np.full(tokens, ATOMS, dtype=np.int32),
        "centre_atom": first + 1,
        "representative_atom": first + 2,
        "frame_atoms": first[:, None] + np.arange(3, dtype=np.int32),
        "has_frame": np.ones(tokens, dtype=np.bool_),
        "column": column,
        "ref_element": np.full(atoms, 6, dtype=np.uint8),
        "ref_charge": np.zeros(atoms, dtype=np.int8),
        "ref_atom_name_chars": np.full((atoms, 4), 33, dtype=np.uint8),
        "ref_space_uid": np.repeat(np.arange(tokens), ATOMS).astype(np.int32),
        "position": (rng.normal(size=(atoms, 3)) * 12).astype(np.float32),
        "resolved": rng.random(atoms) < 0.95,
        "pose_atom": np.tile(np.arange(ATOMS), tokens).astype(np.int32),
        "entity_atom": np.concatenate([np.arange(n * ATOMS) for n in lengths]).astype(np.int32),
        "component": np.full(tokens, 5, dtype=np.int64),
        "token_bonds": np.empty((0, 2), dtype=np.int32),
        "bonds": np.empty((0, 2), dtype=np.int32),
        "polymer_ligand_bonds": np.empty((0, 2), dtype=np.int32),
        "permutation_ptr": np.zeros(tokens + 1, dtype=np.int64),
        "permutation_atoms": np.empty(0, dtype=np.int32),
        "molecule_id": numbers,
        "molecule_entity": numbers,
        "resolution": np.array(2.0, dtype=np.float32),
        "description": np.frombuffer(json.dumps(words).encode(), dtype=np.uint8),
    }


def made_up_poses():
    pool = np.random.default_rng(0).normal(size=(1, ATOMS, 3)).astype(np.float32)
    return collected({5: pool})


STORED = (*ENTRY_FIELDS, *INDEX_FIELDS)


def indexed(lengths, seed=0, released="2020-02-03"):
    entry = made_up_entry(lengths, seed, released)
    return entry | index_of(entry)


def empty_entry():
    return {f.name: np.zeros((0, *f.shape) if f.ragged else f.shape, f.dtype) for f in STORED}
