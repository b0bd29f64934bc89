"""Residual, row dropout and normalisation in Triton: two custom operators and their launches."""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from bevatron.kernels.molecule.norm_gelu.triton import (
    add_shares,
    check_width,
    contiguous,
    new_sums,
    shape_of_block,
)
from bevatron.kernels.molecule.residual_norm.triton_kernels import (
    residual_norm_backward,
    residual_norm_forward,
)
from bevatron.kernels.pair.layer_norm.triton import on_device
from bevatron.kernels.shared.rows import processors

FORWARD_ELEMENTS, BACKWARD_ELEMENTS = 512, 256
"""Of a warp: the backward kernel has two branches and three sums in registers."""
WARPS_PER_PROCESSOR = 16


def residual_norm(
    x: Tensor,
    branches: Sequence[Tensor],
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    scales: Sequence[Tensor | None],
    eps: float,
) -> Tensor:
    """Compute what the reference computes; see `bevatron.kernels.molecule.residual_norm`."""
    check_width("residual_norm", x)
    pairs: list[Tensor | None] = []
    for given in (branches, scales, weights, biases):
        pairs += [contiguous(given[0]), contiguous(given[1]) if len(given) > 1 else None]
    y: Tensor = merge(x.contiguous(), *pairs, eps)[0]
    return y


@torch.library.custom_op("bevatron::residual_norm", mutates_args=())
def merge(
    x: Tensor,
    branch_1: Tensor,
    branch_2: Tensor | None,
    scale_1: Tensor | None,
    scale_2: Tensor | None,
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
        given = (branch_1, branch_2, scale_1, scale_2, weight_1, bias_1, weight_2, bias_2)
        with on_device(x):
            residual_norm_forward[(triton.cdiv(len(x), block),)](
                *(x, *(x if tensor is None else tensor for tensor in given), y, mean, rstd),
                *(len(x), eps),
                **_constants(x, branch_2, scale_1, scale_2, pad, block),
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
    weight_1: Tensor,
    weight_2: Tensor | None,
    bias_1: Tensor,
    bias_2: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    del branch_1, scale_1, scale_2, weight_1, weight_2, bias_1, bias_2, eps
    return x.new_empty(x.shape), *_new_statistics(x, branch_2)


@torch.library.custom_op("bevatron::residual_norm_backward", mutates_args=())
def merge_backward(
    dy: Tensor,
    x: Tensor,
    branch_1: Tensor,
    branch_2: Tensor | None,
    scale_1: Tensor | None,
    scale_2: Tensor | None,
    weight_1: Tensor,
    weight_2: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return gradients of x and both branches, and [3, C]: of a bias and of both weights."""
    width = x.shape[1]
    dx, dbranch_1 = x.new_empty(x.shape), x.new_empty(x.shape)
    dbranch_2 = x.new_empty(0 if branch_2 is None else x.shape)
    sums = new_sums(x, 3, width)
    if x.numel():
        pad, block, warps = shape_of_block(width, BACKWARD_ELEMENTS)
        most = WARPS_PER_PROCESSOR // warps * processors(x.device)
        programs = min(triton.cdiv(len(x), block), most)
        parts = x.new_empty((programs, 3, width), dtype=_wide(x))
        given = (branch_1, branch_2, scale_1, scale_2, weight_1, weight_2)
        with on_device(x):
            residual_norm_backward[(programs,)](
                *(dy, x, *(x if tensor is None else tensor for tensor in given), mean, rstd),
                *(dx, dbranch_1, dbranch_2, parts, len(x)),
                **_constants(x, branch_2, scale_1, scale_2, pad, block),
                num_warps=warps,
            )
        add_shares(parts, sums)
    return dx, dbranch_1, dbranch_2, sums


@merge_backward.register_fake
def _(
    dy: Tensor,
    x: Tensor,
    branch_1: Tensor,
    branch_2: Tensor | None,
    scale_1: Tensor | None,
    scale_2: Tensor | None,
    weight_1: Tensor,
    weight_2: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    del dy, branch_1, scale_1, scale_2, weight_1, weight_2, mean, rstd
    second = x.new_empty(0 if branch_2 is None else x.shape)
    sums = x.new_empty((3, x.shape[1]), dtype=_wide(x))
    return x.new_empty(x.shape), x.new_empty(x.shape), second, sums


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    *tensors, bias_1, bias_2, _ = inputs
    ctx.bias_dtypes = [None if bias is None else bias.dtype for bias in (bias_1, bias_2)]
    ctx.save_for_backward(*tensors, *output[1:])
    ctx.set_materialize_grads(False)


def _backward(
    ctx: Any, dy: Tensor | None, dmean: Tensor | None, drstd: Tensor | None
) -> tuple[Tensor | None, ...]:
    del dmean, drstd  # nobody outside sees the statistics
    if dy is None:
        return (None,) * 10
    saved = ctx.saved_tensors
    dx, dbranch_1, dbranch_2, sums = merge_backward(dy.contiguous(), *saved)
    weight_1, weight_2 = saved[5:7]
    two = weight_2 is not None
    dtype_1, dtype_2 = ctx.bias_dtypes
    return (
        *(dx, dbranch_1, dbranch_2 if two else None, None, None),
        *(sums[1].to(weight_1.dtype), sums[2].to(weight_2.dtype) if two else None),
        *(sums[0].to(dtype_1), sums[0].to(dtype_2) if two else None, None),
    )


merge.register_autograd(_backward, setup_context=_save)


def _constants(
    x: Tensor,
    branch_2: Tensor | None,
    scale_1: Tensor | None,
    scale_2: Tensor | None,
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
        "WIDE": tl.float64 if x.dtype == torch.float64 else tl.float32,
    }


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _new_statistics(x: Tensor, branch_2: Tensor | None) -> tuple[Tensor, Tensor]:
    shape = (1 if branch_2 is None else 2, x.shape[0])
    return x.new_empty(shape, dtype=_wide(x)), x.new_empty(shape, dtype=_wide(x))
