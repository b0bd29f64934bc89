"""Steps of a run under torch's profiler: the loop as it is, its real loader, nothing kept.

`ProfiledTrainer` replaces the loop's own `Trainer`: first warm-up steps, then
steps that are only timed, then as many that are traced.
"""

import gc
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from bevatron.data.dataset import Concatenated
from bevatron.data.loader import LoadedBatch, Loader
from bevatron.data.padding import Paddable
from bevatron.errors import BevatronError
from bevatron.parallel.mesh import Mesh, ranks_from_environment
from bevatron.train.course import Choice, begin_step
from bevatron.train.epochs import EpochPlan, plan_epoch
from bevatron.train.loop import Trainer, fit
from bevatron.train.optim import trained_parameters
from bevatron.train.precision import dtype_of
from bevatron.train.profiling.autograd_memory import SavedBytes, saved_bytes_by_module
from bevatron.train.profiling.timeline import HOST, Span, classify, clipped, innermost
from bevatron.train.profiling.trace import DATA, WINDOW, read_trace
from bevatron.train.run import FitResult, Run, example_batch, one_unchanging_batch
from bevatron.train.step import LaunchedStep, out_of_memory

LEAD_IN = 2
"""Traced steps before the window opens, while the profiler itself warms up."""


@dataclass
class Memory:
    """Bytes by purpose; None where nothing was measured.

    Attributes
    ----------
    weights, gradients, optimizer, averages
        Those of the model (buffers included), its gradients, Adam's moments, averaged weights.
    activations : kept by autograd between forward and backward pass of the largest batch, by module
    temporary : what the step needs beyond all that at its peak, on a GPU
    batch : the largest batch itself
    peak, reserved
        Most that torch's allocator held in the run, on a GPU: in tensors, and in all from CUDA.
    """

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    averages: int = 0
    activations: dict[str, SavedBytes] = field(default_factory=dict)
    temporary: int | None = None
    batch: dict[str, int] = field(default_factory=dict)
    peak: int | None = None
    reserved: int | None = None


@dataclass
class Profile:
    """Measurements of one rank.

    Attributes
    ----------
    steps : that were traced, and as many were timed before
    window : window of the traced steps
    spans : what ran on the device: kernels and copies, or on a CPU the innermost operators
    calls : what is counted: the same on a GPU, all operators on a CPU
    data, ranks : when the host waited for a batch, and for other ranks
    launches : asked by the host in the window
    untraced : nanoseconds of a step that is not traced
    captured : whether the steps were replayed CUDA graphs
    sizes : mean sizes of this rank's traced steps, as logs name them
    """

    mesh: Mesh = field(default_factory=Mesh)
    steps: int = 0
    window: tuple[int, int] = (0, 0)
    spans: list[Span] = field(default_factory=list)
    calls: list[Span] = field(default_factory=list)
    data: list[Span] = field(default_factory=list)
    ranks: list[Span] = field(default_factory=list)
    launches: int = 0
    untraced: float = 0.0
    captured: bool = False
    sizes: dict[str, float] = field(default_factory=dict)
    memory: Memory = field(default_factory=Memory)


def profile_steps(run: Run, steps: int = 50, warm: int = 10) -> Profile:
    """Run some steps under the profiler; nothing is written to the run's folder.

    All steps are of one epoch, for which the data are repeated if need be; none is validated.
    Raises BevatronError if it was stopped on the way, or whatever training itself raises.

    Parameters
    ----------
    run : what to profile, from new weights; under torchrun every process calls this
    steps : number to time, and then to trace
    warm : warm-up steps; the first captures all shapes of batches where steps are CUDA graphs
    """
    found = Profile(steps=steps)
    with TemporaryDirectory(prefix="bevatron-profile-") as folder:
        config = replace(run.settings.train, tensorboard=False, wandb=False)
        config = replace(config, epochs=max(config.epochs, 1))
        alone = replace(
            _repeated(run, warm + 2 * steps + LEAD_IN + 1),
            folder=Path(folder) / "run",
            settings=replace(run.settings, train=config),
            valid=None,
            valid_sizes=None,
            resume=False,
            checkpoint=None,
            on_end=None,
        )
        fit(alone, partial(ProfiledTrainer, found, warm))
    return found


