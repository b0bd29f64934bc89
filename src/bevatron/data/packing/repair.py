"""Repairs of a packing: move overflowing samples, split costly batches."""

import numpy as np

from bevatron.data.packing.costs import Problem
from bevatron.data.packing.randomness import sorting_order
from bevatron.data.ragged import count_up
from bevatron.typing import BoolArray, IntArray

_MAX_ROUNDS = 64


def move_overflow(problem: Problem, batch_of: IntArray, num_batches: int) -> bool:
    """Move samples out of batches above a capacity into others, in place.

    Each batch above a capacity keeps its largest samples that fit; the others are offered, largest
    first, to the batches with the most room.

    Returns
    -------
    bool
        Whether all batches are within capacity; if not, ``batch_of`` is invalid.
    """
    loads = problem.loads(batch_of, num_batches)
    limits = problem.limits[:, None]
    over: BoolArray = np.any(loads > limits, axis=0)
    if not over.any():
        return True
    if over.mean() > 0.5 and num_batches > 1000:
        return False
    moving = _do_not_fit(problem, batch_of, over)
    share = _share(problem, moving)
    moving = moving[sorting_order(int(share.max()) - share)]
    staying = np.ones(problem.num_samples, dtype=bool)
    staying[moving] = False
    loads = problem.loads(batch_of[staying], num_batches, staying)
    return _place(problem, batch_of, moving, limits - loads)


def _do_not_fit(problem: Problem, batch_of: IntArray, over: BoolArray) -> IntArray:
    """Return the samples to move out of batches above a capacity: the smallest."""
    members = np.flatnonzero(over[batch_of])
    share = _share(problem, members)
    members = members[sorting_order(int(share.max()) - share)]
    members = members[sorting_order(batch_of[members])]
    lengths = np.bincount(batch_of[members])
    lengths = lengths[lengths > 0]
    begins = np.cumsum(lengths) - lengths
    leave = np.zeros(len(members), dtype=bool)
    for units, limit in zip(problem.units, problem.limits, strict=True):
        total = np.cumsum(units[members])
        before = np.repeat(total[begins] - units[members[begins]], lengths)
        leave |= total - before > limit
    return members[leave]


def _share(problem: Problem, members: IntArray) -> IntArray:
    """Return the largest share of a capacity that a sample takes, in 2^-30."""
    shares = problem.units[:, members] / problem.limits[:, None]
    largest: IntArray = np.rint(shares.max(axis=0) * 2**30).astype(np.int64)
    return largest


def _place(problem: Problem, batch_of: IntArray, moving: IntArray, room: IntArray) -> bool:
    """Offer samples, sorted by size, to batches in rounds: one sample to a batch in each."""
    limits = problem.limits[:, None]
    offset = 0
    for _ in range(_MAX_ROUNDS):
        free = np.rint(np.maximum(room / limits, 0.0).min(axis=0) * 2**30).astype(np.int64)
        best = sorting_order(int(free.max()) - free)
        tried = moving[: len(best)]
        target = best[: len(tried)]
        if offset:
            target = np.roll(best, -offset)[: len(tried)]
        fits = (problem.units[:, tried] <= room[:, target]).all(axis=0)
        batch_of[tried[fits]] = target[fits]
        room[:, target[fits]] -= problem.units[:, tried[fits]]
        moving = np.concatenate([tried[~fits], moving[len(best) :]])
        if not len(moving):
            return True
        # Nothing fits where the most room is: several capacities are badly paired, or full.
        if not fits.any():
            offset = 2 * offset + 1
            if offset >= len(best) or len(limits) == 1:
                return False
        else:
            offset = 0
    return False


def split_batches(
    batch_of: IntArray, num_batches: int, wanted: int, balance: IntArray
) -> tuple[IntArray, int]:
    """Split the costliest batches in two until there are ``wanted``, or single samples only."""
    while num_batches < wanted:
        counts = np.bincount(batch_of, minlength=num_batches)
        cost = np.bincount(batch_of, weights=balance, minlength=num_batches)
        eligible = np.flatnonzero(counts > 1)
        if not len(eligible):
            break
        costliest = eligible[np.argsort(-cost[eligible], kind="stable")]
        chosen = costliest[: wanted - num_batches]
        new_batch = np.full(num_batches, -1, dtype=np.int64)
        new_batch[chosen] = num_batches + np.arange(len(chosen))
        members = np.flatnonzero(new_batch[batch_of] >= 0)
        # Dealt alternately from the largest on, so that both batches cost about the same.
        members = members[np.argsort(-balance[members], kind="stable")]
        members = members[np.argsort(batch_of[members], kind="stable")]
        odd = members[count_up(np.bincount(batch_of[members])) % 2 == 1]
        batch_of[odd] = new_batch[batch_of[odd]]
        num_batches += len(chosen)
    return batch_of, num_batches
