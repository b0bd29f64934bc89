"""Readers of proteins: alignments, template hits, inputs of predictions, files of OpenFold.

A reader understands its format and nothing else: no feature, no filter, no choice among rows. Every
one reads gzip, bzip2, xz and Zstandard too and raises DataError of one sentence.
"""

from bevatron.data.readers.proteins.alignments import Alignment, parse_alignment, read_alignment
from bevatron.data.readers.proteins.hits import TemplateHits, parse_hits, read_hits
from bevatron.data.readers.proteins.inputs import Complex, Entity, read_inputs
from bevatron.data.readers.proteins.names import Origins, parse_names
from bevatron.data.readers.proteins.openfold import (
    AlignmentDatabase,
    read_duplicate_chains,
    read_release_dates,
)

__all__ = [
    "Alignment",
    "AlignmentDatabase",
    "Complex",
    "Entity",
    "Origins",
    "TemplateHits",
    "parse_alignment",
    "parse_hits",
    "parse_names",
    "read_alignment",
    "read_duplicate_chains",
    "read_hits",
    "read_inputs",
    "read_release_dates",
]
