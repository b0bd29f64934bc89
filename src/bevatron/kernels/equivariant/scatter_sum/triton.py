# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Sums over segments in Triton, in a fixed order: no atomics.

A program owns one segment and ``COLUMNS`` of its columns. It accumulates ``ROWS`` rows of the
segment at a time in registers, reduces over them at the end and writes one row of the result.

Two operators, each the other's derivative: ``total`` sums the rows of a segment, ``spread`` copies
the row of each segment to its members.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from bevatron.kernels.shared.custom_op import custom_op
from bevatron.kernels.shared.triton_math import accumulator

NUMBERS, INTERPRETED_NUMBERS = 512, 4096
"""Elements that a program holds: several rows of one segment."""


def scatter_sum(values: Tensor, index: Tensor, num_segments: int, ordered: bool) -> Tensor:
    """Compute the same as the reference."""
    order = None
    ascending = index
    if not ordered:
        ascending, order = torch.sort(index, stable=True)
    bounds = torch.arange(num_segments + 1, device=index.device, dtype=index.dtype)
    ptr = torch.searchsorted(ascending.contiguous(), bounds)
    rows = values.reshape(len(values), values.shape[1:].numel())
    result: Tensor = total(rows, index, ptr, order)
    return result.view(num_segments, *values.shape[1:])


@custom_op(
    "scatter_sum", fake=lambda values, ptr: values.new_empty(ptr.shape[0] - 1, values.shape[1])
)
def total(values: Tensor, index: Tensor, ptr: Tensor, order: Tensor | None) -> Tensor:
    """[N, C] from [E, C], the offsets of the segments and the permutation of the rows."""
    del index
    values = values.contiguous()
    count, width = ptr.shape[0] - 1, values.shape[1]
    sums = values.new_empty(count, width)
    if sums.numel():
        numbers = NUMBERS if values.is_cuda else INTERPRETED_NUMBERS
        columns = min(triton.next_power_of_2(width), numbers)
        scatter_sum_kernel[(count, triton.cdiv(width, columns))](
            values, ptr, ptr if order is None else order, sums,
            WIDTH=width, ORDERED=order is None, ROWS=numbers // columns, COLUMNS=columns,
            WIDE=accumulator(values),
            num_warps=4,
        )  # fmt: skip
    return sums


@total.backward("values", fake=lambda sums, index: sums.new_empty(index.shape[0], sums.shape[1]))
def spread(sums: Tensor, index: Tensor, ptr: Tensor, order: Tensor | None) -> Tensor:
    """[E, C] from [N, C]."""
    del ptr, order
    return sums.index_select(0, index)


spread.gradients("sums", total)


@triton.jit
def scatter_sum_kernel(
    values_ptr, ptr_ptr, order_ptr, sums_ptr, WIDTH: tl.constexpr, ORDERED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Sum COLUMNS columns of one segment."""
    segment = tl.program_id(0).to(tl.int64)
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    begin = tl.load(ptr_ptr + segment).to(tl.int64)  # []
    end = tl.load(ptr_ptr + segment + 1).to(tl.int64)  # []
    sums = tl.zeros([ROWS, COLUMNS], WIDE)
    for first in range(begin, end, ROWS):
        position = (first + tl.arange(0, ROWS))[:, None]
        row = position
        if not ORDERED:
            row = tl.load(order_ptr + position, mask=position < end, other=0)  # [ROWS, 1]
            row = row.to(tl.int64)
        mask = (position < end) & (column < WIDTH)
        rows_ptr = values_ptr + row * WIDTH + column
        sums += tl.load(rows_ptr, mask=mask, other=0.0).to(WIDE)  # [ROWS, COLUMNS]
    result = tl.sum(sums, 0)[None, :].to(sums_ptr.dtype.element_ty)  # [1, COLUMNS]
    tl.store(sums_ptr + segment * WIDTH + column, result, mask=column < WIDTH)
