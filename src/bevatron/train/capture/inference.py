"""Inference without launching kernel after kernel: recorded as CUDA graphs over padded batches.

The energy and forces of a few thousand atoms are some hundreds of short kernels, which take the
host longer to launch than the GPU to run. Sizes are rounded up to few shapes
(`bevatron.data.padding.size_buckets.geometric_shape`); each shape that comes again is recorded once
and replayed from then on. The memory of a recording is its own, so what it finds is copied to the
host before anybody sees it, without the padding.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from bevatron import kernels
from bevatron.data.padding import BatchShape
from bevatron.data.padding.size_buckets import geometric_shape
from bevatron.data.samples import StructureBatch
from bevatron.task import ChecksBatches
from bevatron.train.capture.cuda_graphs import Recorder
from bevatron.train.capture.transfers import BatchFeed, Reading

MAX_RECORDINGS = 8
"""Recordings that are kept at a time; they share one pool of memory."""
PATIENCE = 2
"""How often a shape is launched kernel by kernel before it is recorded, which takes as long as
some four such launches: a shape that never comes again is not worth it."""

Outputs = dict[str, Tensor]


def obstacle(device: torch.device) -> str | None:
    """Say why inference cannot be captured, None if nothing is known to be in the way."""
    return None if device.type == "cuda" else f"the device is {device.type}"


class CapturedInference:
    """A model evaluated on batches of a few fixed shapes, recorded as CUDA graphs.

    On a CPU everything runs in the same way but unrecorded. A recording reads the weights where
    they are: they may change in place but not move. It belongs to the implementations of operators
    and to the precision of products that were in force when it was made; others are recorded anew.

    Parameters
    ----------
    model
        Called as ``model(batch, compute=...)``, returns tensors by name; its weights are frozen.
    device, dtype
        Of the model.
    per_atom
        Names of those outputs that have a row per atom; all others have one per structure.
    patience
        Launches of a shape before it is recorded.
    max_recordings
        If there are more, the one that was not used for longest is dropped.

    Attributes
    ----------
    num_recorded
        How often a shape was recorded.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        device: torch.device,
        dtype: torch.dtype,
        per_atom: Collection[str],
        patience: int = PATIENCE,
        max_recordings: int = MAX_RECORDINGS,
    ) -> None:
        self._model, self._device, self._dtype = model, device, dtype
        self._per_atom, self._patience, self._max = frozenset(per_atom), patience, max_recordings
        self._lock = threading.Lock()
        self.num_recorded = 0
        self._begin(None)

    def __reduce__(self) -> tuple[type["CapturedInference"], tuple[Any, ...]]:
        """Copy and pickle without the recordings."""
        given = (self._model, self._device, self._dtype, self._per_atom, self._patience, self._max)
        return type(self), given

    @property
    def shapes(self) -> list[BatchShape]:
        """The shapes that are known, the one last used at the end."""
        return [shape for shape, _ in self._evaluations]

    def launch(
        self, batch: StructureBatch, compute: Collection[str] = ("energy", "forces")
    ) -> Callable[[], Outputs]:
        """Launch the evaluation of a batch, which is on the CPU and has at least one atom.

        Returns
        -------
        Callable
            Waits and returns the outputs on the CPU. Any number may be waiting.

        Raises
        ------
        DataError
            If the model refuses the batch.
        NotRecordableError
            If the model waits for the GPU somewhere.
        torch.OutOfMemoryError
            If the GPU has too little memory.
        """
        if isinstance(self._model, ChecksBatches):
            self._model.check(batch)
        # Streams and events are those of the current device, which may be another.
        on_gpu = self._device.type == "cuda"
        with self._lock, torch.cuda.device(self._device) if on_gpu else nullcontext():
            evaluation = self._evaluation_of(batch, frozenset(compute))
            evaluation.send(batch)
            if evaluation.uses == self._patience:
                evaluation.record(self._recorder)
                self.num_recorded += 1
            found = evaluation.launch()

        def read() -> Outputs:
            sizes = batch.num_atoms, batch.num_graphs
            return {
                name: values()[: sizes[0] if name in self._per_atom else sizes[1]]
                for name, values in found.items()
            }

        return read

    def _begin(self, circumstances: Hashable) -> None:
        """Forget all recordings and the memory they shared."""
        self._evaluations: OrderedDict[tuple[BatchShape, frozenset[str]], _Evaluation]
        self._evaluations = OrderedDict()
        self._circumstances = circumstances
        self._recorder = Recorder(self._device)

    def _evaluation_of(self, batch: StructureBatch, compute: frozenset[str]) -> "_Evaluation":
        circumstances = (str(kernels.current()), torch.backends.cuda.matmul.fp32_precision)
        if circumstances != self._circumstances:
            self._begin(circumstances)
        key = geometric_shape((batch.num_edges, batch.num_atoms, batch.num_graphs)), compute
        if key not in self._evaluations:
            while len(self._evaluations) >= self._max:
                self._evaluations.popitem(last=False)
            feed = BatchFeed(key[0], self._dtype, self._device)
            self._evaluations[key] = _Evaluation(self._model, feed, compute)
        self._evaluations.move_to_end(key)
        return self._evaluations[key]


class _Evaluation:
    """The model on batches of one shape with one set of results.

    Attributes
    ----------
    uses
        How often it was launched.
    """

    def __init__(self, model: torch.nn.Module, feed: BatchFeed, compute: frozenset[str]) -> None:
        self._model, self._feed, self._compute = model, feed, tuple(sorted(compute))
        self._outputs: dict[str, Tensor] = {}
        self._run: Callable[[], None] = self._evaluate
        self.uses = 0

    def send(self, batch: StructureBatch) -> None:
        self._feed.send(batch)

    def record(self, recorder: Recorder) -> None:
        self._run = recorder.record(self._evaluate)

    def launch(self) -> Mapping[str, Callable[[], Tensor]]:
        """Run on what was sent last; return what waits for each output, padding included."""
        self._run()
        self.uses += 1
        # Memory of their own: readings may wait while the next batch is evaluated.
        return {name: Reading(values).launch() for name, values in self._outputs.items()}

    def _evaluate(self) -> None:
        """Write the results where they are read, outside the memory of a recording.

        The first run, which is never recorded, finds out what there is.
        """
        found = self._model(self._feed.batch, compute=self._compute)
        for name, values in found.items():
            if name not in self._outputs:
                self._outputs[name] = torch.empty_like(values, requires_grad=False)
            self._outputs[name].copy_(values.detach())
