"""The atoms of one model: which locations and components are kept, sorted by residue."""

import itertools
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from bevatron.data.readers.elements import PDB_NUMBERS
from bevatron.data.readers.proteins.cif import Table
from bevatron.data.readers.proteins.structure import UNKNOWN_NUMBER, Strings
from bevatron.errors import DataError
from bevatron.typing import BoolArray, FloatArray, IntArray

FARTHEST = 1e6
"""Å; squares of larger coordinates have no digits left in 32 bits."""


@dataclass(frozen=True)
class Sites:
    """Observed residues and their atoms.

    Residues are sorted by chain (in order of appearance) and place, atoms by residue.

    Attributes
    ----------
    labels, authors, entities : [C]
        ``label_asym_id``, ``auth_asym_id`` and ``label_entity_id`` of each chain.
    chain, number, author_number, insertion, component : [R]
        ``number`` is 0 where the file has no ``label_seq_id``.
    atom_ptr : [R + 1]
    columns : those of `structure.Atoms` but ``residue``
    """

    labels: list[str]
    authors: list[str]
    entities: list[str]
    chain: IntArray
    number: npt.NDArray[np.int32]
    author_number: npt.NDArray[np.int32]
    insertion: Strings
    component: Strings
    atom_ptr: IntArray
    columns: dict[str, Any]


def read_sites(block: Any, name: str, model: int | None) -> tuple[Sites, int, tuple[int, ...]]:
    """Read the atoms of one model.

    Where several components share a residue, the one with the highest mean occupancy is kept, then
    the alternative location with the highest; ties go to the first in the file. An atom without
    that location keeps its own of highest occupancy; so do atoms of equal name. Raises DataError if
    there are no atoms, no such model, or a position is not finite or not below `FARTHEST`.

    Parameters
    ----------
    block : gemmi's block
    model : number of the model; None for the first

    Returns
    -------
    sites
        What was kept.
    model
        Number of the model that was read.
    models
        Numbers of all models.
    """
    table = Table(block, "_atom_site", name)
    rows = table.count("Cartn_x")
    if not rows:
        raise DataError(f"{name}: holds no atoms (_atom_site); it is not a structure or is cut off")
    numbers = table.integers("pdbx_PDB_model_num", rows, 1)
    models = tuple(dict.fromkeys(numbers.tolist()))
    wanted = models[0] if model is None else model
    if wanted not in models:
        listed = f"{min(models)} to {max(models)}" if len(models) > 1 else f"only {models[0]}"
        raise DataError(f"{name}: has no model {wanted}, {listed}")
    found = _Rows(table, rows, np.flatnonzero(numbers == wanted), name)
    found.part_ligands(Table(block, "_pdbx_nonpoly_scheme", name))
    return _grouped(found), wanted, models


class _Rows:
    """Columns of the rows of one model."""

    def __init__(self, table: Table, rows: int, at: IntArray, name: str) -> None:
        kept = at.tolist() if len(at) < rows else None

        def texts(*tags: str) -> list[str]:
            found = next((tag for tag in tags if tag in table), tags[0])
            column = table.texts(found, rows)
            return column if kept is None else [column[row] for row in kept]

        self.asym, self.labels = _codes(texts("label_asym_id"))
        self.author, self.authors = _codes(texts("auth_asym_id", "label_asym_id"))
        self.entity = np.array(texts("label_entity_id"), dtype=object)
        self.component, self.components = _codes(map(str.upper, texts("label_comp_id")))
        self.atom, self.atoms = _codes(texts("label_atom_id", "auth_atom_id"))
        self.alt, self.alts = _codes(texts("label_alt_id"))
        self.insertion, self.insertions = _codes(texts("pdbx_PDB_ins_code"))
        self.number = table.integers("label_seq_id", rows, 0)[at]  # 0: no polymer
        tag = "auth_seq_id" if "auth_seq_id" in table else "label_seq_id"
        self.author_number = table.integers(tag, rows, UNKNOWN_NUMBER)[at]
        self.occupancy = table.floats("occupancy", rows, 1.0)[at]
        self.charge = np.clip(table.integers("pdbx_formal_charge", rows, 0)[at], -128, 127)
        symbols, known = _codes(map(str.upper, texts("type_symbol")))
        self.element = np.array([PDB_NUMBERS.get(s, 0) for s in known], dtype=np.uint8)[symbols]
        position = [table.floats(f"Cartn_{axis}", rows)[at] for axis in "xyz"]
        with np.errstate(over="ignore"):
            self.b_factor = table.floats("B_iso_or_equiv", rows)[at].astype(np.float32)
            self.position = np.stack(position, axis=1).astype(np.float32)
        self._check(name, at)

    def part_ligands(self, scheme: Table) -> None:
        """Move ligands that continue a polymer's numbering to chains of their own.

        Assembly files of alphafold3-pytorch join what shares an author's chain; they still list
        the ligands in ``pdbx_nonpoly_scheme``. ``A:MG:167`` is the new label.
        """
        chains = scheme.texts("asym_id")
        codes = [code.upper() for code in scheme.texts("pdb_mon_id", len(chains))]
        numbers = scheme.integers("pdb_seq_num", len(chains), UNKNOWN_NUMBER).tolist()
        for chain, code, number in zip(chains, codes, numbers, strict=True):
            if chain not in self.labels or code not in self.components:
                continue
            rows = np.flatnonzero(
                (self.number > 0)
                & (self.author_number == number)
                & (self.asym == self.labels.index(chain))
                & (self.component == self.components.index(code))
            )
            if len(rows):
                self.asym[rows] = len(self.labels)
                self.number[rows] = 0
                self.entity[rows] = code
                self.labels.append(f"{chain}:{code}:{number}")

    def _check(self, name: str, at: IntArray) -> None:
        bad = np.flatnonzero(~(np.abs(self.position) < FARTHEST).all(axis=1))
        if len(bad):
            i = int(bad[0])
            number = self.author_number[i] if self.author_number[i] != UNKNOWN_NUMBER else "?"
            raise DataError(
                f"{name}: atom {self.atoms[self.atom[i]]} of {self.components[self.component[i]]} "
                f"{number} in chain {self.labels[self.asym[i]]} (_atom_site row {at[i] + 1}) has "
                f"the position {self.position[i].tolist()}; correct or remove the atom"
            )
        if len(at) > 1 and (self.position == self.position[0]).all():
            place = ", ".join(f"{value:g}" for value in self.position[0])
            raise DataError(
                f"{name}: all {len(at):,} atoms are at one place ({place}); its coordinates are "
                "missing"
            )


