"""Our packing: batches filled to within a few atoms of the capacity, redrawn every epoch.

Samples are dealt from the largest to the smallest, each to a batch that is still low, as in
longest-processing-time-first scheduling. But a whole *stratum* of samples of similar size s is
dealt at once: batch b offers places at its load, load + s, load + 2s, ..., and the lowest places
of all batches are filled. A million samples have some thirty strata, each a few sorts.

Twelve samples go into three batches like this (real sizes are first scaled up, see `_scaled`):

>>> size = np.array([9, 2, 40, 4, 31, 1, 10, 2, 34, 8, 3, 1])
>>> strata = list(_strata(size, num_batches=3))
>>> [size[samples].tolist() for samples in strata]
[[40, 34, 31], [10, 9, 8], [4, 3], [2, 2], [1, 1]]

All batches are empty, so each gets one sample of the first stratum. Then batch 2 is the lowest and
gets the largest sample of the second; of the third, batch 0 gets none, as it is the highest:

>>> load = np.zeros(3, dtype=np.int64)
>>> for samples in strata:
...     batches = _lowest_places(load, size[samples], slack=0, stream=RandomStream(0, 0))
...     load += batch_sums(size[samples], batches, 3)
...     print(size[samples], "to batches", batches, "which then hold", load)
[40 34 31] to batches [0 1 2] which then hold [40 34 31]
[10  9  8] to batches [2 1 0] which then hold [48 43 41]
[4 3] to batches [2 1] which then hold [48 46 45]
[2 2] to batches [2 1] which then hold [48 48 47]
[1 1] to batches [2 0] which then hold [49 48 48]

As long as the samples to come can level it, unevenness costs nothing, so up to there the places
are filled at random. Evenly so: the places of a batch are spread over the stratum, which is
ordered by size and then by index. A batch with two of six places gets one of the first three
samples and one of the last three:

>>> _spread(np.array([0, 0, 1, 1, 2, 2]), 3, RandomStream(0, 0))
array([1, 0, 2, 1, 0, 2])

Both together give three batches of 48, 48 and 49, and others in the next epoch:

>>> batch_of = deal(size, 3, RandomStream(0, 0))
>>> [size[batch_of == batch].tolist() for batch in range(3)]
[[2, 4, 31, 10, 1], [9, 2, 34, 3], [40, 1, 8]]

A batch thus has samples of every size and, since samples of a file are adjacent, of every file:
its gradient is closer to the full gradient than that of a random batch, and batches still differ
between epochs. Only the last strata are dealt exactly.

What exceeds a capacity afterwards (there may be several) is repaired by moving single samples; if
that fails, the samples are dealt again into a few more batches, or packed by Algorithm 1 where
that needs fewer.
"""

from collections.abc import Iterator

import numpy as np

from bevatron.data.packing.algorithm1 import Order, algorithm1
from bevatron.data.packing.costs import Problem, batch_sums
from bevatron.data.packing.randomness import RandomStream, sorting_order
from bevatron.data.packing.repair import move_overflow
from bevatron.data.ragged import count_up
from bevatron.typing import FloatArray, IntArray

# "The mix" is tools/paper_mix.py at a tenth of its size, 64 ranks, capacity 3072.
_STRATUM_RATIO = 0.75
"""Smallest over largest size of a stratum: from 0.5 to 0.9, steps of the mix cost within 0.02 %."""
_RANDOM_SHARE = 0.5
"""Unevenness allowed, as a share of what a batch still gets: 0.25 to 0.9 level the mix alike."""
_WINDOW_SHARE = 0.25
"""Neighbours that may swap batches, as a share of the batches: 0.05 levels the mix half as well,
4 puts a quarter more of a file into one batch."""
_SPARE = 0.003
"""Share of the capacity left free from 1000 batches on: chosen, 0.3 % more batches at most."""
_SMALL, _TRIES = 10_000, 12
"""Up to _SMALL samples are dealt _TRIES times before a batch is added: chosen, 0.3 % fewer batches
than with one try on uniform sizes, in some 30 ms."""
_WORTH = 0.01
"""Extra batches accepted, as a share, for balanced batches in new company: chosen, 1 % of time."""
_GROWTH = 0.002
"""Batches added after the first failure, as a share, then twice as many: chosen below _WORTH."""
_FRACTION_BITS = 20
"""Bits of a random fraction: 10 to 26 level the mix alike."""
_LOAD_BITS = 26
"""Bits of a load: 20 to 30 level the mix alike, and 26 leave 2^36 places within 63-bit keys."""


