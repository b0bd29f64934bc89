"""Hits of hmmsearch: alignments of targets to the match columns of the query's profile."""

import re

import numpy as np
import numpy.typing as npt

from bevatron.data.readers.proteins.fasta import BLANKS, split_records
from bevatron.data.readers.proteins.hits.table import Hit, checked, residue_number, residues
from bevatron.data.readers.proteins.stockholm import parse_stockholm
from bevatron.errors import DataError
from bevatron.typing import BoolArray

_TITLE = re.compile(r"(\S+)/(\d+)-(\d+)(?:\s+(.*))?", re.DOTALL)
_LENGTH = re.compile(r"\blength:(\d+)")


def parse_hmmsearch(data: bytes, name: str, format_: str) -> list[Hit]:
    """Read a3m or Stockholm; upper case and ``-`` are match columns, lower case insertions.

    The format holds neither e-values nor the query's name. A first record without a range, the
    query itself, is skipped. Raises DataError naming the record whose name has no range or whose
    row does not fit the others.
    """
    if format_ == "a3m":
        records = split_records(data, name)
        headers, rows, where = records.headers, records.sequences, records.where
    else:
        found = parse_stockholm(data, name)
        headers, rows, where = found.headers, found.rows, found.where
    hits: list[Hit] = []
    width = -1
    for number, (header, row) in enumerate(zip(headers, rows, strict=True)):
        title = _TITLE.fullmatch(header.strip())
        letters = np.frombuffer(row.translate(None, BLANKS + b"."), dtype=np.uint8)
        is_match = letters < ord("a")
        columns = int(is_match.sum())
        width = columns if width < 0 else width
        if columns != width:
            raise DataError(
                f"{where(number)}: has {columns} match columns, the first record {width}; the "
                "file is cut off or damaged"
            )
        if title is None and number:
            raise DataError(
                f"{where(number)}: its name has no range; expected 'ENTRY_CHAIN/START-END'"
            )
        if title is not None:
            hits.append(_hit(title, letters, is_match, where(number)))
    return hits


def _hit(
    title: re.Match[str], letters: npt.NDArray[np.uint8], is_match: BoolArray, where: str
) -> Hit:
    is_residue = letters != ord("-")
    aligned = np.flatnonzero(is_match & is_residue)
    if not len(aligned):
        raise DataError(f"{where}: has no aligned residue")
    # Columns before the first and after the last pair are outside the query's alignment, but
    # insertions there are residues of the target's range.
    query_columns = np.flatnonzero(is_match)
    first = int(np.searchsorted(query_columns, aligned[0]))
    stop = int(np.searchsorted(query_columns, aligned[-1])) + 1
    inside = slice(aligned[0], aligned[-1] + 1)
    before = int(is_residue[: aligned[0]].sum())
    after = int(is_residue[aligned[-1] + 1 :].sum())
    description = title[4] or ""
    length = _LENGTH.search(description)
    hit = Hit(
        "",
        title[1],
        (first, stop),
        (
            residue_number(title[2], "the first residue", where) - 1 + before,
            residue_number(title[3], "the last residue", where) - after,
        ),
        is_match[inside],
        is_residue[inside],
        description=description,
        sequence=residues(letters[inside].tobytes()),
        target_length=residue_number(length[1], "the length", where) if length else 0,
    )
    return checked(hit, where)
