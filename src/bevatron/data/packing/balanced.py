"""Our packing: batches filled to within a few atoms of the capacity, redrawn every epoch.

The samples are dealt in strata, largest first, as longest-processing-time-first scheduling does;
but a whole stratum is dealt at once, by *water filling*: with samples of about equal size s, batch
b offers places at heights load_b, load_b + s, load_b + 2s, ..., and the lowest places of all
batches are taken. A million samples need some thirty strata, each a few sorts.

Small samples come last and level what the large ones left uneven. As long as what is still to come
can level it, unevenness costs nothing, so up to there the dealing is *random*, but evenly so: each
batch's places are spread over the stratum, which is ordered by size and then by index, one at
random in each part. A batch thus has samples of every size and, since samples of a file are
adjacent, of every file: its gradient is closer to the full gradient than that of a random batch,
and batches still differ between epochs. Only the last strata are dealt exactly.

What exceeds a capacity afterwards (there may be several) is repaired by moving single samples; if
that fails, the samples are dealt again into a few more batches, or packed by Algorithm 1 where
that needs fewer.
"""

import numpy as np

from bevatron.data.packing.algorithm1 import Order, algorithm1
from bevatron.data.packing.costs import Problem, batch_sums
from bevatron.data.packing.randomness import RandomStream, sorting_order
from bevatron.data.packing.repair import move_overflow
from bevatron.typing import FloatArray, IntArray

_STRATUM_RATIO = 0.75
"""Smallest over largest size of a stratum."""
_RANDOM_SHARE = 0.5
"""Unevenness allowed after a stratum, as a share of what is still to be dealt to a batch."""
_WINDOW_SHARE = 0.25
"""Neighbouring samples of a stratum that may swap batches, as a share of the batches."""
_SPARE = 0.003
"""Share of the capacity left free in large problems, where one batch more costs nothing."""
_SMALL, _TRIES = 10_000, 12
"""Up to _SMALL samples are dealt _TRIES times before a batch is added, which would cost more."""
_WORTH = 0.01
"""Extra batches accepted, as a share, for balanced batches that differ every epoch."""
_PART_BITS = 20
"""Bits of a place within its part of a stratum."""
_HEIGHT_BITS = 26
"""Bits of a batch's load while dealing; a sample's size is rounded to that."""


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
    pull = None if np.array_equal(problem.balance, size) else problem.balance
    num_batches = _first_guess(problem)
    growth, fallback = 0.002, None
    tries = _TRIES if count <= _SMALL else 1
    while num_batches < count:
        for _ in range(tries):
            batch_of = deal(size, num_batches, problem.stream, pull)
            if move_overflow(problem, batch_of, num_batches):
                return fill_empty(batch_of, num_batches), num_batches
        if fallback is None:
            fallback = _without_overflow(problem)
        num_batches = problem.round_up(max(num_batches + 1, int(num_batches * (1 + growth))))
        if num_batches > fallback[1] * (1 + _WORTH):
            return fallback
        growth *= 2
    return np.arange(count, dtype=np.int64), count


def _without_overflow(problem: Problem) -> tuple[IntArray, int]:
    """Pack by Algorithm 1, which never exceeds a capacity, in the better of its two orders.

    Without small samples (all between a third and a half of the capacity, say) there is nothing
    to level with, and equal batches are the wrong aim.
    """
    orders: tuple[Order, Order] = ("fullest", "emptiest")
    return min((algorithm1(problem, order) for order in orders), key=lambda packed: packed[1])


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


