"""An optimiser step without waiting: captured as CUDA graphs, its figures read one step later.

A step is two graphs. The first, one per shape of a batch, adds the gradients of a padded batch
(forward, the inner gradient that forces are, backward) to one flat buffer. The second, a step of
`bevatron.train.fused_optim.FusedAdamEMA`, clips, steps the optimiser and updates the averaged
weights. Between them come the other batches of an accumulated step and the sum over ranks, which
are not captured: sums begin while the backward pass goes on, see
`bevatron.train.capture.gradients`. Processes that compute a sample together exchange its parts
within the graphs. Where there is neither, both are one graph, because the device idles before each
graph it starts.

The host never waits for the step it has just launched. A loss or gradient that is not finite, or an
exploded loss, is detected on the device: this and all later steps then change nothing, until the
host, one step behind, reads the verdict and stops the run with the weights from before the bad
step.

Only the batch knows its content: one that is `Paddable` is padded to a few shapes, one
that is `Unchanging` stays on the device.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, distributed

from bevatron.data.padding import BatchShape, Paddable, PaddingRule, pad
from bevatron.data.padding.size_buckets import (
    SizeBuckets,
    choose_shapes,
    grow_shapes,
    smallest_shape,
    waste,
)
from bevatron.errors import ConfigError
from bevatron.parallel.mesh import Mesh
from bevatron.task import Batch, Capturable, ChecksBatches, Unchanging
from bevatron.train.capture.prediction import CapturedPrediction
from bevatron.train.capture.step_graphs import Choice, Key, StepGraphs
from bevatron.train.epochs import IndexedBatch
from bevatron.train.optim import FusedAdamEMA, fused_optimizer, set_lr, trained_parameters
from bevatron.train.run import Run, SamplesTogether, example_batch, one_unchanging_batch
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

Predict = Callable[[torch.nn.Module, Any], dict[str, Tensor]]

TOGETHER = "all processes take the same batch"
NOT_NCCL = "processes that share a sample exchange its parts through {}, not through NCCL"

LARGE_BATCH = 2**22
"""Length of the longest axis from which on a step over one unchanging batch is bound by the device
anyway: a graph would only keep the memory of its activations."""


def obstacle(run: Run, state: TrainState, mesh: Mesh) -> str | None:
    """Return why the steps of a run cannot be captured, None if nothing is known to prevent it."""
    if run.settings.train.autocast == "float16":
        return "a step in float16 may have to be skipped (train.autocast bfloat16 can be captured)"
    if mesh.device.type != "cuda":
        return f"the device is {mesh.device.type}"
    if run.settings.train.compile:
        return "train.compile is on"
    if not isinstance(run.task, Capturable):
        return "this task's loss does not support it"
    why = _obstacle_of_batches(run, mesh)
    if why is not None:
        return why
    kinds = {(p.dtype, p.device) for p in trained_parameters(state.model).values()}
    return "the parameters are of several types" if len(kinds) > 1 else None


def _obstacle_of_batches(run: Run, mesh: Mesh) -> str | None:
    """Return why the batches of a run cannot be fed to a graph, None if they can."""
    if not len(run.train):
        return "there is nothing to train on"
    if isinstance(run.sharing, SamplesTogether) and mesh.world > 1:
        return TOGETHER
    joined = run.sharing.repeats > 1 and distributed.is_initialized()
    backend = distributed.get_backend_config() if joined else "nccl"
    if "nccl" not in backend:
        return NOT_NCCL.format(backend)
    batch = example_batch(run)
    if isinstance(batch, Paddable):
        if run.stages:
            return None
        missing = [name for name in batch.padding.names if not _counted(run, batch.padding, name)]
        return f"the {' and '.join(missing)} of the samples are not counted" if missing else None
    if not isinstance(batch, Unchanging) or len(run.train) > 1:
        return "batches of this kind cannot be padded to one shape"
    return TOGETHER if mesh.world > 1 else None


def _counted(run: Run, rule: PaddingRule, name: str) -> bool:
    return name in run.sizes or name == rule.samples


def sizes_of_batches(run: Run, rule: PaddingRule, batches: Sequence[IndexedBatch]) -> IntArray:
    """Return the lengths of batches along the axes of a rule, [B, axes]."""
    ones = np.ones(len(run.train), dtype=np.int64)
    counted = [run.sizes.get(name, ones) for name in rule.names]
    return np.array([[values[i].sum() for values in counted] for i, _ in batches])


def captured_step(
    run: Run, state: TrainState, mesh: Mesh, say: Callable[[str], None]
) -> "CapturedStep | None":
    """Build a captured step if ``train.cuda_graphs`` wants one, else log why not and return None.

    Raises ConfigError if it was asked for and cannot be.
    """
    wanted = run.settings.train.cuda_graphs
    if wanted is False:
        return None
    why = obstacle(run, state, mesh)
    if why is None and not wanted and one_unchanging_batch(run):
        longest = max(int(counts.sum()) for counts in run.sizes.values())
        why = "the batch is large" if longest > LARGE_BATCH else None
    if why is None:
        return CapturedStep(run, state, mesh, say)
    if wanted:
        raise ConfigError(f"train.cuda_graphs: steps cannot be captured, {why}; leave it out")
    if mesh.device.type == "cuda":
        say(f"steps are not captured as CUDA graphs: {why}")
    return None


class CapturedStep:
    """Steps over batches of a few fixed shapes, or over one unchanging batch, as CUDA graphs.

    The optimiser of ``state`` becomes a `FusedAdamEMA` if it is none. On a CPU everything runs in
    the same way but is not captured.

    Parameters
    ----------
    run, state, mesh : as in `bevatron.train.step.train_step`
    say : takes lines for the log

    Attributes
    ----------
    buckets : the shapes in use and what they waste
    predict : the task's predictions; for one unchanging batch captured too
    """

    def __init__(
        self, run: Run, state: TrainState, mesh: Mesh, say: Callable[[str], None] = lambda _: None
    ) -> None:
        self.run, self.state, self.mesh, self._say = run, state, mesh, say
        self.buckets = SizeBuckets(())
        self._sizes: IntArray | None = None
        optim = run.settings.optim
        self._rows = optim.accumulate
        if not isinstance(state.optimizer, FusedAdamEMA):
            state.optimizer = fused_optimizer(state.model, state.optimizer, optim, state.ema)
            state.gradient_sums = None
        self._update = state.optimizer
        self._update.stops = True
        self._graphs: StepGraphs | None = None
        self._unchanging = one_unchanging_batch(run)
        # Found once: to look at what an object can do takes as long as a launch.
        task, model = run.task, state.model
        self._checks = model.check if isinstance(model, ChecksBatches) else None
        self._constants = task.constants if isinstance(task, Capturable) else None
        self.predict: Predict = (
            CapturedPrediction(run.task, mesh.device) if self._unchanging else run.task.predict
        )

    def plan(self, batches: Sequence[IndexedBatch], accumulate: int | None = None) -> str | None:
        """Choose the shapes for an epoch's batches, keeping the current ones as far as they fit.

        Given the batches of all ranks, all ranks choose alike and capture at the same time; one
        that captures while the others wait for its gradients holds them up. The sizes of drawn
        samples are not known before they are loaded: their shapes are chosen as they come.

        Parameters
        ----------
        batches : those of all ranks
        accumulate : batches of each rank in a step; None = as the optimiser's settings say

        Returns
        -------
        str or None
            A line for the log if the shapes have changed.
        """
        self._rows = accumulate or self.run.settings.optim.accumulate
        if not len(batches) or self._unchanging or self.run.stages:
            return None
        rule: PaddingRule = example_batch(self.run).padding
        sizes = sizes_of_batches(self.run, rule, batches)
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
        choice: Choice = (),
    ) -> LaunchedStep:
        """Launch a step over this rank's batches, which are on the CPU.

        Raises OutOfMemoryError if the GPU has too little memory to capture the step;
        NotCapturableError if the step waits for the GPU somewhere; nothing has changed.

        Parameters
        ----------
        batches, lr, notes : as in `bevatron.train.step.train_step`
        choice : what the task has chosen for the step; each has graphs of its own

        Returns
        -------
        LaunchedStep
            Its ``result`` waits for the step, and raises DivergenceError as
            `bevatron.train.step.train_step` does.
        """
        run, state, mesh = self.run, self.state, self.mesh
        if self._checks is not None:
            for batch in batches:
                self._checks(batch)
        counts, sizes, totalled = step_totals(run, batches, notes or {}, mesh)
        try:
            graphs = self._graphs_for(batches[0], counts)
            if self.buckets.shapes:
                graphs.capture_all(self.buckets.shapes, choice, self._smallest_batch)
            for place, batch in enumerate(batches):
                key = self._key_of(batch)
                graphs.feed(batch, key, choice)
                if graphs.whole_steps:
                    self._set_update(lr)
                graphs.add_gradients(place, key, choice)
        except torch.OutOfMemoryError as error:
            largest = max(batches, key=lambda batch: max(batch.sizes.values()))
            raise out_of_memory(run, largest, mesh) from error
        graphs.add_up(len(batches))
        if not graphs.whole_steps:
            self._set_update(lr)
        read = graphs.update(choice)

        def result() -> StepResult:
            losses, total, terms, norm, fine = read()
            if not fine:
                raise divergence(run, state.progress, batches, losses, total, norm, mesh)
            return StepResult(total, terms, norm, sizes, totalled)

        return LaunchedStep(totalled, result, graphs.take_seconds())

    def _set_update(self, lr: float) -> None:
        explode_factor = self.run.settings.train.explode_factor
        self._update.largest_loss = largest_loss(self.state.progress, explode_factor)
        set_lr(self._update, lr)
        self._update.advance()

    def _smallest_batch(self) -> Paddable:
        """Build a batch that fits into every shape: the sample with the shortest first axis."""
        rule: PaddingRule = example_batch(self.run).padding
        counts = [self.run.sizes[name] for name in rule.names if name in self.run.sizes]
        smallest = int(np.lexsort(counts[::-1])[0])
        batch: Paddable = self.run.task.collate(
            [self.run.train[smallest]], np.array([smallest]), [0.0]
        )
        return batch

    def close(self) -> None:
        """Drop the graphs: NCCL cannot shut down while graphs use it."""
        if self._graphs is not None:
            self._graphs.keep(())
        self._graphs = None

    def release(self) -> None:
        """Restore the optimiser for steps that are not captured."""
        self.close()
        self._update.stops = False
        self._update.zero_grad()

    def _key_of(self, batch: Batch) -> Key:
        if self._unchanging:
            return tuple(batch.sample_indices.tolist())
        paddable = cast("Paddable", batch)
        rule, size = paddable.padding, paddable.padding.size_of(batch.sizes)
        if self.run.stages:
            return rule.rounded(size)
        shape = smallest_shape(rule, self.buckets.shapes, size)
        if shape is None:
            shape = choose_shapes(rule, np.array([size])).shapes[0]
            self.buckets = SizeBuckets((*self.buckets.shapes, shape))
        return shape

    def _graphs_for(self, batch: Batch, counts: Mapping[str, float]) -> StepGraphs:
        """Return the graphs, new ones once the loss has changed its weights."""
        constants = None if self._constants is None else self._constants()
        wanted = (constants, self._rows)
        if self._graphs is None or (self._graphs.constants, self._graphs.rows) != wanted:
            self.close()  # frees its memory first
            # The shapes of drawn samples are not known beforehand, and some never come again.
            patience = 1 if self.run.stages else 0
            self._graphs = StepGraphs(
                self.run, self.state, self.mesh, self._update, self._rows, patience
            )
            key = self._key_of(batch)
            if isinstance(key, BatchShape) and isinstance(batch, Paddable):
                batch = pad(batch, key)
            self._graphs.begin(constants, batch, counts, self._say)
        self._graphs.counts.send([*counts.values()])
        return self._graphs