def _repeated(run: Run, steps: int) -> Run:
    """Repeat the data until an epoch has that many steps; one unchanging batch stays one."""
    if one_unchanging_batch(run) or not len(run.train):
        return run
    if run.stages:
        first = run.stages[0]
        config = replace(first.config, target=None, ends_at_target=False)
        config = replace(config, steps=steps, evaluate_every=steps)
        return replace(run, stages=[replace(first, config=config)])
    mesh = Mesh(world=ranks_from_environment(os.environ)[1])
    batches = steps * run.settings.optim.accumulate
    repeated, times = run, 1
    # Samples of several epochs fill batches better, so each repetition is planned.
    while (planned := _number_of_batches(repeated, mesh)) < batches:
        times = -(-times * batches // planned) + 1
        sizes = {name: np.tile(values, times) for name, values in run.sizes.items()}
        repeated = replace(run, train=Concatenated([run.train] * times), sizes=sizes)
    return repeated


def _number_of_batches(run: Run, mesh: Mesh) -> int:
    batch, seed = run.settings.batch, run.settings.train.seed
    plan = plan_epoch(run.sizes, batch, mesh, seed=seed, epoch=0, describe=run.train.describe)
    return plan.num_batches


class _Enough(Exception):  # noqa: N818  no error
    """All steps are done."""


class ProfiledTrainer(Trainer):
    """Runs until enough steps are profiled.

    Parameters
    ----------
    found : is filled in
    warm : warm-up steps
    """

    def __init__(self, found: Profile, warm: int, *parts: Any) -> None:
        super().__init__(*parts)
        self.loader = _WatchedLoader(self.loader)  # type: ignore[assignment]
        self._found, self._warm = found, warm
        self._phase, self._taken, self._began = "warm", 0, 0.0
        self._totals: dict[str, float] = {}
        gpu = [ProfilerActivity.CUDA] if self._on_gpu else []
        self._profiler = profile(activities=[ProfilerActivity.CPU, *gpu])
        self._window = record_function(WINDOW)

    def walk(self) -> FitResult:
        """Measure the memory of a step, then train until enough steps are profiled."""
        found, state = self._found, self.state
        found.mesh = self.mesh
        found.memory = self._probe_memory()
        gc.collect()  # a graph of autograd that lives on spoils a capture on another stream
        if self._on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.mesh.device)
        try:
            super().walk()
        except _Enough:
            self.logger.console.end()
        else:
            raise BevatronError("the run ended before enough steps were profiled")
        found.captured = self.captured is not None
        memory, moments = found.memory, state.optimizer.state.values()
        memory.optimizer = _bytes(v for m in moments for v in m.values() if torch.is_tensor(v))
        memory.averages = 0 if state.ema is None else _bytes(state.ema.tensors().values())
        if self._on_gpu:
            memory.peak = torch.cuda.max_memory_allocated(self.mesh.device)
            memory.reserved = torch.cuda.max_memory_reserved(self.mesh.device)
        return self.saver.result(None, {})

    def _plan_epoch(self) -> EpochPlan:
        """Repeat one unchanging batch for every step."""
        epoch = super()._plan_epoch()
        if not one_unchanging_batch(self.run):
            return epoch
        steps = self._warm + 2 * self._found.steps + LEAD_IN + 1
        batches = list(epoch.batches) * (steps * self.run.settings.optim.accumulate)
        self.loader.set_batches(batches)
        return replace(epoch, batches=batches, num_batches=len(batches))

    def _launch(
        self, batches: list[Any], lr: float, asks: Any, choice: Choice = ()
    ) -> LaunchedStep:
        self._next_phase()
        if self._phase == "traced":
            for batch in batches:
                for name, size in batch.sizes.items():
                    self._totals[name] = self._totals.get(name, 0.0) + size
        launched = super()._launch(batches, lr, asks, choice)
        # Here and not in the loop, which would save what nobody can resume.
        if stopped := self.stops.agreed(launched.notes):
            raise BevatronError(f"stopped by {stopped} before enough steps were profiled")
        return launched

    def _next_phase(self) -> None:
        """Decide before a step whether another phase begins; all ranks decide alike."""
        steps = self._found.steps
        if self._phase == "warm" and self._taken >= self._warm:
            self._began, self._taken, self._phase = self._now(), 0, "timed"
        elif self._phase == "timed" and self._taken == steps:
            self._found.untraced = (self._now() - self._began) / steps * 1e9
            self._profiler.start()
            self._taken, self._phase = 0, "lead-in"
        elif self._phase == "lead-in" and self._taken == LEAD_IN:
            self._now()
            self._window.__enter__()
            self._taken, self._phase = 0, "traced"
        elif self._phase == "traced" and self._taken == steps:
            self._now()
            self._window.__exit__(None, None, None)
            self._profiler.stop()
            self._read_trace()
            raise _Enough
        self._taken += 1

    @property
    def _on_gpu(self) -> bool:
        return self.mesh.device.type == "cuda"

    def _now(self) -> float:
        """Wait for the device; return the time in seconds."""
        if self._on_gpu:
            torch.cuda.synchronize(self.mesh.device)
        return time.perf_counter()

    def _probe_memory(self) -> Memory:
        """Take the loss of the largest batch and its gradient once, without a step."""
        run, state, device = self.run, self.state, self.mesh.device
        parameters = list(trained_parameters(state.model).values())
        excluded = [*state.model.parameters(), *state.model.buffers()]
        memory = Memory(weights=_bytes(excluded), gradients=_bytes(parameters))
        batch = _largest_batch(run, self.mesh)
        memory.batch = {name: int(size) for name, size in self.run.named(batch.sizes).items()}
        moved = batch.to(device, dtype_of(run.settings.train.dtype))
        counts = {name: v.to(device) for name, v in run.task.normalisers(batch).items()}

        def loss() -> torch.Tensor:
            return run.task.loss(state.model, moved, counts).total

        run.task.begin_epoch(0)
        begin_step(run, state.progress, 0)
        try:
            if self._on_gpu:
                torch.autograd.grad(loss(), parameters, allow_unused=True)  # compiles, fills caches
                before = torch.cuda.memory_allocated(device)
                torch.cuda.reset_peak_memory_stats(device)
                torch.autograd.grad(loss(), parameters, allow_unused=True)
                more = torch.cuda.max_memory_allocated(device) - before
            memory.activations = saved_bytes_by_module(state.model, loss, excluded)
        except torch.OutOfMemoryError as error:
            raise out_of_memory(run, batch, self.mesh) from error
        if self._on_gpu:
            kept = sum(saved.total for saved in memory.activations.values())
            memory.temporary = max(more - kept - memory.gradients, 0)
        return memory

    def _read_trace(self) -> None:
        found, read = self._found, read_trace(self._profiler)
        found.window = window = read.window
        on_device = read.device if self._on_gpu else innermost(read.operators)
        calls = read.device if self._on_gpu else read.operators
        found.spans = _work(clipped(on_device, window))
        found.calls = _work(call for call in calls if window[0] <= call.start < window[1])
        found.data = clipped(read.data, window)
        found.ranks = clipped(read.ranks, window) if self._on_gpu else []
        found.launches = sum(window[0] <= start < window[1] for start in read.launches)
        steps = max(found.steps, 1)
        found.sizes = {name: total / steps for name, total in self.run.named(self._totals).items()}