def _codes(texts: Iterable[str]) -> tuple[IntArray, list[str]]:
    """Enumerate distinct texts in order of appearance."""
    table: defaultdict[str, int] = defaultdict(itertools.count().__next__)
    return np.fromiter(map(table.__getitem__, texts), np.int64), list(table)


def _grouped(rows: _Rows) -> Sites:
    sequenced = rows.number > 0
    author = np.where(sequenced, 0, rows.author_number)
    insertion = np.where(sequenced, 0, rows.insertion)
    first, residue = _unique(rows.asym, rows.number, author, insertion)
    # Polymers by position in the sequence, all else by appearance.
    order = np.lexsort((first, rows.number[first], rows.asym[first]))
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    residue, first = rank[residue], first[order]

    component = _preferred(residue, rows.component, rows.occupancy)
    of_component = rows.component == component[residue]
    kept = np.flatnonzero(of_component)
    located = kept[np.array([bool(text) for text in rows.alts])[rows.alt[kept]]]
    chosen = np.full(len(first), -1, dtype=np.int64)
    which, best = np.unique(residue[located]), None
    if len(which):
        dense = np.searchsorted(which, residue[located])
        best = _preferred(dense, rows.alt[located], rows.occupancy[located])
        chosen[which] = best
    kept = _one_location(rows, residue, kept, chosen)
    atom_ptr = np.searchsorted(residue[kept], np.arange(len(first) + 1))
    heads = kept[atom_ptr[:-1]]
    with np.errstate(over="ignore"):
        occupancy = rows.occupancy[kept].astype(np.float32)
    _, chain_heads = np.unique(rows.asym[heads], return_index=True)
    return Sites(
        labels=rows.labels,
        authors=[rows.authors[rows.author[i]] for i in heads[chain_heads]],
        entities=[str(rows.entity[i]) for i in heads[chain_heads]],
        chain=rows.asym[heads],
        number=rows.number[heads],
        author_number=rows.author_number[heads],
        insertion=np.array(rows.insertions)[rows.insertion[heads]],
        component=np.array(rows.components)[component],
        atom_ptr=atom_ptr.astype(np.int64),
        columns={
            "name": np.array(rows.atoms)[rows.atom[kept]],
            "element": rows.element[kept],
            "position": rows.position[kept],
            "b_factor": rows.b_factor[kept],
            "occupancy": occupancy,
            "charge": rows.charge[kept].astype(np.int8),
            "altloc": np.array(rows.alts)[rows.alt[kept]],
        },
    )


def _one_location(rows: _Rows, residue: IntArray, kept: IntArray, chosen: IntArray) -> IntArray:
    """Keep one row per residue and atom name, sorted by residue and row."""
    blank = np.array([not text for text in rows.alts])[rows.alt[kept]]
    other = ~(blank | (rows.alt[kept] == chosen[residue[kept]]))
    keys = (kept, -rows.occupancy[kept], other, rows.atom[kept], residue[kept])
    sorted_rows = kept[np.lexsort(keys)]
    new = _changes(residue[sorted_rows], rows.atom[sorted_rows])
    best = np.sort(sorted_rows[new])
    return best[np.argsort(residue[best], kind="stable")]


def _preferred(group: IntArray, label: IntArray, occupancy: FloatArray) -> IntArray:
    """Return for each group 0, 1, ... the label of highest mean occupancy, the first at ties."""
    first, pair = _unique(group, label)
    mean = np.bincount(pair, weights=occupancy) / np.bincount(pair)
    # Sums of equal numbers in another order differ in the last bits.
    order = np.lexsort((first, -np.round(mean, 6), group[first]))
    ranked = first[order]
    return label[ranked[_changes(group[ranked])]]


def _unique(*columns: npt.NDArray[Any]) -> tuple[IntArray, IntArray]:
    """Find distinct rows: the first place of each, and which of them every row is."""
    order = np.lexsort(columns[::-1])
    new = _changes(*(column[order] for column in columns))
    group = np.empty(len(order), dtype=np.int64)
    group[order] = np.cumsum(new) - 1
    # lexsort is stable, so that the first of a run is the first in the file.
    return order[new], group


def _changes(*columns: npt.NDArray[Any]) -> BoolArray:
    """Mark the rows that differ from the one before, and the first."""
    new = np.zeros(len(columns[0]), dtype=np.bool_)
    new[:1] = True
    for column in columns:
        new[1:] |= column[1:] != column[:-1]
    return new
