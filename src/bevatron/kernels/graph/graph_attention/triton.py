"""GAT's attention in Triton: custom operators and their launches."""

from typing import Any

import torch
from torch import Tensor

from bevatron.kernels.graph.csr import Csr
from bevatron.kernels.graph.csr.direct import direct, is_traced
from bevatron.kernels.graph.csr.launch import columns_of, ids_of, rows_of
from bevatron.kernels.graph.graph_attention.triton_launch import (
    INFERENCE,
    PARTIAL,
    PARTIAL_INFERENCE,
    TRAINING,
    launch_columns,
    launch_forward,
    launch_prepare,
    launch_values,
)
from bevatron.kernels.shared.autograd import is_differentiated
from bevatron.kernels.shared.dtypes import wide_type

LOG2E = 1.4426950408889634


def graph_attention(
    csr: Csr,
    x: Tensor,
    row_score: Tensor,
    col_score: Tensor,
    negative_slope: float,
    dropout: float,
    seed: Tensor | None,
) -> Tensor:
    """Compute what the reference computes; see `bevatron.kernels.graph.graph_attention`."""
    rows, row_numbers = rows_of(csr)
    columns, column_numbers = columns_of(csr)
    training = is_differentiated(x, row_score, col_score, csr.values)
    by_column = csr.values_by_column if training else None
    by_column = None if by_column is None else by_column.detach()
    run = attend if is_traced(x) else _attend_directly
    z: Tensor = run(
        *(x, row_score, col_score, csr.values, by_column, rows, row_numbers),
        *(columns, column_numbers, ids_of(csr) if seed is not None else [], seed),
        *(csr.shape[0], negative_slope, dropout, TRAINING if training else INFERENCE),
    )[0]
    return z


