"""What a training step costs on this device: its time by size, and the largest batch that fits.

The cost model t = a*atoms + b*edges + c*structures + d, fitted to measured steps, is what packing
balances over ranks (batch.cost_*); the saturation curve (atoms per second by atoms of a batch, the
paper's Figure 11) says from which capacity on a device is busy.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import torch
from torch.nn import Module

from bevatron.data.dataset import Dataset
from bevatron.errors import ConfigError, OutOfMemoryError
from bevatron.recipes.structures import batch_sizes
from bevatron.task import Task
from bevatron.train.optim import make_optimizer
from bevatron.train.settings import OptimConfig
from bevatron.typing import FloatArray, IntArray

MEMORY_SHARE = 0.9
"""Part of the free memory that a batch found by `find_capacity` may use."""

TERMS = ("atoms", "edges", "graphs")


@dataclass(frozen=True)
class StepCost:
    """One measured training step.

    Attributes
    ----------
    sizes
        atoms, edges, graphs of the batch.
    seconds
        Median over repeats.
    peak_bytes
        Memory at its highest; 0 on a CPU, where it is not measured.
    """

    sizes: dict[str, int]
    seconds: float
    peak_bytes: int


class StepMeter:
    """Measures training steps of a model on batches of a data set.

    Steps run eagerly; one that is recorded as a CUDA graph takes less where batches are small.

    Parameters
    ----------
    model
        Moved to the device; its weights change.
    task
        The loss; the ``sizes`` of its batches have the names in `TERMS`.
    dataset
        Where batches come from.
    device, dtype
        Where and in which precision.
    sizes
        ``atoms`` and ``edges`` of every sample, [n] each; those of structures if not given.
    """

    def __init__(
        self,
        model: Module,
        task: Task[Any],
        dataset: Dataset,
        device: torch.device,
        dtype: torch.dtype,
        sizes: Mapping[str, IntArray] | None = None,
    ) -> None:
        self.model, self.task = model.to(device, dtype), task
        self.dataset, self.device, self.dtype = dataset, device, dtype
        self.sizes = batch_sizes(dataset) if sizes is None else sizes
        self.optimizer = make_optimizer(self.model, OptimConfig(lr=1e-6))

    def measure(self, indices: IntArray, repeats: int = 3) -> StepCost:
        """Time steps over some samples.

        Raises
        ------
        OutOfMemoryError
            If they do not fit.
        """
        samples = [self.dataset[int(i)] for i in indices]
        batch = self.task.collate(samples, indices, [1.0] * len(samples))
        try:
            moved = batch.to(self.device, self.dtype)
            self._step(moved)
            self._synchronise(reset=True)
            seconds = []
            for _ in range(repeats):
                began = time.perf_counter()
                self._step(moved)
                self._synchronise()
                seconds.append(time.perf_counter() - began)
        except torch.OutOfMemoryError:
            self.optimizer.zero_grad(set_to_none=True)
            torch.cuda.empty_cache()
            atoms = batch.sizes["atoms"]
            raise OutOfMemoryError(f"a batch of {atoms} atoms does not fit") from None
        peak = torch.cuda.max_memory_allocated(self.device) if self._on_gpu else 0
        return StepCost(dict(batch.sizes), median(seconds), peak)

    @property
    def _on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def _step(self, batch: Any) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        normalisers = {k: v.to(self.device) for k, v in self.task.normalisers(batch).items()}
        self.task.loss(self.model, batch, normalisers).total.backward()
        self.optimizer.step()

    def _synchronise(self, *, reset: bool = False) -> None:
        if self._on_gpu:
            torch.cuda.synchronize(self.device)
            if reset:
                torch.cuda.reset_peak_memory_stats(self.device)

    def random_batch(self, capacity: int, seed: int) -> IntArray:
        """Draw samples until ``capacity`` atoms are full; at least one, samples may repeat."""
        generator = np.random.default_rng(seed)
        return self._filled(generator.integers(len(self.dataset), size=capacity + 1), capacity)

    def densest_batch(self, capacity: int) -> IntArray:
        """Fill ``capacity`` atoms with the sample of most edges per atom: the worst case."""
        atoms, edges = self.sizes["atoms"], self.sizes["edges"]
        density = np.where(atoms <= capacity, edges / np.maximum(atoms, 1), -1.0)
        densest = int(np.argmax(density))
        return np.full(max(1, capacity // int(atoms[densest])), densest, dtype=np.int64)

    def _filled(self, order: IntArray, capacity: int) -> IntArray:
        used = np.cumsum(self.sizes["atoms"][order])
        number = max(1, int(np.searchsorted(used, capacity, side="right")))
        return np.asarray(order[:number], dtype=np.int64)


def saturation(
    meter: StepMeter, first: int = 64, most: int = 65536, seconds_at_most: float = 60.0
) -> Iterator[StepCost]:
    """Measure steps of growing batches until memory, ``most`` atoms or a step's time ends it."""
    capacity = max(first, int(meter.sizes["atoms"].min()))
    while capacity <= most:
        try:
            cost = meter.measure(meter.random_batch(capacity, seed=capacity))
        except OutOfMemoryError:
            return
        yield cost
        if cost.seconds * 8 > seconds_at_most:
            return
        capacity = int(capacity * 2**0.5) + 1


