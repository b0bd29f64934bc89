"""An optimiser step without waiting: captured as CUDA graphs, its figures read one step later.

A step is two graphs. The first, one per shape of a batch, adds the gradients of a padded batch
(forward, the inner gradient that forces are, backward) to one flat buffer. The second, see
`DeviceUpdate`, clips, steps the optimiser and updates the averaged weights. Between them come the
other batches of an accumulated step and the sum over ranks, which are not captured. Where there is
neither, both are one graph, because the device idles before each graph it starts.

The host never waits for the step it has just launched. A loss or gradient that is not finite, or an
exploded loss, is detected on the device: this and all later steps then change nothing, until the
host, one step behind, reads the verdict and stops the run with the weights from before the bad
step.

What a batch consists of is its own affair: one that is `Paddable` is padded to a few shapes, one
that is `Unchanging` stays on the device.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bevatron.data.padding import BatchShape, Paddable, PaddingRule
from bevatron.data.padding.size_buckets import (
    SizeBuckets,
    choose_shapes,
    grow_shapes,
    smallest_shape,
    waste,
)
from bevatron.errors import ConfigError
from bevatron.parallel.collectives import sum_over_ranks
from bevatron.parallel.mesh import Mesh
from bevatron.task import Batch, Capturable, ChecksBatches, Unchanging
from bevatron.train.capture.cuda_graphs import GraphPool, Work, same_draws
from bevatron.train.capture.device_update import DeviceUpdate
from bevatron.train.capture.prediction import CapturedPrediction
from bevatron.train.capture.transfers import BatchFeed, Feed, NumberFeed, Reading, StandingFeed
from bevatron.train.epochs import IndexedBatch
from bevatron.train.optim import trained_parameters
from bevatron.train.precision import dtype_of, products
from bevatron.train.run import Run, example_batch, one_unchanging_batch
from bevatron.train.state import TrainState
from bevatron.train.step import (
    LaunchedStep,
    StepResult,
    divergence,
    largest_loss,
    out_of_memory,
    step_totals,
)
from bevatron.typing import IntArray

Figures = tuple[Tensor, float, dict[str, float], float, bool]
"""Loss and terms of each batch of this rank [B, 1 + T]; of the whole step the loss, its terms, the
gradient's norm, and whether the weights were changed."""

Predict = Callable[[torch.nn.Module, Any], dict[str, Tensor]]

Key = BatchShape | tuple[int, ...]
"""What a graph is for: batches padded to a shape, or the unchanging batch of just these samples."""

LARGE_BATCH = 2**22
"""Length of the longest axis from which on a step over one unchanging batch is bound by the device
anyway: a graph would only keep the memory of its activations."""


def obstacle(run: Run, state: TrainState, mesh: Mesh) -> str | None:
    """Say why the steps of a run cannot be captured, None if nothing is known to be in the way."""
    if run.settings.train.autocast == "float16":
        return "a step in float16 may have to be left out (train.autocast bfloat16 can be captured)"
    if mesh.device.type != "cuda":
        return f"the device is {mesh.device.type}"
    if run.settings.train.compile:
        return "train.compile is on"
    if not isinstance(run.task, Capturable):
        return "this task's loss is not made for it"
    why = _obstacle_of_batches(run, mesh)
    if why is not None:
        return why
    kinds = {(p.dtype, p.device) for p in trained_parameters(state.model).values()}
    return "the parameters are of several types" if len(kinds) > 1 else None


def _obstacle_of_batches(run: Run, mesh: Mesh) -> str | None:
    """Say why the batches of a run cannot be fed to a graph, None if they can."""
    if not len(run.train):
        return "there is nothing to train on"
    batch = example_batch(run)
    if isinstance(batch, Paddable):
        missing = [name for name in batch.padding.names if not _counted(run, batch.padding, name)]
        return f"the {' and '.join(missing)} of the samples are not counted" if missing else None
    if not isinstance(batch, Unchanging) or len(run.train) > 1:
        return "batches of this kind cannot be padded to one shape"
    return "several processes share one sample" if mesh.world > 1 else None


def _counted(run: Run, rule: PaddingRule, name: str) -> bool:
    return name in run.sizes or name == rule.samples


