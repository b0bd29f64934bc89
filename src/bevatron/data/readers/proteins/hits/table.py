"""Template hits as flat arrays."""

import datetime as dt
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from bevatron.data.ragged import pointer
from bevatron.data.readers.proteins.fasta import BLANKS
from bevatron.errors import DataError
from bevatron.typing import Array, BoolArray, FloatArray, IntArray

GAPS = b"-."

LONGEST = 100_000
"""Maximum length of a protein; the longest known ones have half of that."""


@dataclass(frozen=True)
class Hit:
    """One hit, as the parsers give it; positions count from 0, ends are excluded.

    Attributes
    ----------
    in_query, in_target : bool [columns]
        Which columns of the alignment have a residue; empty if the file has no alignment.
    """

    query: str
    target: str
    query_range: tuple[int, int]
    target_range: tuple[int, int]
    in_query: BoolArray
    in_target: BoolArray
    description: str = ""
    sequence: str = ""
    target_length: int = 0
    e_value: float = math.nan
    probability: float = math.nan
    sum_probability: float = math.nan
    score: float = math.nan
    identity: float = math.nan


@dataclass(frozen=True)
class TemplateHits:
    """Hits of structures for the residues of a query.

    Positions count from 0, ends of ranges are excluded. A number that the format does not have is
    NaN, a length 0, a text empty.

    Attributes
    ----------
    queries, targets : [hits]
        Names; a target is ENTRY_CHAIN, in upper or lower case as in the file.
    descriptions : [hits]
        What the file says of the target.
    sequences : [hits]
        The target's aligned residues and those between them, in upper case, without gaps.
    query_ranges, target_ranges : int32 [hits, 2]
        Aligned part.
    target_lengths : int32 [hits]
        Residues of the whole target.
    e_values : float64 [hits]
    probabilities : float32 [hits]
        Probability of being homologous, 0 to 1 (HH-suite).
    sum_probabilities : float32 [hits]
        Sum of the probabilities of all aligned pairs (HH-suite).
    scores : float32 [hits]
        Bits, or HH-suite's score.
    identities : float32 [hits]
        Share of identical residues, 0 to 1.
    pairs : int32 [pairs, 2]
        Aligned positions in query and target, hit after hit.
    pair_ptr : int64 [hits + 1]
        Where the pairs of each hit begin; a hit without alignment has none.
    """

    queries: tuple[str, ...]
    targets: tuple[str, ...]
    descriptions: tuple[str, ...]
    sequences: tuple[str, ...]
    query_ranges: npt.NDArray[np.int32]
    target_ranges: npt.NDArray[np.int32]
    target_lengths: npt.NDArray[np.int32]
    e_values: FloatArray
    probabilities: npt.NDArray[np.float32]
    sum_probabilities: npt.NDArray[np.float32]
    scores: npt.NDArray[np.float32]
    identities: npt.NDArray[np.float32]
    pairs: npt.NDArray[np.int32]
    pair_ptr: IntArray

    def __len__(self) -> int:
        return len(self.targets)

    @property
    def entries(self) -> tuple[str, ...]:
        """PDB code of each target, in lower case: ``4hhb`` of 4HHB_A."""
        return tuple(target.rpartition("_")[0].lower() or target.lower() for target in self.targets)

    @property
    def chains(self) -> tuple[str, ...]:
        """Chain of each target: ``A`` of 4HHB_A; empty if the name has none."""
        return tuple(target.rpartition("_")[2] if "_" in target else "" for target in self.targets)

    def pairs_of(self, hit: int) -> npt.NDArray[np.int32]:
        """Return the aligned positions of a hit, [pairs, 2]."""
        return self.pairs[self.pair_ptr[hit] : self.pair_ptr[hit + 1]]

    def released(self, dates: Mapping[str, dt.date]) -> Array:
        """Look up when each target was released, datetime64[D] [hits]; NaT if unknown.

        Parameters
        ----------
        dates
            By PDB code in lower case; no file of hits has them, `openfold.read_release_dates` does.
        """
        found = [dates.get(entry) for entry in self.entries]
        return np.array([date or "NaT" for date in found], dtype="datetime64[D]")

    def take(self, rows: IntArray) -> "TemplateHits":
        """Return some of the hits, in the order given."""
        found: dict[str, Any] = {}
        for each in fields(self):
            values = getattr(self, each.name)
            if isinstance(values, tuple):
                found[each.name] = tuple(values[row] for row in rows.tolist())
            elif not each.name.startswith("pair"):
                found[each.name] = values[rows]
        pairs = [self.pairs_of(row) for row in rows.tolist()]
        return TemplateHits(**found, **_joined_pairs(pairs))

    def moved(self, first: int) -> "TemplateHits":
        """Return the hits for a query with ``first`` more residues at its beginning."""
        shift = np.array([first, 0], dtype=np.int32)
        return replace(self, pairs=self.pairs + shift, query_ranges=self.query_ranges + first)