def deal(
    size: IntArray, num_batches: int, stream: RandomStream, pull: IntArray | None = None
) -> IntArray:
    """Deal samples into batches of nearly equal size, as randomly as that allows.

    Parameters
    ----------
    size : [n] whole sizes; zeros are spread evenly too
    num_batches
        At most n.
    stream
        Source of randomness.
    pull : [n] or None
        A second quantity, to be evened out as far as the first permits.

    Returns
    -------
    IntArray
        Batch of each sample, [n].
    """
    size = _rounded(size, num_batches)
    excess = None if pull is None else _excess(pull, size)
    order = sorting_order(int(size.max()) - size)
    falling = size[order]
    ascending, dealt = -falling, np.cumsum(falling)
    load = np.zeros(num_batches, dtype=np.int64)
    pulled = np.zeros(num_batches)
    batch_of = np.empty(len(size), dtype=np.int64)
    start = 0
    while start < len(size):
        stop = int(np.searchsorted(ascending, -_STRATUM_RATIO * falling[start], side="right"))
        stop = min(max(stop, start + num_batches // 4, start + 1), len(size))
        samples, stratum = order[start:stop], falling[start:stop]
        to_come = int(dealt[-1] - dealt[stop - 1]) // num_batches
        slack = int(_RANDOM_SHARE * to_come)
        at_random = slack > 2 * int(stratum[0] - stratum[-1])
        places = _lowest_places(load, stratum, slack, stream)
        if not at_random:
            samples = _ties_shuffled(samples, stratum, stream)
        else:
            places = _evenly(places, num_batches, stream)
            if excess is not None:
                places = _pair_excess(places, excess[samples], pulled, stream)
        batch_of[samples] = places
        load += batch_sums(stratum, places, num_batches)
        if excess is not None:
            pulled += np.bincount(places, weights=excess[samples], minlength=num_batches)
        start = stop
    return batch_of


def _ties_shuffled(samples: IntArray, size: IntArray, stream: RandomStream) -> IntArray:
    """Shuffle runs of samples of equal size."""
    shuffled = stream.permutation(len(samples))
    return samples[shuffled[sorting_order(int(size[0]) - size[shuffled])]]


def _lowest_places(load: IntArray, stratum: IntArray, slack: int, stream: RandomStream) -> IntArray:
    """Choose a batch for each sample of a stratum by water filling: the lowest for the first.

    If there is slack, the batches that get one sample more are random.
    """
    count = len(stratum)
    step = max(int(stratum.sum()) // count, 1)
    chance = min(slack, step)
    height = load + stream.integers(chance, len(load)) if chance > 1 else load
    level = _water_level(height, count * step)
    open_batches = np.flatnonzero(height <= level)
    base = height[open_batches]
    offered = (level - base) // step + 1
    first = np.cumsum(offered) - offered
    owner = np.repeat(np.arange(len(base)), offered)
    rung = np.arange(len(owner)) - first[owner]
    heights = base[owner] + rung * step
    return open_batches[owner[sorting_order(heights)[:count]]]


def _evenly(places: IntArray, num_batches: int, stream: RandomStream) -> IntArray:
    """Order places so that those of each batch are spread evenly, at random within each part.

    A batch with c places has one in each c-th part of the order.
    """
    counts = np.bincount(places, minlength=num_batches)
    first = np.cumsum(counts) - counts
    batch = np.repeat(np.arange(num_batches), counts)
    part = np.arange(len(batch)) - first[batch]
    within = stream.integers(1 << _PART_BITS, len(batch))
    return batch[sorting_order(((part << _PART_BITS) + within) // counts[batch])]


def _water_level(height: IntArray, volume: int) -> int:
    """Return the least level at which the room below it, summed over batches, holds ``volume``."""
    rising = np.sort(height)
    below = np.cumsum(rising)
    room = rising * np.arange(1, len(rising) + 1) - below
    wet = int(np.count_nonzero(room < volume))
    return -(-(volume + int(below[wet - 1])) // wet)


def _pair_excess(
    places: IntArray, excess: IntArray, pulled: FloatArray, stream: RandomStream
) -> IntArray:
    """Assign samples with much of the second quantity to batches that have little of it.

    Only neighbouring samples swap batches, so everything else stays as even as before.
    """
    spread = int(excess.max() - excess.min()) + 1
    here = pulled[places].astype(np.int64)
    here -= here.min()
    here += stream.integers(min(spread, 1 << 30), len(here))
    window = np.arange(len(places)) // max(int(_WINDOW_SHARE * len(pulled)), 2)
    rising = sorting_order(window * (int(here.max()) + 1) + here)
    falling = sorting_order(window * spread + excess.max() - excess)
    paired = np.empty_like(places)
    paired[falling] = places[rising]
    return paired


def _excess(pull: IntArray, size: IntArray) -> IntArray:
    """Return the excess of the second quantity over samples of equal size."""
    scaled = pull.astype(np.float64) * (float(size.sum()) / max(float(pull.sum()), 1.0))
    return np.rint(scaled - size).astype(np.int64)


def _rounded(size: IntArray, num_batches: int) -> IntArray:
    """Scale sizes to a fixed number of bits; even a sample of size zero gets a small one."""
    typical = max(int(size.sum()) // num_batches, int(size.max()), 1)
    shift = _HEIGHT_BITS - typical.bit_length()
    scaled = size << shift if shift >= 0 else size >> -shift
    per_sample = int(scaled.sum()) // len(size)
    return scaled + max(per_sample >> 12, 1)


def _first_guess(problem: Problem) -> int:
    """Return the lower bound of batches, plus a few where that makes success likely."""
    fewest = fewest_batches(problem)
    least = problem.round_up(fewest)
    spare = (least - fewest) / least if least else 1.0
    if fewest < 1000 or spare >= _SPARE:
        return max(least, 1)
    return problem.round_up(-(-int(fewest * (1 + _SPARE)) // 1))


def fill_empty(batch_of: IntArray, num_batches: int) -> IntArray:
    """Move samples from the batches with the most samples into empty ones.

    Needs at least as many samples as batches.
    """
    counts = np.bincount(batch_of, minlength=num_batches)
    empty = np.flatnonzero(counts == 0)
    if not len(empty):
        return batch_of
    batch_of = batch_of.copy()
    by_batch = np.argsort(batch_of, kind="stable")
    first = np.cumsum(counts) - counts
    rank_in_batch = np.empty_like(batch_of)
    rank_in_batch[by_batch] = np.arange(len(batch_of)) - first[batch_of[by_batch]]
    remaining_after = counts[batch_of] - rank_in_batch
    spare = np.flatnonzero(rank_in_batch > 0)
    spare = spare[np.argsort(-remaining_after[spare], kind="stable")]
    batch_of[spare[: len(empty)]] = empty
    return batch_of