def balanced(problem: Problem) -> tuple[IntArray, int]:
    """Pack samples into as few full and equal batches as possible.

    Returns
    -------
    batch_of : [n] batch of each sample, none above a capacity
    num_batches
        None of them is empty.
    """
    count = problem.num_samples
    size = problem.units[problem.tightest]
    balance = None if np.array_equal(problem.balance, size) else problem.balance
    num_batches = _first_guess(problem)
    growth, fallback = _GROWTH, None
    tries = _TRIES if count <= _SMALL else 1
    while num_batches < count:
        for _ in range(tries):
            batch_of = deal(size, num_batches, problem.stream, balance)
            # None is empty: dealt to the lowest, and what is too full keeps its largest sample.
            if move_overflow(problem, batch_of, num_batches):
                return batch_of, num_batches
        if fallback is None:
            fallback = _without_overflow(problem)
        num_batches = problem.round_up(max(num_batches + 1, int(num_batches * (1 + growth))))
        if num_batches > fallback[1] * (1 + _WORTH):
            return fallback
        growth *= 2
    return np.arange(count, dtype=np.int64), count


def _first_guess(problem: Problem) -> int:
    """Return the lower bound of batches, plus a few where that makes success likely."""
    fewest = fewest_batches(problem)
    least = problem.round_up(fewest)
    if fewest < 1000 or (least - fewest) / least >= _SPARE:
        return least
    return problem.round_up(int(fewest * (1 + _SPARE)))