def joined(parts: Sequence[TemplateHits]) -> TemplateHits:
    """Join hits of several searches, one after another."""
    parts = parts or [collect([])]
    pairs = [part.pairs_of(row) for part in parts for row in range(len(part))]
    found: dict[str, Any] = {}
    for each in fields(TemplateHits):
        values = [getattr(part, each.name) for part in parts]
        if isinstance(values[0], tuple):
            found[each.name] = tuple(text for part in values for text in part)
        elif not each.name.startswith("pair"):
            found[each.name] = np.concatenate(values)
    return TemplateHits(**found, **_joined_pairs(pairs))


def _joined_pairs(pairs: Sequence[npt.NDArray[np.int32]]) -> dict[str, Any]:
    empty = np.zeros((0, 2), dtype=np.int32)
    ptr = pointer([len(part) for part in pairs])
    return {"pairs": np.concatenate([empty, *pairs]), "pair_ptr": ptr}


def collect(hits: Sequence[Hit]) -> TemplateHits:
    """Join hits into arrays."""
    ranges = np.array([(*hit.query_range, *hit.target_range) for hit in hits], dtype=np.int32)
    ranges = ranges.reshape(-1, 4)

    def column(name: str) -> npt.NDArray[np.float32]:
        with np.errstate(over="ignore"):
            return np.array([getattr(hit, name) for hit in hits], dtype=np.float32)

    pairs, pair_ptr = _pairs(hits, ranges)
    return TemplateHits(
        queries=tuple(hit.query for hit in hits),
        targets=tuple(hit.target for hit in hits),
        descriptions=tuple(hit.description for hit in hits),
        sequences=tuple(hit.sequence for hit in hits),
        query_ranges=ranges[:, :2],
        target_ranges=ranges[:, 2:],
        target_lengths=np.array([hit.target_length for hit in hits], dtype=np.int32),
        e_values=np.array([hit.e_value for hit in hits], dtype=np.float64),
        probabilities=column("probability"),
        sum_probabilities=column("sum_probability"),
        scores=column("score"),
        identities=column("identity"),
        pairs=pairs,
        pair_ptr=pair_ptr,
    )


def _pairs(
    hits: Sequence[Hit], ranges: npt.NDArray[np.int32]
) -> tuple[npt.NDArray[np.int32], IntArray]:
    lengths = np.array([len(hit.in_query) for hit in hits], dtype=np.int64)
    ends = pointer(lengths)
    positions = []
    both = np.ones(ends[-1], dtype=np.bool_)
    for side, start in (("in_query", 0), ("in_target", 2)):
        present = np.concatenate([[False], *(getattr(hit, side) for hit in hits)])
        before = np.cumsum(present)
        first = ranges[:, start] - before[ends[:-1]]
        positions.append(before[1:] - 1 + np.repeat(first, lengths))
        both &= present[1:]
    pairs = np.stack(positions, axis=1)[both].astype(np.int32)
    return pairs, pointer(both)[ends]


def has_residue(row: bytes) -> BoolArray:
    """Mark the columns of an aligned row that hold a residue."""
    letters = np.frombuffer(row, dtype=np.uint8)
    return np.not_equal(letters, ord("-")) & np.not_equal(letters, ord("."))


def residues(row: bytes) -> str:
    """Residues of an aligned row, in upper case."""
    return row.translate(None, GAPS + BLANKS).upper().decode("ascii", "replace")


def residue_number(text: str, what: str, where: str) -> int:
    """Read the number of a residue, or a number of residues.

    Raises DataError if it is not a whole number, or larger than any protein.
    """
    try:
        number = int(text)
    except ValueError:
        raise DataError(f"{where}: {what} is '{text[:40]}', not a position") from None
    if abs(number) > LONGEST:
        raise DataError(f"{where}: {what} is {text[:40]}, more residues than any protein has")
    return number


def checked(hit: Hit, where: str) -> Hit:
    """Return the hit if its ranges and its alignment agree.

    Raises DataError naming ``where`` and what does not fit.
    """
    sides = (("query", hit.query_range, hit.in_query), ("target", hit.target_range, hit.in_target))
    for side, (start, stop), present in sides:
        if not 0 <= start < stop:
            raise DataError(
                f"{where}: the range {start + 1} to {stop} of the {side} is not of a protein; "
                "expected 1 <= start <= end"
            )
        if len(present) and int(present.sum()) != stop - start:
            raise DataError(
                f"{where}: the {side}'s range {start + 1} to {stop} has {stop - start} residues, "
                f"its alignment {int(present.sum())}; the file is cut off or damaged"
            )
    if len(hit.in_query) != len(hit.in_target):
        raise DataError(
            f"{where}: the aligned rows have {len(hit.in_query)} and {len(hit.in_target)} columns; "
            "the file is cut off or damaged"
        )
    return hit
