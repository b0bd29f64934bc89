"""The CUDA graphs of a captured step: one per shape of a batch, and one for the update.

They share one pool of memory: a graph grows it by what it needs beyond the others. Together they
hold at most a share of the GPU's memory (`memory_limit`), or as much as the stage of the run says
(`bevatron.train.run.BesideGraphs`). Beyond it a graph that is no longer used
makes room, and the next finds room where that was; while all are used, none is captured any more:
to capture a step takes as long as to launch it many times.
"""

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bevatron.data.padding import BatchShape, Paddable
from bevatron.parallel.axial import sample_group
from bevatron.parallel.collectives import sum_over_ranks
from bevatron.parallel.mesh import Mesh
from bevatron.task import Batch
from bevatron.train.capture.cuda_graphs import GraphPool, NotCapturableError, Work
from bevatron.train.capture.gradients import GradientBuckets
from bevatron.train.capture.transfers import BatchFeed, Feed, NumberFeed, Reading, StandingFeed
from bevatron.train.optim import FusedAdamEMA
from bevatron.train.precision import autocast_context, dtype_of
from bevatron.train.run import Run, Stage
from bevatron.train.state import TrainState

Figures = tuple[list[float], float, dict[str, float], float, bool]
"""The loss of each batch of this rank; of the whole step the loss, its terms, the gradient's norm,
and whether the weights were changed."""

Key = BatchShape | tuple[int, ...]
"""Key of a graph: a padded shape, or the samples of a batch that never changes."""

Choice = Hashable
"""Second part of the key: a task's choice for the step (`bevatron.task.Numbered`)."""


MOST_TERMS = 16
"""Most terms of a loss that can be captured; their names may differ from choice to choice."""

MEMORY_SHARE = 0.5
"""Share of a GPU's memory that graphs may hold."""

ROUNDS_UNUSED = 8
"""A graph is no longer used once all others could have had as many batches meanwhile: of shapes in
random order nearly all come sooner."""


def memory_limit(device: torch.device) -> int:
    """Return the maximum size of all graphs in bytes; a single one may be larger."""
    return 0 if device.type != "cuda" else int(MEMORY_SHARE * torch.cuda.mem_get_info(device)[1])


def is_whole_step(batches: int, ranks: int) -> bool:
    """Whether the graph of a batch is a whole step, given the batches of each rank in a step."""
    return batches == ranks == 1


@contextmanager
def same_buffers(model: nn.Module) -> Iterator[None]:
    """Restore the buffers of a model, such as running means, after what is only a warm-up."""
    before = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        for buffer, value in before:
            buffer.copy_(value)


@dataclass
class _Graph:
    """Adds the gradients of a batch, kernel by kernel until it is captured.

    Attributes
    ----------
    work, warm_up : as `GraphPool.capture` takes them
    launched : the work, in as little memory as it takes beside graphs
    run : what is launched, or replays the work
    size : bytes by which it has grown the pool; None = it is not captured
    last : number of the batch that it was last used for
    """

    work: Work
    warm_up: Work
    launched: Work
    run: Work
    size: int | None = None
    last: int = 0


