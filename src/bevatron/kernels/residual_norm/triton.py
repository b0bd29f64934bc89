"""Residual, row dropout and normalisation in Triton: two custom operators and their launches."""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from bevatron.kernels.layer_norm.triton import on_device
from bevatron.kernels.norm_gelu.triton import (
    add_shares,
    check_width,
    contiguous,
    new_sums,
    shape_of_block,
)
from bevatron.kernels.residual_norm.triton_kernels import (
    residual_norm_backward,
    residual_norm_forward,
)
from bevatron.kernels.rows import processors

FORWARD_ELEMENTS, BACKWARD_ELEMENTS = 512, 256
"""Of a warp: the backward kernel has two branches and three sums in registers."""
WARPS_PER_PROCESSOR = 16
MOST_READERS = 3
"""Whose gradients the backward kernel adds up."""


def residual_norm(
    x: Tensor,
    branches: Sequence[Tensor],
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    scales: Sequence[Tensor | None],
    linear_biases: Sequence[Tensor | None],
    eps: float,
    readers: int,
) -> tuple[Tensor, ...]:
    """Compute what the reference computes; see `bevatron.kernels.residual_norm`."""
    check_width("residual_norm", x)
    pairs: list[Tensor | None] = []
    for given in (branches, scales, linear_biases, weights, biases):
        pairs += [contiguous(given[0]), contiguous(given[1]) if len(given) > 1 else None]
    found: tuple[Tensor, ...] = _Merge.apply(readers, eps, x.contiguous(), *pairs)
    return found


