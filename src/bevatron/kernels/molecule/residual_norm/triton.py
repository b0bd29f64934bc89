"""Residual, row dropout and normalisation in Triton: two custom operators and their launches."""

from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from bevatron.kernels.molecule.residual_norm.triton_kernels import (
    residual_norm_backward,
    residual_norm_forward,
)
from bevatron.kernels.molecule.triton_norm_rows import shape_of_block
from bevatron.kernels.shared.checks import check_width
from bevatron.kernels.shared.custom_op import custom_op
from bevatron.kernels.shared.dtypes import wide_type
from bevatron.kernels.shared.launch import contiguous, num_sms, pointers
from bevatron.kernels.shared.triton_math import accumulator
from bevatron.kernels.shared.triton_partial_sums import sum_partials

FORWARD_ELEMENTS, BACKWARD_ELEMENTS = 512, 256
"""Elements per warp; the backward kernel holds two branches and three sums in registers."""
WARPS_PER_SM = 16


def residual_norm(
    x: Tensor,
    branches: Sequence[Tensor],
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    scales: Sequence[Tensor | None],
    eps: float,
) -> Tensor:
    """Compute the same as the reference; see `bevatron.kernels.molecule.residual_norm`."""
    check_width("residual_norm", x)
    pairs: list[Tensor | None] = []
    for given in (branches, scales, weights, biases):
        pairs += [contiguous(given[0]), contiguous(given[1]) if len(given) > 1 else None]
    y: Tensor = merge(x.contiguous(), *pairs, eps)[0]
    return y


@custom_op(
    "residual_norm",
    outputs="y mean rstd",
    fake=lambda x, branch_2: (x.new_empty(x.shape), *_new_statistics(x, branch_2)),
)
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
    """Return the result, and the mean and 1/sigma of every branch and row."""
    y = x.new_empty(x.shape)
    mean, rstd = _new_statistics(x, branch_2)
    if x.numel():
        pad, block, warps = shape_of_block(x.shape[1], FORWARD_ELEMENTS)
        given = (branch_1, branch_2, scale_1, scale_2, weight_1, bias_1, weight_2, bias_2)
        residual_norm_forward[(triton.cdiv(len(x), block),)](
            *(x, *pointers(x, *given), y, mean, rstd), *(len(x), eps),
            **_constants(x, branch_2, scale_1, scale_2, pad, block),
            num_warps=warps,
        )  # fmt: skip
    return y, mean, rstd


def _new_gradients(x: Tensor, branch_2: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    second = x.new_empty(0 if branch_2 is None else x.shape)
    sums = x.new_empty((3, x.shape[1]), dtype=_wide(x))
    return x.new_empty(x.shape), x.new_empty(x.shape), second, sums


@merge.backward(
    "x branch_1 branch_2 weight_1 weight_2 bias_1 bias_2",
    fake=_new_gradients,
    # Both biases have the same gradient, but an in-place change of one must not reach the other.
    unpack=lambda dx, dbranch_1, dbranch_2, sums: (
        *(dx, dbranch_1, dbranch_2, sums[1], sums[2]),
        *(sums[0], sums[0].clone()),
    ),
)
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
    """Return gradients of x and both branches, and [3, C]: a bias and both weights."""
    width, dy = x.shape[1], dy.contiguous()
    dx, dbranch_1, dbranch_2, sums = _new_gradients(x, branch_2)
    if not x.numel():
        sums.zero_()
    else:
        pad, block, warps = shape_of_block(width, BACKWARD_ELEMENTS)
        most = WARPS_PER_SM // warps * num_sms(x.device)
        programs = min(triton.cdiv(len(x), block), most)
        parts = x.new_empty((programs, 3, width), dtype=_wide(x))
        given = (branch_1, branch_2, scale_1, scale_2, weight_1, weight_2)
        residual_norm_backward[(programs,)](
            *(dy, x, *pointers(x, *given), mean, rstd),
            *(dx, dbranch_1, dbranch_2, parts, len(x)),
            **_constants(x, branch_2, scale_1, scale_2, pad, block),
            num_warps=warps,
        )
        sum_partials(parts, sums)
    return dx, dbranch_1, dbranch_2, sums


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
        "WIDE": accumulator(x),
    }


def _wide(x: Tensor) -> torch.dtype:
    return wide_type(x)


def _new_statistics(x: Tensor, branch_2: Tensor | None) -> tuple[Tensor, Tensor]:
    shape = (1 if branch_2 is None else 2, x.shape[0])
    return x.new_empty(shape, dtype=_wide(x)), x.new_empty(shape, dtype=_wide(x))