class StepGraphs:
    """The CUDA graphs for one set of the loss's constants, and the memory they work on.

    Parameters
    ----------
    patience : how often a batch of one kind is launched before that kind is captured

    Attributes
    ----------
    counts : what the losses are divided by
    num_launched, num_replayed
        Batches whose gradients were launched kernel by kernel, and replayed.
    rows : most batches of this rank in a step
    whole_steps : see `is_whole_step`
    """

    counts: NumberFeed

    def __init__(
        self,
        run: Run,
        state: TrainState,
        mesh: Mesh,
        update: FusedAdamEMA,
        rows: int,
        patience: int = 0,
    ) -> None:
        self._task, self._model, self._update = run.task, state.model, update
        self._buckets, self._mesh = GradientBuckets(update, mesh), mesh
        self._config = run.settings.train
        self._device, self._dtype = mesh.device, dtype_of(self._config.dtype)
        self.rows = rows
        self.whole_steps = is_whole_step(rows, mesh.world)
        self._pool = GraphPool(mesh.device)
        self._inputs: dict[Key, Feed] = {}
        self._graphs: OrderedDict[tuple[Key, Choice], _Graph] = OrderedDict()
        self._stages, self._state, self._num_fed = run.stages, state, 0
        self._names: dict[Choice, list[str]] = {}
        self._is_full = self._told = False
        self._say: Callable[[str], None] = lambda _: None
        self._patience, self._seen = patience, Counter[tuple[Key, Choice]]()
        self._complete: dict[Choice, Sequence[BatchShape]] = {}
        self.num_launched = self.num_replayed = 0
        self._seconds = 0.0

    def begin(
        self,
        constants: object,
        batch: Batch,
        counts: Mapping[str, float],
        say: Callable[[str], None],
    ) -> None:
        """Compile the kernels of a step and capture the update.

        The batch is padded, as kernels are compiled anew for sizes of other divisibility.
        """
        began = time.monotonic()
        self.constants, self._say = constants, say
        # All processes of a group drop the same graphs, so the smallest of their GPUs decides.
        limit = torch.tensor(-memory_limit(self._device))
        self._memory_limit = -int(sample_group().all_reduce(limit, "max").wait())
        self.counts = NumberFeed(len(counts), self._device)
        self._normalisers = dict(zip(counts, self.counts.values.unbind(), strict=True))
        moved = batch.to(self._device, self._dtype)
        with same_buffers(self._model):
            self._pool.compile_ahead(lambda: self._rehearse(moved), say)
        width, rows = 1 + MOST_TERMS, self.rows

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float64, device=self._device)

        self._terms, self._totals, self._parts = zeros(width), zeros(width), zeros(rows, width)
        self._figures = zeros((rows + 1) * width + 2)
        self._readings = [Reading(self._figures), Reading(self._figures)]
        if not self.whole_steps:
            # In a pool of its own, so that the others' can be given back.
            self._replay_update = GraphPool(self._device).capture(
                self._finish, self._update.warm_up
            )
        self._seconds += time.monotonic() - began

    def _rehearse(self, batch: Batch) -> None:
        """Launch the kernels of a step that changes nothing; no gradient is held before it.

        Gradients are freed as in a step: all of them together would take more memory than it does.
        """
        try:
            with autocast_context(self._config, self._device):
                loss = self._task.loss(self._model, batch, self._normalisers).total
            if loss.requires_grad:
                self._buckets.differentiate(loss)
            self._update.warm_up()
        finally:
            self._update.zero_grad()  # the kernel that does it may have been left out

    def keep(self, shapes: Sequence[BatchShape]) -> None:
        """Drop the graphs of other shapes."""
        for key, choice in [*self._graphs]:
            if key not in shapes:
                self._drop(key, choice)

    def capture_all(
        self, shapes: Sequence[BatchShape], choice: Choice, some_batch: Callable[[], Paddable]
    ) -> None:
        """Capture all shapes that are not yet for this choice, with a batch that fits into each.

        The largest first: smaller ones then find room in the memory that it has left.
        """
        if self._complete.get(choice) is shapes:
            return
        missing = [shape for shape in {*shapes} if (shape, choice) not in self._seen]
        if missing:
            batch = some_batch()
            for shape in sorted(missing, reverse=True):
                self._seen[shape, choice] = 0
                self._make(shape, choice, batch)
                if not self._is_full:
                    self._capture(shape, choice)
        self._complete[choice] = shapes

    def feed(self, batch: Batch, key: Key, choice: Choice) -> None:
        """Hand a batch to its graph; capture it once enough of its kind were seen."""
        if (key, choice) in self._graphs:
            self._inputs[key].send(batch)
        else:
            self._make(key, choice, batch)
        self._graphs.move_to_end((key, choice))
        graph, self._num_fed = self._graphs[key, choice], self._num_fed + 1
        graph.last = self._num_fed
        if graph.size is None and self._seen[key, choice] >= self._patience:
            unused = self._unused() if self._is_full else None
            if unused is not None:
                self._drop(*unused)
            if unused is not None or not self._is_full:
                self._capture(key, choice)
        self._seen[key, choice] += 1

    def add_gradients(self, place: int, key: Key, choice: Choice) -> None:
        """Add the gradients of the batch that was fed; if that is a whole step, also update."""
        graph = self._graphs[key, choice]
        graph.run()
        self.num_launched += graph.size is None
        self.num_replayed += graph.size is not None
        if not self.whole_steps:
            self._parts[place].copy_(self._terms)

    def _make(self, key: Key, choice: Choice, batch: Batch) -> None:
        """Make what adds the gradients of a batch, and hand it the batch."""
        inputs = self._inputs[key] if key in self._inputs else self._feed(key, batch)
        inputs.send(batch)

        def gradients() -> None:
            self._gradients(inputs.batch, choice)

        def step() -> None:
            gradients()
            self._parts[0].copy_(self._terms)
            self._totals.copy_(self._terms)
            self._finish()

        def warm_up() -> None:
            gradients()
            self._update.warm_up()

        work, warm_up = (step, warm_up) if self.whole_steps else (gradients, gradients)
        launched = self._sparing(work)
        graph = _Graph(work, self._sparing(warm_up), launched, launched)
        self._inputs[key], self._graphs[key, choice] = inputs, graph

    def _sparing(self, work: Work) -> Work:
        """Set up the model for work that is launched beside graphs, while that runs."""

        def call() -> None:
            stage, model = self._stage, self._model
            if stage is None or stage.beside is None or stage.set_up is None:
                work()
                return
            stage.beside.set_up(model)
            try:
                work()
            finally:
                stage.set_up(model)

        return call

    @property
    def _stage(self) -> Stage | None:
        return self._stages[self._state.progress.stage] if self._stages else None

    @property
    def _limit(self) -> int:
        stage = self._stage
        if stage is None or stage.beside is None:
            return self._memory_limit
        return stage.beside.graph_bytes

    def _capture(self, key: Key, choice: Choice) -> None:
        """Capture what was made, if need be in place of others; the gradients stay as they are."""
        began, graph = time.monotonic(), self._graphs[key, choice]
        # A whole step, also where it only warms up, begins and ends with a gradient of zero.
        before = None if self.whole_steps else self._update.gradient.clone()
        if self._limit and self._pool.grown > 2 * self._limit:
            self._begin_again(key, choice)  # what was dropped has left gaps that nothing fits in
        grown = self._pool.grown
        group = sample_group()
        fits = False
        try:
            with same_buffers(self._model):
                graph.run = self._pool.capture(graph.work, graph.warm_up)
            fits = True
        except torch.OutOfMemoryError:
            # The others of a group wait for the collectives of this capture, not of another.
            if len(self._graphs) == 1 or group.size > 1:
                raise
        if not fits:  # not in the clause: while the error lives, so do the activations it met
            self._begin_again(key, choice)
            grown = 0
            with same_buffers(self._model):
                graph.run = self._pool.capture(graph.work, graph.warm_up)
        if before is not None:
            self._update.gradient.copy_(before)
        # What is dropped is decided by these numbers, alike on all processes of a group.
        size = torch.tensor(self._pool.grown - grown)
        graph.size = int(group.all_reduce(size, "max").wait())
        self._pool.grown = grown + graph.size
        self._make_room(key, choice)
        self._seconds += time.monotonic() - began

    def _make_room(self, key: Key, choice: Choice) -> None:
        """Drop graphs while they hold too much memory: unused ones first, then the newest."""
        captured = {name: graph for name, graph in self._graphs.items() if graph.size is not None}
        held = sum(graph.size or 0 for graph in captured.values())
        if not self._limit or held <= self._limit or len(captured) == 1:
            return
        self._is_full = True
        if not self._told:
            self._told = True
            self._say(
                f"CUDA graphs hold {self._limit / 2**30:.1f} GiB, as much as they may: steps over "
                "batches of further shapes are launched until a graph is no longer used"
            )
        while held > self._limit and (unused := self._unused()) is not None:
            held -= captured[unused].size or 0
            self._drop(*unused)
        if held > self._limit:
            graph = self._graphs[key, choice]
            graph.run, graph.size = graph.launched, None

    def _unused(self) -> tuple[Key, Choice] | None:
        """Return the least recently used captured graph, if that was long ago."""
        captured = [name for name, graph in self._graphs.items() if graph.size is not None]
        if not captured:
            return None
        idle = self._num_fed - self._graphs[captured[0]].last
        return captured[0] if idle > ROUNDS_UNUSED * len(captured) else None

    def _drop(self, key: Key, choice: Choice) -> None:
        """Drop a graph, and its batch if no other reads it; its shape must be seen again."""
        del self._graphs[key, choice]
        self._seen[key, choice] = 0
        if not any(other == key for other, _ in self._graphs):
            del self._inputs[key]

    def _begin_again(self, key: Key, choice: Choice) -> None:
        """Drop all graphs but one that is not captured, and free the memory they shared."""
        for other in [*self._graphs]:
            if other != (key, choice):
                self._drop(*other)
        self._pool, self._is_full = GraphPool(self._device), False
        if self._device.type == "cuda":
            # A graph may still run. Of its memory torch waits for the stream it was captured on.
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()

    def take_seconds(self) -> float:
        """Return the seconds spent on capturing since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _feed(self, key: Key, batch: Batch) -> Feed:
        if isinstance(key, BatchShape) and isinstance(batch, Paddable):
            return BatchFeed(key, self._dtype, self._device, batch)
        return StandingFeed(batch, self._dtype, self._device)

    def add_up(self, num_batches: int) -> None:
        """Sum gradients, loss and terms over this rank's batches and over ranks, on the device."""
        if not self.whole_steps:
            self._buckets.sum()
            self._parts[num_batches:].zero_()
            torch.sum(self._parts, 0, out=self._totals)
            sum_over_ranks(self._totals, self._mesh)

    def update(self, choice: Choice) -> Callable[[], Figures]:
        """Launch the update if it has not been; return what waits for the step's figures."""
        if not self.whole_steps:
            self._replay_update()
        self._readings.reverse()
        read, names = self._readings[0].launch(), self._names[choice]

        def figures() -> Figures:
            values, width = read().tolist(), 1 + MOST_TERMS
            losses = values[: self.rows * width : width]
            total, *terms, norm, fine = values[self.rows * width :]
            return losses, total, dict(zip(names, terms, strict=False)), norm, bool(fine)

        return figures

    def _gradients(self, batch: Batch, choice: Choice) -> None:
        """Add a batch's gradients to the flat buffer and store its loss and terms."""
        with autocast_context(self._config, self._device):
            loss = self._task.loss(self._model, batch, self._normalisers)
        names = self._names[choice] = sorted(loss.terms)
        if len(names) > MOST_TERMS:
            raise NotCapturableError(
                f"its loss has {len(names)} terms, a captured step takes at most {MOST_TERMS}"
            )
        if loss.total.requires_grad:
            self._buckets.differentiate(loss.total)
        scalars = [loss.total, *(loss.terms[name] for name in names)]
        found = torch.stack([scalar.detach().double() for scalar in scalars])
        self._terms[: len(found)].copy_(found)

    def _finish(self) -> None:
        """Update from the summed gradients, and store the figures."""
        self._update.loss.copy_(self._totals[0])
        self._update.run()
        self._figures.copy_(torch.cat([self._parts.flatten(), self._totals, self._update.verdict]))
