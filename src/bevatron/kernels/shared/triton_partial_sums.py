"""Adds what the programs of a kernel leave behind, in their order: results repeat bit for bit."""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import triton
import triton.language as tl
from torch import Tensor

from bevatron.kernels.shared.dtypes import wide_type
from bevatron.kernels.shared.triton_launch import launch
from bevatron.kernels.shared.triton_math import accumulator

SUM_BLOCK, PAIR_BLOCK, SUM_BLOCK_C = 512, 1024, 8
"""Partial sums that are added at once, at most, of one tensor and of two; columns of a program."""


def new_sums(rows: Tensor, count: int, width: int) -> Tensor:
    """Allocate sums of rows that `sum_partials` will write; zeros if there are no rows."""
    wide = wide_type(rows)
    if rows.numel():
        return rows.new_empty((count, width), dtype=wide)
    return rows.new_zeros((count, width), dtype=wide)


def sum_partials(parts: Tensor, sums: Tensor) -> None:
    """Add what programs left in ``parts`` [programs, ...], in their order."""
    programs, width = len(parts), sums.numel()
    launch(
        add_shares_kernel,
        (triton.cdiv(width, SUM_BLOCK_C),),
        (parts, sums),
        (programs, width),
        BLOCK=min(SUM_BLOCK, triton.next_power_of_2(programs)),
        BLOCK_C=SUM_BLOCK_C,
        WIDE=accumulator(parts),
        num_warps=8,
    )


def sum_weight_and_bias_partials(
    shares: Tensor, weight: Tensor | None, bias: Tensor | None, dweight: Tensor, dbias: Tensor
) -> None:
    """Add what programs left in ``shares`` [programs, 2, C], in their order."""
    if weight is None and bias is None:
        return
    programs, _, width = shares.shape
    launch(
        sum_kernel,
        (-(-width // SUM_BLOCK_C), 2),
        (shares, dweight, dbias),
        (programs,),
        C=width,
        BLOCK=min(PAIR_BLOCK, 1 << (programs - 1).bit_length()),
        BLOCK_C=SUM_BLOCK_C,
        HAS_WEIGHT=weight is not None,
        HAS_BIAS=bias is not None,
        num_warps=8,
    )


@triton.jit
def add_shares_kernel(
    Parts, Out, parts, width, BLOCK: tl.constexpr, BLOCK_C: tl.constexpr, WIDE: tl.constexpr
):
    """Add the programs' partial sums [parts, width] of BLOCK_C columns in order."""
    col = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    total = tl.zeros([BLOCK, BLOCK_C], WIDE)
    for first in range(0, parts, BLOCK):
        part = first + tl.arange(0, BLOCK)
        mask = (part < parts)[:, None] & (col < width)[None, :]
        block = Parts + part[:, None].to(tl.int64) * width + col[None, :]
        total += tl.load(block, mask=mask, other=0.0)  # [BLOCK, BLOCK_C]
    tl.store(Out + col, tl.sum(total, 0), mask=col < width)  # [BLOCK_C]


@triton.jit
def sum_kernel(
    Parts, DWeight, DBias, parts, C: tl.constexpr, BLOCK: tl.constexpr, BLOCK_C: tl.constexpr,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Sum the partial gradients of BLOCK_C channels of dweight (program_id(1) = 0) or dbias (1)."""
    col = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    which = tl.program_id(1)
    total = tl.zeros([BLOCK, BLOCK_C], tl.float32)
    for first in range(0, parts, BLOCK):
        part = first + tl.arange(0, BLOCK)
        at = Parts + (part * 2 + which)[:, None] * C + col[None, :]
        # [BLOCK, BLOCK_C]
        total += tl.load(at, mask=(part < parts)[:, None] & (col < C)[None, :], other=0.0)
    summed = tl.sum(total, 0)  # [BLOCK_C]
    if HAS_WEIGHT and which == 0:
        tl.store(DWeight + col, summed.to(DWeight.dtype.element_ty), mask=col < C)
    if HAS_BIAS and which == 1:
        tl.store(DBias + col, summed.to(DBias.dtype.element_ty), mask=col < C)
