"""Links between residues and biological assemblies of an mmCIF block."""

from typing import Any

import numpy as np

from bevatron.data.readers.proteins.atom_site import FARTHEST
from bevatron.data.readers.proteins.cif import Table
from bevatron.data.readers.proteins.structure import Assembly, Atoms, Chains, Links, Residues
from bevatron.errors import DataError

MOST_COPIES = 10_000
"""Motions of an assembly; the largest capsids of the archive have 1,680."""

_BONDS = ("covale", "disulf", "metalc", "modres")
_Partner = tuple[str, ...]
_TAGS = (
    "{}_label_asym_id",
    "{}_auth_asym_id",
    "{}_label_seq_id",
    "{}_auth_seq_id",
    "pdbx_{}_PDB_ins_code",
    "{}_label_comp_id",
    "{}_auth_comp_id",
    "{}_label_atom_id",
    "pdbx_{}_label_alt_id",
)


def read_links(block: Any, name: str, chains: Chains, residues: Residues, atoms: Atoms) -> Links:
    """Read ``struct_conn``; see `structure.Links` for what is left out."""
    table = Table(block, "_struct_conn", name)
    kinds = table.texts("conn_type_id")
    rows = len(kinds)
    sides: list[list[_Partner]] = []
    for side in ("ptnr1", "ptnr2"):
        tags = [tag.format(side) for tag in _TAGS]
        sides.append(list(zip(*(table.texts(tag, rows) for tag in tags), strict=True)))
    images = [table.texts(f"ptnr{side}_symmetry", rows) for side in (1, 2)]
    find = _Finder(chains, residues, atoms)
    pairs, kept = [], []
    for row, kind in enumerate(kinds):
        if not kind.lower().startswith(_BONDS) or images[0][row] != images[1][row]:
            continue
        first, second = find(sides[0][row]), find(sides[1][row])
        if first is not None and second is not None and first != second:
            pairs.append((first, second))
            kept.append(kind.lower())
    return Links(
        np.array(pairs, dtype=np.int32).reshape(-1, 2), np.array(kept, dtype=np.str_).reshape(-1)
    )


class _Finder:
    """Finds the atom that a row of struct_conn names."""

    def __init__(self, chains: Chains, residues: Residues, atoms: Atoms) -> None:
        self._labels = {label: [i] for i, label in enumerate(chains.label.tolist())}
        self._authors: dict[str, list[int]] = {}
        for i, author in enumerate(chains.author.tolist()):
            self._authors.setdefault(author, []).append(i)
        self._residue_ptr = chains.residue_ptr
        self._residues, self._atoms = residues, atoms
        self._places: dict[tuple[int, bool], dict[tuple[int, str], int]] = {}
        letters = residues.letter[chains.residue_ptr[:-1]].tolist()
        self._polymer = {i for i, letter in enumerate(letters) if letter}

    def __call__(self, partner: _Partner) -> int | None:
        label, author, number, author_number, insertion, code, author_code, atom, alt = partner
        # Some files give author's names only.
        chains = self._labels.get(label, []) if label else self._authors.get(author, [])
        for chain in chains:
            sequenced = bool(label and number and chain in self._polymer)
            key = (number, "") if sequenced else (author_number, insertion)
            try:
                residue = self._index(chain, sequenced).get((int(key[0]), key[1]))
            except ValueError:
                continue
            if (
                residue is None
                or self._residues.component[residue] != (code or author_code).upper()
            ):
                continue
            first, past = self._residues.atom_ptr[residue : residue + 2]
            found = np.flatnonzero(self._atoms.name[first:past] == atom)
            if not len(found):
                return None
            place = int(first + found[0])
            kept = str(self._atoms.altloc[place])
            return None if alt and kept and alt != kept else place
        return None

    def _index(self, chain: int, sequenced: bool) -> dict[tuple[int, str], int]:
        if (chain, sequenced) not in self._places:
            first, past = (int(i) for i in self._residue_ptr[chain : chain + 2])
            rows = slice(first, past)
            if sequenced:
                keys = [(n, "") for n in self._residues.number[rows].tolist()]
            else:
                numbers = self._residues.author_number[rows].tolist()
                keys = list(zip(numbers, self._residues.insertion[rows].tolist(), strict=True))
            self._places[chain, sequenced] = {key: first + i for i, key in enumerate(keys)}
        return self._places[chain, sequenced]


