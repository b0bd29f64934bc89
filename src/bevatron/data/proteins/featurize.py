"""Fixed features of one assembly for AlphaFold3: tokens, atoms, bonds, symmetries.

Sources: supplement of AlphaFold3, sections 2.6, 2.8 and 4.2, table 5. Alignments and templates are
looked up by the sequences of the chains; crops and poses are drawn for each sample.
"""

import json
from typing import Any

import numpy as np
import numpy.typing as npt

from bevatron.data.proteins.bonds import Bonds, find_bonds, polymer_ends
from bevatron.data.proteins.frames import NO_FRAME
from bevatron.data.proteins.layout import Layout, lay_out
from bevatron.data.proteins.tokens import LIGAND, residue_class
from bevatron.data.ragged import count_up, pointer
from bevatron.data.readers.proteins.components import Dictionary
from bevatron.data.readers.proteins.structure import POLYMERS, Structure
from bevatron.data.samples import Field
from bevatron.errors import DataError
from bevatron.typing import Array, Arrays, BoolArray, IntArray

ENTRY_FIELDS = (
    Field("restype", "int8", (), True, "[N] class of the residue, of the alphabet of 32"),
    Field("residue_index", "int32", (), True, "[N] number in the chain, from 1"),
    Field("asym_id", "int32", (), True, "[N] chain, from 1"),
    Field("entity_id", "int32", (), True, "[N] entity, from 1; copies have the same"),
    Field("sym_id", "int32", (), True, "[N] copy of its entity, from 1"),
    Field("molecule_type", "int8", (), True, "[N] 0 protein, 1 RNA, 2 DNA, 3 ligand"),
    Field("num_atoms", "int32", (), True, "[N] heavy atoms; the token's atoms follow each other"),
    Field("centre_atom", "int32", (), True, "[N] CA, C1' or the atom"),
    Field("representative_atom", "int32", (), True, "[N] CB (CA), C4 or C2, or the atom"),
    Field("frame_atoms", "int32", (3,), True, "[N] atoms a, b, c of the frame; -1 without one"),
    Field("has_frame", "bool", (), True, "[N] whether there is a frame"),
    Field("column", "int32", (), True, "[N] place in the chain's sequence from 0, -1: no polymer"),
    Field("ref_element", "uint8", (), True, "[A] atomic number, 0 if unknown"),
    Field("ref_charge", "int8", (), True, "[A] formal charge"),
    Field("ref_atom_name_chars", "uint8", (4,), True, "[A] ord(c) - 32, 0 after the name's end"),
    Field("ref_space_uid", "int32", (), True, "[A] residue of the entry, from 0 to U - 1"),
    Field("position", "float32", (3,), True, "[A] Å, 0 if unresolved"),
    Field("resolved", "bool", (), True, "[A] whether the atom was observed"),
    Field("pose_atom", "int32", (), True, "[A] place among the heavy atoms of its component"),
    Field("entity_atom", "int32", (), True, "[A] number in its entity; the same in all copies"),
    Field("component", "int64", (), True, "[U] component_key, by which its poses are found"),
    Field("token_bonds", "int32", (2,), True, "[E] pairs of tokens, both directions"),
    Field("bonds", "int32", (2,), True, "[B] all covalent bonds of atoms, each once"),
    Field("polymer_ligand_bonds", "int32", (2,), True, "[P] those of a polymer and a ligand"),
    Field("permutation_ptr", "int64", (), True, "[U + 1] where a residue's permutations begin"),
    Field(
        "permutation_atoms",
        "int32",
        (),
        True,
        "permutations of each residue's n atoms, [permutations, n] row after row, places in the "
        "residue, the identity first; nothing if there is only the identity",
    ),
    Field("molecule_id", "int32", (), True, "[C] chains joined by bonds have the same, from 1"),
    Field("molecule_entity", "int32", (), True, "[C] molecules of equal chains, from 1"),
    Field("resolution", "float32", (), False, "Å, NaN if unknown"),
    Field("description", "uint8", (), True, "JSON of names, dates, chains and sequences"),
)
"""Fields of an entry: N tokens, A atoms, U residues, C chains."""


