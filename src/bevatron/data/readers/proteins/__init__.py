"""Readers of proteins: structures, components, alignments, template hits, inputs, OpenFold's files.

A reader understands its format and nothing else: no feature, no filter, no choice among rows. Every
one reads gzip, bzip2, xz and Zstandard too and raises DataError of one sentence.
"""

from bevatron.data.readers.proteins.alignments import Alignment, parse_alignment, read_alignment
from bevatron.data.readers.proteins.components import (
    Component,
    Components,
    ExpectedAtoms,
    expected_atoms,
    open_components,
)
from bevatron.data.readers.proteins.hits import TemplateHits, parse_hits, read_hits
from bevatron.data.readers.proteins.inputs import Complex, Entity, read_inputs
from bevatron.data.readers.proteins.names import Origins, parse_names
from bevatron.data.readers.proteins.openfold import (
    AlignmentDatabase,
    read_duplicate_chains,
    read_release_dates,
)
from bevatron.data.readers.proteins.structure import (
    Assembly,
    Atoms,
    Chains,
    Links,
    Residues,
    Structure,
)
from bevatron.data.readers.proteins.structures import parse_structure, read_structure

__all__ = [
    "Alignment",
    "AlignmentDatabase",
    "Assembly",
    "Atoms",
    "Chains",
    "Complex",
    "Component",
    "Components",
    "Entity",
    "ExpectedAtoms",
    "Links",
    "Origins",
    "Residues",
    "Structure",
    "TemplateHits",
    "expected_atoms",
    "open_components",
    "parse_alignment",
    "parse_hits",
    "parse_names",
    "parse_structure",
    "read_alignment",
    "read_duplicate_chains",
    "read_hits",
    "read_inputs",
    "read_release_dates",
    "read_structure",
]