def captured_step(
    run: Run, state: TrainState, mesh: Mesh, say: Callable[[str], None]
) -> "CapturedStep | None":
    """Make a captured step if ``train.cuda_graphs`` wants one, else say why not and return None.

    Raises
    ------
    ConfigError
        If it was asked for and cannot be.
    """
    wanted = run.settings.train.cuda_graphs
    if wanted is False:
        return None
    why = obstacle(run, state, mesh)
    if why is None and not wanted and one_unchanging_batch(run):
        longest = max(int(counts.sum()) for counts in run.sizes.values())
        why = "the batch is large" if longest > LARGE_BATCH else None
    if why is None:
        return CapturedStep(run, state, mesh)
    if wanted:
        raise ConfigError(f"train.cuda_graphs: steps cannot be captured, {why}; leave it out")
    if mesh.device.type == "cuda":
        say(f"steps are not captured as CUDA graphs: {why}")
    return None


class CapturedStep:
    """Steps over batches of a few fixed shapes, or over one unchanging batch, as CUDA graphs.

    It takes over parts of ``state``, see `DeviceUpdate`. On a CPU everything runs in the same way
    but is not captured.

    Parameters
    ----------
    run, state, mesh
        As in `bevatron.train.step.train_step`.

    Attributes
    ----------
    buckets
        The shapes in use and what they waste.
    predict
        The task's predictions; for one unchanging batch captured too.
    """

    def __init__(self, run: Run, state: TrainState, mesh: Mesh) -> None:
        self.run, self.state, self.mesh = run, state, mesh
        self.buckets = SizeBuckets(())
        self._sizes: IntArray | None = None
        optim = run.settings.optim
        self._update = DeviceUpdate(state, optim.clip, per_tensor=optim.clip_norm == "tensor")
        self._graphs: _Graphs | None = None
        self._unchanging = one_unchanging_batch(run)
        self.predict: Predict = (
            CapturedPrediction(run.task, mesh.device) if self._unchanging else run.task.predict
        )

    def plan(self, batches: Sequence[IndexedBatch]) -> str | None:
        """Choose the shapes for an epoch's batches, keeping the present ones as far as they fit.

        Given the batches of all ranks, all ranks choose alike and capture at the same time; one
        that captures while the others wait for its gradients holds them up.

        Returns
        -------
        str or None
            A line for the log if the shapes have changed.
        """
        if not len(batches) or self._unchanging:
            return None
        rule: PaddingRule = example_batch(self.run).padding
        counts = self.run.sizes
        ones = np.ones(len(self.run.train), dtype=np.int64)
        counted = [counts.get(name, ones) for name in rule.names]
        sizes = np.array([[values[i].sum() for values in counted] for i, _ in batches])
        shapes = self.buckets.shapes
        if all(smallest_shape(rule, shapes, size) for size in sizes.tolist()):
            self.buckets, self._sizes = SizeBuckets(shapes, waste(rule, sizes, shapes)), sizes
            return None
        # With the last epoch's batches: soon the shapes are such that every epoch's fit.
        known = sizes if self._sizes is None else np.concatenate([self._sizes, sizes])
        self.buckets = grow_shapes(rule, shapes, known) if shapes else choose_shapes(rule, known)
        self._sizes = sizes
        if self._graphs is not None:
            self._graphs.keep(self.buckets.shapes)
        return f"steps are captured as CUDA graphs, batches {self.buckets}"

    def __call__(
        self,
        batches: Sequence[Batch],
        *,
        lr: float,
        notes: Mapping[str, float] | None = None,
    ) -> LaunchedStep:
        """Launch a step over this rank's batches, which are on the CPU.

        Returns
        -------
        LaunchedStep
            Its ``result`` waits for the step, and raises DivergenceError as
            `bevatron.train.step.train_step` does.

        Raises
        ------
        OutOfMemoryError
            If the GPU has too little memory to capture the step.
        NotCapturableError
            If the step waits for the GPU somewhere; nothing has changed.
        """
        run, state, mesh = self.run, self.state, self.mesh
        if isinstance(state.model, ChecksBatches):
            for batch in batches:
                state.model.check(batch)
        counts, sizes, totalled = step_totals(run.task, batches, notes or {}, mesh)
        try:
            graphs = self._graphs_for(batches[0], counts)
            if self.buckets.shapes:
                graphs.capture_all(self.buckets.shapes, self._smallest_batch)
            for place, batch in enumerate(batches):
                key = self._key_of(batch)
                graphs.feed(batch, key)
                if graphs.whole_steps:
                    self._set_update(lr)
                graphs.add_gradients(place, key)
        except torch.OutOfMemoryError as error:
            largest = max(batches, key=lambda batch: max(batch.sizes.values()))
            raise out_of_memory(run, largest, mesh) from error
        totals = graphs.add_up(len(batches))
        if mesh.world > 1:
            sum_over_ranks(self._update.gradients.flat, mesh)
            sum_over_ranks(totals, mesh)
        if not graphs.whole_steps:
            self._set_update(lr)
        read = graphs.update()

        def result() -> StepResult:
            parts, total, terms, norm, fine = read()
            if not fine:
                losses = parts[: len(batches), 0].tolist()
                raise divergence(run, state.progress, batches, losses, total, norm, mesh)
            return StepResult(total, terms, norm, sizes, totalled)

        return LaunchedStep(totalled, result, graphs.take_seconds())

    def _set_update(self, lr: float) -> None:
        explode_factor = self.run.settings.train.explode_factor
        self._update.set(lr, largest_loss(self.state.progress, explode_factor))

    def _smallest_batch(self) -> Paddable:
        """Make a batch that fits into every shape: the sample with the shortest first axis."""
        rule: PaddingRule = example_batch(self.run).padding
        counts = [self.run.sizes[name] for name in rule.names if name in self.run.sizes]
        smallest = int(np.lexsort(counts[::-1])[0])
        batch: Paddable = self.run.task.collate(
            [self.run.train[smallest]], np.array([smallest]), [0.0]
        )
        return batch

    def release(self) -> None:
        """Give the optimiser back as it was, for steps of another kind."""
        self._graphs = None
        self._update.release()

    def _key_of(self, batch: Batch) -> Key:
        if not isinstance(batch, Paddable):
            return tuple(batch.sample_indices.tolist())
        rule, size = batch.padding, batch.padding.size_of(batch.sizes)
        shape = smallest_shape(rule, self.buckets.shapes, size)
        if shape is None:
            shape = choose_shapes(rule, np.array([size])).shapes[0]
            self.buckets = SizeBuckets((*self.buckets.shapes, shape))
        return shape

    def _graphs_for(self, batch: Batch, counts: Mapping[str, Tensor]) -> "_Graphs":
        """Return the graphs, new ones once the loss has changed its weights."""
        task = self.run.task
        constants = task.constants() if isinstance(task, Capturable) else None
        if self._graphs is None or self._graphs.constants != constants:
            self._graphs = None  # frees its memory first
            self._graphs = _Graphs(self.run, self.state, self.mesh, self._update)
            self._graphs.begin(constants, batch, counts)
        self._graphs.counts.send(torch.stack(list(counts.values())))
        return self._graphs


