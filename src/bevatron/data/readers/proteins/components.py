"""The chemical component dictionary (CCD) of the wwPDB: atoms and bonds of residues and ligands.

The dictionary's text (``components.cif``, 400 MB) is read once into an Arrow file, which is opened
memory-mapped: any number of processes share it, and only what is looked up is read.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from bevatron.data.readers.base import content_hash
from bevatron.data.readers.proteins.components_index import (
    CHECKSUM,
    FORMAT,
    KEY,
    STRUCTURE,
    read_columns,
    row_checksum,
    structure_checksum,
    write_index,
)
from bevatron.data.readers.proteins.structure import POLYMERS, Strings, Structure
from bevatron.errors import DataError, MissingPackageError, require
from bevatron.files import cache_folder, explained
from bevatron.output import note
from bevatron.typing import BoolArray

INSTALLED = "biotite"
"""In place of a file: the dictionary that comes with the package biotite."""

LARGE = 10_000_000
"""Bytes of a dictionary, also compressed, that takes seconds to index."""

_NUCLEIC = {"dna", "rna", "hybrid"}


@dataclass(frozen=True)
class Component:
    """A residue or ligand as an isolated molecule of n atoms and b bonds.

    Attributes
    ----------
    code, name, type : ``MSE``, ``SELENOMETHIONINE``, ``L-PEPTIDE LINKING`` (upper case)
    parent
        Standard residue that it derives from (``MET``); empty if there is none, or several
        (chromophores).
    letter : one letter; empty if it has none
    status : ``REL`` (released), ``OBS`` (obsolete) and so on
    replaced_by : code of the component that replaces it; empty if there is none
    atoms : str [n]
        Names of the atoms, hydrogens included.
    other_names : str [n]
        Names in files from before the remediation of 2007; as ``atoms`` where there was no other.
    elements : uint8 [n]
        Atomic numbers, 0 if unknown.
    charges : int8 [n]
        Formal charges.
    leaving : bool [n]
        Whether the atom leaves when the component is bound to a neighbour (``OXT``).
    aromatic : bool [n]
    ideal, model : float32 [n, 3]
        Computed coordinates and those of an entry, Å; NaN where there are none.
    bonds : int32 [b, 2]
        Bonded atoms.
    orders : uint8 [b]
        1, 2, 3, 4; 0 if the bond is delocalised.
    aromatic_bonds : bool [b]
    """

    code: str
    name: str
    type: str
    parent: str
    letter: str
    status: str
    replaced_by: str
    atoms: Strings
    other_names: Strings
    elements: npt.NDArray[np.uint8]
    charges: npt.NDArray[np.int8]
    leaving: BoolArray
    aromatic: BoolArray
    ideal: npt.NDArray[np.float32]
    model: npt.NDArray[np.float32]
    bonds: npt.NDArray[np.int32]
    orders: npt.NDArray[np.uint8]
    aromatic_bonds: BoolArray


class Dictionary(Protocol):
    """Components by code: `Components`, or several dictionaries as one."""

    def __contains__(self, code: object) -> bool:
        """Whether there is a component of that code."""

    def __getitem__(self, code: str) -> Component:
        """Look a component up."""


class Components:
    """A dictionary of components in an index file, by code.

    Pickles as the path of its index. Raises DataError if the file is not one, or is damaged.

    Parameters
    ----------
    index : what `open_components` made
    """

    def __init__(self, index: str | Path) -> None:
        self.path = Path(index)
        try:
            table = pa.ipc.open_file(pa.memory_map(str(index))).read_all()
            metadata = table.schema.metadata or {}
        except (OSError, pa.ArrowInvalid) as error:
            raise DataError(
                f"{index}: is not an index of components, or it is damaged ({error}); remove it to "
                "rebuild it"
            ) from None
        if metadata.get(b"format") != FORMAT:
            raise DataError(
                f"{index}: is not an index of components of this version; remove it to rebuild it"
            )
        self.key = metadata[KEY].decode()
        self._columns = {
            name: table.column(name).chunk(0) for name in table.column_names if table.num_rows
        }
        if structure_checksum(self._columns) != metadata[STRUCTURE].decode():
            raise DataError(f"{index}: is damaged; remove it to rebuild it")
        codes = self._columns["code"].to_pylist() if table.num_rows else []
        self._rows = {code: row for row, code in enumerate(codes)}

    def __reduce__(self) -> tuple[type["Components"], tuple[Path]]:
        return Components, (self.path,)

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __contains__(self, code: object) -> bool:
        return code in self._rows

    def __getitem__(self, code: str) -> Component:
        """Look a component up.

        Raises DataError if there is none of that code, or it is damaged.
        """
        if code not in self._rows:
            raise DataError(
                f"the dictionary of {len(self):,} components has no '{code}'; check the code, or "
                "give a newer components.cif"
            )
        row = self._rows[code]
        try:
            damaged = row_checksum(self._columns, row) != self._columns[CHECKSUM][row].as_py()
        except ValueError:  # no UTF-8
            damaged = True
        if damaged:
            raise DataError(
                f"{self.path}: component '{code}' is damaged, its checksum does not match; remove "
                "the file to rebuild it"
            )
        texts = ("code", "name", "type", "parent", "letter", "status", "replaced_by")
        return Component(
            **{name: self._columns[name][row].as_py() for name in texts},
            atoms=np.array(self._columns["atoms"][row].as_py(), dtype=np.str_),
            other_names=np.array(self._columns["other_names"][row].as_py(), dtype=np.str_),
            elements=self._values("elements", row),
            charges=self._values("charges", row),
            leaving=self._values("leaving", row).view(np.bool_),
            aromatic=self._values("aromatic", row).view(np.bool_),
            ideal=self._values("ideal", row).reshape(-1, 3),
            model=self._values("model", row).reshape(-1, 3),
            bonds=self._values("bonds", row).reshape(-1, 2),
            orders=self._values("orders", row),
            aromatic_bonds=self._values("aromatic_bonds", row).view(np.bool_),
        )

    def _values(self, column: str, row: int) -> npt.NDArray[Any]:
        values: npt.NDArray[Any] = self._columns[column][row].values.to_numpy(zero_copy_only=True)
        return values


def open_components(source: str | Path = INSTALLED, index: str | Path | None = None) -> Components:
    """Open a dictionary of components; the first time, or if it has changed, it is indexed.

    Raises DataError if the source is damaged, holds no components, or the index cannot be written;
    MissingPackageError if gemmi, or biotite where it is asked for, is not installed.

    Parameters
    ----------
    source
        ``components.cif`` of https://www.wwpdb.org/data/ccd or any file of components, also
        compressed; or ``biotite``: the dictionary that comes with this package.
    index
        Where the index is kept; by default next to the source, as NAME.components.arrow, or where
        that cannot be written, as in a shared folder, in ``~/.cache/bevatron/components``.
    """
    installed = str(source) == INSTALLED
    path = _installed_file() if installed else Path(source)
    try:
        key = content_hash(path)
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read ({error.strerror or error}); check the path"
        ) from None
    beside = path.with_name(f"{path.name}.components.arrow")
    own = cache_folder() / "bevatron" / "components"
    places = [beside, own / f"{key}.arrow"] if index is None else [Path(index)]
    for place in filter(Path.exists, places):
        with suppress(DataError):
            found = Components(place)
            if found.key == key:
                return found
    place = places[0]
    if index is None and not os.access(path.parent, os.W_OK):
        place = places[1]
        with explained(own, DataError):
            own.mkdir(parents=True, exist_ok=True)
    if path.stat().st_size > LARGE:
        note(f"{path}: its components are indexed, once, into {place}")
    write_index(place, read_columns(path, binary=installed), key, path)
    return Components(place)


def _installed_file() -> Path:
    try:
        package = require("biotite.structure.info", "ccd")
    except MissingPackageError as error:
        raise MissingPackageError(
            f'{error}; or give wwPDB\'s file (`components="components.cif"`; for training '
            "`data.components`)"
        ) from None
    return Path(str(package.__file__)).parent / "components.bcif"


@dataclass(frozen=True)
class ExpectedAtoms:
    """The X heavy atoms that the residues of a structure have, seen or not, sorted by residue.

    Attributes
    ----------
    name : str [X]
    element : uint8 [X]
    residue : int32 [X]
        Residue of the structure.
    atom : int32 [X]
        Atom of the structure; -1 if it was not observed.
    """

    name: Strings
    element: npt.NDArray[np.uint8]
    residue: npt.NDArray[np.int32]
    atom: npt.NDArray[np.int32]

    @property
    def observed(self) -> BoolArray:
        """Whether the atom has coordinates, [X]."""
        return np.greater_equal(self.atom, 0)


def expected_atoms(structure: Structure, components: Dictionary) -> ExpectedAtoms:
    """List the heavy atoms of every residue from the dictionary, and which were observed.

    In the order of the dictionary. Atoms that leave on binding are expected of ligands without a
    link, of the free ends of proteins (``OXT``) and nucleic acids (``OP3``), and where they were
    observed. Atoms may have their names in older files. Observed atoms that a component
    lacks are left out, as are residues that the dictionary lacks.
    """
    chains, residues, atoms = structure.chains, structure.residues, structure.atoms
    kinds = chains.kind[residues.chain].tolist()
    bonded = structure.links.atoms.ravel()
    linked = set(atoms.residue[bonded].tolist())
    sites = set(zip(atoms.residue[bonded].tolist(), atoms.name[bonded].tolist(), strict=True))
    first, last = chains.residue_ptr[:-1].tolist(), (chains.residue_ptr[1:] - 1).tolist()
    ends = {(r, "OXT") for r in last if kinds[r] == "protein" and (r, "C") not in sites}
    ends |= {(r, "OP3") for r in first if kinds[r] in _NUCLEIC and (r, "P") not in sites}
    names: list[str] = []
    elements: list[int] = []
    owners: list[int] = []
    found: list[int] = []
    heavy = _Heavy(components)
    listed = atoms.name.tolist()
    pointer = residues.atom_ptr.tolist()
    for residue, code in enumerate(residues.component.tolist()):
        if code not in components:
            continue
        seen = {listed[a]: a for a in range(pointer[residue], pointer[residue + 1])}
        known = heavy[code]
        for other in known.renamed.keys() & seen.keys():
            seen.setdefault(known.renamed[other], seen[other])
        polymer = kinds[residue] in POLYMERS
        free = not polymer and residue not in linked
        for name, element, leaving in known.atoms:
            atom = seen.get(name, -1)
            if leaving and atom < 0 and not free and (residue, name) not in ends:
                continue
            names.append(name)
            elements.append(element)
            owners.append(residue)
            found.append(atom)
    return ExpectedAtoms(
        name=np.array(names, dtype=np.str_),
        element=np.array(elements, dtype=np.uint8),
        residue=np.array(owners, dtype=np.int32),
        atom=np.array(found, dtype=np.int32),
    )


class _HeavyAtoms(NamedTuple):
    """The heavy atoms of a component: name, element, whether it leaves; and names of old files."""

    atoms: list[tuple[str, int, bool]]
    renamed: dict[str, str]


class _Heavy(dict[str, _HeavyAtoms]):
    """Heavy atoms by component."""

    def __init__(self, components: Dictionary) -> None:
        self._components = components

    def __missing__(self, code: str) -> _HeavyAtoms:
        whole = self._components[code]
        names = whole.atoms.tolist()
        rows = zip(names, whole.elements.tolist(), whole.leaving.tolist(), strict=True)
        others = zip(whole.other_names.tolist(), names, strict=True)
        # An old name may be another atom's present name, which takes precedence.
        renamed = {other: name for other, name in others if other and other not in set(names)}
        self[code] = _HeavyAtoms([row for row in rows if row[1] != 1], renamed)
        return self[code]
