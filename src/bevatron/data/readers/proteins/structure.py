"""A structure file as flat arrays: atoms, residues, chains, links, assemblies."""

import datetime as dt
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from bevatron.data.ragged import members, pointer
from bevatron.errors import DataError
from bevatron.typing import BoolArray, FloatArray, IntArray

Strings: TypeAlias = npt.NDArray[Any]
_Table = TypeVar("_Table", "Atoms", "Residues", "Chains")

KINDS = ("protein", "dna", "rna", "hybrid", "other", "ligand", "ion", "glycan", "water")
"""Kinds of chains; ``hybrid`` has DNA and RNA nucleotides, ``other`` is any other polymer."""

POLYMERS = KINDS[:5]

UNKNOWN_NUMBER = np.iinfo(np.int32).min
"""Author's number of residues to which the file gives none."""

MOST_ATOMS = 5_000_000
"""Maximum number of atoms of an assembly; the largest in the archive has half of that."""


@dataclass(frozen=True)
class Atoms:
    """The A atoms of a structure, sorted by residue.

    Attributes
    ----------
    name : str [A]
        ``CA``, ``O5'``; unique within a residue.
    element : uint8 [A]
        Atomic number; deuterium is 1, an unknown element 0.
    position : float32 [A, 3]
        Å.
    b_factor : float32 [A]
        Å^2; of a predicted structure its confidence. NaN if the file gives none.
    occupancy : float32 [A]
        1 if the file gives none.
    charge : int8 [A]
        Formal charge; 0 if the file gives none.
    altloc : str [A]
        Label of the alternative location that was kept, empty if there was one location.
    residue : int32 [A]
        Residue of the atom.
    """

    name: Strings
    element: npt.NDArray[np.uint8]
    position: npt.NDArray[np.float32]
    b_factor: npt.NDArray[np.float32]
    occupancy: npt.NDArray[np.float32]
    charge: npt.NDArray[np.int8]
    altloc: Strings
    residue: npt.NDArray[np.int32]


@dataclass(frozen=True)
class Residues:
    """The R residues of a structure, those without coordinates included, sorted by chain.

    Ligands, ions, waters and the sugars of a glycan are residues too.

    Attributes
    ----------
    component : str [R]
        Code in the chemical component dictionary: ``ALA``, ``MSE``, ``HEM``.
    parent : str [R]
        Standard residue that a modified one derives from (``MET`` of ``MSE``), the component
        itself if it is standard, empty if there is none.
    letter : str [R]
        One letter: that of the parent, ``X`` (protein) or ``N`` (nucleic acid) of a residue of a
        polymer without one, empty outside polymers.
    chain : int32 [R]
        Chain of the residue.
    number : int32 [R]
        Position in the sequence of its entity, from 1 (``label_seq_id``); outside polymers, or if
        the file gives no sequence, the place within the chain.
    author_number : int32 [R]
        ``auth_seq_id``; `UNKNOWN_NUMBER` of a residue without coordinates that the file does not
        number.
    insertion : str [R]
        Insertion code, empty if there is none.
    atom_ptr : int64 [R + 1]
        The atoms of residue r are ``atom_ptr[r]`` to ``atom_ptr[r + 1]``.
    """

    component: Strings
    parent: Strings
    letter: Strings
    chain: npt.NDArray[np.int32]
    number: npt.NDArray[np.int32]
    author_number: npt.NDArray[np.int32]
    insertion: Strings
    atom_ptr: IntArray

    @property
    def observed(self) -> BoolArray:
        """Whether the residue has an atom, [R]."""
        return np.diff(self.atom_ptr) > 0


@dataclass(frozen=True)
class Chains:
    """The C chains of a structure: one per ``label_asym_id``.

    Attributes
    ----------
    label : str [C]
        ``label_asym_id``; unique. A copy made by an assembly's operator has ``-2`` and so on
        appended. PDB files have none: ``Axp`` is the polymer of chain A, ``Ax1`` its first ligand.
    author : str [C]
        ``auth_asym_id``, the name of the chain in publications.
    entity : str [C]
        Chains of the same entity are copies of each other.
    kind : str [C]
        One of `KINDS`.
    residue_ptr : int64 [C + 1]
        The residues of chain c are ``residue_ptr[c]`` to ``residue_ptr[c + 1]``.
    """

    label: Strings
    author: Strings
    entity: Strings
    kind: Strings
    residue_ptr: IntArray


@dataclass(frozen=True)
class Links:
    """The L bonds that the file lists (``struct_conn``: between residues, or to metals).

    Hydrogen bonds, bonds to an image of the asymmetric unit and bonds of an alternative location
    that was not kept are left out.

    Attributes
    ----------
    atoms : int32 [L, 2]
        The bonded atoms.
    kind : str [L]
        ``covale``, ``disulf``, ``metalc`` and so on.
    """

    atoms: npt.NDArray[np.int32]
    kind: Strings


