"""The CUDA graphs of a captured step: one per shape of a batch, and one for the update."""

import time
from collections.abc import Callable, Hashable, Mapping, Sequence

import torch
from torch import Tensor

from bevatron.data.padding import BatchShape, Paddable
from bevatron.parallel.mesh import Mesh
from bevatron.task import Batch
from bevatron.train.capture.cuda_graphs import GraphPool, Work, same_draws
from bevatron.train.capture.transfers import BatchFeed, Feed, NumberFeed, Reading, StandingFeed
from bevatron.train.optim import FusedAdamEMA
from bevatron.train.precision import autocast_context, dtype_of
from bevatron.train.run import Run
from bevatron.train.state import TrainState

Figures = tuple[Tensor, float, dict[str, float], float, bool]
"""Loss and terms of each batch of this rank [B, 1 + T]; of the whole step the loss, its terms, the
gradient's norm, and whether the weights were changed."""

Key = BatchShape | tuple[int, ...]
"""What a graph is for: batches padded to a shape, or the unchanging batch of just these samples."""

Choice = Hashable
"""What else it is for: a task's choice for the step (`bevatron.task.Numbered`)."""


class StepGraphs:
    """The CUDA graphs for one set of the loss's constants, and the memory they work on.

    Attributes
    ----------
    counts
        What the losses are divided by.
    rows
        Most batches of this rank in a step.
    whole_steps
        Whether the graph of a batch is a whole step: one batch, one rank.
    """

    counts: NumberFeed

    def __init__(
        self, run: Run, state: TrainState, mesh: Mesh, update: FusedAdamEMA, rows: int
    ) -> None:
        self._task, self._model, self._update = run.task, state.model, update
        self._config = run.settings.train
        self._device, self._dtype = mesh.device, dtype_of(self._config.dtype)
        self.rows = rows
        self.whole_steps = rows == 1 and mesh.world == 1
        self._pool = GraphPool(mesh.device)
        self._inputs: dict[Key, Feed] = {}
        self._replays: dict[tuple[Key, Choice], Work] = {}
        self._seconds = 0.0

    def begin(
        self,
        constants: object,
        batch: Batch,
        counts: Mapping[str, Tensor],
        say: Callable[[str], None],
    ) -> None:
        """Compile the kernels of a step, find out the loss's terms and capture the update.

        The batch is padded, as kernels are compiled anew for sizes of other divisibility.
        """
        began = time.monotonic()
        self.constants = constants
        self.counts = NumberFeed(len(counts), self._device)
        self._normalisers = dict(zip(counts, self.counts.values.unbind(), strict=True))
        moved = batch.to(self._device, self._dtype)
        self._pool.compile_ahead(lambda: self._rehearse(moved), say)
        with autocast_context(self._config, self._device), same_draws(self._device):
            self._names = sorted(self._task.loss(self._model, moved, self._normalisers).terms)
        width, rows = 1 + len(self._names), self.rows

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float64, device=self._device)

        self._terms, self._totals, self._parts = zeros(width), zeros(width), zeros(rows, width)
        self._figures = zeros((rows + 1) * width + 2)
        self._readings = [Reading(self._figures), Reading(self._figures)]
        if not self.whole_steps:
            self._replay_update = self._pool.capture(self._finish, self._update.warm_up)
        self._seconds += time.monotonic() - began

    def _rehearse(self, batch: Batch) -> None:
        """Launch the kernels of a step without changing anything."""
        with autocast_context(self._config, self._device):
            loss = self._task.loss(self._model, batch, self._normalisers).total
        if loss.requires_grad:
            torch.autograd.grad(loss, self._update.parameters, allow_unused=True)
        self._update.warm_up()

    def keep(self, shapes: Sequence[BatchShape]) -> None:
        """Drop the graphs of other shapes."""
        for key in set(self._inputs) - set(shapes):
            del self._inputs[key]
        for key, choice in [*self._replays]:
            if key not in self._inputs:
                del self._replays[key, choice]

    def capture_all(
        self,
        shapes: Sequence[BatchShape],
        choice: Choice,
        some_batch: Callable[[], Paddable],
    ) -> None:
        """Capture all shapes that are not yet for this choice, with a batch that fits into each.

        The largest first: smaller ones then find room in the memory that it has left.
        """
        missing = [shape for shape in {*shapes} if (shape, choice) not in self._replays]
        if missing:
            batch = some_batch()
            for shape in sorted(missing, reverse=True):
                self._capture(shape, choice, batch)

    def feed(self, batch: Batch, key: Key, choice: Choice) -> None:
        """Hand a batch to its graph; capture it if this is the first of its kind."""
        if (key, choice) not in self._replays:
            self._capture(key, choice, batch)
        else:
            self._inputs[key].send(batch)

    def add_gradients(self, place: int, key: Key, choice: Choice) -> None:
        """Add the gradients of the batch that was fed; if that is a whole step, also update."""
        self._replays[key, choice]()
        if not self.whole_steps:
            self._parts[place].copy_(self._terms)

    def _capture(self, key: Key, choice: Choice, batch: Batch) -> None:
        """Capture what adds the gradients of a batch; the gradients stay as they are."""
        began = time.monotonic()
        inputs = self._inputs[key] if key in self._inputs else self._feed(key, batch)
        inputs.send(batch)
        before = self._update.gradient.clone()

        def gradients() -> None:
            self._gradients(inputs.batch)

        def step() -> None:
            gradients()
            self._parts[0].copy_(self._terms)
            self._totals.copy_(self._terms)
            self._finish()

        def warm_up() -> None:
            gradients()
            self._update.warm_up()

        replay = self._pool.capture(*((step, warm_up) if self.whole_steps else (gradients,)))
        self._update.gradient.copy_(before)
        self._inputs[key], self._replays[key, choice] = inputs, replay
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
            parts = values[: self.rows * width].view(self.rows, width)
            total, *terms, norm, fine = values[self.rows * width :].tolist()
            return parts, total, dict(zip(self._names, terms, strict=True)), norm, bool(fine)

        return figures

    def _gradients(self, batch: Batch) -> None:
        """Add a batch's gradients to the flat buffer and store its loss and terms."""
        with autocast_context(self._config, self._device):
            loss = self._task.loss(self._model, batch, self._normalisers)
        if loss.total.requires_grad:
            found = torch.autograd.grad(
                loss.total, self._update.parameters, allow_unused=True, materialize_grads=True
            )
            torch._foreach_add_(self._update.gradients, list(found))
        scalars = [loss.total, *(loss.terms[name] for name in self._names)]
        self._terms.copy_(torch.stack([scalar.detach().double() for scalar in scalars]))

    def _finish(self) -> None:
        """Update from the summed gradients, and store the figures."""
        self._update.loss.copy_(self._totals[0])
        self._update.run()
        self._figures.copy_(torch.cat([self._parts.flatten(), self._totals, self._update.verdict]))