class _Merge(torch.autograd.Function):
    """`merge` with one result for every reader, whose gradients the backward kernel adds up."""

    @staticmethod
    def forward(ctx: Any, readers: int, eps: float, *tensors: Any) -> tuple[Tensor, ...]:
        y, mean, rstd = merge(*tensors, eps)
        _keep(ctx, tensors, mean, rstd)
        return y, *(y.detach() for _ in range(readers - 1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dys: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None, None, *_gradients(ctx, dys))


@torch.library.custom_op("bevatron::residual_norm", mutates_args=())
def merge(
    x: Tensor,
    branch_1: Tensor,
    branch_2: Tensor | None,
    scale_1: Tensor | None,
    scale_2: Tensor | None,
    linear_1: Tensor | None,
    linear_2: Tensor | None,
    weight_1: Tensor,
    weight_2: Tensor | None,
    bias_1: Tensor,
    bias_2: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the result and, of every branch and row, the mean and 1/sigma."""
    y = x.new_empty(x.shape)
    mean, rstd = _new_statistics(x, branch_2)
    if x.numel():
        pad, block, warps = shape_of_block(x.shape[1], FORWARD_ELEMENTS)
        pairs = (branch_1, branch_2, scale_1, scale_2, linear_1, linear_2)
        given = (*pairs, weight_1, bias_1, weight_2, bias_2)
        with on_device(x):
            residual_norm_forward[(triton.cdiv(len(x), block),)](
                *(x, *(x if tensor is None else tensor for tensor in given), y, mean, rstd),
                *(len(x), eps),
                **_constants(x, *pairs[1:], pad, block),
                num_warps=warps,
            )
    return y, mean, rstd


@merge.register_fake
def _(
    x: Tensor,
    branch_1: Tensor,
    branch_2: Tensor | None,
    scale_1: Tensor | None,
    scale_2: Tensor | None,
    linear_1: Tensor | None,
    linear_2: Tensor | None,
    weight_1: Tensor,
    weight_2: Tensor | None,
    bias_1: Tensor,
    bias_2: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    del branch_1, scale_1, scale_2, linear_1, linear_2, weight_1, weight_2, bias_1, bias_2, eps
    return x.new_empty(x.shape), *_new_statistics(x, branch_2)


@torch.library.custom_op("bevatron::residual_norm_backward", mutates_args=())
def merge_backward(
    dys: list[Tensor],
    x: Tensor,
    branch_1: Tensor,
    branch_2: Tensor | None,
    scale_1: Tensor | None,
    scale_2: Tensor | None,
    linear_1: Tensor | None,
    linear_2: Tensor | None,
    weight_1: Tensor,
    weight_2: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return gradients of x and both branches, and [5, C] of vectors; ``dys`` are added up.

    Of a bias, of both weights and of both linear biases.
    """
    width = x.shape[1]
    dx, dbranch_1 = x.new_empty(x.shape), x.new_empty(x.shape)
    dbranch_2 = x.new_empty(0 if branch_2 is None else x.shape)
    sums = new_sums(x, 5, width)
    if x.numel():
        pad, block, warps = shape_of_block(width, BACKWARD_ELEMENTS)
        most = WARPS_PER_PROCESSOR // warps * processors(x.device)
        programs = min(triton.cdiv(len(x), block), most)
        parts = x.new_empty((programs, 5, width), dtype=_wide(x))
        pairs = (branch_1, branch_2, scale_1, scale_2, linear_1, linear_2)
        given = (*pairs, weight_1, weight_2)
        with on_device(x):
            residual_norm_backward[(programs,)](
                *(*dys, *dys[-1:] * (MOST_READERS - len(dys))),
                *(x, *(x if tensor is None else tensor for tensor in given), mean, rstd),
                *(dx, dbranch_1, dbranch_2, parts, len(x)),
                **_constants(x, *pairs[1:], pad, block),
                READERS=len(dys),
                num_warps=warps,
            )
        add_shares(parts, sums)
    return dx, dbranch_1, dbranch_2, sums


@merge_backward.register_fake
def _(
    dys: list[Tensor],
    x: Tensor,
    branch_1: Tensor,
    branch_2: Tensor | None,
    scale_1: Tensor | None,
    scale_2: Tensor | None,
    linear_1: Tensor | None,
    linear_2: Tensor | None,
    weight_1: Tensor,
    weight_2: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    del dys, branch_1, scale_1, scale_2, linear_1, linear_2, weight_1, weight_2, mean, rstd
    second = x.new_empty(0 if branch_2 is None else x.shape)
    sums = x.new_empty((5, x.shape[1]), dtype=_wide(x))
    return x.new_empty(x.shape), x.new_empty(x.shape), second, sums


def _keep(ctx: Any, tensors: Sequence[Any], mean: Tensor, rstd: Tensor) -> None:
    *saved, bias_1, bias_2 = tensors
    ctx.bias_dtypes = [None if bias is None else bias.dtype for bias in (bias_1, bias_2)]
    ctx.save_for_backward(*saved, mean, rstd)
    ctx.set_materialize_grads(False)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    _keep(ctx, inputs[:-1], *output[1:])


def _gradients(ctx: Any, dys: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """Return the gradients of `merge`'s tensors."""
    given = [dy.contiguous() for dy in dys if dy is not None]
    if not given:
        return (None,) * 11
    saved = ctx.saved_tensors
    while len(given) > MOST_READERS:
        given.append(given.pop() + given.pop())
    dx, dbranch_1, dbranch_2, sums = merge_backward(given, *saved)
    linear_1, linear_2, weight_1, weight_2 = saved[5:9]
    two = weight_2 is not None
    dtype_1, dtype_2 = ctx.bias_dtypes
    return (
        *(dx, dbranch_1, dbranch_2 if two else None, None, None),
        None if linear_1 is None else sums[3].to(linear_1.dtype),
        None if linear_2 is None else sums[4].to(linear_2.dtype),
        *(sums[1].to(weight_1.dtype), sums[2].to(weight_2.dtype) if two else None),
        *(sums[0].to(dtype_1), sums[0].to(dtype_2) if two else None),
    )


def _backward(
    ctx: Any, dy: Tensor | None, dmean: Tensor | None, drstd: Tensor | None
) -> tuple[Tensor | None, ...]:
    del dmean, drstd  # nobody outside sees the statistics
    return *_gradients(ctx, [dy]), None


merge.register_autograd(_backward, setup_context=_save)


def _constants(
    x: Tensor,
    branch_2: Tensor | None,
    scale_1: Tensor | None,
    scale_2: Tensor | None,
    linear_1: Tensor | None,
    linear_2: Tensor | None,
    pad: int,
    block: int,
) -> dict[str, Any]:
    return {
        "C": x.shape[1],
        "C_PAD": pad,
        "BLOCK": block,
        "TWO": branch_2 is not None,
        "SCALED_1": scale_1 is not None,
        "SCALED_2": scale_2 is not None,
        "LINEAR_1": linear_1 is not None,
        "LINEAR_2": linear_2 is not None,
        "WIDE": tl.float64 if x.dtype == torch.float64 else tl.float32,
    }


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _new_statistics(x: Tensor, branch_2: Tensor | None) -> tuple[Tensor, Tensor]:
    shape = (1 if branch_2 is None else 2, x.shape[0])
    return x.new_empty(shape, dtype=_wide(x)), x.new_empty(shape, dtype=_wide(x))
