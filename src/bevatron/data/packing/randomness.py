"""Random numbers and sorting that give the same plan on every machine.

Every rank computes the plan itself, so machines must agree to the last bit. numpy does not
guarantee that in two cases: the methods of `Generator` may change their stream between releases,
and the order of equal keys in an unstable sort depends on the vector width of the CPU. So only raw
words of a bit generator are used, whose stream is fixed, and keys are made unique by the position
in their lowest bits. (Sorting such keys is also several times faster than ``argsort``.)
"""

import numpy as np

from bevatron.typing import IntArray, WordArray


def sorting_order(keys: IntArray) -> IntArray:
    """Return the permutation that sorts non-negative integer keys, stably.

    Examples
    --------
    >>> sorting_order(np.array([5, 0, 5, 1]))
    array([1, 3, 0, 2])
    """
    count = len(keys)
    shift = _bits(count)
    if count and int(keys.max()).bit_length() + shift > 63:
        return np.argsort(keys, kind="stable").astype(np.int64, copy=False)
    packed = (keys << shift) | np.arange(count, dtype=np.int64)
    packed.sort()
    packed &= (1 << shift) - 1
    return packed


class RandomStream:
    """Random integers that depend only on (seed, epoch).

    Parameters
    ----------
    seed, epoch : non-negative integers; each pair gives an independent stream
    """

    def __init__(self, seed: int, epoch: int) -> None:
        self._words = np.random.PCG64(np.random.SeedSequence((seed, epoch)))

    def integers(self, bound: int, count: int) -> IntArray:
        """Draw ``count`` numbers in [0, ``bound``), ``bound`` at most 2^31."""
        high = self._words.random_raw(count) >> np.uint64(33)
        return ((high * np.uint64(bound)) >> np.uint64(31)).astype(np.int64)

    def permutation(self, count: int) -> IntArray:
        """Draw a permutation of 0 ... count-1."""
        shift = _bits(count)
        packed = self._words.random_raw(count).astype(np.uint64, copy=False)
        packed >>= np.uint64(shift + 1)
        packed <<= np.uint64(shift)
        packed |= np.arange(count, dtype=np.uint64)
        packed.sort()
        packed &= np.uint64((1 << shift) - 1)
        return packed.astype(np.int64)


DRAWS, STEPS = 1, 2
"""Purposes of random numbers: independent streams of one seed."""


def counted_words(seed: int, purpose: int, first: int, count: int) -> WordArray:
    """Return four random words for each number from ``first`` on, uint64 [count, 4].

    The words of a number depend on it, the seed and the purpose alone (Philox4x64, Salmon et al.
    2011), so no state is kept between calls.

    Examples
    --------
    >>> ahead = counted_words(seed=7, purpose=DRAWS, first=1, count=3)
    >>> bool((counted_words(7, DRAWS, 2, 1) == ahead[1]).all())
    True
    """
    key = np.array([seed, purpose], dtype=np.uint64)
    counter = np.array([first, 0, 0, 0], dtype=np.uint64)
    words: WordArray = np.random.Philox(key=key, counter=counter).random_raw(4 * count)
    return words.reshape(count, 4)


def _bits(count: int) -> int:
    """Bits that hold the positions 0 ... count-1."""
    return max(count - 1, 1).bit_length()