def fit_cost(costs: Sequence[StepCost]) -> tuple[dict[str, float], float]:
    """Fit seconds = a*atoms + b*edges + c*graphs + d by least squares, nothing below zero.

    Returns
    -------
    The factors by name (``constant`` for d), and the root mean square of the relative error.

    Raises
    ------
    ConfigError
        If there are fewer measurements than factors.
    """
    if len(costs) < len(TERMS) + 1:
        raise ConfigError(f"the cost model needs {len(TERMS) + 1} measurements, got {len(costs)}")
    seconds = np.array([cost.seconds for cost in costs])
    columns = [[cost.sizes[name] for cost in costs] for name in TERMS]
    table = np.array([*columns, [1.0] * len(costs)], dtype=np.float64).T
    factors = _non_negative(table / seconds[:, None], np.ones(len(costs)))
    error = table @ factors / seconds - 1.0
    names = (*TERMS, "constant")
    return dict(zip(names, factors.tolist(), strict=True)), float(np.sqrt(np.mean(error**2)))


def _non_negative(table: FloatArray, target: FloatArray) -> FloatArray:
    """Least squares with factors >= 0: leave out the most negative one until none is."""
    scale = np.abs(table).max(axis=0)
    kept = [i for i in range(table.shape[1]) if scale[i] > 0]
    factors = np.zeros(table.shape[1])
    while kept:
        found = np.linalg.lstsq(table[:, kept] / scale[kept], target, rcond=None)[0] / scale[kept]
        if (found >= 0).all():
            factors[kept] = found
            break
        kept.pop(int(np.argmin(found * scale[kept])))
    return factors


def find_capacity(meter: StepMeter, most: int = 1 << 20) -> int:
    """Find the largest number of atoms whose densest batch fits into the device's memory.

    Two small batches give the memory of an atom; the extrapolated size is then tried, and
    reduced until it fits.

    Raises
    ------
    ConfigError
        On a CPU, whose memory is shared with everything else.
    OutOfMemoryError
        If not even the largest structure fits.
    """
    if meter.device.type != "cuda":
        raise ConfigError("batch.capacity: 'auto' needs a GPU; give a number of atoms")
    largest = int(meter.sizes["atoms"].max())
    small, large = (
        meter.measure(meter.densest_batch(n)) for n in (max(64, largest), 512 + largest)
    )
    free, _ = torch.cuda.mem_get_info(meter.device)
    available = MEMORY_SHARE * (free + torch.cuda.memory_reserved(meter.device))
    atoms = large.sizes["atoms"] - small.sizes["atoms"]
    per_atom = max((large.peak_bytes - small.peak_bytes) / max(atoms, 1), 1.0)
    capacity = int(large.sizes["atoms"] + (available - large.peak_bytes) / per_atom)
    capacity = max(largest, min(capacity, most))
    while True:
        try:
            if meter.measure(meter.densest_batch(capacity), repeats=1).peak_bytes <= available:
                return capacity
        except OutOfMemoryError:
            if capacity <= largest:
                raise
        capacity = max(largest, int(capacity * 0.9))
