"""The plan as a batch sampler for any DataLoader (torch's or PyG's)."""

import os
from collections.abc import Callable, Iterator
from functools import partial

from torch.utils.data import Sampler

from bevatron.data.packing.costs import Numbers
from bevatron.data.packing.epoch import Algorithm, Oversized, pack
from bevatron.data.packing.plan import Plan
from bevatron.errors import DataError
from bevatron.typing import FloatArray


class BalancedBatchSampler(Sampler[list[int]]):
    """Batches of mixed-size samples that fill the capacity and cost every rank the same.

    Pass it to a DataLoader as ``batch_sampler``. Batches differ between epochs; the epoch advances
    whenever the sampler is iterated again, or is set by `set_epoch`.

    Parameters
    ----------
    costs, capacity, algorithm, balance, batch_size, oversized, names, seed
        As for `bevatron.data.packing.pack`.
    num_ranks, rank
        Number of processes that share the epoch, and this one's rank. None: from torch.distributed
        if initialised, else from WORLD_SIZE and RANK, else a single process.
    drop_repeats
        With fewer batches than ranks, some ranks get batches of repeated samples (weight 0, see
        `weights`). True skips these batches, for loops that do not synchronise at every step.

    Examples
    --------
    >>> sampler = BalancedBatchSampler([3, 1, 2, 2], capacity=4, num_ranks=1, rank=0)
    >>> len(sampler)
    2
    >>> sorted(index for batch in sampler for index in batch)
    [0, 1, 2, 3]
    """

    def __init__(
        self,
        costs: Numbers,
        capacity: Numbers | None,
        *,
        num_ranks: int | None = None,
        rank: int | None = None,
        seed: int = 0,
        algorithm: Algorithm = "balanced",
        balance: int | Numbers = 0,
        batch_size: int | None = None,
        oversized: Oversized = "refuse",
        names: Callable[[int], str] | None = None,
        drop_repeats: bool = False,
    ) -> None:
        world, own = _world()
        self.num_ranks = world if num_ranks is None else num_ranks
        self.rank = own if rank is None else rank
        if not 0 <= self.rank < self.num_ranks:
            raise DataError(f"rank {self.rank} is not among {self.num_ranks} ranks")
        self.epoch = 0
        self.start_step = 0
        self._iterated = False
        self._drop_repeats = drop_repeats
        self._planned: tuple[int, Plan] | None = None
        self._make = partial(
            pack,
            *(costs, capacity, self.num_ranks, seed),
            algorithm=algorithm,
            balance=balance,
            batch_size=batch_size,
            oversized=oversized,
            names=names,
        )

    @property
    def plan(self) -> Plan:
        """The plan of the current epoch, for all ranks."""
        if self._planned is None or self._planned[0] != self.epoch:
            self._planned = (self.epoch, self._make(epoch=self.epoch))
        return self._planned[1]

    def set_epoch(self, epoch: int, start_step: int = 0) -> None:
        """Set the epoch, and the first step when training resumes in mid-epoch.

        Raises DataError if the step is negative.
        """
        if start_step < 0:
            raise DataError(f"the first step of an epoch is at least 0, got {start_step}")
        self.epoch, self.start_step, self._iterated = epoch, start_step, False

    def weights(self, step: int) -> FloatArray:
        """Return the weight of each sample of a batch of this rank: 1, or 0 for a repeat."""
        return self.plan.weights(self.rank, step)

    def __iter__(self) -> Iterator[list[int]]:
        if self._iterated:
            self.epoch, self.start_step = self.epoch + 1, 0
        self._iterated = True
        plan = self.plan
        for step in range(self.start_step, plan.num_steps):
            if self._drop_repeats and not plan.weights(self.rank, step).any():
                continue
            yield plan.batch(self.rank, step).tolist()

    def __len__(self) -> int:
        return max(self.plan.num_steps - self.start_step, 0)


def _world() -> tuple[int, int]:
    """Return the number of processes and this one's rank."""
    from torch import distributed

    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_world_size(), distributed.get_rank()
    return int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
