"""Tables of hits as MMseqs2, Foldseek and BLAST write them: one hit per line, tabs between."""

import re
from dataclasses import replace

import numpy as np

from bevatron.data.readers.proteins.fasta import as_text
from bevatron.data.readers.proteins.hits.table import (
    Hit,
    checked,
    has_residue,
    residue_number,
    residues,
)
from bevatron.errors import DataError
from bevatron.typing import BoolArray

_COLUMNS = (
    *("query", "target", "identity", "alnlen", "mismatch", "gapopen"),
    *("qstart", "qend", "tstart", "tend", "evalue", "bits"),
)
_NEEDED = ("query", "target", "qstart", "qend", "tstart", "tend")
_CIGAR = re.compile(r"(\d+)([MID=X])")
_WHOLE_CIGAR = re.compile(r"(?:\d+[MID=X])+")
_NO_COLUMNS = np.zeros(0, dtype=np.bool_)


def parse_m8(data: bytes, name: str) -> list[Hit]:
    """Read the lines of a table.

    Raises DataError naming the line that has other columns, no number where one is expected, or an
    alignment that does not fit its ranges.
    """
    lines = [
        (number, line.split("\t"))
        for number, line in enumerate(as_text(data, name).split("\n"), start=1)
        if line.strip() and not line.startswith("#")
    ]
    if not lines:
        return []
    columns = [text.strip() for text in lines[0][1]]
    if {"query", "target"} <= set(columns):
        lines = lines[1:]
        missing = [column for column in _NEEDED if column not in columns]
        if missing:
            raise DataError(f"{name}: has no column {' or '.join(missing)}")
    else:
        columns = _unnamed_columns(lines[0][1], f"{name}, line {lines[0][0]}")
    hits = []
    for number, fields in lines:
        if len(fields) != len(columns):
            raise DataError(
                f"{name}, line {number}: has {len(fields)} columns, expected {len(columns)} as in "
                "the first line; the file is cut off or damaged"
            )
        row = dict(zip(columns, (field.strip() for field in fields), strict=True))
        hits.append(_hit(row, f"{name}, line {number}"))
    percent = any(hit.identity > 1 for hit in hits)
    return [replace(hit, identity=hit.identity / 100) for hit in hits] if percent else hits


def _unnamed_columns(fields: list[str], where: str) -> list[str]:
    extra = len(fields) - len(_COLUMNS)
    if extra < 0 or extra > 1 or (extra and not _WHOLE_CIGAR.fullmatch(fields[-1].strip())):
        raise DataError(
            f"{where}: has {len(fields)} columns; expected the 12 of BLAST's format 6, perhaps "
            "with a 13th 'cigar', or a first line of column names"
        )
    return [*_COLUMNS, "cigar"][: len(fields)]


def _hit(row: dict[str, str], where: str) -> Hit:
    def number(column: str, default: float = float("nan")) -> float:
        if column not in row:
            return default
        try:
            return float(row[column])
        except ValueError:
            raise DataError(f"{where}: {column} is '{row[column][:40]}', not a number") from None

    def position(column: str) -> int:
        return residue_number(row[column], column, where)

    query_range = position("qstart") - 1, position("qend")
    target_range = position("tstart") - 1, position("tend")
    in_query, in_target, sequence = _NO_COLUMNS, _NO_COLUMNS, ""
    if "qaln" in row and "taln" in row:
        aligned = row["taln"].encode()
        in_query, in_target = has_residue(row["qaln"].encode()), has_residue(aligned)
        sequence = residues(aligned)
    elif "cigar" in row:
        in_query, in_target = _expand(row["cigar"], where)
    elif query_range[1] - query_range[0] == target_range[1] - target_range[0] and (
        row.get("gapopen") == "0"
    ):
        in_query = in_target = np.ones(max(query_range[1] - query_range[0], 0), dtype=np.bool_)
    percent = number("pident")
    hit = Hit(
        row["query"],
        row["target"],
        query_range,
        target_range,
        in_query,
        in_target,
        description=row.get("theader", ""),
        sequence=sequence,
        target_length=position("tlen") if "tlen" in row else 0,
        e_value=number("evalue"),
        probability=number("prob"),
        score=number("bits"),
        identity=number("fident", number("identity", percent / 100)),
    )
    return checked(hit, where)


def _expand(cigar: str, where: str) -> tuple[BoolArray, BoolArray]:
    """Expand CIGAR to columns: I has a residue only in the query, D only in the target."""
    if not _WHOLE_CIGAR.fullmatch(cigar):
        raise DataError(f"{where}: cigar is '{cigar[:40]}'; expected counts of M, I, D, = and X")
    runs = _CIGAR.findall(cigar)
    counts = [residue_number(count, "a count of the cigar", where) for count, _ in runs]
    residue_number(str(sum(counts)), "the length of the cigar", where)
    in_query = np.array([kind != "D" for _, kind in runs])
    in_target = np.array([kind != "I" for _, kind in runs])
    return np.repeat(in_query, counts), np.repeat(in_target, counts)
