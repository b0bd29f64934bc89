"""Inference without launching kernel after kernel: CUDA graphs over padded batches.

The energy and forces of a few thousand atoms are some hundreds of short kernels, which take the
host longer to launch than the GPU to run. Sizes are rounded up to few shapes
(`bevatron.data.padding.PaddingRule.rounded`); each shape that comes again is captured once and
replayed from then on. The memory of a graph is its own, so its outputs are copied to the host
before they are returned, without the padding.
"""

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from bevatron import kernels
from bevatron.data.padding import BatchShape, Paddable
from bevatron.task import ChecksBatches
from bevatron.train.capture.cuda_graphs import GraphPool
from bevatron.train.capture.transfers import BatchFeed, Reading, present_stream

log = logging.getLogger(__name__)

MAX_GRAPHS = 8
"""Graphs that are kept at a time; they share one memory pool."""
PATIENCE = 2
"""Times that a shape is launched kernel by kernel before it is captured: capturing takes as long as
four such launches, which a shape that never comes again is not worth."""

Outputs = dict[str, Tensor]

Options = Mapping[str, Hashable]
"""Keyword arguments of a model besides the batch."""


def obstacle(device: torch.device) -> str | None:
    """Return why inference cannot be captured, None if nothing is known to prevent it."""
    return None if device.type == "cuda" else f"the device is {device.type}"


class CapturedInference:
    """A model evaluated on batches of a few fixed shapes, captured as CUDA graphs.

    On a CPU everything runs in the same way but is not captured. A graph reads the weights where
    they are: they may change in place but not move. It belongs to the implementations of operators
    and to the matmul precision that were in force when it was captured; for others another is.

    Parameters
    ----------
    model
        Called as ``model(batch, **options)``, returns tensors by name: a module with frozen
        weights, or a function such as ``partial(task.predict, module)``.
    device, dtype : those of the model
    rows
        Name of an output -> name of the batch's axis that its rows run along; all others have one
        row per sample.
    patience : launches of a shape before it is captured
    max_graphs : if there are more, the least recently used one is dropped

    Attributes
    ----------
    num_captured : how often a shape was captured
    """

    def __init__(
        self,
        model: Callable[..., Outputs],
        device: torch.device,
        dtype: torch.dtype,
        rows: Mapping[str, str],
        patience: int = PATIENCE,
        max_graphs: int = MAX_GRAPHS,
    ) -> None:
        self._model: Any = model
        self._device, self._dtype = device, dtype
        self._rows, self._patience, self._max = dict(rows), patience, max_graphs
        self._lock = threading.Lock()
        self._compiled: list[Options] = []
        self._stream: torch.cuda.Stream | None = None
        self.num_captured = 0
        self._begin(None)

    def __reduce__(self) -> tuple[type["CapturedInference"], tuple[Any, ...]]:
        """Copy and pickle without the graphs."""
        given = (self._model, self._device, self._dtype, self._rows, self._patience, self._max)
        return type(self), given

    @property
    def shapes(self) -> list[BatchShape]:
        """The shapes that are known, the one last used at the end."""
        return [shape for shape, _ in self._evaluations]

    def launch(self, batch: Paddable, **options: Hashable) -> Callable[[], Outputs]:
        """Launch the evaluation of a batch, which is on the CPU and not empty.

        Raises DataError if the model refuses the batch; NotCapturableError if the model waits for
        the GPU somewhere; torch.OutOfMemoryError if the GPU has too little memory.

        Parameters
        ----------
        **options : options of the model; each set of options is captured separately

        Returns
        -------
        Callable
            Waits and returns the outputs on the CPU. Any number may be waiting.
        """
        if isinstance(self._model, ChecksBatches):
            self._model.check(batch)
        # Streams and events belong to the current device, which may be another.
        on_gpu = self._device.type == "cuda"
        with self._lock, torch.cuda.device(self._device) if on_gpu else nullcontext():
            if on_gpu:
                self._follow()
            evaluation = self._evaluation_of(batch, options)
            evaluation.send(batch)
            if options not in self._compiled:
                self._compiled.append(options)
                self._pool.compile_ahead(evaluation.rehearse, log.warning)
            if evaluation.uses == self._patience:
                evaluation.capture(self._pool)
                self.num_captured += 1
            found = evaluation.launch()
        sizes, samples = dict(batch.sizes), batch.padding.samples

        def read() -> Outputs:
            return {
                name: values()[: sizes[self._rows.get(name, samples)]]
                for name, values in found.items()
            }

        return read

    def _follow(self) -> None:
        """Come after the launch before, which may be on another stream: they share memory."""
        present = present_stream()
        if self._stream is not None and self._stream is not present:
            present.wait_stream(self._stream)
        self._stream = present

    def _begin(self, context: Hashable) -> None:
        """Forget all graphs and the memory they shared."""
        self._evaluations: OrderedDict[tuple[BatchShape, Hashable], _Evaluation]
        self._evaluations = OrderedDict()
        self._context = context
        self._pool = GraphPool(self._device)

    def _evaluation_of(self, batch: Paddable, options: Options) -> "_Evaluation":
        context = (str(kernels.current()), torch.backends.cuda.matmul.fp32_precision)
        if context != self._context:
            self._begin(context)
        shape = batch.padding.rounded(batch.padding.size_of(batch.sizes))
        key = shape, tuple(sorted(options.items()))
        if key not in self._evaluations:
            while len(self._evaluations) >= self._max:
                self._evaluations.popitem(last=False)
            feed = BatchFeed(shape, self._dtype, self._device, batch)
            self._evaluations[key] = _Evaluation(self._model, feed, options)
        self._evaluations.move_to_end(key)
        return self._evaluations[key]


class _Evaluation:
    """The model on batches of one shape with one set of options.

    Attributes
    ----------
    uses : how often it was launched
    """

    def __init__(self, model: Callable[..., Outputs], feed: BatchFeed, options: Options) -> None:
        self._model, self._feed, self._options = model, feed, options
        self._outputs: dict[str, Tensor] = {}
        self._run: Callable[[], None] = self._evaluate
        self.uses = 0

    def send(self, batch: Paddable) -> None:
        self._feed.send(batch)

    def rehearse(self) -> None:
        """Launch the kernels without keeping what they compute."""
        self._model(self._feed.batch, **self._options)

    def capture(self, pool: GraphPool) -> None:
        self._run = pool.capture(self._evaluate)

    def launch(self) -> Mapping[str, Callable[[], Tensor]]:
        """Run on the batch sent last; return what waits for each output, padding included."""
        self._run()
        self.uses += 1
        # Memory of their own: readings may wait while the next batch is evaluated.
        return {name: Reading(values).launch() for name, values in self._outputs.items()}

    def _evaluate(self) -> None:
        """Write the results where they are read, outside the memory of a graph.

        The first run, which is never captured, finds out what there is.
        """
        found = self._model(self._feed.batch, **self._options)
        for name, values in found.items():
            if name not in self._outputs:
                self._outputs[name] = torch.empty_like(values, requires_grad=False)
            self._outputs[name].copy_(values.detach())