class _Graphs:
    """The CUDA graphs for one set of the loss's constants, and the memory they work on.

    Attributes
    ----------
    counts
        What the losses are divided by.
    whole_steps
        Whether the graph of a batch is a whole step: one batch, one rank.
    """

    counts: NumberFeed

    def __init__(self, run: Run, state: TrainState, mesh: Mesh, update: DeviceUpdate) -> None:
        self._task, self._model, self._update = run.task, state.model, update
        self._config = run.settings.train
        self._device, self._dtype = mesh.device, dtype_of(self._config.dtype)
        self._rows = run.settings.optim.accumulate
        self.whole_steps = self._rows == 1 and mesh.world == 1
        self._pool = GraphPool(mesh.device)
        self._inputs: dict[Key, Feed] = {}
        self._replays: dict[Key, Work] = {}
        self._seconds = 0.0

    def begin(self, constants: object, batch: Batch, counts: Mapping[str, Tensor]) -> None:
        """Find out the loss's terms and capture the update."""
        began = time.monotonic()
        self.constants = constants
        self.counts = NumberFeed(len(counts), self._device)
        self._normalisers = dict(zip(counts, self.counts.values.unbind(), strict=True))
        moved = batch.to(self._device, self._dtype)
        with products(self._config, self._device), same_draws(self._device):
            self._names = sorted(self._task.loss(self._model, moved, self._normalisers).terms)
        width, rows = 1 + len(self._names), self._rows

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float64, device=self._device)

        self._terms, self._totals, self._parts = zeros(width), zeros(width), zeros(rows, width)
        self._figures = zeros((rows + 1) * width + 2)
        self._readings = [Reading(self._figures), Reading(self._figures)]
        if not self.whole_steps:
            self._replay_update = self._pool.capture(self._finish, self._update.rehearse)
        self._seconds += time.monotonic() - began

    def keep(self, shapes: Sequence[BatchShape]) -> None:
        """Drop the graphs of other shapes."""
        for shape in set(self._replays) - set(shapes):
            del self._replays[shape], self._inputs[shape]

    def capture_all(self, shapes: Sequence[BatchShape], some_batch: Callable[[], Paddable]) -> None:
        """Capture all shapes that are not yet, with a batch that fits into each.

        The largest first: smaller ones then find room in the memory that it has left.
        """
        missing = sorted({*shapes} - self._replays.keys(), reverse=True)
        if missing:
            batch = some_batch()
            for shape in missing:
                self._capture(shape, batch)

    def feed(self, batch: Batch, key: Key) -> None:
        """Hand a batch to its graph; capture it if this is the first of its kind."""
        if key not in self._replays:
            self._capture(key, batch)
        else:
            self._inputs[key].send(batch)

    def add_gradients(self, place: int, key: Key) -> None:
        """Add the gradients of the batch that was fed; if that is a whole step, also update."""
        self._replays[key]()
        if not self.whole_steps:
            self._parts[place].copy_(self._terms)

    def _capture(self, key: Key, batch: Batch) -> None:
        """Capture what adds the gradients of a batch; the gradients stay as they are."""
        began = time.monotonic()
        inputs = self._feed(key, batch)
        inputs.send(batch)
        before = self._update.gradients.flat.clone()

        def gradients() -> None:
            self._gradients(inputs.batch)

        def step() -> None:
            gradients()
            self._parts[0].copy_(self._terms)
            self._totals.copy_(self._terms)
            self._finish()

        def rehearsal() -> None:
            gradients()
            self._update.rehearse()

        replay = self._pool.capture(*((step, rehearsal) if self.whole_steps else (gradients,)))
        self._update.gradients.flat.copy_(before)
        self._inputs[key], self._replays[key] = inputs, replay
        self._seconds += time.monotonic() - began

    def take_seconds(self) -> float:
        """Return the seconds spent on capturing since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _feed(self, key: Key, batch: Batch) -> Feed:
        if isinstance(key, BatchShape) and isinstance(batch, Paddable):
            return BatchFeed(key, self._dtype, self._device, batch)
        return StandingFeed(batch, self._dtype, self._device)

    def add_up(self, num_batches: int) -> Tensor:
        """Return loss and terms of this rank's batches together, on the device."""
        if not self.whole_steps:
            self._parts[num_batches:].zero_()
            torch.sum(self._parts, 0, out=self._totals)
        return self._totals

    def update(self) -> Callable[[], Figures]:
        """Launch the update if it has not been; return what waits for the step's figures."""
        if not self.whole_steps:
            self._replay_update()
        self._readings.reverse()
        read = self._readings[0].launch()

        def figures() -> Figures:
            values, width = read(), len(self._totals)
            parts = values[: self._rows * width].view(self._rows, width)
            total, *terms, norm, fine = values[self._rows * width :].tolist()
            return parts, total, dict(zip(self._names, terms, strict=True)), norm, bool(fine)

        return figures

    def _gradients(self, batch: Batch) -> None:
        """Add a batch's gradients to the flat buffer and store its loss and terms."""
        with products(self._config, self._device):
            loss = self._task.loss(self._model, batch, self._normalisers)
        if loss.total.requires_grad:
            found = torch.autograd.grad(
                loss.total, self._update.parameters, allow_unused=True, materialize_grads=True
            )
            torch._foreach_add_(list(self._update.gradients.parts.values()), list(found))
        scalars = [loss.total, *(loss.terms[name] for name in self._names)]
        self._terms.copy_(torch.stack([scalar.detach().double() for scalar in scalars]))

    def _finish(self) -> None:
        """Update from the summed gradients, and store the figures."""
        self._update.loss.copy_(self._totals[0])
        self._update.run()
        verdict = self._update.verdict[1:]
        self._figures.copy_(torch.cat([self._parts.flatten(), self._totals, verdict]))
