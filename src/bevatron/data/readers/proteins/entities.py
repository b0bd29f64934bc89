"""Kinds of chains, sequences of polymers and parents of modified residues."""

from collections import Counter
from functools import lru_cache
from typing import Any

import numpy as np

from bevatron.data.readers.elements import ATOMIC_NUMBERS
from bevatron.data.readers.proteins.atom_site import Sites
from bevatron.data.readers.proteins.cif import Table, gemmi
from bevatron.data.readers.proteins.structure import POLYMERS, UNKNOWN_NUMBER
from bevatron.errors import DataError
from bevatron.typing import IntArray

_POLYMER_TYPES = {
    "polypeptide(l)": "protein",
    "polypeptide(d)": "protein",
    "cyclic-pseudo-peptide": "protein",
    "polydeoxyribonucleotide": "dna",
    "polyribonucleotide": "rna",
    "polydeoxyribonucleotide/polyribonucleotide hybrid": "hybrid",
}
_SYMBOLS = {symbol.upper() for symbol in ATOMIC_NUMBERS}
_ORGANIC = {1, 6, 7, 8, 15, 16}
_WATERS = {"HOH", "DOD", "WAT"}
_RESIDUE_KINDS = {"AA": "protein", "PAA": "protein", "MAA": "protein", "DNA": "dna", "RNA": "rna"}


class Entities:
    """Entities and components of a block.

    Parameters
    ----------
    block : gemmi's block
    """

    def __init__(self, block: Any, name: str) -> None:
        self._block, self._name = block, name
        asym = self._table("_struct_asym")
        self.of_chain = dict(zip(asym.texts("id"), asym.texts("entity_id"), strict=False))
        entity = self._table("_entity")
        self._types = dict(zip(entity.texts("id"), entity.texts("type"), strict=False))
        poly = self._table("_entity_poly")
        self._poly = dict(zip(poly.texts("entity_id"), poly.texts("type"), strict=False))
        component = self._table("_chem_comp")
        codes = [code.upper() for code in component.texts("id")]
        self._component_types = dict(zip(codes, component.texts("type"), strict=False))
        self._formulas = dict(zip(codes, component.texts("formula"), strict=False))
        self._parents: dict[str, str] = {}
        for category, code, parent in (
            ("_pdbx_struct_mod_residue", "label_comp_id", "parent_comp_id"),
            ("_chem_comp", "id", "mon_nstd_parent_comp_id"),
        ):
            table = self._table(category)
            listed: dict[str, dict[str, None]] = {}
            for key, value in zip(table.texts(code), table.texts(parent), strict=False):
                if value:
                    listed.setdefault(key.upper(), {})[value.upper()] = None
            self._parents |= {key: ",".join(parents) for key, parents in listed.items()}
        self._of_entity = self._read_sequences("_entity_poly_seq", "entity_id", "num")
        self._of_chain = self._read_sequences("_pdbx_poly_seq_scheme", "asym_id", "seq_id")
        self._distinct: dict[str, list[list[str]]] = {}

    def _table(self, category: str) -> Table:
        return Table(self._block, category, self._name)

    def _read_sequences(self, category: str, key: str, place: str) -> dict[str, dict[int, str]]:
        """Read components by number, the first of alternatives."""
        table = self._table(category)
        keys = table.texts(key)
        numbers = table.integers(place, len(keys), 0).tolist()
        found: dict[str, dict[int, str]] = {}
        for owner, number, code in zip(keys, numbers, table.texts("mon_id"), strict=False):
            found.setdefault(owner, {}).setdefault(number, code.upper())
        return found

    def own_name(self, entity: str, codes: list[str]) -> str:
        """Name the entity of a polymer after its sequence if the file gives it to other ones too.

        Assembly files of alphafold3-pytorch give all polymers one entity: ``6``, ``6.2``, ``6.3``.
        """
        distinct = self._distinct.setdefault(entity, [])
        if codes not in distinct:
            distinct.append(codes)
        place = distinct.index(codes)
        return f"{entity}.{place + 1}" if place else entity

    def author_numbers(self) -> dict[str, dict[int, tuple[int, str]]]:
        """Read author's numbers and insertion codes by chain and place in the sequence."""
        table = self._table("_pdbx_poly_seq_scheme")
        chains = table.texts("asym_id")
        numbers = table.integers("seq_id", len(chains), 0).tolist()
        authors = table.integers("pdb_seq_num", len(chains), UNKNOWN_NUMBER).tolist()
        codes = table.texts("pdb_ins_code", len(chains))
        found: dict[str, dict[int, tuple[int, str]]] = {}
        for chain, number, author, code in zip(chains, numbers, authors, codes, strict=False):
            found.setdefault(chain, {})[number] = (author, code)
        return found

    def sequence(
        self, label: str, entity: str, sites: Sites, rows: slice
    ) -> tuple[IntArray, list[str], str]:
        """Return numbers and components of a polymer, and its entity.

        Where several components share a place it is the one seen in the chain. Raises DataError if
        the chain has a residue that its sequence lacks.
        """
        seen = dict(zip(sites.number[rows].tolist(), sites.component[rows].tolist(), strict=True))
        listed = self._of_entity.get(entity) or self._of_chain.get(label)
        if listed is None:
            return np.array(sorted(seen), dtype=np.int64), [seen[n] for n in sorted(seen)], entity
        numbers = sorted(listed)
        outside = sorted(set(seen) - set(listed))
        if outside:
            raise DataError(
                f"{self._name}: chain {label} has a residue {outside[0]} ({seen[outside[0]]}), but "
                f"its sequence (entity {entity}) ends at {numbers[-1]}; its numbering is damaged"
            )
        if entity not in self._of_entity:
            entity = self.own_name(entity, [listed[n] for n in numbers])
        return np.array(numbers, dtype=np.int64), [seen.get(n, listed[n]) for n in numbers], entity

    def kind(self, entity: str, sites: Sites, rows: slice) -> str:
        """Kind of a chain: one of `structure.KINDS`."""
        codes = sites.component[rows].tolist()
        kind = self._types.get(entity, "").lower()
        if (
            kind == "polymer"
            or entity in self._poly
            or (not kind and (sites.number[rows] > 0).any())
        ):
            return self._polymer(self._poly.get(entity, "").lower(), codes)
        if kind == "water" or set(codes) <= _WATERS:
            return "water"
        types = [self._component_types.get(code, "").lower() for code in codes]
        if kind == "branched" or any("saccharide" in text for text in types):
            return "glycan"
        if all(_is_sugar(code) for code in codes):
            return "glycan"
        heads = sites.atom_ptr[rows.start : rows.stop]
        sizes = np.diff(sites.atom_ptr[rows.start : rows.stop + 1])
        elements = sites.columns["element"][heads]
        single = (
            self._is_monatomic(code, int(size), int(element))
            for code, size, element in zip(codes, sizes, elements, strict=True)
        )
        return "ion" if all(single) else "ligand"

    def _polymer(self, declared: str, codes: list[str]) -> str:
        if declared in _POLYMER_TYPES:
            return _POLYMER_TYPES[declared]
        if declared.startswith("polysaccharide"):
            return "glycan"
        known = Counter(kind for code in codes if (kind := _residue_kind(code)))
        if declared and declared != "other":
            return "other"
        if known["dna"] and known["rna"] and known["protein"] == 0:
            return "hybrid"
        most = known.most_common(1)
        return most[0][0] if most and most[0][1] * 2 >= len(codes) else "other"

    def _is_monatomic(self, code: str, atoms: int, element: int) -> bool:
        """Whether a component is one atom, by its formula (``Zn 2``, with a charge) if known."""
        formula = self._formulas.get(code)
        if not formula:
            return atoms == 1 and element not in _ORGANIC
        symbols = [part for part in formula.split() if part[0].isalpha()]
        return len(symbols) == 1 and symbols[0].upper() in _SYMBOLS

    def parent(self, code: str) -> str:
        """Return the standard residue that a component is or derives from, or nothing."""
        if _letter(code):
            return code
        declared = self._parents.get(code, "")
        if "," in declared:  # a chromophore, fused of several
            return ""
        return declared if _letter(declared) else _tabulated_parent(code)


