"""Templates that the input of a prediction gives as structures."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bevatron.data.proteins.template_atoms import place_template, stored_templates
from bevatron.data.readers.proteins import parse_structure, read_structure
from bevatron.data.readers.proteins.cif import gemmi
from bevatron.data.readers.proteins.inputs import Template
from bevatron.data.readers.proteins.structure import Structure
from bevatron.errors import DataError
from bevatron.typing import Arrays, IntArray

LEAST_IDENTITY = 0.3
"""Sequence identity below which two sequences are not aligned automatically."""


def given_templates(sequence: str, templates: Sequence[Template], where: str) -> Arrays:
    """Return `template_atoms.TEMPLATE_FIELDS` of structures, in the order given.

    A template without pairs of residues is aligned by its sequence. Raises DataError if a structure
    cannot be read, has no such chain or residue, or is too unlike.

    Parameters
    ----------
    sequence : sequence of the chain that they are templates of
    templates : templates of the input
    where : what messages call the chain
    """
    found = []
    for number, each in enumerate(templates, start=1):
        name = f"{where}, template {number}"
        structure = _read(each, name)
        chain = _chain(structure, each, sequence, name)
        own = structure.sequence(chain)
        if each.pairs is None:
            pairs = align(sequence, own)
            equal = sum(sequence[i] == own[j] for i, j in pairs.tolist())
            if not len(pairs) or equal < LEAST_IDENTITY * len(pairs):
                raise DataError(
                    f"{name}: is too unlike the chain to be aligned by its sequence; give the "
                    "residues, as queryIndices and templateIndices of AlphaFold3's JSON"
                )
        else:
            pairs = each.pairs.astype(np.int64)
        last = pairs.max(axis=0, initial=-1)
        if last[0] >= len(sequence) or last[1] >= len(own):
            raise DataError(
                f"{name}: aligns residue {last[0]} of {len(sequence)} with residue {last[1]} of "
                f"{len(own)}; positions count from 0"
            )
        found.append(place_template(structure, chain, pairs, len(sequence)))
    return stored_templates(found, len(sequence))


def _read(template: Template, name: str) -> Structure:
    if isinstance(template.structure, Path):
        try:
            return read_structure(template.structure)
        except DataError as error:
            raise DataError(f"{name}: {error}") from error
    return parse_structure(template.structure.encode(), name)


def _chain(structure: Structure, template: Template, sequence: str, name: str) -> int:
    """Find the chain that is named, else the one most similar to the sequence."""
    proteins = np.flatnonzero(structure.chains.kind == "protein").tolist()
    names = structure.chains.author, structure.chains.label
    for wanted in template.chains[:1]:
        for chain in proteins:
            if wanted in {each[chain] for each in names}:
                return int(chain)
        raise DataError(f"{name}: its structure has no protein chain '{wanted}'")
    if not proteins:
        raise DataError(f"{name}: its structure holds no protein")
    if len(proteins) == 1:
        return int(proteins[0])
    if template.pairs is not None:
        raise DataError(
            f"{name}: its structure has {len(proteins)} protein chains; give one of a single "
            "chain, of which the indices are"
        )

    def alike(chain: int) -> int:
        own = structure.sequence(chain)
        return sum(sequence[i] == own[j] for i, j in align(sequence, own).tolist())

    return int(max(proteins, key=alike))


def align(query: str, target: str) -> IntArray:
    """Align two sequences from end to end; return the pairs of positions, int64 [pairs, 2].

    Examples
    --------
    >>> align("ACDEFGHIK", "ACDFGHIKL").tolist()[2:5]
    [[2, 2], [4, 3], [5, 4]]
    """
    scoring = gemmi().AlignmentScoring()
    scoring.match, scoring.mismatch, scoring.gapo, scoring.gape = 5, -2, -4, -1
    found = gemmi().align_string_sequences(list(query), list(target), [], scoring)
    rows = found.add_gaps(query, 1), found.add_gaps(target, 2)
    present = np.array([[letter != "-" for letter in row] for row in rows])
    places = np.cumsum(present, axis=1) - 1
    return places[:, present.all(axis=0)].T.astype(np.int64)
