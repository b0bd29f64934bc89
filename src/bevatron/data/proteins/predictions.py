"""Entries of molecules to be predicted: the features of a structure, with nothing resolved."""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bevatron.data.proteins.conformers import component_of_file, component_of_smiles, heavy_atoms
from bevatron.data.proteins.featurize import featurize
from bevatron.data.proteins.tokens import component_of_letter
from bevatron.data.readers.proteins.components import Component, Dictionary, open_components
from bevatron.data.readers.proteins.inputs.complexes import AtomName, Complex, Entity
from bevatron.data.readers.proteins.structure import Links, Structure, structure_of_columns
from bevatron.errors import DataError
from bevatron.typing import Arrays

_LISTED = 12


class Extended:
    """A dictionary and the user's own components, which take precedence.

    Parameters
    ----------
    own : by code
    base : where all others are looked up
    """

    def __init__(self, own: Mapping[str, Component], base: Dictionary) -> None:
        self._own, self._base = dict(own), base

    def __contains__(self, code: object) -> bool:
        return code in self._own or code in self._base

    def __getitem__(self, code: str) -> Component:
        return self._own[code] if code in self._own else self._base[code]


def featurize_inputs(given: Complex, components: Dictionary) -> tuple[Arrays, Dictionary]:
    """Compute the features of molecules without coordinates; see `featurize.featurize`.

    An ambiguous letter is the residue of its class (B aspartate), U and O of a protein are
    selenocysteine and pyrrolysine. Atoms that leave on binding are absent at the bonds that the
    user gives. Chains have the names that the user gives, entities the numbers from 0 in the order
    of the input. Raises DataError if a component is unknown, a SMILES is invalid, or a bond names
    an atom that is not there; MissingPackageError if there is a SMILES or a file of a ligand and
    RDKit is not installed.

    Parameters
    ----------
    given : what `read_inputs` made

    Returns
    -------
    entry
        See `featurize.ENTRY_FIELDS`; ``resolved`` is False everywhere.
    components
        The dictionary with the input's own components and its SMILES, for `poses.make_pools`.
    """
    known = Extended(_own_components(given), components)
    for entity in given.entities:
        if absent := [code for code in _codes(entity) if code not in known]:
            raise DataError(
                f"{_chain_of(given, entity)}: the dictionary has no component '{absent[0]}'; check "
                "the code, or give a newer components.cif"
            )
    structure = _structure(given, known)
    entry = featurize(structure, known)
    nothing = {name: np.zeros_like(entry[name]) for name in ("position", "resolved")}
    return {**entry, **nothing}, known


def _own_components(given: Complex) -> dict[str, Component]:
    own: dict[str, Component] = {}
    if given.components:
        with tempfile.TemporaryDirectory() as folder:
            source = given.components
            if isinstance(source, str):
                text, source = source, Path(folder) / "components.cif"
                source.write_text(text)
            # The mapped file outlives its name.
            try:
                listed = open_components(source, Path(folder) / "components.arrow")
            except DataError as error:
                own_text = f"{given.where}, userCCD"
                raise DataError(str(error).replace(f"{folder}/components.cif", own_text)) from None
            own |= {code: listed[code] for code in listed}
    for entity in given.entities:
        code = _own_code(entity)
        if entity.smiles:
            try:
                own[code] = component_of_smiles(entity.smiles, code)
            except DataError as error:
                raise DataError(f"{_chain_of(given, entity)}: {error}") from None
        elif entity.file is not None:
            own[code] = component_of_file(entity.file, code)
    return own


def _chain_of(given: Complex, entity: Entity) -> str:
    return f"{given.where}, chain {entity.chains[0]}"


def _own_code(entity: Entity) -> str:
    """Name a ligand that has no code after its first chain; no code of a dictionary has a colon."""
    return f"LIGAND:{entity.chains[0]}"


def _codes(entity: Entity) -> list[str]:
    """Components of the residues of an entity."""
    if entity.kind == "ligand":
        return list(entity.codes) or [_own_code(entity)]
    codes = [component_of_letter(entity.kind, letter) for letter in entity.sequence]
    for modification in entity.modifications:
        codes[modification.position - 1] = modification.code
    return codes


@dataclass
class _Rows:
    """Rows of the tables of a structure, appended one by one."""

    residues: list[tuple[str, str, int, int]] = field(default_factory=list)
    chains: list[tuple[str, str, str]] = field(default_factory=list)
    atoms: list[tuple[str, int, int]] = field(default_factory=list)
    place: dict[tuple[int, str], int] = field(default_factory=dict)
    first: dict[str, int] = field(default_factory=dict)