@dataclass(frozen=True)
class Assembly:
    """A biological assembly: copies of chains under rigid motions, x' = R x + t.

    Attributes
    ----------
    name : ``1``, ``2``, ``PAU``
    parts
        Labels of chains, rotations R float64 [O, 3, 3] and translations t float64 [O, 3] in Å; each
        of the O motions makes a copy of each of the chains.
    """

    name: str
    parts: tuple[tuple[tuple[str, ...], FloatArray, FloatArray], ...]


@dataclass(frozen=True, kw_only=True)
class Structure:
    """One model of an entry.

    Attributes
    ----------
    name : ``1ABC``, or what the file calls itself
    methods : ``X-RAY DIFFRACTION``, ``SOLUTION NMR``; empty if unknown
    resolution : Å; None if the file gives none
    released, deposited : dates; None if the file gives none
    model, models : number of the model that was read, and of all models in the file
    """

    name: str
    methods: tuple[str, ...] = ()
    resolution: float | None = None
    released: dt.date | None = None
    deposited: dt.date | None = None
    model: int = 1
    models: tuple[int, ...] = (1,)
    atoms: Atoms
    residues: Residues
    chains: Chains
    links: Links
    assemblies: tuple[Assembly, ...] = ()

    def sequence(self, chain: int) -> str:
        """Return the sequence of a chain in one letter per residue, missing residues included."""
        first, past = self.chains.residue_ptr[chain : chain + 2]
        return "".join(self.residues.letter[first:past].tolist())

    def take_chains(self, chains: Sequence[int] | IntArray) -> "Structure":
        """Return the structure of some of the chains, in the order given; links among them stay.

        Raises ValueError if a chain is named twice.
        """
        wanted = np.asarray(chains, dtype=np.int64)
        if len(np.unique(wanted)) != len(wanted):
            raise ValueError("a chain is named twice")
        residues, residue_ptr = members(self.chains.residue_ptr, wanted)
        return self._taken(wanted, residues, residue_ptr)

    def take_atoms(self, keep: BoolArray) -> "Structure":
        """Return the structure of some of the atoms; all residues stay.

        Parameters
        ----------
        keep : one truth value per atom: ``structure.atoms.element != 1`` drops the hydrogens
        """
        kept = np.flatnonzero(keep)
        counts = np.bincount(self.atoms.residue[kept], minlength=len(self.residues.number))
        residues = replace(self.residues, atom_ptr=pointer(counts))
        links = _renumbered(self.links, kept, len(keep))
        return replace(self, atoms=_take(self.atoms, kept), residues=residues, links=links)

    def assembly(self, name: str = "1") -> "Structure":
        """Build a biological assembly.

        Links stay within a copy: both atoms under the same operator. Raises DataError if there is
        none of that name, it has no chain, or more than `MOST_ATOMS` atoms.

        Parameters
        ----------
        name : one of ``assemblies``; a file without any is its own assembly ``1``
        """
        if not self.assemblies and name == "1":
            return self
        known = {assembly.name: assembly for assembly in self.assemblies}
        if name not in known:
            listed = ", ".join(known) or "1"
            raise DataError(f"{self.name}: has no assembly '{name}'; choose one of {listed}")
        labels: dict[str, int] = {text: i for i, text in enumerate(self.chains.label.tolist())}
        copies: list[tuple[IntArray, FloatArray, FloatArray]] = []
        for chains, rotations, translations in known[name].parts:
            wanted = sorted(labels[text] for text in chains if text in labels)
            if wanted:
                motions = zip(rotations, translations, strict=True)
                copies += [(np.array(wanted), r, t) for r, t in motions]
        if not copies:
            raise DataError(f"{self.name}: no chain of assembly '{name}' has atoms")
        sizes = np.diff(self.residues.atom_ptr[self.chains.residue_ptr])
        size = sum(int(sizes[wanted].sum()) for wanted, _, _ in copies)
        if size > MOST_ATOMS:
            raise DataError(
                f"{self.name}: assembly '{name}' has {size:,} atoms, more than {MOST_ATOMS:,}; "
                "leave the entry out or take another assembly"
            )
        return self._assembled(copies)

    def _assembled(self, copies: list[tuple[IntArray, FloatArray, FloatArray]]) -> "Structure":
        chains = np.concatenate([wanted for wanted, _, _ in copies])
        residues, residue_ptr = members(self.chains.residue_ptr, chains)
        whole = self._taken(chains, residues, residue_ptr)
        ends = np.cumsum([0] + [len(wanted) for wanted, _, _ in copies])
        edges = whole.residues.atom_ptr[residue_ptr[ends]]
        position = whole.atoms.position.astype(np.float64)
        for copy, (_, rotation, translation) in enumerate(copies):
            part = slice(edges[copy], edges[copy + 1])
            position[part] = position[part] @ rotation.T + translation
        links = []
        for copy, (wanted, _, _) in enumerate(copies):
            part_residues, _ = members(self.chains.residue_ptr, wanted)
            kept, _ = members(self.residues.atom_ptr, part_residues)
            found = _renumbered(self.links, kept, len(self.atoms.residue))
            links.append(replace(found, atoms=found.atoms + np.int32(edges[copy])))
        return replace(
            whole,
            atoms=replace(whole.atoms, position=position.astype(np.float32)),
            chains=replace(whole.chains, label=_unique_labels(whole.chains.label)),
            links=Links(
                np.concatenate([found.atoms for found in links]),
                np.concatenate([found.kind for found in links]),
            ),
            assemblies=(),
        )

    def _taken(self, chains: IntArray, residues: IntArray, residue_ptr: IntArray) -> "Structure":
        atoms, atom_ptr = members(self.residues.atom_ptr, residues)
        chain = np.repeat(np.arange(len(chains), dtype=np.int32), np.diff(residue_ptr))
        residue = np.repeat(np.arange(len(residues), dtype=np.int32), np.diff(atom_ptr))
        unique = len(np.unique(chains)) == len(chains)
        return replace(
            self,
            atoms=replace(_take(self.atoms, atoms), residue=residue),
            residues=replace(_take(self.residues, residues), chain=chain, atom_ptr=atom_ptr),
            chains=replace(_take(self.chains, chains), residue_ptr=residue_ptr),
            links=_renumbered(self.links, atoms, len(self.atoms.residue)) if unique else self.links,
        )