def featurize(
    structure: Structure, components: Dictionary, *, max_tokens: int | None = None
) -> Arrays:
    """Compute the fixed features of an assembly.

    Tokens are in the order of the structure. Atoms that a residue has but the file lacks are there,
    not resolved. Unlike Protenix's: chains are not sorted by kind; numbers of chains, entities and
    copies begin at 1; ``ref_element`` is the atomic number, not its class; ``frame_atoms`` of a
    token without a frame are all -1; residues that follow each other in a sequence but were
    observed more than 2.4 Å apart (a depsipeptide) are not bonded. Raises DataError if no polymer
    or ligand is left, there are too many tokens, or a position is not finite.

    Parameters
    ----------
    structure : one assembly: ``read_structure(path).assembly("1")``
    components : the chemical component dictionary
    max_tokens : more tokens are an error; None for any number

    Returns
    -------
    Arrays
        See `ENTRY_FIELDS`.
    """
    layout = lay_out(structure, components)
    if max_tokens is not None and layout.num_tokens > max_tokens:
        raise DataError(
            f"{structure.name}: has {layout.num_tokens:,} tokens, more than {max_tokens:,}; leave "
            "the entry out or allow more"
        )
    token_of_atom = _token_of_atom(layout)
    bonds = find_bonds(layout, token_of_atom)
    chains = _chain_numbers(layout)
    resolution = structure.resolution
    return {
        **_token_arrays(layout, chains, token_of_atom),
        **_atom_arrays(layout, chains),
        "component": np.array([variant.key for variant in layout.variants], dtype=np.int64),
        "token_bonds": bonds.tokens,
        "bonds": bonds.atoms,
        "polymer_ligand_bonds": bonds.atoms[bonds.polymer_ligand],
        **_permutation_arrays(layout, bonds),
        **_molecule_arrays(layout, chains["entity_id"], bonds),
        "resolution": np.array(np.nan if resolution is None else resolution, dtype=np.float32),
        "description": _description(layout),
    }


def describe(entry: Arrays) -> dict[str, Any]:
    """Return the description of an entry: its chains and where it comes from.

    Returns
    -------
    dict
        ``name``, ``methods``, ``released``, ``deposited`` (ISO dates or None), ``components``
        (codes, for `poses.prepare_poses`), ``left_out`` (codes that the dictionary lacks) and
        ``chains``: for each ``label``, ``author``, ``entity``, ``kind``, ``sequence`` (empty
        outside polymers).
    """
    return dict(json.loads(np.asarray(entry["description"]).tobytes()))


def _token_of_atom(layout: Layout) -> npt.NDArray[np.int32]:
    """Token of each atom: that of its residue, or one for each atom."""
    sizes = np.diff(layout.atom_ptr)
    single = np.diff(layout.token_ptr) != 1
    first = np.repeat(layout.token_ptr[:-1], sizes)
    return (first + np.where(np.repeat(single, sizes), count_up(sizes), 0)).astype(np.int32)


def _token_arrays(
    layout: Layout, chains: dict[str, Array], token_of_atom: Array
) -> dict[str, Array]:
    structure, of_token = layout.structure, layout.residue_of_token
    residues = structure.residues
    chain = residues.chain[layout.residue]
    polymer = np.isin(structure.chains.kind[chain], POLYMERS)
    column = np.where(polymer, layout.residue - structure.chains.residue_ptr[chain], -1)
    letters = residues.letter[layout.residue].tolist()
    restype = [
        variant.standard.restype
        if variant.standard
        else residue_class(molecule, letter, variant.component.letter)
        for variant, letter, molecule in zip(
            layout.variants, letters, layout.molecule.tolist(), strict=True
        )
    ]
    first = layout.atom_ptr[of_token]

    def atoms(name: str) -> npt.NDArray[np.int32]:
        found = np.concatenate([getattr(variant, name) for variant in layout.variants])
        shifted = found + first.reshape(-1, *[1] * (found.ndim - 1))
        return np.where(found < 0, NO_FRAME, shifted).astype(np.int32)

    frames = atoms("frame")
    has_frame: BoolArray = np.all(frames >= 0, axis=1)
    return {
        "restype": np.array(restype, dtype=np.int8)[of_token],
        "residue_index": residues.number[layout.residue][of_token].astype(np.int32),
        **{name: numbers[layout.chain][of_token] for name, numbers in chains.items()},
        "molecule_type": layout.molecule[of_token],
        "num_atoms": np.bincount(token_of_atom, minlength=layout.num_tokens).astype(np.int32),
        "centre_atom": atoms("centre"),
        "representative_atom": atoms("representative"),
        "frame_atoms": frames,
        "has_frame": has_frame,
        "column": column[of_token].astype(np.int32),
    }


def _atom_arrays(layout: Layout, chains: dict[str, Array]) -> dict[str, Array]:
    def joined(name: str) -> Array:
        return np.concatenate([getattr(variant, name) for variant in layout.variants])

    resolved = np.asarray(layout.source >= 0)
    position = np.zeros((layout.num_atoms, 3), dtype=np.float32)
    position[resolved] = layout.structure.atoms.position[layout.source[resolved]]
    row = joined("row")
    return {
        "ref_element": joined("element"),
        "ref_charge": joined("charge"),
        "ref_atom_name_chars": joined("chars"),
        "ref_space_uid": layout.residue_of_atom,
        "position": position,
        "resolved": resolved,
        "pose_atom": row,
        "entity_atom": _entity_atoms(layout, chains["entity_id"], row.astype(np.int64)),
    }


