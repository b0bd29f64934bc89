"""Aggregation over the semirings in Triton: custom operators and their launches."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from bevatron.errors import KernelError
from bevatron.kernels.graph.csr import Csr
from bevatron.kernels.graph.csr.direct import direct, is_traced
from bevatron.kernels.graph.csr.launch import Tile, buckets, columns_of, on_device, rows_of, slices
from bevatron.kernels.graph.csr.triton_merge import add_shares
from bevatron.kernels.graph.csr.triton_parts import accumulator
from bevatron.kernels.graph.spmm.triton_kernels import (
    entries_kernel,
    extreme_backward_kernel,
    extreme_kernel,
    extreme_merge_kernel,
    sum_kernel,
)
from bevatron.kernels.shared.dtypes import wide_type

TILES = {"sum": Tile(1024, 32), "extreme": Tile(512, 32), "entries": Tile(512, 128)}
"""Sizes of programs."""


@contextmanager
def tiles(**replaced: Tile) -> Iterator[None]:
    """Use other sizes of programs, to test or to measure them."""
    before = dict(TILES)
    TILES.update(replaced)
    try:
        yield
    finally:
        TILES.update(before)


def spmm(csr: Csr, x: Tensor, reduce: str) -> Tensor:
    """Compute what the reference computes; see `bevatron.kernels.spmm`. x is [columns, 1, C]."""
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
    run = add if is_traced(x) else _add_directly
    result = run(x, values, by_column, *sides, csr.shape[0])
    if reduce == "sum":
        return result
    amount = csr.row_ptr.diff()[:, None, None].to(wide_type(x))
    if values is not None:
        ones = x.new_ones((csr.shape[1], 1, 1), dtype=wide_type(x))
        amount = torch.where(amount > 0, run(ones, values, by_column, *sides, csr.shape[0]), 1.0)
    else:
        amount = amount.clamp(min=1.0)
    return (result / amount).to(x.dtype)


def _add(
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


add = torch.library.custom_op("bevatron::spmm_sum", _add, mutates_args=())


@add.register_fake
def _(
    x: Tensor,
    values: Tensor | None,
    values_by_column: Tensor | None,
    rows: list[Tensor],
    row_numbers: list[int],
    columns: list[Tensor],
    column_numbers: list[int],
    num_rows: int,
) -> Tensor:
    del values, values_by_column, rows, row_numbers, columns, column_numbers
    return x.new_empty((num_rows, *x.shape[1:]))


@torch.library.custom_op("bevatron::spmm_extreme", mutates_args=())
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
    """Return the largest (sign 1) or smallest (-1) over the columns of every row, and which."""
    del columns, column_numbers  # for the backward pass
    shape = (num_rows, *x.shape[1:])
    out, arg = x.new_empty(shape), x.new_empty(shape, dtype=torch.int32)
    launch_extreme(x, values, rows, row_numbers, out, arg, sign)
    return out, arg


@extreme.register_fake
def _(
    x: Tensor,
    values: Tensor | None,
    rows: list[Tensor],
    row_numbers: list[int],
    columns: list[Tensor],
    column_numbers: list[int],
    num_rows: int,
    sign: int,
) -> tuple[Tensor, Tensor]:
    del values, rows, row_numbers, columns, column_numbers, sign
    shape = (num_rows, *x.shape[1:])
    return x.new_empty(shape), x.new_empty(shape, dtype=torch.int32)


@torch.library.custom_op("bevatron::spmm_extreme_backward", mutates_args=())
def extreme_backward(
    grad: Tensor, x: Tensor, arg: Tensor, columns: list[Tensor], column_numbers: list[int]
) -> Tensor:
    """Return the gradient of x."""
    dx = x.new_empty(x.shape)
    launch_extreme_backward(grad, arg, columns, column_numbers, dx)
    return dx


@extreme_backward.register_fake
def _(
    grad: Tensor, x: Tensor, arg: Tensor, columns: list[Tensor], column_numbers: list[int]
) -> Tensor:
    del grad, arg, columns, column_numbers
    return x.new_empty(x.shape)


@torch.library.custom_op("bevatron::spmm_entries", mutates_args=())
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


@entries.register_fake
def _(
    grad: Tensor,
    x: Tensor,
    arg: Tensor | None,
    values: Tensor,
    rows: list[Tensor],
    row_numbers: list[int],
) -> Tensor:
    del grad, x, arg, rows, row_numbers
    return values.new_empty(values.shape)


def _save_sum(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, values, by_column, rows, row_numbers, columns, column_numbers, _ = inputs
    del output
    ctx.numbers, ctx.count, ctx.num_columns = (row_numbers, column_numbers), len(rows), len(x)
    ctx.save_for_backward(x, values, by_column, *rows, *columns)


def _backward_sum(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    x, values, by_column, *lists = ctx.saved_tensors
    rows, columns = lists[: ctx.count], lists[ctx.count :]
    dx = dvalues = dby_column = None
    if ctx.needs_input_grad[0]:
        # The transposed product: columns take the place of rows.
        dx = (add if is_traced(grad) else _add_directly)(
            *(grad, by_column, values, columns, ctx.numbers[1], rows, ctx.numbers[0]),
            ctx.num_columns,
        )
    if values is not None and ctx.needs_input_grad[1]:
        dvalues = entries(grad, x, None, values, rows, ctx.numbers[0])
    if by_column is not None and ctx.needs_input_grad[2]:
        # This is that transposed product: the values that have a gradient are in the other order.
        dby_column = entries(x, grad, None, by_column, columns, ctx.numbers[1])
    return dx, dvalues, dby_column, [None] * len(rows), None, [None] * len(columns), None, None


def _save_extreme(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, values, rows, row_numbers, columns, column_numbers, _, _ = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.numbers, ctx.count = (row_numbers, column_numbers), len(rows)
    ctx.save_for_backward(x, values, output[1], *rows, *columns)


def _backward_extreme(ctx: Any, grad: Tensor | None, unused: Tensor | None) -> tuple[Any, ...]:
    del unused
    x, values, arg, *lists = ctx.saved_tensors
    rows, columns = lists[: ctx.count], lists[ctx.count :]
    dx = dvalues = None
    if grad is not None:
        dx = extreme_backward(grad, x, arg, columns, ctx.numbers[1])
        if values is not None and ctx.needs_input_grad[1]:
            dvalues = entries(grad, x, arg, values, rows, ctx.numbers[0])
    return dx, dvalues, [None] * len(rows), None, [None] * len(columns), None, None, None


add.register_autograd(_backward_sum, setup_context=_save_sum)
_add_directly = direct(_add, _save_sum, _backward_sum, once=False)
extreme.register_autograd(_backward_extreme, setup_context=_save_extreme)


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
                HAS_VALUES=values is not None,
                CUT=numbers[0] > 0,
                **_sizes(x, width, bucket, tile),
            )
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
    """Write the extreme of all rows and the column it is from."""
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
                HAS_VALUES=values is not None,
                CUT=num_slots > 0,
                SIGN=float(sign),
                **_sizes(x, width, bucket, tile),
            )
        if num_slots:
            extreme_merge_kernel[(len(cut_row), shares)](
                *(cut_row, cut_ptr, out, arg, share, arg_share),
                C=x.shape[2],
                BLOCK_C=width,
                ACC=accumulator(x),
                SIGN=float(sign),
                num_warps=1,
            )


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
                CUT=numbers[0] > 0,
                **_sizes(dx, width, bucket, tile),
            )
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
                EXTREME=arg is not None,
                **_sizes(x, width, bucket, tile),
            )


def _sizes(x: Tensor, width: int, bucket: Any, tile: Tile) -> dict[str, Any]:
    return {
        "C": x.shape[2],
        "BLOCK_C": width,
        "R": bucket.rows,
        "E": bucket.entries,
        "ACC": accumulator(x),
        "num_warps": tile.num_warps,
    }