def _structure(given: Complex, components: Dictionary) -> Structure:
    """Lay the molecules out as a structure whose atoms are all at the origin."""
    rows = _Rows()
    for number, entity in enumerate(given.entities):
        codes = _codes(entity)
        letters = entity.sequence or [""] * len(codes)
        for label in entity.chains:
            rows.first[label] = len(rows.residues)
            rows.chains.append((label, str(number), entity.kind))
            chain = len(rows.chains) - 1
            for place, (code, letter) in enumerate(zip(codes, letters, strict=True)):
                rows.residues.append((code, letter, chain, place + 1))
    links = [tuple(_located(atom, rows, components, given) for atom in b) for b in given.bonds]
    links += _ring_bonds(given, rows, components)
    bonded = {end for link in links for end in link}
    for residue, (code, letter, *_) in enumerate(rows.residues):
        component = components[code]
        ends = {name for owner, name in bonded if owner == residue} if bonded else set()
        gone = _gone(component, ends, polymer=bool(letter))
        for name, element in _heavy(component):
            if name not in gone:
                rows.place[residue, name] = len(rows.atoms)
                rows.atoms.append((name, element, residue))
    pairs = [[rows.place[end] for end in link] for link in links]
    return _tables(given.name, rows, np.array(pairs, dtype=np.int32).reshape(-1, 2))


def _heavy(component: Component) -> list[tuple[str, int]]:
    """Names and elements of the heavy atoms."""
    heavy = heavy_atoms(component)
    return list(
        zip(component.atoms[heavy].tolist(), component.elements[heavy].tolist(), strict=True)
    )


def _gone(component: Component, ends: set[str], *, polymer: bool) -> set[str]:
    """Name the leaving atoms of a ligand: those next to an atom bonded to another residue.

    In a polymer all of them leave; `expected_atoms` puts those of its free ends back.
    """
    names = component.atoms.tolist()
    leaving = set(component.atoms[component.leaving].tolist()) - ends
    if polymer:
        return leaving
    pairs = [(names[i], names[j]) for i, j in component.bonds.tolist()]
    beside = {a for pair in pairs for a, b in (pair, pair[::-1]) if b in ends}
    return leaving & beside


def _located(
    atom: AtomName, rows: _Rows, components: Dictionary, given: Complex
) -> tuple[int, str]:
    """Find the residue and the name of an atom of a bond."""
    residue = rows.first[atom.chain] + atom.position - 1
    component = components[rows.residues[residue][0]]
    names = [name for name, _ in _heavy(component)]
    if atom.atom in names:
        return residue, atom.atom
    if atom.atom.isdigit() and ":" in component.code and int(atom.atom) < len(names):
        return residue, names[int(atom.atom)]
    listed = ", ".join(names[:_LISTED]) + (" ..." if len(names) > _LISTED else "")
    raise DataError(
        f"{given.where}: a bond names the atom '{atom.atom}' of residue {atom.position} in chain "
        f"{atom.chain}, which is {component.code} with the atoms {listed}"
    )


def _ring_bonds(
    given: Complex, rows: _Rows, components: Dictionary
) -> list[tuple[tuple[int, str], ...]]:
    """Join the ends of cyclic polymers."""
    found = []
    for entity in (entity for entity in given.entities if entity.cyclic and entity.length > 1):
        names = ("C", "N") if entity.kind == "protein" else ("O3'", "P")
        for label in entity.chains:
            ends = (AtomName(label, entity.length, names[0]), AtomName(label, 1, names[1]))
            found.append(tuple(_located(end, rows, components, given) for end in ends))
    return found


def _tables(name: str, rows: _Rows, pairs: Any) -> Structure:
    names, elements, owners = list(zip(*rows.atoms, strict=True)) or [(), (), ()]
    codes, letters, chains, places = zip(*rows.residues, strict=True)
    labels, entities, kinds = zip(*rows.chains, strict=True)
    return structure_of_columns(
        name,
        {
            "name": names,
            "element": elements,
            "position": np.zeros((len(names), 3)),
            "residue": owners,
        },
        {"component": codes, "letter": letters, "chain": chains, "number": places},
        {"label": labels, "author": labels, "entity": entities, "kind": kinds},
        Links(pairs, np.array(["covale"] * len(pairs), dtype=np.str_).reshape(-1)),
    )