def read_assemblies(block: Any, name: str) -> tuple[Assembly, ...]:
    """Read the biological assemblies.

    Raises DataError if an assembly names an operator that the file lacks.
    """
    table = Table(block, "_pdbx_struct_assembly_gen", name)
    names = table.texts("assembly_id")
    rows = len(names)
    operators = _read_operators(block, name)
    parts: dict[str, list[Any]] = {}
    for key, expression, chains in zip(
        names, table.texts("oper_expression", rows), table.texts("asym_id_list", rows), strict=True
    ):
        products = _expand(expression)
        if products is None:
            raise DataError(
                f"{name}: assembly '{key}' has more than {MOST_COPIES:,} operators "
                f"('{expression[:40]}'); its oper_expression is damaged"
            )
        motions = [_product(product, operators, key, name) for product in products]
        labels = tuple(label.strip() for label in chains.split(",") if label.strip())
        whole = np.stack(motions) if motions else np.zeros((0, 4, 4))
        parts.setdefault(key, []).append((labels, whole[:, :3, :3], whole[:, :3, 3]))
    return tuple(Assembly(key, tuple(found)) for key, found in parts.items())


def _read_operators(block: Any, name: str) -> dict[str, Any]:
    table = Table(block, "_pdbx_struct_oper_list", name)
    names = table.texts("id")
    operators = {key: np.eye(4) for key in names}
    for i in range(3):
        for j in range(3):
            column = table.floats(f"matrix[{i + 1}][{j + 1}]", len(names), float(i == j))
            for key, value in zip(names, column.tolist(), strict=True):
                operators[key][i, j] = value
        shifts = table.floats(f"vector[{i + 1}]", len(names), 0.0)
        for key, value in zip(names, shifts.tolist(), strict=True):
            operators[key][i, 3] = value
    for key, motion in operators.items():
        if not (np.abs(motion) < FARTHEST).all():
            raise DataError(
                f"{name}: the operator '{key}' of _pdbx_struct_oper_list has an element that "
                "is not a number or is too large; correct or remove it"
            )
    # Files of one assembly name operator 1 without listing it.
    return operators or {"1": np.eye(4)}


def _product(product: tuple[str, ...], operators: dict[str, Any], key: str, name: str) -> Any:
    whole = np.eye(4)
    for operator in product:
        if operator not in operators:
            raise DataError(
                f"{name}: assembly '{key}' names the operator '{operator}', which is not among "
                "_pdbx_struct_oper_list"
            )
        whole = whole @ operators[operator]
    return whole


def _expand(expression: str) -> list[tuple[str, ...]] | None:
    """Expand ``1``, ``1,2``, ``(1-60)`` and ``(X0)(1-3,7)``; the operator on the right acts first.

    None if there are more than `MOST_COPIES`.

    Examples
    --------
    >>> _expand("(X0)(1-2,7)")
    [('X0', '1'), ('X0', '2'), ('X0', '7')]
    """
    factors = [part for part in expression.replace("(", ")").split(")") if part.strip()]
    products: list[tuple[str, ...]] = [()]
    for factor in factors:
        listed: list[str] = []
        for item in (text.strip() for text in factor.split(",")):
            first, dash, last = item.partition("-")
            if dash and first.isdecimal() and last.isdecimal():
                if max(len(first), len(last)) > 9:
                    return None
                numbers = range(int(first), int(last) + 1)
                listed += map(str, numbers[: MOST_COPIES + 1])
            elif item:
                listed.append(item)
            if len(listed) * len(products) > MOST_COPIES:
                return None
        products = [(*product, item) for product in products for item in listed]
    return products if factors else []
