"""Data parallelism: replicated weights, gradients all-reduced during the backward pass.

The loss is already divided by counts over all ranks, so gradients are summed, not averaged. They
are reduced in buckets once per optimiser step, while the backward pass of the last micro-batch
runs. Only accumulated gradients count, so models that differentiate inside their forward pass
(forces) need no special case. Neither buckets nor their order depend on which gradient is ready
first: results repeat.
"""

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed, nn
from torch.utils.hooks import RemovableHandle

from bevatron.parallel.collectives import broadcast
from bevatron.parallel.mesh import Mesh

P = TypeVar("P", bound=Tensor)

BUCKET_BYTES = 64 * 2**20


def equalise(model: nn.Module, mesh: Mesh) -> None:
    """Broadcast the parameters and buffers of rank 0."""
    if mesh.world == 1:
        return
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            if tensor.numel():
                dense = tensor.detach().contiguous()
                tensor.copy_(broadcast(dense, mesh))


class GradientSums:
    """All-reduces (sums) gradients in place, each bucket as soon as its gradients are complete.

    All ranks start buckets from the last to the first, because a backward pass reaches the last
    parameters first. A parameter that took no part in this rank's batches has a gradient of zero,
    on one process too, so that the optimiser treats it alike on any number of ranks.

    Parameters
    ----------
    parameters : parameters of the gradients; frozen ones are skipped
    mesh : its ranks must all do the same
    flat
        Tensor that contains all gradients, in the order of the parameters with zeros between
        them: then nothing is copied.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], mesh: Mesh, flat: Tensor | None = None
    ) -> None:
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._flat, self._open, self._group = flat, False, mesh.group
        self._buckets = [] if mesh.world == 1 else list(buckets(self._parameters))[::-1]
        self._place: dict[Tensor, int] = {
            p: i for i, bucket in enumerate(self._buckets) for p in bucket
        }
        self._reset()
        this = weakref.ref(self)

        def complete(parameter: Tensor) -> None:
            found = this()
            if found is not None:
                found._complete(parameter)  # noqa: SLF001

        hooks = [p.register_post_accumulate_grad_hook(complete) for p in self._place]
        weakref.finalize(self, _remove, hooks)

    def _reset(self) -> None:
        self._missing = [set(bucket) for bucket in self._buckets]
        self._running: list[tuple[Any, Tensor]] = []

    @contextmanager
    def overlapping(self) -> Iterator[None]:
        """Start sums during the backward pass within the block, which must be a step's last."""
        self._reset()
        self._open = True
        try:
            yield
        finally:
            self._open = False

    def _complete(self, parameter: Tensor) -> None:
        if not self._open:
            return
        self._missing[self._place[parameter]].discard(parameter)
        while len(self._running) < len(self._buckets) and not self._missing[len(self._running)]:
            self._start()

    def _start(self) -> None:
        gradients = [p.grad for p in self._buckets[len(self._running)] if p.grad is not None]
        if self._flat is None:
            piece = torch.cat([gradient.reshape(-1) for gradient in gradients])
        else:
            end = gradients[-1].storage_offset() + gradients[-1].numel()
            piece = self._flat[gradients[0].storage_offset() : end]
        work = distributed.all_reduce(piece, group=self._group, async_op=True)
        self._running.append((work, piece))

    def finish(self) -> None:
        """Sum the remaining buckets, and let all later work on the device wait for the sums."""
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        while len(self._running) < len(self._buckets):
            self._start()
        for (work, piece), bucket in zip(self._running, self._buckets, strict=True):
            work.wait()
            if self._flat is not None:
                continue
            parts = piece.split([parameter.numel() for parameter in bucket])
            for parameter, part in zip(bucket, parts, strict=True):
                if parameter.grad is not None:
                    parameter.grad.copy_(part.view_as(parameter.grad))
        self._reset()


def _remove(hooks: Sequence[RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()


def buckets(parameters: Sequence[P]) -> Iterator[list[P]]:
    """Group tensors of one dtype into buckets, in order, up to `BUCKET_BYTES` each."""
    for dtype in dict.fromkeys(parameter.dtype for parameter in parameters):
        bucket: list[P] = []
        size = 0
        for parameter in parameters:
            if parameter.dtype != dtype:
                continue
            bucket.append(parameter)
            size += parameter.numel() * parameter.element_size()
            if size >= BUCKET_BYTES:
                yield bucket
                bucket, size = [], 0
        if bucket:
            yield bucket
