"""Aggregation over the semirings in Triton: custom operators and their launches."""

from typing import Any

import torch
from torch import Tensor

from bevatron.errors import KernelError
from bevatron.kernels.graph.csr import Csr
from bevatron.kernels.graph.csr.launch import Tile, buckets, columns_of, rows_of, slices
from bevatron.kernels.graph.csr.triton_merge import add_shares
from bevatron.kernels.graph.spmm.triton_kernels import (
    entries_kernel,
    extreme_backward_kernel,
    extreme_kernel,
    extreme_merge_kernel,
    sum_kernel,
)
from bevatron.kernels.shared.custom_op import custom_op
from bevatron.kernels.shared.dtypes import wide_type
from bevatron.kernels.shared.launch import on_device
from bevatron.kernels.shared.tiles import TileTable
from bevatron.kernels.shared.triton_math import accumulator

TILES = TileTable(sum=Tile(1024, 32), extreme=Tile(512, 32), entries=Tile(512, 128))
"""Sizes of programs."""


def spmm(csr: Csr, x: Tensor, reduce: str) -> Tensor:
    """Compute the same as the reference, of x [columns, 1, C]."""
    if reduce in {"max", "min"} and csr.col.dtype != torch.int32:
        raise KernelError(
            f"spmm: '{reduce}' over {csr.shape[1]} columns needs 64-bit column numbers, which the "
            "Triton kernel does not keep; use('reference') does"
        )
    values, by_column = csr.values, csr.values_by_column
    sides = *rows_of(csr), *columns_of(csr)
    by_column = None if by_column is None else by_column.detach()
    if reduce in {"max", "min"}:
        sign = 1 if reduce == "max" else -1
        result: Tensor = extreme(x, values, *sides, csr.shape[0], sign)[0]
        return result
    result = add(x, values, by_column, *sides, csr.shape[0])
    if reduce == "sum":
        return result
    amount = csr.row_ptr.diff()[:, None, None].to(wide_type(x))
    if values is not None:
        ones = x.new_ones((csr.shape[1], 1, 1), dtype=wide_type(x))
        amount = torch.where(amount > 0, add(ones, values, by_column, *sides, csr.shape[0]), 1.0)
    else:
        amount = amount.clamp(min=1.0)
    return (result / amount).to(x.dtype)


@custom_op("spmm_sum", fake=lambda x, num_rows: x.new_empty((num_rows, *x.shape[1:])))
def add(
    x: Tensor,
    values: Tensor | None,
    values_by_column: Tensor | None,
    rows: list[Tensor],
    row_numbers: list[int],
    columns: list[Tensor],
    column_numbers: list[int],
    num_rows: int,
) -> Tensor:
    """Return the sum over the columns of every row."""
    del values_by_column, columns, column_numbers  # for the backward pass
    out = x.new_empty((num_rows, *x.shape[1:]))
    launch_sum(x, values, rows, row_numbers, out)
    return out


