"""The cost of a training step on this device: time and memory by the size of the batch.

The cost model t = a*atoms + b*edges + c*structures + d, fitted to measured steps, is what packing
balances over ranks (batch.cost); the saturation curve (atoms per second by atoms of a batch, the
paper's Figure 11) shows from which capacity on a device is saturated.

Steps are those of `bevatron.train.fit`: captured as CUDA graphs where training captures them.
"""

import copy
import gc
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch.nn import Module

from bevatron.data.dataset import Dataset
from bevatron.data.padding.size_buckets import choose_shapes
from bevatron.errors import ConfigError, OutOfMemoryError
from bevatron.parallel.mesh import Mesh
from bevatron.recipes.mace.data import batch_sizes
from bevatron.task import Task
from bevatron.train.capture.cuda_graphs import NotCapturableError
from bevatron.train.capture.step import CapturedStep, obstacle
from bevatron.train.loop import begin_state
from bevatron.train.memory_plan import plan_memory
from bevatron.train.run import Run
from bevatron.train.settings import OptimConfig, Settings, TrainConfig
from bevatron.train.step import train_step
from bevatron.typing import FloatArray, IntArray

LEARNING_RATE = 1e-6

TERMS = ("atoms", "edges", "graphs")


@dataclass(frozen=True)
class StepCost:
    """One measured training step.

    Attributes
    ----------
    sizes : atoms, edges, graphs of the batch
    seconds : median over repeats
    peak_bytes : peak memory of a step; 0 on a CPU, where it is not measured
    kept_bytes : memory held by the captured graph of the step; 0 if it is not captured
    """

    sizes: dict[str, int]
    seconds: float
    peak_bytes: int
    kept_bytes: int = 0

    @property
    def needed_bytes(self) -> int:
        """Memory of training: while one graph is held, another is captured or a validation runs."""
        return self.peak_bytes + self.kept_bytes