def fewest_batches(problem: Problem) -> int:
    """Return a lower bound of the number of batches.

    The sum of the costs over the capacity; and of samples above 1/(k + 1) of the capacity, no
    batch holds more than k.
    """
    bound = 1
    for units, limit in zip(problem.units, problem.limits, strict=True):
        bound = max(bound, -(-int(units.sum()) // int(limit)))
        for k in (1, 2, 3):
            large = int(np.count_nonzero(units * (k + 1) > limit))
            bound = max(bound, -(-large // k))
    return bound


def _without_overflow(problem: Problem) -> tuple[IntArray, int]:
    """Pack by Algorithm 1, which never exceeds a capacity, in the better of its two orders.

    Without small samples (all between a third and a half of the capacity, say) there is nothing
    to level with, and equal batches are the wrong aim.
    """
    orders: tuple[Order, Order] = ("fullest", "emptiest")
    return min((algorithm1(problem, order) for order in orders), key=lambda packed: packed[1])


def deal(
    size: IntArray, num_batches: int, stream: RandomStream, balance: IntArray | None = None
) -> IntArray:
    """Deal samples into batches of nearly equal size, as randomly as that allows.

    Parameters
    ----------
    size : [n] whole sizes; zeros are spread evenly too
    num_batches : at most n
    balance : [n] or None
        A second quantity, to be evened out as far as the first permits.

    Returns
    -------
    IntArray
        Batch of each sample, [n].
    """
    size = _scaled(size, num_batches)
    excess = None if balance is None else _excess(balance, size)
    load, excess_load = np.zeros(num_batches, dtype=np.int64), np.zeros(num_batches)
    batch_of = np.empty(len(size), dtype=np.int64)
    to_come = int(size.sum())
    for stratum in _strata(size, num_batches):
        samples, sizes = stratum, size[stratum]
        to_come -= int(sizes.sum())
        slack = int(_RANDOM_SHARE * (to_come // num_batches))
        batches = _lowest_places(load, sizes, slack, stream)
        # In a random order each of two batches may be off by the difference of their sizes.
        if slack > 2 * int(sizes[0] - sizes[-1]):
            batches = _spread(batches, num_batches, stream)
            if excess is not None:
                batches = _pair_excess(batches, excess[samples], excess_load, stream)
        else:
            samples = _shuffle_ties(samples, sizes, stream)
        batch_of[samples] = batches
        load += batch_sums(sizes, batches, num_batches)
        if excess is not None:
            excess_load += np.bincount(batches, weights=excess[samples], minlength=num_batches)
    return batch_of


def _scaled(size: IntArray, num_batches: int) -> IntArray:
    """Scale sizes until a batch holds about 2^26; even a sample of size zero gets a small one."""
    typical = max(int(size.sum()) // num_batches, int(size.max()), 1)
    shift = _LOAD_BITS - typical.bit_length()
    scaled = size << shift if shift >= 0 else size >> -shift
    mean = int(scaled.sum()) // len(size)
    return scaled + max(mean >> 12, 1)


def _excess(balance: IntArray, size: IntArray) -> IntArray:
    """Return how much more of the second quantity a sample has than is usual for its size."""
    scaled = balance.astype(np.float64) * (float(size.sum()) / max(float(balance.sum()), 1.0))
    return np.rint(scaled - size).astype(np.int64)


def _strata(size: IntArray, num_batches: int) -> Iterator[IntArray]:
    """Cut the samples, largest first, into strata of similar size."""
    order = sorting_order(int(size.max()) - size)
    rising = -size[order]
    start = 0
    while start < len(order):
        stop = int(np.searchsorted(rising, _STRATUM_RATIO * rising[start], side="right"))
        stop = max(stop, start + num_batches // 4, start + 1)
        yield order[start:stop]
        start = stop


def _lowest_places(load: IntArray, sizes: IntArray, slack: int, stream: RandomStream) -> IntArray:
    """Choose a batch for each sample of a stratum: the lowest place for the first.

    If there is slack, the batches that get one sample more are random.
    """
    count = len(sizes)
    step = max(int(sizes.sum()) // count, 1)
    chance = min(slack, step)
    bottom = load + stream.integers(chance, len(load)) if chance > 1 else load
    level = _water_level(bottom, count * step)
    offered = np.maximum((level - bottom) // step + 1, 0)
    batches = np.repeat(np.arange(len(bottom)), offered)
    places = bottom[batches] + step * count_up(offered)
    return batches[sorting_order(places)[:count]]


def _water_level(bottom: IntArray, volume: int) -> int:
    """Return how high ``volume`` of water stands in joined vessels whose bottoms are given."""
    rising = np.sort(bottom)
    below = np.cumsum(rising)
    room = rising * np.arange(1, len(rising) + 1) - below
    wet = int(np.count_nonzero(room < volume))
    return -(-(volume + int(below[wet - 1])) // wet)


def _spread(batches: IntArray, num_batches: int, stream: RandomStream) -> IntArray:
    """Reorder places so that a batch with c of them has one in each c-th part, at random there."""
    counts = np.bincount(batches, minlength=num_batches)
    batch = np.repeat(np.arange(num_batches), counts)
    within = stream.integers(1 << _FRACTION_BITS, len(batch))
    position = ((count_up(counts) << _FRACTION_BITS) + within) // counts[batch]
    return batch[sorting_order(position)]


def _pair_excess(
    batches: IntArray, excess: IntArray, excess_load: FloatArray, stream: RandomStream
) -> IntArray:
    """Give samples with much of the second quantity to batches that have little of it.

    Only neighbouring samples swap batches, so everything else stays as even as before.
    """
    spread = int(excess.max() - excess.min()) + 1
    here = excess_load[batches].astype(np.int64)
    here -= here.min()
    here += stream.integers(min(spread, 1 << 30), len(here))
    window = np.arange(len(batches)) // max(int(_WINDOW_SHARE * len(excess_load)), 2)
    rising = sorting_order(window * (int(here.max()) + 1) + here)
    falling = sorting_order(window * spread + excess.max() - excess)
    paired = np.empty_like(batches)
    paired[falling] = batches[rising]
    return paired


def _shuffle_ties(samples: IntArray, sizes: IntArray, stream: RandomStream) -> IntArray:
    """Shuffle runs of samples of equal size."""
    shuffled = stream.permutation(len(samples))
    return samples[shuffled[sorting_order(int(sizes[0]) - sizes[shuffled])]]
