"""The plan of one epoch: which samples form which batch, on which rank, in which order."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import overload

import numpy as np

from bevatron.errors import DataError
from bevatron.typing import BoolArray, FloatArray, IntArray


@dataclass(frozen=True, eq=False)
class RankPlan(Sequence[IntArray]):
    """The batches of one rank; each is an int64 array of sample indices.

    Attributes
    ----------
    indices, offsets, num_ranks : as in the `Plan`
    rank : the rank whose batches these are
    """

    indices: IntArray
    offsets: IntArray
    num_ranks: int
    rank: int

    def __len__(self) -> int:
        return (len(self.offsets) - 1) // self.num_ranks

    @overload
    def __getitem__(self, step: int) -> IntArray: ...
    @overload
    def __getitem__(self, step: slice) -> list[IntArray]: ...
    def __getitem__(self, step: int | slice) -> IntArray | list[IntArray]:
        if isinstance(step, slice):
            return [self[s] for s in range(len(self))[step]]
        place = range(len(self))[step] * self.num_ranks + self.rank
        return self.indices[self.offsets[place] : self.offsets[place + 1]]


@dataclass(frozen=True, eq=False)
class Plan(Sequence[RankPlan]):
    """The batches of an epoch; ``plan[rank][step]`` are the indices of one batch's samples.

    Batch b = ``step * num_ranks + rank`` holds ``indices[offsets[b]:offsets[b + 1]]``: a million
    samples take 8 MB, without a Python object per batch.

    Attributes
    ----------
    indices : int64, samples of all batches, steps first
    offsets : [num_steps * num_ranks + 1], start of each batch
    num_ranks : number of ranks that share the epoch
    repeated : bool like ``indices``, repeated samples, which have weight zero; or None
    costs : [num_steps, num_ranks] cost of each batch, repeats included
    used : [d] sum of each cost column over the epoch, without repeats
    capacity : [d] or None

    Examples
    --------
    >>> from bevatron.data.packing import pack
    >>> plan = pack([3, 1, 2, 2], capacity=4, num_ranks=2)
    >>> plan.num_steps, plan.fill, plan.imbalance
    (1, 1.0, 1.0)
    >>> sorted(int(i) for rank in plan for batch in rank for i in batch)
    [0, 1, 2, 3]
    """

    indices: IntArray
    offsets: IntArray
    num_ranks: int
    repeated: BoolArray | None
    costs: FloatArray
    used: FloatArray
    capacity: FloatArray | None

    def __len__(self) -> int:
        return self.num_ranks

    @overload
    def __getitem__(self, rank: int) -> RankPlan: ...
    @overload
    def __getitem__(self, rank: slice) -> list[RankPlan]: ...
    def __getitem__(self, rank: int | slice) -> RankPlan | list[RankPlan]:
        if isinstance(rank, slice):
            return [self[r] for r in range(self.num_ranks)[rank]]
        place = range(self.num_ranks)[rank]
        return RankPlan(self.indices, self.offsets, self.num_ranks, place)

    @property
    def num_batches(self) -> int:
        """Number of batches over all ranks."""
        return len(self.offsets) - 1

    @property
    def num_steps(self) -> int:
        """Number of batches of each rank."""
        return self.num_batches // self.num_ranks

    @property
    def num_repeats(self) -> int:
        """Number of repeated samples, which have weight zero."""
        return 0 if self.repeated is None else int(np.count_nonzero(self.repeated))

    @property
    def num_samples(self) -> int:
        """Number of samples, without repeats."""
        return len(self.indices) - self.num_repeats

    @property
    def batch_sizes(self) -> IntArray:
        """Number of samples in each batch, [num_steps, num_ranks]."""
        return np.diff(self.offsets).reshape(-1, self.num_ranks)

    def batch(self, rank: int, step: int) -> IntArray:
        """Return the samples of one batch, ascending; a view."""
        return self[rank][step]

    def weights(self, rank: int, step: int) -> FloatArray:
        """Return the weight of each sample of a batch: 1, or 0 for a repeat."""
        place = range(self.num_steps)[step] * self.num_ranks + range(self.num_ranks)[rank]
        first, last = self.offsets[place], self.offsets[place + 1]
        if self.repeated is None:
            return np.ones(last - first)
        return np.where(self.repeated[first:last], 0.0, 1.0)

    def flat(self, rank: int, start: int = 0) -> "Batches":
        """Return (indices, weights) of a rank's batches from step ``start`` on, for a loader.

        Raises DataError if there is no such rank, or the start is negative.
        """
        if not 0 <= rank < self.num_ranks:
            raise DataError(f"rank {rank} is not among {self.num_ranks} ranks")
        if start < 0:
            raise DataError(f"the first step of an epoch is at least 0, got {start}")
        return Batches(self, rank, start)

    def finished(self, num_steps: int) -> IntArray:
        """Return the samples of the first ``num_steps`` steps over all ranks, without repeats."""
        stop = int(self.offsets[min(num_steps, self.num_steps) * self.num_ranks])
        done = self.indices[:stop]
        return done if self.repeated is None else done[~self.repeated[:stop]]

    @cached_property
    def fills(self) -> FloatArray:
        """Cost of the epoch over (batches x capacity) for each cost column; NaN if unlimited."""
        if self.capacity is None or not self.num_batches:
            return np.full(len(self.used), np.nan)
        return self.used / (self.num_batches * self.capacity)

    @property
    def fill(self) -> float:
        """The largest of `fills`: the used share of the tightest capacity."""
        return float(self.fills.max(initial=-np.inf)) if len(self.fills) else float("nan")

    @cached_property
    def step_imbalance(self) -> FloatArray:
        """Largest over mean cost of the ranks in each step, [num_steps]; 1 is perfect."""
        mean = self.costs.mean(axis=1)
        largest = self.costs.max(axis=1, initial=0.0)
        return np.where(mean > 0, largest / np.where(mean > 0, mean, 1.0), 1.0)

    @property
    def imbalance(self) -> float:
        """Straggler factor: cost of the slowest rank of each step over that of a perfect split."""
        mean = float(self.costs.mean(axis=1).sum()) if self.num_batches else 0.0
        return float(self.costs.max(axis=1).sum()) / mean if mean > 0 else 1.0


@dataclass(frozen=True)
class Batches(Sequence[tuple[IntArray, FloatArray]]):
    """(indices, weights) of one rank's batches from a step on."""

    plan: Plan
    rank: int
    start: int = 0

    def __len__(self) -> int:
        return max(self.plan.num_steps - self.start, 0)

    @overload
    def __getitem__(self, place: int) -> tuple[IntArray, FloatArray]: ...
    @overload
    def __getitem__(self, place: slice) -> list[tuple[IntArray, FloatArray]]: ...
    def __getitem__(
        self, place: int | slice
    ) -> tuple[IntArray, FloatArray] | list[tuple[IntArray, FloatArray]]:
        if isinstance(place, slice):
            return [self[p] for p in range(len(self))[place]]
        step = range(len(self))[place] + self.start
        return self.plan.batch(self.rank, step), self.plan.weights(self.rank, step)