def one_letter(parent: str, kind: str) -> str:
    """Return the letter of a residue from its parent: ``X`` or ``N`` if it has none."""
    if kind not in POLYMERS:
        return ""
    return _letter(parent) or ("X" if kind in {"protein", "other"} else "N")


@lru_cache(maxsize=1 << 16)
def _letter(code: str) -> str:
    info = gemmi().find_tabulated_residue(code)
    return info.one_letter_code if info.found() and info.is_standard() else ""


@lru_cache(maxsize=1 << 16)
def _tabulated_parent(code: str) -> str:
    package = gemmi()
    info = package.find_tabulated_residue(code)
    letter = info.one_letter_code.strip()
    if not info.found() or not letter or info.kind.name not in _RESIDUE_KINDS:
        return ""
    kind = info.kind if info.kind.name in {"DNA", "RNA"} else package.ResidueKind.AA
    parent = package.expand_one_letter(letter.upper(), kind) or ""
    return parent if _letter(parent) not in {"", "X", "N"} else ""


@lru_cache(maxsize=1 << 16)
def _residue_kind(code: str) -> str:
    return _RESIDUE_KINDS.get(gemmi().find_tabulated_residue(code).kind.name, "")


@lru_cache(maxsize=1 << 16)
def _is_sugar(code: str) -> bool:
    return gemmi().find_tabulated_residue(code).kind.name in {"PYR", "KET"}