def _chain_numbers(layout: Layout) -> dict[str, Array]:
    """Enumerate chains, entities in order of appearance, and the copies of each, [C]."""
    entities: dict[str, int] = {}
    copies: dict[int, int] = {}
    entity_id, sym_id = [], []
    for label in layout.structure.chains.entity[layout.chains].tolist():
        entity = entities.setdefault(label, len(entities) + 1)
        copies[entity] = copies.get(entity, 0) + 1
        entity_id.append(entity)
        sym_id.append(copies[entity])
    return {
        "asym_id": np.arange(1, len(layout.chains) + 1, dtype=np.int32),
        "entity_id": np.array(entity_id, dtype=np.int32),
        "sym_id": np.array(sym_id, dtype=np.int32),
    }


def _entity_atoms(layout: Layout, entity_id: Array, row: IntArray) -> npt.NDArray[np.int32]:
    """Enumerate the atoms that any copy of an entity has, by residue, component and atom.

    Copies differ in atoms at their ends, at links, and where a residue is another component.
    """
    codes = {key: i for i, key in enumerate(dict.fromkeys(v.key for v in layout.variants))}
    number = layout.structure.residues.number[layout.residue].astype(np.int64)
    parts = (
        entity_id[layout.chain].astype(np.int64),
        number - number.min(),
        np.array([codes[variant.key] for variant in layout.variants], dtype=np.int64),
    )
    place = np.zeros(len(layout.variants), dtype=np.int64)
    for part in parts:
        place = place * (int(part.max()) + 1) + part
    of_atom = layout.residue_of_atom
    place = place[of_atom] * (int(row.max()) + 1) + row
    _, rank = np.unique(place, return_inverse=True)
    entity = parts[0][of_atom]
    first = np.full(int(entity.max()) + 1, len(rank), dtype=np.int64)
    np.minimum.at(first, entity, rank)
    return (rank - first[entity]).astype(np.int32)


def _permutation_arrays(layout: Layout, bonds: Bonds) -> dict[str, Array]:
    of_atom = layout.residue_of_atom
    fixed: dict[int, set[int]] = {}
    for atom in bonds.atoms[bonds.between].ravel().tolist():
        residue = int(of_atom[atom])
        fixed.setdefault(residue, set()).add(atom - int(layout.atom_ptr[residue]))
    parts = [np.empty(0, dtype=np.int32)]
    counts = []
    for residue, (variant, molecule) in enumerate(
        zip(layout.variants, layout.molecule.tolist(), strict=True)
    ):
        if molecule != LIGAND:  # also where a chain is interrupted
            ends = (variant.places.get(end) for end in polymer_ends(molecule))
            fixed.setdefault(residue, set()).update(end for end in ends if end is not None)
        found = variant.permutations(frozenset(fixed.get(residue, ())))
        counts.append(found.size if len(found) > 1 else 0)
        if len(found) > 1:
            parts.append(found.ravel())
    return {
        "permutation_ptr": pointer(counts),
        "permutation_atoms": np.concatenate(parts),
    }


def _molecule_arrays(layout: Layout, entity_id: Array, bonds: Bonds) -> dict[str, Array]:
    """Join chains that are bonded to each other."""
    chain_of_atom = layout.chain[layout.residue_of_atom]
    molecule: IntArray = np.arange(len(layout.chains))
    for first, second in chain_of_atom[bonds.atoms[bonds.between]].tolist():
        if molecule[first] != molecule[second]:
            pair = molecule[[first, second]]
            molecule[molecule == pair.max()] = pair.min()
    number = np.unique(molecule, return_inverse=True)[1]
    members: dict[int, list[int]] = {}
    for chain, joined in enumerate(number.tolist()):
        members.setdefault(joined, []).append(int(entity_id[chain]))
    kinds: dict[tuple[int, ...], int] = {}
    kind = [kinds.setdefault(tuple(sorted(members[m])), len(kinds) + 1) for m in sorted(members)]
    return {
        "molecule_id": (number + 1).astype(np.int32),
        "molecule_entity": np.array(kind, dtype=np.int32)[number],
    }


def _description(layout: Layout) -> npt.NDArray[np.uint8]:
    structure = layout.structure
    columns = (structure.chains.label, structure.chains.author, structure.chains.entity)
    chains = [
        {
            "label": str(columns[0][chain]),
            "author": str(columns[1][chain]),
            "entity": str(columns[2][chain]),
            "kind": str(structure.chains.kind[chain]),
            "sequence": structure.sequence(chain),
        }
        for chain in layout.chains.tolist()
    ]
    words = {
        "name": structure.name,
        "methods": structure.methods,
        "released": structure.released and structure.released.isoformat(),
        "deposited": structure.deposited and structure.deposited.isoformat(),
        "components": sorted({variant.component.code for variant in layout.variants}),
        "left_out": layout.left_out,
        "chains": chains,
    }
    return np.frombuffer(json.dumps(words).encode(), dtype=np.uint8)
