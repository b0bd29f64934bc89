"""Sums over the entries of a sparse matrix in plain PyTorch, differentiable to any order.

Both sums loop over chunks of the entries, so neither the forward nor the backward pass allocates a
tensor of entries x features; each sum appears in the other's gradient.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

PIECE = 2**24
"""Elements of a gathered chunk."""


def weighted_sum(weights: Tensor, x: Tensor, into: Tensor, out_of: Tensor, count: int) -> Tensor:
    r"""Compute :math:`z_{i} = \sum_{e: into_e = i} w_e x_{out\_of_e}`.

    Parameters
    ----------
    weights : [E, H]
    x : [N, H, C]
    into, out_of : [E], row of the result and row of ``x`` of each entry
    count : rows of the result, [count, H, C]
    """
    result: Tensor = _WeightedSum.apply(weights, x, into, out_of, count)
    return result


def entry_dot(a: Tensor, b: Tensor, into: Tensor, out_of: Tensor) -> Tensor:
    r"""Compute :math:`\langle a_{into_e}, b_{out\_of_e}\rangle`, [entries, heads]."""
    result: Tensor = _EntryDot.apply(a, b, into, out_of)
    return result


class _WeightedSum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, weights: Tensor, x: Tensor, into: Tensor, out_of: Tensor, count: int
    ) -> Tensor:
        ctx.save_for_backward(weights, x, into, out_of)
        result = x.new_zeros((count, *x.shape[1:]))
        for piece in _pieces(into, x):
            result.index_add_(0, into[piece], weights[piece, :, None] * x[out_of[piece]])
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weights, x, into, out_of = ctx.saved_tensors
        by_weights = entry_dot(grad, x, into, out_of) if ctx.needs_input_grad[0] else None
        by_x = None
        if ctx.needs_input_grad[1]:
            by_x = weighted_sum(weights, grad, out_of, into, len(x))
        return by_weights, by_x, None, None, None


class _EntryDot(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, into: Tensor, out_of: Tensor) -> Tensor:
        ctx.save_for_backward(a, b, into, out_of)
        result = a.new_empty((len(into), a.shape[1]))
        for piece in _pieces(into, a):
            result[piece] = (a[into[piece]] * b[out_of[piece]]).sum(-1)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        a, b, into, out_of = ctx.saved_tensors
        by_a = by_b = None
        if ctx.needs_input_grad[0]:
            by_a = weighted_sum(grad, b, into, out_of, len(a))
        if ctx.needs_input_grad[1]:
            by_b = weighted_sum(grad, a, out_of, into, len(b))
        return by_a, by_b, None, None


def segment_softmax(logits: Tensor, into: Tensor, count: int) -> Tensor:
    """Normalise [E, H] so that exponentials of each row of the matrix sum to one."""
    index = into[:, None].expand_as(logits)
    largest = logits.new_full((count, logits.shape[1]), -torch.inf)
    largest = largest.scatter_reduce(0, index, logits.detach(), "amax")
    weights = torch.exp(logits - largest[into])
    total = weights.new_zeros(largest.shape).index_add(0, into, weights)
    return weights / total[into]


def by_pieces(
    function: Callable[..., Tensor], tensors: tuple[Tensor, ...], entries: Tensor, like: Tensor
) -> Tensor:
    """Compute ``function(*tensors, slice)`` for all entries, chunk by chunk, and again for grad.

    Parameters
    ----------
    function : applied to some entries, [entries, ...]
    tensors : the inputs with gradients
    entries : [E] of any kind
    like : [n, ...] with rows as wide as the intermediates of one entry
    """
    pieces = _pieces(entries, like)
    if len(pieces) < 2:
        return function(*tensors, slice(None))
    return torch.cat(
        [checkpoint(function, *tensors, piece, use_reentrant=False) for piece in pieces]
    )


def _pieces(entries: Tensor, x: Tensor) -> list[slice]:
    step = max(1, PIECE // max(1, x[:1].numel()))
    return [slice(start, start + step) for start in range(0, len(entries), step)]
