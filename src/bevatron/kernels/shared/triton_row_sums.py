"""Sums over many rows, such as bias gradients, several times as fast as torch's."""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from bevatron.kernels.shared.custom_op import custom_op
from bevatron.kernels.shared.dtypes import wide_type
from bevatron.kernels.shared.launch import num_sms
from bevatron.kernels.shared.triton_launch import launch
from bevatron.kernels.shared.triton_partial_sums import sum_partials

BLOCK_M, LARGEST_BLOCK_C = 64, 128
"""Rows loaded at once, and channels of a program.

67 MB take 21 to 22 us on an H200, or 28 to 30 after the L2 is flushed; blocks of 8 rows and 256
channels with one warp each took 35 to 36 and 45
(`benchmarks/results/history/kernels/row_sums-blocks_nvidia-h200_2026-11-29.md`)."""
PROGRAMS_PER_SM = 4


@custom_op("sum_rows", fake=lambda rows: rows.new_empty(rows.shape[1], dtype=wide_type(rows)))
def sum_rows(rows: Tensor) -> Tensor:
    """Return the sum of all rows [n, C], possibly slices of longer ones, in at least float32."""
    wide = wide_type(rows)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    count, width = rows.shape
    if not rows.numel():
        return rows.new_zeros(width, dtype=wide)
    sums = rows.new_empty(width, dtype=wide)
    block = min(LARGEST_BLOCK_C, int(triton.next_power_of_2(width)))
    columns = -(-width // block)
    most = -(-PROGRAMS_PER_SM * num_sms(rows.device) // columns)
    programs = min(-(-count // BLOCK_M), most)
    parts = rows.new_empty((programs, width), dtype=wide)
    launch(
        sum_rows_kernel,
        (programs, columns),
        (rows, parts),
        (count, rows.stride(0)),
        C=width,
        BLOCK=BLOCK_M,
        BLOCK_C=block,
        WIDE=tl.float64 if wide == torch.float64 else tl.float32,
    )
    sum_partials(parts, sums)
    return sums


@triton.jit(do_not_specialize=["count"])
def sum_rows_kernel(
    Rows, Parts, count, stride, C: tl.constexpr, BLOCK: tl.constexpr, BLOCK_C: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Sum blocks of rows over BLOCK_C channels, one partial sum per program.

    A program strides over the blocks of rows, accumulates [BLOCK, BLOCK_C] in registers and writes
    one row of Parts [num_programs, C], which the host sums.
    """
    col = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    total = tl.zeros([BLOCK, BLOCK_C], WIDE)
    for block in range(tl.program_id(0), tl.cdiv(count, BLOCK), tl.num_programs(0)):
        row = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        mask = (row < count)[:, None] & (col < C)[None, :]
        rows = Rows + row[:, None] * stride + col[None, :]
        total += tl.load(rows, mask=mask, other=0.0).to(WIDE)  # [BLOCK, BLOCK_C]
    out = Parts + tl.program_id(0).to(tl.int64) * C + col
    tl.store(out, tl.sum(total, 0), mask=col < C)  # [BLOCK_C]
