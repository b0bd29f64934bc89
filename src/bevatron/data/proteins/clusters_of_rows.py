"""Clusters of the rows of an alignment: the nearest centre of every row, contents of the clusters.

Supplement of AlphaFold2, section 1.2.7. Classes are AlphaFold2's: 0 to 20 residues, 21 the gap, 22
the mask.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Protocol

import numpy as np
import numpy.typing as npt

from bevatron.typing import IntArray

GAP, MASK = 21, 22
NUM_COUNTED = 22
"""Classes of rows that are not masked."""
_COMPARED = GAP
"""Classes below this agree with themselves; the gap and the mask agree with nothing."""
_PAIRS = (GAP + 1) ** 2
_BLOCK = 2048
"""Rows compared at a time: enough to use a table before the next one replaces it in the cache."""
_CHUNK = 127
"""Pairs of columns compared at a time: their agreement fits into 8 bits."""

Rows = npt.NDArray[np.int8]
Counts = npt.NDArray[np.uint8]


class AlignmentRows(Protocol):
    """R rows of an alignment, the query first, and L columns, with classes of the alphabet.

    `bevatron.data.proteins.stored_alignment.StoredAlignment` is one.
    """

    @property
    def num_rows(self) -> int:
        """R."""

    @property
    def num_columns(self) -> int:
        """L."""

    @property
    def profile(self) -> npt.NDArray[np.float32]:
        """Share of each of the 32 classes of the alphabet in all rows, [L, 32]."""

    def read(self, rows: IntArray | slice, columns: IntArray) -> tuple[Rows, Counts]:
        """Return residues and deletions of some rows and columns, in any order."""

    def stream(self, rows_at_once: int = 64) -> Iterator[tuple[Rows, Counts]]:
        """Yield all rows with all columns: residues and deletions."""


def alphafold2_classes(rows: Rows) -> Rows:
    """Turn classes of the alphabet into AlphaFold2's: the gap is 21."""
    return np.minimum(rows, GAP)


def nearest_centres(rows: Rows, centres: Sequence[Rows]) -> IntArray:
    r"""Find the centre that each row agrees with in most columns; the first of equal ones.

    .. math::
        \arg\max_s \sum_j [a_{rj} = c_{sj}]\,[a_{rj} \ne \mathrm{gap}]

    Two columns are compared at once: a table has the agreement of each of 22 x 22 pairs of classes
    with all centres, so a row adds one line of the table for each pair of columns.

    Parameters
    ----------
    rows : int8 [R, L]
        Classes 0 to 21.
    centres : groups of centres, int8 [S, L] each; a row is given one centre of each group

    Returns
    -------
    int64 [groups, R]
    """
    joined = np.concatenate(centres)
    ends = np.cumsum([0] + [len(group) for group in centres])
    agreement = _agreement(rows, joined)
    return np.stack([agreement[:, a:b].argmax(axis=1) for a, b in pairwise(ends)])


def _agreement(rows: Rows, centres: Rows) -> npt.NDArray[np.int16]:
    """Count the columns in which each row agrees with each centre, [R, S]."""
    width = rows.shape[1] + rows.shape[1] % 2
    even = np.full((len(rows), width), GAP, dtype=np.int16)
    even[:, : rows.shape[1]] = rows
    pairs = np.ascontiguousarray((even[:, ::2] * (GAP + 1) + even[:, 1::2]).T.astype(np.intp))
    counts = np.zeros((len(rows), len(centres)), dtype=np.int16)
    part = np.empty((min(_BLOCK, len(rows)), len(centres)), dtype=np.uint8)
    line = np.empty_like(part)
    for first in range(0, len(pairs), _CHUNK):
        chunk = pairs[first : first + _CHUNK]
        tables = _pair_tables(centres[:, 2 * first : 2 * (first + _CHUNK)], len(chunk))
        for start in range(0, len(rows), _BLOCK):
            block = slice(start, min(start + _BLOCK, len(rows)))
            total, add = (x[: block.stop - start] for x in (part, line))
            total[:] = 0
            for table, pair in zip(tables, chunk, strict=True):
                np.take(table, pair[block], axis=0, out=add, mode="clip")
                total += add
            counts[block] += total
    return counts


def _pair_tables(centres: Rows, num_pairs: int) -> npt.NDArray[np.uint8]:
    """Agreement of each pair of classes in each pair of columns with each centre."""
    classes = np.arange(GAP + 1, dtype=np.int8)[:, None]
    classes = np.where(classes < _COMPARED, classes, -1)
    own = np.full((2 * num_pairs, len(centres)), MASK, dtype=np.int8)
    own[: centres.shape[1]] = centres.T
    single = (own[:, None, :] == classes).view(np.uint8)
    pair: Counts = single[::2, :, None, :] + single[1::2, None, :, :]
    return pair.reshape(num_pairs, _PAIRS, len(centres))


def cluster_sums(
    rows: Rows, deletions: Counts, cluster: IntArray, num_clusters: int
) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.int32]]:
    """Count the classes in each column of each cluster, and sum its deletions.

    Parameters
    ----------
    rows, deletions : [R, N]
        Classes 0 to 21.
    cluster : int64 [R]
        Cluster of each row.

    Returns
    -------
    int16 [clusters, N, 22], at most 32,767 rows of a class are counted; int32 [clusters, N].
    """
    num_columns = rows.shape[1]
    order = np.argsort(cluster, kind="stable")
    ends = np.searchsorted(cluster[order], np.arange(num_clusters + 1))
    profile = np.zeros((num_clusters, num_columns, NUM_COUNTED), dtype=np.int16)
    totals = np.zeros((num_clusters, num_columns), dtype=np.int32)
    cell = np.arange(num_columns, dtype=np.intp) * NUM_COUNTED
    # A few clusters at a time: their counts stay in the cache.
    for first in range(0, num_clusters, 4):
        past = min(first + 4, num_clusters)
        members = order[ends[first] : ends[past]]
        if not len(members):
            continue
        start = (cluster[members] - first) * (num_columns * NUM_COUNTED)
        cells = rows[members] + (start[:, None] + cell)
        counts = np.bincount(
            cells.ravel(), minlength=(past - first) * num_columns * NUM_COUNTED
        ).reshape(past - first, num_columns, NUM_COUNTED)
        np.minimum(counts, np.iinfo(np.int16).max, out=counts)
        profile[first:past] = counts
    filled = np.flatnonzero(np.diff(ends))
    if len(filled):
        totals[filled] = np.add.reduceat(deletions[order], ends[filled], axis=0, dtype=np.int32)
    return profile, totals
