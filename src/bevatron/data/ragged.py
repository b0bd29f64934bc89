"""Rows of different lengths, one after the other: where each begins, and what belongs to it."""

import numpy as np
import numpy.typing as npt

from bevatron.typing import Array, IntArray


def pointer(counts: npt.ArrayLike) -> IntArray:
    """Return where each row begins and where the last one ends, [n + 1].

    Parameters
    ----------
    counts : the length of each row, [n]

    Examples
    --------
    >>> pointer([3, 0, 2])
    array([0, 3, 3, 5])
    """
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])


def count_up(counts: IntArray) -> IntArray:
    """Return 0 ... c - 1 for each count c, one after the other.

    Examples
    --------
    >>> count_up(np.array([3, 0, 2]))
    array([0, 1, 2, 0, 1])
    """
    first = np.cumsum(counts) - counts
    return np.arange(int(counts.sum())) - np.repeat(first, counts)


def members(ptr: Array, rows: IntArray) -> tuple[IntArray, IntArray]:
    """List the places of what belongs to some of the rows, and the pointer of the result.

    Examples
    --------
    >>> places, own = members(pointer([3, 0, 2]), np.array([2, 0]))
    >>> places.tolist(), own.tolist()
    ([3, 4, 0, 1, 2], [0, 2, 5])
    """
    first = ptr[rows].astype(np.int64)
    counts = ptr[rows + 1].astype(np.int64) - first
    return np.repeat(first, counts) + count_up(counts), pointer(counts)