class StepMeter:
    """Measures training steps of a model on batches of a data set.

    Parameters
    ----------
    model : moved to the device; its weights change
    task : the loss; the ``sizes`` of its batches have the names in `TERMS`
    dataset : where batches come from
    device, dtype : where and in which precision
    sizes : ``atoms`` and ``edges`` of every sample, [n] each; those of structures if not given

    Attributes
    ----------
    captured : whether steps are captured as CUDA graphs, as in training where that is possible
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
        self.dataset, self.device, self.dtype = dataset, device, dtype
        self.sizes = batch_sizes(dataset) if sizes is None else sizes
        name: Any = str(dtype).removeprefix("torch.")
        train = TrainConfig(dtype=name, explode_factor=None)
        settings = Settings(optim=OptimConfig(lr=LEARNING_RATE), train=train)
        self._run = Run(model, task, dataset, self.sizes, Path(), settings)
        self._mesh = Mesh(device=device)
        self._state = begin_state(self._run, self._mesh, None)
        self.captured = obstacle(self._run, self._state, self._mesh) is None

    def measure(self, indices: IntArray, repeats: int = 5) -> StepCost:
        """Time steps over some samples, one after the other as in training.

        Raises OutOfMemoryError if they do not fit.
        """
        samples = [self.dataset[int(i)] for i in indices]
        batch = self._run.task.collate(samples, indices, [1.0] * len(samples))
        try:
            if self.captured:
                try:
                    return self._replayed(batch, repeats)
                except NotCapturableError:
                    self.captured = False
            return self._launched(batch, repeats)
        except (torch.OutOfMemoryError, OutOfMemoryError):
            atoms = batch.sizes["atoms"]
        self._forget()
        raise OutOfMemoryError(f"a batch of {atoms} atoms does not fit")

    def planned(self, indices: IntArray) -> tuple[int, int]:
        """Plan what of `StepCost.needed_bytes` stays, and what steps over some samples add to it.

        Raises NotPlannableError if it depends on values of the batch.
        """
        run = self._run
        batch = run.task.collate(
            [self.dataset[int(i)] for i in indices], indices, [1.0] * len(indices)
        )
        shape = None
        if self.captured:
            size = np.array([batch.padding.size_of(batch.sizes)])
            shape = choose_shapes(batch.padding, size).shapes[0]
        on_host = replace(run, model=copy.deepcopy(run.model).cpu())
        plan = plan_memory(on_host, batch, shape=shape, captured=self.captured)
        added = plan.batch + plan.activations
        return plan.peak - plan.gaps - added, 2 * added if self.captured else added

    def _replayed(self, batch: Any, repeats: int) -> StepCost:
        """Capture the step of a batch and replay it; each is launched before the last is read."""
        self._forget()
        before = self._reset_peak()
        step = CapturedStep(self._run, self._state, self._mesh)
        try:
            waiting = step([batch], lr=LEARNING_RATE)
            peak = self._peak()
            gc.collect()
            if self._on_gpu:
                torch.cuda.empty_cache()  # of the warm-up; what remains is held by the graph
            kept = max(self._reserved() - before, 0)
            times = [self._now()]
            for _ in range(repeats + 1):
                following = step([batch], lr=LEARNING_RATE)
                waiting.result()
                times.append(time.perf_counter())
                waiting = following
            waiting.result()
        finally:
            step.release()
            del step
            self._forget()
        seconds = median(np.diff(times[1:]).tolist())
        return StepCost(dict(batch.sizes), seconds, peak, kept)

    def _launched(self, batch: Any, repeats: int) -> StepCost:
        run, state, mesh = self._run, self._state, self._mesh
        train_step(run, state, state.model, [batch], lr=LEARNING_RATE, mesh=mesh)
        self._reset_peak()
        times = [self._now()]
        for _ in range(repeats):
            train_step(run, state, state.model, [batch], lr=LEARNING_RATE, mesh=mesh)
            times.append(self._now())
        return StepCost(dict(batch.sizes), median(np.diff(times).tolist()), self._peak())

    @property
    def _on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def _now(self) -> float:
        """Wait for the device; return the time in seconds."""
        if self._on_gpu:
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def _forget(self) -> None:
        self._state.optimizer.zero_grad(set_to_none=True)
        gc.collect()
        if self._on_gpu:
            torch.cuda.empty_cache()

    def _reset_peak(self) -> int:
        """Reset the peak; return the memory reserved now."""
        if self._on_gpu:
            torch.cuda.reset_peak_memory_stats(self.device)
        return self._reserved()

    def _peak(self) -> int:
        return torch.cuda.max_memory_allocated(self.device) if self._on_gpu else 0

    def _reserved(self) -> int:
        return torch.cuda.memory_reserved(self.device) if self._on_gpu else 0

    def random_batch(self, capacity: int, seed: int = 0) -> IntArray:
        """Draw samples until ``capacity`` atoms are full; at least one, samples may repeat.

        Only samples that fit are drawn: one that does not would leave the batch empty.
        """
        atoms = self.sizes["atoms"]
        fitting = np.flatnonzero(atoms <= max(capacity, int(atoms.min())))
        drawn = np.random.default_rng(seed).integers(len(fitting), size=capacity + 1)
        return self._filled(fitting[drawn], capacity)

    def densest_batch(self, capacity: int) -> IntArray:
        """Fill ``capacity`` atoms with the sample of most edges per atom: the worst case."""
        atoms, edges = self.sizes["atoms"], self.sizes["edges"]
        density = np.where(atoms <= capacity, edges / np.maximum(atoms, 1), -1.0)
        densest = int(np.argmax(density))
        return np.full(max(1, capacity // int(atoms[densest])), densest, dtype=np.int64)

    def full_batch(self, capacity: Mapping[str, int]) -> IntArray:
        """Fill both atoms and edges: the largest batch of a capacity, or slightly above."""
        batch = self.random_batch(capacity["atoms"])
        missing = capacity["edges"] - int(self.sizes["edges"][batch].sum())
        densest = self.densest_batch(capacity["atoms"])[:1]
        more = -(-missing // max(int(self.sizes["edges"][densest].sum()), 1))
        return np.concatenate([batch, np.repeat(densest, max(more, 0))])

    def _filled(self, order: IntArray, capacity: int) -> IntArray:
        used = np.cumsum(self.sizes["atoms"][order])
        number = max(1, int(np.searchsorted(used, capacity, side="right")))
        return np.asarray(order[:number], dtype=np.int64)


FIRST = 64
"""Number of atoms of the smallest measured batch, unless the smallest sample is larger."""


def smallest_measured(meter: StepMeter, first: int = FIRST) -> int:
    """Return the number of atoms at which `saturation` starts."""
    return max(first, int(meter.sizes["atoms"].min()))


def saturation(
    meter: StepMeter, first: int = FIRST, most: int = 65536, seconds_at_most: float = 60.0
) -> Iterator[StepCost]:
    """Measure steps of growing batches up to the limit of memory, atoms or time.

    Parameters
    ----------
    first, most : atoms of the smallest and of the largest batch
    seconds_at_most : stop when eight steps take longer
    """
    capacity = smallest_measured(meter, first)
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
    """Fit seconds = a*atoms + b*edges + c*graphs + d by non-negative least squares.

    Raises ConfigError if there are fewer measurements than coefficients.

    Returns
    -------
    The coefficients by name (``constant`` for d), and the RMS of the relative error.
    """
    if len(costs) < len(TERMS) + 1:
        raise ConfigError(f"the cost model needs {len(TERMS) + 1} measurements, got {len(costs)}")
    seconds = np.array([cost.seconds for cost in costs])
    columns = [[cost.sizes[name] for cost in costs] for name in TERMS]
    table = np.array([*columns, [1.0] * len(costs)], dtype=np.float64).T
    factors = non_negative(table / seconds[:, None], np.ones(len(costs)))
    error = table @ factors / seconds - 1.0
    names = (*TERMS, "constant")
    return dict(zip(names, factors.tolist(), strict=True)), float(np.sqrt(np.mean(error**2)))


def non_negative(table: FloatArray, target: FloatArray) -> FloatArray:
    """Solve least squares with coefficients >= 0: drop the most negative one until none is."""
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