def _new_extremes(x: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    shape = (num_rows, *x.shape[1:])
    return x.new_empty(shape), x.new_empty(shape, dtype=torch.int32)


@custom_op("spmm_extreme", outputs="out arg", fake=_new_extremes)
def extreme(
    x: Tensor,
    values: Tensor | None,
    rows: list[Tensor],
    row_numbers: list[int],
    columns: list[Tensor],
    column_numbers: list[int],
    num_rows: int,
    sign: int,
) -> tuple[Tensor, Tensor]:
    """Return the maximum (sign 1) or minimum (-1) over the columns of every row, and the column."""
    del columns, column_numbers  # for the backward pass
    out, arg = _new_extremes(x, num_rows)
    launch_extreme(x, values, rows, row_numbers, out, arg, sign)
    return out, arg


@custom_op("spmm_extreme_backward", fake="x")
def extreme_backward(
    grad: Tensor, x: Tensor, arg: Tensor, columns: list[Tensor], column_numbers: list[int]
) -> Tensor:
    """Return the gradient of x."""
    dx = x.new_empty(x.shape)
    launch_extreme_backward(grad, arg, columns, column_numbers, dx)
    return dx


@custom_op("spmm_entries", fake="values")
def entries(
    grad: Tensor,
    x: Tensor,
    arg: Tensor | None,
    values: Tensor,
    rows: list[Tensor],
    row_numbers: list[int],
) -> Tensor:
    """Return the gradient of the matrix's values."""
    dvalues = values.new_empty(values.shape)
    launch_entries(grad, x, arg, rows, row_numbers, dvalues)
    return dvalues


def _sum_gradients(
    grad: Tensor,
    x: Tensor,
    values: Tensor | None,
    values_by_column: Tensor | None,
    rows: list[Tensor],
    row_numbers: list[int],
    columns: list[Tensor],
    column_numbers: list[int],
    needs: list[bool],
) -> tuple[Tensor | None, ...]:
    dx = dvalues = dby_column = None
    if needs[0]:
        # The transposed product: columns act as rows.
        dx = add(
            *(grad, values_by_column, values, columns, column_numbers, rows, row_numbers), len(x)
        )
    if needs[1]:
        dvalues = entries(grad, x, None, values, rows, row_numbers)
    if needs[2]:
        # This is the transposed product: the differentiable values are in the other order.
        dby_column = entries(x, grad, None, values_by_column, columns, column_numbers)
    return dx, dvalues, dby_column


def _extreme_gradients(
    grad: Tensor,
    x: Tensor,
    values: Tensor | None,
    arg: Tensor,
    rows: list[Tensor],
    row_numbers: list[int],
    columns: list[Tensor],
    column_numbers: list[int],
    needs: list[bool],
) -> tuple[Tensor | None, ...]:
    dx = extreme_backward(grad, x, arg, columns, column_numbers) if needs[0] else None
    return dx, entries(grad, x, arg, values, rows, row_numbers) if needs[1] else None


add.gradients("x values values_by_column", _sum_gradients)
extreme.gradients("x values", _extreme_gradients)


def launch_sum(
    x: Tensor, values: Tensor | None, rows: list[Tensor], numbers: list[int], out: Tensor
) -> None:
    """Write the sums of all rows."""
    if not out.numel():
        return
    x, tile = x.contiguous(), TILES["sum"]
    width, shares = slices(x.shape[2], tile)
    share = x.new_empty((numbers[0], *x.shape[1:]), dtype=wide_type(x))
    index, *parts, cut_row, cut_ptr = rows
    with on_device(x):
        for bucket in buckets(numbers, width, tile):
            sum_kernel[(bucket.programs, shares)](
                *(index, *parts, bucket.first, bucket.count, x if values is None else values),
                *(x, out, share),
                HAS_VALUES=values is not None, CUT=numbers[0] > 0,
                **_sizes(x, width, bucket, tile),
            )  # fmt: skip
        if numbers[0]:
            add_shares(cut_row, cut_ptr, share, out)


def launch_extreme(
    x: Tensor,
    values: Tensor | None,
    rows: list[Tensor],
    numbers: list[int],
    out: Tensor,
    arg: Tensor,
    sign: int,
) -> None:
    """Write the extremum of all rows and its column."""
    if not out.numel():
        return
    x, tile, num_slots = x.contiguous(), TILES["extreme"], numbers[0]
    width, shares = slices(x.shape[2], tile)
    share = x.new_empty((num_slots, *x.shape[1:]), dtype=wide_type(x))
    arg_share = x.new_empty(share.shape, dtype=torch.int32)
    index, *parts, cut_row, cut_ptr = rows
    with on_device(x):
        for bucket in buckets(numbers, width, tile):
            extreme_kernel[(bucket.programs, shares)](
                *(index, *parts, bucket.first, bucket.count, x if values is None else values),
                *(x, out, arg, share, arg_share),
                HAS_VALUES=values is not None, CUT=num_slots > 0, SIGN=float(sign),
                **_sizes(x, width, bucket, tile),
            )  # fmt: skip
        if num_slots:
            extreme_merge_kernel[(len(cut_row), shares)](
                *(cut_row, cut_ptr, out, arg, share, arg_share),
                C=x.shape[2], BLOCK_C=width, ACC=accumulator(x), SIGN=float(sign),
                num_warps=1,
            )  # fmt: skip


def launch_extreme_backward(
    grad: Tensor, arg: Tensor, columns: list[Tensor], numbers: list[int], dx: Tensor
) -> None:
    """Write the gradient of x."""
    if not dx.numel():
        return
    grad, tile = grad.contiguous(), TILES["extreme"]
    width, shares = slices(dx.shape[2], tile)
    share = dx.new_empty((numbers[0], *dx.shape[1:]), dtype=wide_type(dx))
    index, *parts, cut_row, cut_ptr = columns
    with on_device(dx):
        for bucket in buckets(numbers, width, tile):
            extreme_backward_kernel[(bucket.programs, shares)](
                *(index, *parts, bucket.first, bucket.count, grad, arg, dx, share),
                CUT=numbers[0] > 0, **_sizes(dx, width, bucket, tile),
            )  # fmt: skip
        if numbers[0]:
            add_shares(cut_row, cut_ptr, share, dx)


def launch_entries(
    grad: Tensor,
    x: Tensor,
    arg: Tensor | None,
    rows: list[Tensor],
    numbers: list[int],
    dvalues: Tensor,
) -> None:
    """Write the gradient of the matrix's values."""
    if not dvalues.numel():
        return
    if not x.numel():
        dvalues.zero_()
        return
    grad, x, tile = grad.contiguous(), x.contiguous(), TILES["entries"]
    width, _ = slices(x.shape[2], tile)
    index, *parts, _, _ = rows
    with on_device(x):
        for bucket in buckets(numbers, width, tile):
            entries_kernel[(bucket.programs,)](
                *(index, *parts, bucket.first, bucket.count, grad, x),
                *(x if arg is None else arg, dvalues),
                EXTREME=arg is not None, **_sizes(x, width, bucket, tile),
            )  # fmt: skip


def _sizes(x: Tensor, width: int, bucket: Any, tile: Tile) -> dict[str, Any]:
    return {
        "C": x.shape[2],
        "BLOCK_C": width,
        "R": bucket.rows,
        "E": bucket.entries,
        "ACC": accumulator(x),
        "num_warps": tile.num_warps,
    }
