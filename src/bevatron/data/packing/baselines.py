"""Baseline packings of other programs: a fixed number of samples, and a streaming greedy."""

import numpy as np

from bevatron.data.packing.costs import Problem
from bevatron.data.packing.repair import split_batches
from bevatron.typing import IntArray


def fixed_count(problem: Problem, batch_size: int) -> tuple[IntArray, int]:
    """Give every batch ``batch_size`` shuffled samples, as mace-torch and PyG do.

    The shuffled samples are dealt to the ranks in turn, as torch's DistributedSampler does, and
    cut into batches there. The last batch of a rank may be smaller, and nothing is dropped. A
    rank whose samples fill all its batches but the last leaves the last sample to that one.

    Returns
    -------
    batch_of : [n] batch of each sample; batch ``step * num_ranks + rank``
    num_batches
        Batches of the last step are empty only if there are fewer samples than batches.
    """
    num_ranks = problem.num_ranks
    place = np.empty(problem.num_samples, dtype=np.int64)
    place[problem.stream.permutation(problem.num_samples)] = np.arange(problem.num_samples)
    rank, turn = place % num_ranks, place // num_ranks
    last_step = (problem.num_samples - 1) // (num_ranks * batch_size)
    step = turn // batch_size
    if last_step and batch_size > 1:
        is_last_of_rank = place + num_ranks >= problem.num_samples
        step[is_last_of_rank] = last_step
    return step * num_ranks + rank, (last_step + 1) * num_ranks


def streaming(problem: Problem) -> tuple[IntArray, int]:
    """Fill batches in random order; open a new one whenever a capacity would be exceeded.

    GPS++'s greedy. The costliest batches are split to make their number a multiple of the ranks.
    """
    count = problem.num_samples
    order = problem.stream.permutation(count)
    end = np.full(count, count, dtype=np.int64)
    for units, limit in zip(problem.units, problem.limits, strict=True):
        total = np.cumsum(units[order])
        before = total - units[order]
        np.minimum(end, np.searchsorted(total, before + limit, side="right"), out=end)
    following = end.tolist()
    begins = []
    start = 0
    while start < count:
        begins.append(start)
        start = following[start]
    sizes = np.diff(np.append(begins, count))
    batch_of = np.empty(count, dtype=np.int64)
    batch_of[order] = np.repeat(np.arange(len(begins)), sizes)
    wanted = problem.round_up(len(begins))
    return split_batches(batch_of, len(begins), wanted, problem.balance)
