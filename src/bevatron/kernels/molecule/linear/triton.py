"""A linear layer whose backward pass sums the gradient of the bias in a kernel."""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from bevatron.kernels.molecule.linear.rounding import rounded
from bevatron.kernels.shared.chunked_linear import linear as product
from bevatron.kernels.shared.custom_op import custom_op
from bevatron.kernels.shared.dtypes import wide_type
from bevatron.kernels.shared.launch import num_sms, on_gpu
from bevatron.kernels.shared.rows import indexable_by_32_bits
from bevatron.kernels.shared.triton_partial_sums import sum_partials

BLOCK_M, LARGEST_BLOCK_C = 8, 256
"""Rows that are loaded at once, and channels of a program: a warp's, so that a thread adds up its
own."""
PROGRAMS_PER_SM = 8


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute the same as the reference; see `bevatron.kernels.molecule.linear`."""
    kind, dtype = x.device.type, x.dtype
    if torch.is_autocast_enabled(kind) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(kind)
    found: tuple[Tensor, Tensor] = _Linear.apply(x, weight, bias, dtype)
    return found


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        narrow_x, narrow_weight = indexable_by_32_bits(x.to(dtype)), rounded(weight, dtype)
        ctx.save_for_backward(narrow_x, narrow_weight)
        ctx.set_materialize_grads(False)
        ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        y = product(narrow_x, narrow_weight, None if bias is None else rounded(bias, dtype))
        return y, x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, more: Tensor | None) -> tuple[Tensor | None, ...]:
        if dy is None:
            return more, None, None, None
        dy = indexable_by_32_bits(dy)
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.dtypes
        dx = dweight = dbias = None
        if ctx.needs_input_grad[0]:
            dx = _row_gradient(dy, weight, more, of_x)
        if ctx.needs_input_grad[1]:
            dweight = _weight_gradient(dy, x, of_weight)
        if of_bias is not None and ctx.needs_input_grad[2]:
            dbias = sum_rows(dy.contiguous()).to(of_bias)
        return dx, dweight, dbias, None


def _row_gradient(dy: Tensor, weight: Tensor, more: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Compute ``dy weight + more``; not into ``more``, which autograd may have given to others."""
    if more is None:
        return torch.mm(dy, weight).to(dtype)
    if dtype == dy.dtype:
        return torch.addmm(more, dy, weight)
    return more + torch.mm(dy, weight).to(dtype)


def _weight_gradient(dy: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    if on_gpu(dy) and dy.dtype != dtype == torch.float32:
        return torch.mm(dy.t(), x, out_dtype=dtype)
    return torch.mm(dy.t(), x).to(dtype)


@custom_op("sum_rows", fake=lambda rows: rows.new_empty(rows.shape[1], dtype=wide_type(rows)))
def sum_rows(rows: Tensor) -> Tensor:
    """Return the sum of all rows, in float32 at least."""
    wide = wide_type(rows)
    count, width = rows.shape
    if not rows.numel():
        return rows.new_zeros(width, dtype=wide)
    sums = rows.new_empty(width, dtype=wide)
    block = min(LARGEST_BLOCK_C, int(triton.next_power_of_2(width)))
    columns = -(-width // block)
    most = -(-PROGRAMS_PER_SM * num_sms(rows.device) // columns)
    programs = min(-(-count // BLOCK_M), most)
    parts = rows.new_empty((programs, width), dtype=wide)
    sum_rows_kernel[(programs, columns)](
        *(rows, parts, count),
        C=width,
        BLOCK=BLOCK_M,
        BLOCK_C=block,
        WIDE=tl.float64 if wide == torch.float64 else tl.float32,
        num_warps=1,
    )
    sum_partials(parts, sums)
    return sums


@triton.jit(do_not_specialize=["count"])
def sum_rows_kernel(
    Rows, Parts, count, C: tl.constexpr, BLOCK: tl.constexpr, BLOCK_C: tl.constexpr,
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
        rows = Rows + row[:, None] * C + col[None, :]
        total += tl.load(rows, mask=mask, other=0.0).to(WIDE)  # [BLOCK, BLOCK_C]
    out = Parts + tl.program_id(0).to(tl.int64) * C + col
    tl.store(out, tl.sum(total, 0), mask=col < C)  # [BLOCK_C]