def sums(
    csr: Csr,
    x: Tensor,
    row_score: Tensor,
    col_score: Tensor,
    negative_slope: float,
    dropout: float,
    seed: Tensor | None,
    backward: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute a block's m, s, positive part of s, Z and positive part of Z."""
    rows, numbers = rows_of(csr)
    with torch.no_grad():
        z, largest, total, positive, z_positive = _attend(
            *(x, row_score, col_score, csr.values, None, rows, numbers, [], []),
            *(ids_of(csr) if seed is not None else [], seed, csr.shape[0]),
            *(negative_slope, dropout, PARTIAL if backward else PARTIAL_INFERENCE),
        )
    return largest, total, positive, z, z_positive


def gradients(
    csr: Csr,
    x: Tensor,
    row_score: Tensor,
    col_score: Tensor,
    grad: Tensor,
    lse: Tensor,
    delta: Tensor,
    negative_slope: float,
    dropout: float,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Compute a block's share of the gradients of x and of the columns' scores."""
    columns, numbers = columns_of(csr)
    dtype = wide_type(x)
    info = torch.stack([row_score.to(dtype), lse.to(dtype) * LOG2E, delta.to(dtype)], -1)
    info = torch.nn.functional.pad(info, (0, 1)).contiguous()
    values = csr.values_by_column
    dx, dscore = (
        x.new_empty(x.shape, dtype=dtype),
        col_score.new_empty(col_score.shape, dtype=dtype),
    )
    launch_columns(
        *(x, col_score, grad, info, None if values is None else values.detach(), columns, numbers),
        *(ids_of(csr) if seed is not None else [], seed, dx, dscore, negative_slope, dropout),
    )
    return dx, dscore


def _attend(
    x: Tensor,
    row_score: Tensor,
    col_score: Tensor,
    values: Tensor | None,
    values_by_column: Tensor | None,
    rows: list[Tensor],
    row_numbers: list[int],
    columns: list[Tensor],
    column_numbers: list[int],
    ids: list[Tensor],
    seed: Tensor | None,
    num_rows: int,
    slope: float,
    dropout: float,
    mode: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return z and, in training, L, the share of the smaller side, nothing, and that side of Z.

    As part of a block: Z, m, s and, for a backward pass, the positive part of s and of Z.
    """
    del values_by_column, columns, column_numbers  # for the backward pass
    outputs = _outputs(x, num_rows, mode)
    launch_forward(
        *(x, row_score, col_score, values, rows, row_numbers, ids, seed, outputs),
        *(slope, dropout, mode),
    )
    return outputs


attend = torch.library.custom_op("bevatron::graph_attention", _attend, mutates_args=())


@attend.register_fake
def _(
    x: Tensor,
    row_score: Tensor,
    col_score: Tensor,
    values: Tensor | None,
    values_by_column: Tensor | None,
    rows: list[Tensor],
    row_numbers: list[int],
    columns: list[Tensor],
    column_numbers: list[int],
    ids: list[Tensor],
    seed: Tensor | None,
    num_rows: int,
    slope: float,
    dropout: float,
    mode: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    del row_score, col_score, values, values_by_column, rows, row_numbers, columns
    del column_numbers, ids, seed, slope, dropout
    return _outputs(x, num_rows, mode)


def _attend_backward(
    grad: Tensor,
    x: Tensor,
    row_score: Tensor,
    col_score: Tensor,
    z: Tensor,
    lse: Tensor,
    share: Tensor,
    side: Tensor,
    values_by_column: Tensor | None,
    columns: list[Tensor],
    column_numbers: list[int],
    ids: list[Tensor],
    seed: Tensor | None,
    slope: float,
    dropout: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of x and both scores, and (l, L, delta, unused) of every row."""
    info = _info(x, z)
    row_grad = row_score.new_empty(row_score.shape)
    launch_prepare(grad, z, side, lse, share, row_score, info, row_grad, slope)
    dx, dscore = x.new_empty(x.shape), col_score.new_empty(col_score.shape)
    launch_columns(
        *(x, col_score, grad, info, values_by_column, columns, column_numbers, ids, seed),
        *(dx, dscore, slope, dropout),
    )
    return dx, row_grad, dscore, info


attend_backward = torch.library.custom_op(
    "bevatron::graph_attention_backward", _attend_backward, mutates_args=()
)


@attend_backward.register_fake
def _(
    grad: Tensor,
    x: Tensor,
    row_score: Tensor,
    col_score: Tensor,
    z: Tensor,
    lse: Tensor,
    share: Tensor,
    side: Tensor,
    values_by_column: Tensor | None,
    columns: list[Tensor],
    column_numbers: list[int],
    ids: list[Tensor],
    seed: Tensor | None,
    slope: float,
    dropout: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    del grad, lse, share, side, values_by_column, columns, column_numbers, ids, seed, slope
    del dropout
    return (
        x.new_empty(x.shape),
        row_score.new_empty(row_score.shape),
        col_score.new_empty(col_score.shape),
        _info(x, z),
    )


def _attend_backward_values(
    grad: Tensor,
    x: Tensor,
    col_score: Tensor,
    info: Tensor,
    values: Tensor,
    rows: list[Tensor],
    row_numbers: list[int],
    ids: list[Tensor],
    seed: Tensor | None,
    slope: float,
    dropout: float,
) -> Tensor:
    """Return the gradient of the matrix's values."""
    dvalues = values.new_empty(values.shape)
    launch_values(grad, x, col_score, info, rows, row_numbers, ids, seed, dvalues, slope, dropout)
    return dvalues


attend_backward_values = torch.library.custom_op(
    "bevatron::graph_attention_backward_values", _attend_backward_values, mutates_args=()
)


@attend_backward_values.register_fake
def _(
    grad: Tensor,
    x: Tensor,
    col_score: Tensor,
    info: Tensor,
    values: Tensor,
    rows: list[Tensor],
    row_numbers: list[int],
    ids: list[Tensor],
    seed: Tensor | None,
    slope: float,
    dropout: float,
) -> Tensor:
    del grad, x, col_score, info, rows, row_numbers, ids, seed, slope, dropout
    return values.new_empty(values.shape)


def _info(x: Tensor, rows_like: Tensor) -> Tensor:
    return x.new_empty((*rows_like.shape[:2], 4), dtype=wide_type(x))


def _outputs(x: Tensor, num_rows: int, mode: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    dtype, stat, whole = wide_type(x), (num_rows, x.shape[1]), (num_rows, *x.shape[1:])
    if mode == INFERENCE:
        none = [x.new_empty(0) for _ in range(4)]
        return x.new_empty(whole), none[0], none[1], none[2], none[3]
    if mode == TRAINING:
        first, second = (x.new_empty(stat, dtype=dtype) for _ in range(2))
        return x.new_empty(whole), first, second, x.new_empty(0), x.new_empty(whole, dtype=dtype)
    z = x.new_empty(whole, dtype=dtype)
    largest, total = (x.new_empty(stat, dtype=dtype) for _ in range(2))
    kept = mode == PARTIAL
    positive = x.new_empty(stat if kept else 0, dtype=dtype)
    return z, largest, total, positive, x.new_empty(whole if kept else 0, dtype=dtype)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, row_score, col_score, values, by_column, rows, numbers, columns, *rest = inputs
    column_numbers, ids, seed, _, ctx.slope, ctx.dropout, _ = rest
    z, lse, share, _, side = output
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.numbers = numbers, column_numbers
    ctx.counts = len(rows), len(columns), len(ids)
    ctx.save_for_backward(
        *(x, row_score, col_score, z, lse, share, side, values, by_column, seed),
        *(*rows, *columns, *ids),
    )


def _backward(ctx: Any, grad: Tensor | None, *unused: Tensor | None) -> tuple[Any, ...]:
    del unused
    num_rows, num_columns, num_ids = ctx.counts
    nothing = [None] * num_rows, [None] * num_columns, [None] * num_ids
    tail = (None, nothing[0], None, nothing[1], None, nothing[2], None, None, None, None, None)
    if grad is None:
        return (None,) * 4 + tail
    x, row_score, col_score, z, lse, share, side, values, by_column, seed, *lists = (
        ctx.saved_tensors
    )
    rows, columns = lists[:num_rows], lists[num_rows : num_rows + num_columns]
    ids = lists[num_rows + num_columns :]
    traced = is_traced(grad)
    dx, drow, dcol, info = (attend_backward if traced else _attend_backward)(
        *(grad, x, row_score, col_score, z, lse, share, side, by_column, columns),
        *(ctx.numbers[1], ids, seed, ctx.slope, ctx.dropout),
    )
    dvalues = None
    if values is not None and ctx.needs_input_grad[3]:
        dvalues = (attend_backward_values if traced else _attend_backward_values)(
            *(grad, x, col_score, info, values, rows, ctx.numbers[0], ids, seed),
            *(ctx.slope, ctx.dropout),
        )
    return (dx, drow, dcol, dvalues, *tail)


attend.register_autograd(_backward, setup_context=_save)
_attend_directly = direct(_attend, _save, _backward)
