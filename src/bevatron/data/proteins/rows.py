"""The rows of a complex: alignments paired by species, then the unpaired rows.

A row of a complex takes one row, or gaps, from the alignment of each of its distinct sequences;
chains of one sequence share it. First comes the query of all, then rows of one species (AlphaFold-
Multimer, supplement, section 7.3), then the rows of each alignment that are in no pair, the others
being gaps.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bevatron.data.proteins.stored_alignment import StoredAlignment
from bevatron.data.ragged import count_up
from bevatron.data.readers.proteins.alphabet import CLASSES, GAP
from bevatron.typing import Array, IntArray

MAX_ROWS = 16_384
"""Maximum number of rows of a complex, from which a sample draws."""

MAX_PAIRED = MAX_ROWS // 2
"""Maximum number of these that are the query or paired."""

NO_ROW = -1
"""Row number that means gaps."""


@dataclass(frozen=True)
class RowStack:
    """The rows of a complex before any is read.

    Attributes
    ----------
    alignments : [Q]
        The alignment of each distinct sequence.
    rows : int32 [S, Q]
        Row of each alignment, `NO_ROW` for gaps; those of the query are all 0.
    """

    alignments: tuple[StoredAlignment, ...]
    rows: npt.NDArray[np.int32]


def stack_rows(alignments: Sequence[StoredAlignment]) -> RowStack:
    """Pair the rows of alignments by species and put the others below.

    For a species of at least two alignments the rows most similar to their queries form the first
    pair, the next ones the second, and so on as far as all of them have rows. Species of more
    alignments come first, then pairs whose rows stand higher. Of more than `MAX_ROWS` rows, the
    unpaired ones of each alignment are cut at a common number.

    Parameters
    ----------
    alignments : one for each distinct sequence
    """
    paired = _pair(alignments)[: MAX_PAIRED - 1]
    unpaired = [
        _others(alignment.num_rows, paired[:, place]) for place, alignment in enumerate(alignments)
    ]
    most = _fair_share([len(rows) for rows in unpaired], MAX_ROWS - 1 - len(paired))
    parts = [np.zeros((1, len(alignments)), dtype=np.int32), paired]
    for place, rows in enumerate(unpaired):
        part = np.full((min(len(rows), most), len(alignments)), NO_ROW, dtype=np.int32)
        part[:, place] = rows[:most]
        parts.append(part)
    return RowStack(tuple(alignments), np.concatenate(parts))


def _pair(alignments: Sequence[StoredAlignment]) -> npt.NDArray[np.int32]:
    """Return the paired rows without that of the queries, [P, Q]."""
    tables = [np.unique(a.species, return_index=True, return_counts=True) for a in alignments]
    empty = np.empty((0, len(alignments)), dtype=np.int32)
    if len(alignments) < 2:
        return empty
    species = np.unique(np.concatenate([names for names, _, _ in tables]))
    first = np.zeros((len(alignments), len(species)), dtype=np.int64)
    count = np.zeros_like(first)
    for place, (names, starts, counts) in enumerate(tables):
        at = np.searchsorted(species, names)
        first[place, at], count[place, at] = starts, counts
    shared = (count > 0).sum(axis=0) >= 2
    first, count = first[:, shared], count[:, shared]
    depth = np.where(count > 0, count, np.iinfo(np.int64).max).min(axis=0, initial=MAX_ROWS)
    of_pair = np.repeat(np.arange(len(depth)), depth)
    rank = count_up(depth)
    rows = np.full((len(of_pair), len(alignments)), NO_ROW, dtype=np.int32)
    for place, alignment in enumerate(alignments):
        has = count[place, of_pair] > 0
        at = first[place, of_pair[has]] + rank[has]
        rows[has, place] = alignment.species_row[at]
    rows = rows[(rows > 0).any(axis=1)]
    # The product of the numbers of rows, as a sum of logarithms.
    height = np.log(np.maximum(rows, 0) + 1.0).sum(axis=1)
    return rows[np.lexsort((height, -(rows >= 0).sum(axis=1)))]


def _others(num_rows: int, paired: Array) -> IntArray:
    """Rows of an alignment that are in no pair, without the query."""
    free = np.ones(num_rows, dtype=np.bool_)
    free[0] = False
    free[paired[paired != NO_ROW]] = False
    return np.flatnonzero(free)


def _fair_share(lengths: Sequence[int], budget: int) -> int:
    """Return the largest limit for which the sum of min(length, limit) is within the budget."""
    left = budget
    for place, length in enumerate(sorted(lengths)):
        share = left // (len(lengths) - place)
        if length > share:
            return share
        left -= length
    return max(lengths, default=0)


def sample_rows(
    stack: RowStack,
    sequence: IntArray,
    column: IntArray,
    query: npt.NDArray[np.int8],
    num_rows: int,
    rng: np.random.Generator,
) -> dict[str, Array]:
    """Draw rows of a complex, uniformly and without repetition, and read them for some tokens.

    The first is always the query; the others keep their order. Raises StoreError if a row that is
    read is damaged.

    Parameters
    ----------
    sequence : [N]
        Which alignment each token reads; -1 for none.
    column : [N]
        Which column of it.
    query : [N]
        Class that tokens without an alignment have in the first row and in their profile: that of
        the residue in a polymer, the gap elsewhere. Their other rows are gaps.
    num_rows : how many rows to draw; fewer are returned where there are fewer

    Returns
    -------
    dict
        ``msa`` int8 [S, N], ``deletion`` uint8 [S, N], ``msa_mask`` bool [S, N], ``profile``
        float32 [N, 32] and ``deletion_mean`` float32 [N]; the last two are of all rows.
    """
    chosen = stack.rows[_draw(len(stack.rows), num_rows, rng)]
    shape = (len(chosen), len(sequence))
    msa, deletion = np.full(shape, GAP, dtype=np.int8), np.zeros(shape, dtype=np.uint8)
    msa[0] = query
    profile = (query[:, None] == np.arange(len(CLASSES))).astype(np.float32)
    deletion_mean = np.zeros(len(sequence), dtype=np.float32)
    for place, alignment in enumerate(stack.alignments):
        tokens = np.flatnonzero(sequence == place)
        if not len(tokens):
            continue
        present = np.flatnonzero(chosen[:, place] != NO_ROW)
        # Copies of a chain read the same columns; atoms of a residue too.
        columns, repeated = np.unique(column[tokens], return_inverse=True)
        residues, deletions = alignment.read(chosen[present, place], columns)
        _put(msa, present, tokens, residues, repeated)
        _put(deletion, present, tokens, deletions, repeated)
        profile[tokens] = alignment.profile[column[tokens]]
        deletion_mean[tokens] = alignment.deletion_mean[column[tokens]]
    return {
        "msa": msa,
        "deletion": deletion,
        "msa_mask": np.ones(shape, dtype=np.bool_),
        "profile": profile,
        "deletion_mean": deletion_mean,
    }


def _draw(total: int, number: int, rng: np.random.Generator) -> IntArray:
    """Draw the first and others of ``total`` rows, ascending."""
    number = min(max(number, 1), total)
    others = rng.choice(total - 1, number - 1, replace=False, shuffle=False) + 1
    return np.concatenate([[0], np.sort(others)])


def _put(table: Array, rows: IntArray, tokens: IntArray, values: Array, repeated: IntArray) -> None:
    if len(repeated) != values.shape[1] or (np.diff(repeated) != 1).any():
        values = np.take(values, repeated, axis=1)
    whole = len(rows) == len(table)
    if tokens[-1] - tokens[0] + 1 == len(tokens):
        span = slice(int(tokens[0]), int(tokens[-1]) + 1)
        table[slice(None) if whole else rows, span] = values
    elif whole:
        table[:, tokens] = values
    else:
        table[np.ix_(rows, tokens)] = values
