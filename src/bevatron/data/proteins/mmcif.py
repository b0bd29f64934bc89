"""Structures written as mmCIF, the format of predictions, and as PDB."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from bevatron.data.readers.proteins.cif import gemmi
from bevatron.data.readers.proteins.structure import POLYMERS, UNKNOWN_NUMBER, Structure

_POLYMER_TYPES = {
    "protein": "polypeptide(L)",
    "dna": "polydeoxyribonucleotide",
    "rna": "polyribonucleotide",
    "hybrid": "polydeoxyribonucleotide/polyribonucleotide hybrid",
    "other": "other",
}
_ENTITY_TYPES = {"water": "water", "glycan": "branched"}


def format_mmcif(structure: Structure, notes: Mapping[str, str] = {}) -> str:
    """Format a structure as mmCIF; MissingPackageError if gemmi is not installed.

    Entities and their sequences, chains, links and atoms are written; residues without atoms stand
    in the sequences. Reading the text gives the same arrays, positions to 0.001 Å.

    Parameters
    ----------
    structure : its B-factors are written as they are; pLDDT for a prediction
    notes : items of the category ``_bevatron``, such as the scores of a prediction
    """
    cif = gemmi().cif
    document = cif.Document()
    # The name of a block is of printable ASCII without blanks.
    entry = re.sub(r"[^!-~]", "_", structure.name) or "structure"
    block = document.add_new_block(entry)
    block.set_pair("_entry.id", cif.quote(entry))
    for name, note in notes.items():
        block.set_pair(f"_bevatron.{name}", cif.quote(note))
    _add_entities(block, structure)
    _add_links(block, structure)
    _add_atoms(block, structure)
    text: str = document.as_string()
    return text


def format_pdb(mmcif: str) -> str:
    """Format what `format_mmcif` wrote of one chain as PDB.

    A chain whose label has several bytes, which PDB has no room for, becomes A.
    """
    structure = gemmi().make_structure_from_block(gemmi().cif.read_string(mmcif)[0])
    structure.setup_entities()
    (chain,) = structure[0]
    if len(chain.name.encode()) > 1:
        chain.name = "A"
    text: str = structure.make_pdb_string()
    return text


def _add_entities(block: Any, structure: Structure) -> None:
    """Write entities, their sequences and their chains."""
    chains, residues = structure.chains, structure.residues
    first = {entity: c for c, entity in reversed(list(enumerate(chains.entity.tolist())))}
    kinds = {entity: str(chains.kind[c]) for entity, c in first.items()}
    types = [
        "polymer" if kind in POLYMERS else _ENTITY_TYPES.get(kind, "non-polymer")
        for kind in kinds.values()
    ]
    _add(block, "_entity", {"id": kinds, "type": types})
    polymers = [entity for entity, kind in kinds.items() if kind in POLYMERS]
    copies = {
        entity: ",".join(chains.author[chains.entity == entity].tolist()) for entity in polymers
    }
    _add(block, "_entity_poly", {
        "entity_id": polymers,
        "type": [_POLYMER_TYPES[kinds[entity]] for entity in polymers],
        "pdbx_strand_id": copies.values(),
        "pdbx_seq_one_letter_code_can": [structure.sequence(first[each]) for each in polymers],
    })  # fmt: skip
    rows: list[tuple[str, int, str]] = []
    for entity in polymers:
        of_chain = slice(*chains.residue_ptr[first[entity] : first[entity] + 2])
        numbers = residues.number[of_chain].tolist()
        components = residues.component[of_chain].tolist()
        rows += [(entity, n, code) for n, code in zip(numbers, components, strict=True)]
    columns = list(zip(*rows, strict=True)) or [(), (), ()]
    _add(block, "_entity_poly_seq", dict(zip(("entity_id", "num", "mon_id"), columns, strict=True)))
    modified = (residues.parent != "") & (residues.parent != residues.component)
    pairs = sorted({*zip(residues.component[modified], residues.parent[modified], strict=True)})
    _add(block, "_pdbx_struct_mod_residue", {
        "label_comp_id": [code for code, _ in pairs],
        "parent_comp_id": [parent for _, parent in pairs],
    })  # fmt: skip
    _add(block, "_struct_asym", {"id": chains.label.tolist(), "entity_id": chains.entity.tolist()})


def _add_links(block: Any, structure: Structure) -> None:
    atoms, residues, chains = structure.atoms, structure.residues, structure.chains
    columns: dict[str, Sequence[Any]] = {
        "id": [f"{kind}{i + 1}" for i, kind in enumerate(structure.links.kind.tolist())],
        "conn_type_id": structure.links.kind.tolist(),
    }
    for side in (1, 2):
        end = structure.links.atoms[:, side - 1]
        of = atoms.residue[end]
        columns |= {
            f"ptnr{side}_label_asym_id": chains.label[residues.chain[of]].tolist(),
            f"ptnr{side}_label_comp_id": residues.component[of].tolist(),
            f"ptnr{side}_label_seq_id": _sequence_numbers(structure, of),
            f"ptnr{side}_label_atom_id": atoms.name[end].tolist(),
            f"ptnr{side}_auth_seq_id": _author_numbers(structure, of),
            f"pdbx_ptnr{side}_PDB_ins_code": _or_nothing(residues.insertion[of].tolist()),
            f"ptnr{side}_symmetry": ["1_555"] * len(end),
        }
    _add(block, "_struct_conn", columns)


def _add_atoms(block: Any, structure: Structure) -> None:
    atoms, residues, chains = structure.atoms, structure.residues, structure.chains
    of = atoms.residue
    chain = residues.chain[of]
    is_polymer = np.isin(chains.kind, POLYMERS)[chain]
    symbols = {int(z): gemmi().Element(int(z)).name for z in np.unique(atoms.element)}
    x, y, z = ([f"{value:.3f}" for value in column] for column in atoms.position.T.tolist())
    _add(block, "_atom_site", {
        "group_PDB": np.where(is_polymer, "ATOM", "HETATM").tolist(),
        "id": range(1, len(of) + 1),
        "type_symbol": [symbols[number] for number in atoms.element.tolist()],
        "label_atom_id": atoms.name.tolist(),
        "label_alt_id": _or_nothing(atoms.altloc.tolist()),
        "label_comp_id": residues.component[of].tolist(),
        "label_asym_id": chains.label[chain].tolist(),
        "label_entity_id": chains.entity[chain].tolist(),
        "label_seq_id": _sequence_numbers(structure, of),
        "pdbx_PDB_ins_code": _or_nothing(residues.insertion[of].tolist()),
        "Cartn_x": x,
        "Cartn_y": y,
        "Cartn_z": z,
        "occupancy": [f"{value:.2f}" for value in atoms.occupancy.tolist()],
        "B_iso_or_equiv": [
            "?" if np.isnan(value) else f"{value:.2f}" for value in atoms.b_factor.tolist()
        ],
        "pdbx_formal_charge": atoms.charge.tolist(),
        "auth_seq_id": _author_numbers(structure, of),
        "auth_comp_id": residues.component[of].tolist(),
        "auth_asym_id": chains.author[chain].tolist(),
        "auth_atom_id": atoms.name.tolist(),
        "pdbx_PDB_model_num": [1] * len(of),
    })  # fmt: skip


def _sequence_numbers(structure: Structure, residue: Any) -> list[str]:
    """Return the place in the sequence of a polymer; a dot elsewhere."""
    is_polymer = np.isin(structure.chains.kind, POLYMERS)[structure.residues.chain[residue]]
    numbers = structure.residues.number[residue].astype(str)
    found: list[str] = np.where(is_polymer, numbers, ".").tolist()
    return found


def _author_numbers(structure: Structure, residue: Any) -> list[str]:
    """Return the author's numbers; the place in the chain where the file gave none."""
    numbers = structure.residues.author_number[residue]
    own = np.where(numbers == UNKNOWN_NUMBER, structure.residues.number[residue], numbers)
    found: list[str] = own.astype(str).tolist()
    return found


def _or_nothing(texts: Iterable[str]) -> list[str]:
    return [text or "?" for text in texts]


_AS_IS = frozenset("?.")


def _add(block: Any, category: str, columns: Mapping[str, Iterable[Any]]) -> None:
    """Add a table; one without rows is left out."""
    quote = gemmi().cif.quote
    texts = {tag: [str(value) for value in values] for tag, values in columns.items()}
    if not any(texts.values()):
        return
    quoted = {
        text: text if text in _AS_IS else quote(text)
        for each in texts.values()
        for text in set(each)
    }
    loop = block.init_loop(f"{category}.", list(texts))
    loop.set_all_values([[quoted[text] for text in each] for each in texts.values()])
