"""Data parallelism: replicated weights, gradients all-reduced after the backward pass.

The loss is already divided by counts over all ranks, so gradients are summed, not averaged. They
are reduced in buckets once per optimiser step, after the last micro-batch. That needs no hooks in
autograd, so models that differentiate inside their forward pass (forces) need no special case, and
the order of additions does not depend on which gradient is ready first: results repeat.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from bevatron.parallel.collectives import broadcast, sum_over_ranks
from bevatron.parallel.mesh import Mesh

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


def sum_gradients(parameters: Iterable[nn.Parameter], mesh: Mesh) -> None:
    """All-reduce (sum) gradients, in place.

    A parameter that took no part in this rank's batches counts as zero, on one process too, so
    that the optimiser treats it alike on any number of ranks.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    gradients: list[Tensor] = []
    for parameter in trained:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradients.append(parameter.grad)
    if mesh.world == 1:
        return
    for bucket in _buckets(gradients):
        flat = sum_over_ranks(torch.cat([gradient.reshape(-1) for gradient in bucket]), mesh)
        parts = flat.split([gradient.numel() for gradient in bucket])
        for gradient, part in zip(bucket, parts, strict=True):
            gradient.copy_(part.view_as(gradient))


def _buckets(gradients: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Group gradients of one dtype into buckets, in order, up to `BUCKET_BYTES` each."""
    for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
        bucket: list[Tensor] = []
        size = 0
        for gradient in gradients:
            if gradient.dtype != dtype:
                continue
            bucket.append(gradient)
            size += gradient.numel() * gradient.element_size()
            if size >= BUCKET_BYTES:
                yield bucket
                bucket, size = [], 0
        if bucket:
            yield bucket
