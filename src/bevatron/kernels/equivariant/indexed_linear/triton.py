"""The indexed linear map in Triton: one grouped matmul over atoms sorted by element.

A row of the matmul is one component of one atom; all rows of a tile have the same element. Two
operators are closed under differentiation, since each is bilinear:

    mix(x, W):   y[n, j, m] = s * sum_k W[z_n, k, j] x[n, k, m]
    outer(x, g): W[z, k, j] = s * sum over atoms n of z and m of x[n, k, m] g[n, j, m]

The gradient of ``mix`` with respect to x is ``mix`` with W transposed, that of W is ``outer``; the
gradients of ``outer`` are two ``mix``.

A program of ``mix`` computes one [ROWS, COLUMNS] tile, accumulated in registers over blocks of
``DEPTH`` channels. A program of ``outer`` sums x^T g over the rows of one tile of the table into a
[ROWS, COLUMNS] block of the matrix; `sum_tiles` then adds the tiles in order: no atomics.
"""

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from bevatron.kernels.equivariant.element_order import ElementOrder
from bevatron.kernels.equivariant.triton_element_tiles import sum_tiles, tile_table
from bevatron.kernels.shared.custom_op import custom_op
from bevatron.kernels.shared.dtypes import wide_type
from bevatron.kernels.shared.triton_math import accumulator, allows_tf32

ROWS, COLUMNS, DEPTH = 64, 64, 32
"""Tile of a matmul."""
SUMMED_ROWS = 128
"""Rows that a program of ``outer`` sums."""


def indexed_linear(x: Tensor, weights: Tensor, order: ElementOrder, scale: float) -> Tensor:
    """Multiply the channels of each atom by the matrix of its element."""
    result: Tensor = mix(x, weights, order.order, order.ptr, scale)
    return result


@custom_op("indexed_linear", fake=lambda x, weights: _result(x, weights.shape[2]))
def mix(x: Tensor, weights: Tensor, order: Tensor, ptr: Tensor, scale: float) -> Tensor:
    """[N, J, M] from [N, K, M] and W [Z, K, J], any strides."""
    num_atoms, num_in, num_components = x.shape
    num_out = weights.shape[2]
    y = _result(x, num_out)
    table = tile_table(ptr, num_atoms * num_components, ROWS, num_components)
    grid = (len(table), triton.cdiv(num_out, COLUMNS))
    if 0 in grid:
        y.fill_(float("nan"))
    else:
        mix_kernel[grid](
            y, x, weights, order, ptr, table, num_atoms * num_components,
            *y.stride(), *x.stride(), *weights.stride(),
            NUM_GROUPS=ptr.shape[0] - 1, K=num_in, J=num_out, M=num_components, SCALE=scale,
            ROWS=ROWS, COLUMNS=COLUMNS,
            DEPTH=DEPTH if x.is_cuda else triton.next_power_of_2(num_in), **_precision(x),
        )  # fmt: skip
    return y


@custom_op(
    "indexed_linear_outer",
    fake=lambda x, g, ptr: x.new_empty(ptr.shape[0] - 1, x.shape[1], g.shape[1]),
)
def outer(x: Tensor, g: Tensor, order: Tensor, ptr: Tensor, scale: float) -> Tensor:
    """[Z, K, J] from [N, K, M] and [N, J, M], any strides."""
    num_atoms, num_in, num_components = x.shape
    num_out = g.shape[1]
    table = tile_table(ptr, num_atoms * num_components, SUMMED_ROWS, num_components)
    parts = x.new_empty(len(table), num_in, num_out, dtype=wide_type(x))
    grid = (len(table), triton.cdiv(num_in, ROWS), triton.cdiv(num_out, COLUMNS))
    if 0 not in grid:
        outer_kernel[grid](
            parts, x, g, order, table, *x.stride(), *g.stride(),
            K=num_in, J=num_out, M=num_components, SCALE=scale, ROWS=ROWS, COLUMNS=COLUMNS,
            DEPTH=DEPTH if x.is_cuda else SUMMED_ROWS, **_precision(x),
        )  # fmt: skip
    return sum_tiles(parts, ptr, SUMMED_ROWS, num_components).to(x.dtype)


def _mix_gradients(
    g: Tensor,
    x: Tensor,
    weights: Tensor,
    order: Tensor,
    ptr: Tensor,
    scale: float,
    needs: list[bool],
) -> tuple[Tensor | None, ...]:
    g = _laid_out_as(g, x)
    dx = mix(g, weights.mT, order, ptr, scale) if needs[0] else None
    return dx, outer(x, g, order, ptr, scale) if needs[1] else None


def _outer_gradients(
    v: Tensor, x: Tensor, g: Tensor, order: Tensor, ptr: Tensor, scale: float, needs: list[bool]
) -> tuple[Tensor | None, ...]:
    v = v.contiguous()
    dx = mix(g, v.mT, order, ptr, scale) if needs[0] else None
    return dx, mix(x, v, order, ptr, scale) if needs[1] else None


mix.gradients("x weights", _mix_gradients)
outer.gradients("x g", _outer_gradients)


def _is_component_major(x: Tensor) -> bool:
    """Whether channels, rather than components, are contiguous."""
    return x.shape[2] > 1 and x.stride(1) < x.stride(2)


def _result(x: Tensor, num_out: int) -> Tensor:
    """Allocate [N, J, M] in the layout of x."""
    num_atoms, _, num_components = x.shape
    if _is_component_major(x):
        return x.new_empty(num_atoms, num_components, num_out).transpose(1, 2)
    return x.new_empty(num_atoms, num_out, num_components)