class _WatchedLoader:
    """A loader whose waiting can be seen in a trace."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self.set_batches, self.close = loader.set_batches, loader.close

    def __iter__(self) -> Iterator[LoadedBatch[Any]]:
        batches = iter(self._loader)
        while True:
            with record_function(DATA):
                loaded = next(batches, None)
            if loaded is None:
                return
            yield loaded


def _work(spans: Any) -> list[Span]:
    """Leave out the work of the host."""
    return [span for span in spans if classify(span.name) != HOST]


def _bytes(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _largest_batch(run: Run, mesh: Mesh) -> Any:
    """Collate the batch of the first epoch that is longest on the axis with most of the work.

    Drawn samples are cut to one size: the first batch.
    """
    if run.stages:
        first = range(run.settings.batch.size)
        return run.task.collate([run.train[i] for i in first], np.array(first), [1.0] * len(first))
    settings, seed = run.settings.batch, run.settings.train.seed
    epoch = plan_epoch(
        run.sizes, settings, mesh, seed=seed, epoch=0, describe=run.train.describe
    )  # fmt: skip
    example = example_batch(run)
    axis = example.padding.names[0] if isinstance(example, Paddable) else next(iter(run.sizes))
    counted = run.sizes[axis]
    indices, weights = max(epoch.batches, key=lambda batch: int(counted[batch[0]].sum()))
    samples = [run.train[int(i)] for i in indices]
    return run.task.collate(samples, indices, [float(weight) for weight in weights])