_DTYPES = {
    "element": np.uint8, "charge": np.int8, "residue": np.int32, "chain": np.int32,
    "number": np.int32, "author_number": np.int32,
    **dict.fromkeys(("position", "b_factor", "occupancy"), np.float32),
}  # fmt: skip
"""Types of columns; all others are text."""

_ABSENT = {"b_factor": np.nan, "occupancy": 1, "charge": 0, "author_number": UNKNOWN_NUMBER}
"""Values of columns that are not given; of text the empty one."""


def structure_of_columns(
    name: str,
    atoms: Mapping[str, Any],
    residues: Mapping[str, Any],
    chains: Mapping[str, Any],
    links: Links | None = None,
) -> Structure:
    """Return a structure of columns without pointers.

    Of atoms ``b_factor``, ``occupancy``, ``charge`` and ``altloc``, of residues ``parent``,
    ``letter``, ``author_number`` and ``insertion`` may be left out.
    """
    num_residues, num_chains = len(residues["component"]), len(chains["label"])
    owner, chain = np.asarray(atoms["residue"]), np.asarray(residues["chain"])
    atom_ptr = np.searchsorted(owner, np.arange(num_residues + 1)).astype(np.int64)
    residue_ptr = np.searchsorted(chain, np.arange(num_chains + 1)).astype(np.int64)
    return Structure(
        name=name,
        atoms=Atoms(**_columns(Atoms, len(owner), atoms)),
        residues=Residues(**_columns(Residues, num_residues, residues), atom_ptr=atom_ptr),
        chains=Chains(**_columns(Chains, num_chains, chains), residue_ptr=residue_ptr),
        links=links or Links(np.zeros((0, 2), dtype=np.int32), np.zeros(0, dtype=np.str_)),
    )


def _columns(kind: type[Any], rows: int, given: Mapping[str, Any]) -> dict[str, Any]:
    names = [field.name for field in fields(kind) if not field.name.endswith("_ptr")]
    return {
        name: np.array(given[name], dtype=_DTYPES.get(name, np.str_))
        if name in given
        else np.full(rows, _ABSENT.get(name, ""), dtype=_DTYPES.get(name, np.str_))
        for name in names
    }


def _take(table: _Table, rows: IntArray) -> _Table:
    """Index every column that has a row per item; pointers are left to the caller."""
    columns: dict[str, Any] = {
        name: column[rows] for name, column in vars(table).items() if not name.endswith("_ptr")
    }
    return replace(table, **columns)


def _renumbered(links: Links, kept: IntArray, atoms: int) -> Links:
    """Keep the links whose atoms are both kept."""
    place = np.full(atoms, -1, dtype=np.int32)
    place[kept] = np.arange(len(kept), dtype=np.int32)
    pairs = place[links.atoms]
    whole = (pairs >= 0).all(axis=1)
    return Links(pairs[whole], links.kind[whole])


def _unique_labels(labels: Strings) -> Strings:
    seen: dict[str, int] = {}
    taken = set(labels.tolist())
    new = []
    for label in labels.tolist():
        copy = seen.get(label, 0) + 1
        while copy > 1 and f"{label}-{copy}" in taken:
            copy += 1
        seen[label] = copy
        new.append(label if copy == 1 else f"{label}-{copy}")
    return np.array(new, dtype=np.str_)