def _laid_out_as(g: Tensor, x: Tensor) -> Tensor:
    if _is_component_major(x):
        return g.transpose(1, 2).contiguous().transpose(1, 2)
    return g.contiguous()


def _precision(x: Tensor) -> dict[str, Any]:
    tf32 = x.dtype != torch.float64 and allows_tf32()
    return {"ACC": accumulator(x), "PRECISION": "tf32" if tf32 else "ieee"}


# SCALE is compiled in: as an argument it would be rounded to float32.
# The type checks of the tests would wrap these functions, and Triton reads their source.
@triton.jit(do_not_specialize=["num_rows"])
@no_type_check
def mix_kernel(
    y_ptr, x_ptr, w_ptr, order_ptr, ptr_ptr, table_ptr, num_rows,
    y_n, y_j, y_m, x_n, x_k, x_m, w_z, w_k, w_j, NUM_GROUPS: tl.constexpr,
    K: tl.constexpr, J: tl.constexpr, M: tl.constexpr, SCALE: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Multiply the rows of one tile by COLUMNS columns of their element's matrix.

    Rows of atoms without a matrix become NaN: they are before the first group and after the last.
    """
    tile = tl.program_id(0)
    j = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    if tile == tl.num_programs(0) - 1:  # mostly empty
        before = tl.load(ptr_ptr).to(tl.int32) * M  # []
        after = tl.load(ptr_ptr + NUM_GROUPS).to(tl.int32) * M  # []
        for first in range(0, before + num_rows - after, ROWS):
            place = first + tl.arange(0, ROWS)
            row = tl.where(place < before, place, place - before + after)
            valid = row < num_rows
            n = tl.load(order_ptr + row // M, mask=valid, other=0).to(tl.int64)  # [ROWS]
            m = (row % M).to(tl.int64)
            out = y_ptr + (n * y_n + m * y_m)[:, None] + (j.to(tl.int64) * y_j)[None, :]
            nan = tl.full([ROWS, COLUMNS], float("nan"), y_ptr.dtype.element_ty)
            tl.store(out, nan, mask=valid[:, None] & (j < J)[None, :])
    group = tl.load(table_ptr + tile * 3).to(tl.int64)  # []
    start = tl.load(table_ptr + tile * 3 + 1)  # []
    end = tl.load(table_ptr + tile * 3 + 2)  # []
    if start >= end:
        return
    row = start + tl.arange(0, ROWS)
    valid = row < end
    n = tl.load(order_ptr + row // M, mask=valid, other=0).to(tl.int64)  # [ROWS]
    m = (row % M).to(tl.int64)
    x_row = x_ptr + n * x_n + m * x_m
    w_column = w_ptr + group * w_z + j.to(tl.int64) * w_j
    total = tl.zeros([ROWS, COLUMNS], ACC)
    for first in range(0, K, DEPTH):
        k = first + tl.arange(0, DEPTH)
        k64 = k.to(tl.int64)
        x_mask = valid[:, None] & (k < K)[None, :]
        w_mask = (k < K)[:, None] & (j < J)[None, :]
        x_block = x_row[:, None] + (k64 * x_k)[None, :]
        x = tl.load(x_block, mask=x_mask, other=0.0).to(ACC)  # [ROWS, DEPTH]
        w_block = w_column[None, :] + (k64 * w_k)[:, None]
        w = tl.load(w_block, mask=w_mask, other=0.0).to(ACC)  # [DEPTH, COLUMNS]
        total = tl.dot(x, w, total, input_precision=PRECISION, out_dtype=ACC)  # [ROWS, COLUMNS]
    out = y_ptr + (n * y_n + m * y_m)[:, None] + (j.to(tl.int64) * y_j)[None, :]
    tl.store(out, total * SCALE, mask=valid[:, None] & (j < J)[None, :])


@triton.jit
@no_type_check
def outer_kernel(
    part_ptr, x_ptr, g_ptr, order_ptr, table_ptr, x_n, x_k, x_m, g_n, g_j, g_m,
    K: tl.constexpr, J: tl.constexpr, M: tl.constexpr, SCALE: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sum x^T g over the rows of one tile, for one block of the matrix."""
    tile = tl.program_id(0)
    start = tl.load(table_ptr + tile * 3 + 1)  # []
    end = tl.load(table_ptr + tile * 3 + 2)  # []
    if start >= end:
        return
    k = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    j = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    x_column = x_ptr + k.to(tl.int64) * x_k
    g_column = g_ptr + j.to(tl.int64) * g_j
    total = tl.zeros([ROWS, COLUMNS], ACC)
    for first in range(start, end, DEPTH):
        row = first + tl.arange(0, DEPTH)
        valid = row < end
        n = tl.load(order_ptr + row // M, mask=valid, other=0).to(tl.int64)  # [DEPTH]
        m = (row % M).to(tl.int64)
        x_mask = (k < K)[:, None] & valid[None, :]
        g_mask = valid[:, None] & (j < J)[None, :]
        x_block = x_column[:, None] + (n * x_n + m * x_m)[None, :]
        g_block = g_column[None, :] + (n * g_n + m * g_m)[:, None]
        x = tl.load(x_block, mask=x_mask, other=0.0).to(ACC)  # [ROWS, DEPTH]
        g = tl.load(g_block, mask=g_mask, other=0.0).to(ACC)  # [DEPTH, COLUMNS]
        total = tl.dot(x, g, total, input_precision=PRECISION, out_dtype=ACC)  # [ROWS, COLUMNS]
    out = part_ptr + tile.to(tl.int64) * (K * J) + k[:, None] * J + j[None, :]
    tl.store(out, total * SCALE, mask=(k < K)[:, None] & (j < J)[None, :])
