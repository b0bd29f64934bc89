"""Sums of consecutive rows in Triton: two custom operators, their kernels and launches.

``segment_sum_kernel``: a program owns one segment and BLOCK_C of its channels, accumulates BLOCK
rows at a time in registers and writes one row. ``segment_spread_kernel``, its derivative, writes
each segment's gradient to all its rows.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from bevatron.kernels.shared.custom_op import custom_op
from bevatron.kernels.shared.triton_math import accumulator

__all__ = ["launch_sum", "segment_sum"]
"""Names that other operators may use."""

BLOCK_M, LARGEST_BLOCK_C = 8, 1024
"""Rows loaded at once, and channels of a program: one warp per 256, so that each thread sums its
own channels."""


def segment_sum(values: Tensor, ptr: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute the same as the reference; see `bevatron.kernels.molecule.segment_sum`."""
    scale = None if scale is None else scale.detach().contiguous()
    found: tuple[Tensor, Tensor] = _Sum.apply(values, ptr.contiguous(), scale)
    return found


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, values: Tensor, ptr: Tensor, scale: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        ctx.num_rows = len(values)
        ctx.save_for_backward(ptr, scale)
        ctx.set_materialize_grads(False)
        return add_segments(values, ptr, scale), values

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dsums: Tensor | None, more: Tensor | None
    ) -> tuple[Tensor | None, None, None]:
        if dsums is None:
            return more, None, None
        ptr, scale = ctx.saved_tensors
        more = None if more is None else more.contiguous()
        return spread_segments(dsums, ptr, scale, more, ctx.num_rows), None, None


@custom_op(
    "segment_sum", fake=lambda values, ptr: values.new_empty((len(ptr) - 1, values.shape[1]))
)
def add_segments(values: Tensor, ptr: Tensor, scale: Tensor | None) -> Tensor:
    """Return the sum of each segment's rows."""
    sums = values.new_empty((len(ptr) - 1, values.shape[1]))
    launch_sum(values, ptr, sums, scale)
    return sums


@custom_op(
    "segment_sum_backward", fake=lambda dsums, num_rows: dsums.new_empty((num_rows, dsums.shape[1]))
)
def spread_segments(
    dsums: Tensor, ptr: Tensor, scale: Tensor | None, more: Tensor | None, num_rows: int
) -> Tensor:
    """Return the scaled gradient of every row's segment; zero for rows of no segment.

    Rows of ``more`` are added.
    """
    dvalues = dsums.new_empty((num_rows, dsums.shape[1]))
    if dvalues.numel():
        block = _columns(dsums.shape[1])
        grid = (len(ptr), triton.cdiv(dsums.shape[1], block))
        segment_spread_kernel[grid](
            *(
                dsums,
                ptr,
                dsums if scale is None else scale,
                dsums if more is None else more,
                dvalues,
                num_rows,
                len(ptr) - 1,
                dsums.stride(0),
                dsums.stride(1),
            ),
            C=dsums.shape[1],
            BLOCK=BLOCK_M,
            BLOCK_C=block,
            SCALED=scale is not None,
            ADD=more is not None,
            WIDE=accumulator(dsums),
            num_warps=_warps(block),
        )
    return dvalues


def launch_sum(values: Tensor, ptr: Tensor, sums: Tensor, scale: Tensor | None = None) -> None:
    """Write the sums of segments of rows, in any strides."""
    if not sums.numel():
        return
    wide = accumulator(values)
    block = _columns(sums.shape[1])
    segment_sum_kernel[(sums.shape[0], triton.cdiv(sums.shape[1], block))](
        *(values, ptr, values if scale is None else scale, sums, len(values)),
        *(values.stride(0), values.stride(1)),
        C=sums.shape[1], BLOCK=BLOCK_M, BLOCK_C=block, SCALED=scale is not None, WIDE=wide,
        num_warps=_warps(block),
    )  # fmt: skip


def _columns(width: int) -> int:
    return min(LARGEST_BLOCK_C, int(triton.next_power_of_2(width)))


def _warps(columns: int) -> int:
    return max(1, int(columns) // 256)


@triton.jit(do_not_specialize=["M"])
def segment_sum_kernel(
    Values, Ptr, Scale, Sums, M, v_M, v_C, C: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_C: tl.constexpr, SCALED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Sum BLOCK_C channels of one segment."""
    segment = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    first = tl.load(Ptr + segment).to(tl.int64)  # []
    last = tl.minimum(tl.load(Ptr + segment + 1).to(tl.int64), M)  # []
    total = tl.zeros([BLOCK, BLOCK_C], WIDE)
    for start in range(first, last, BLOCK):
        row = start + tl.arange(0, BLOCK)
        mask = (row < last)[:, None] & (col < C)[None, :]
        block = Values + row[:, None] * v_M + col[None, :] * v_C
        rows = tl.load(block, mask=mask, other=0.0).to(WIDE)  # [BLOCK, BLOCK_C]
        if SCALED:
            scale = tl.load(Scale + row, mask=row < last, other=0.0).to(WIDE)  # [BLOCK]
            rows *= scale[:, None]
        total += rows
    summed = tl.sum(total, 0).to(Sums.dtype.element_ty)  # [BLOCK_C]
    tl.store(Sums + segment * C + col, summed, mask=col < C)


@triton.jit
def _fill(
    DValues, Scale, More, value, col, first, last, C: tl.constexpr, BLOCK: tl.constexpr,
    SCALED: tl.constexpr, ADD: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Write one row of values to rows ``first`` to ``last``."""
    for start in range(first, last, BLOCK):
        row = start + tl.arange(0, BLOCK)
        mask = (row < last)[:, None] & (col < C)[None, :]
        offsets = row[:, None] * C + col[None, :]
        rows = tl.broadcast_to(value[None, :], BLOCK, value.shape[0]).to(WIDE)  # [BLOCK, BLOCK_C]
        if SCALED:
            scale = tl.load(Scale + row, mask=row < last, other=0.0)  # [BLOCK]
            rows = rows * scale[:, None].to(WIDE)
        if ADD:
            rows += tl.load(More + offsets, mask=mask, other=0.0).to(WIDE)  # [BLOCK, BLOCK_C]
        tl.store(DValues + offsets, rows.to(DValues.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["M", "S"])
def segment_spread_kernel(
    DSums, Ptr, Scale, More, DValues, M, S, d_S, d_C, C: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_C: tl.constexpr, SCALED: tl.constexpr, ADD: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Write a segment's gradient to its rows; the last program zeroes the rows of no segment."""
    segment = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask = (col < C) & (segment < S)
    value = tl.load(DSums + segment * d_S + col * d_C, mask=mask, other=0.0)  # [BLOCK_C]
    first = tl.load(Ptr + segment).to(tl.int64)  # []
    if segment < S:
        last = tl.minimum(tl.load(Ptr + segment + 1).to(tl.int64), M)  # []
        _fill(DValues, Scale, More, value, col, first, last, C, BLOCK, SCALED, ADD, WIDE)
    else:
        zero = tl.zeros([], tl.int64)
        begin = tl.minimum(tl.load(Ptr).to(tl.int64), M)  # []
        _fill(DValues, Scale, More, value, col, zero, begin, C, BLOCK, False, ADD, WIDE)
        _fill(DValues, Scale, More, value, col, first, zero + M, C, BLOCK, False, ADD, WIDE)
