"""GAT's attention in Triton: custom operators and their launches."""

import torch
from torch import Tensor

from bevatron.kernels.graph.csr import Csr
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
from bevatron.kernels.shared.autograd import empty_gradients, needs_grad
from bevatron.kernels.shared.custom_op import custom_op
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
    """Compute the same as the reference; see `bevatron.kernels.graph.graph_attention`."""
    rows, row_numbers = rows_of(csr)
    columns, column_numbers = columns_of(csr)
    training = needs_grad(x, row_score, col_score, csr.values)
    by_column = csr.values_by_column if training else None
    by_column = None if by_column is None else by_column.detach()
    z: Tensor = attend(
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
        z, largest, total, positive, z_positive = attend(
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


@custom_op(
    "graph_attention",
    outputs="z lse share unused side",
    fake=_outputs,
)
def attend(
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


@custom_op(
    "graph_attention_backward",
    fake=lambda x, row_score, col_score, z: (
        *empty_gradients(x, x, row_score, col_score),
        _info(x, z),
    ),
)
def attend_backward(
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


@custom_op("graph_attention_backward_values", fake="values")
def attend_backward_values(
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


def _gradients(
    grad: Tensor,
    x: Tensor,
    row_score: Tensor,
    col_score: Tensor,
    z: Tensor,
    lse: Tensor,
    share: Tensor,
    side: Tensor,
    values: Tensor | None,
    values_by_column: Tensor | None,
    rows: list[Tensor],
    row_numbers: list[int],
    columns: list[Tensor],
    column_numbers: list[int],
    ids: list[Tensor],
    seed: Tensor | None,
    slope: float,
    dropout: float,
    needs: list[bool],
) -> tuple[Tensor | None, ...]:
    dx, drow, dcol, info = attend_backward(
        *(grad, x, row_score, col_score, z, lse, share, side, values_by_column),
        *(columns, column_numbers, ids, seed, slope, dropout),
    )
    dvalues = None
    if needs[3]:
        dvalues = attend_backward_values(
            *(grad, x, col_score, info, values, rows, row_numbers, ids, seed, slope, dropout)
        )
    return dx, drow, dcol, dvalues


attend.gradients("x row_score col_score values", _gradients)


def _info(x: Tensor, rows_like: Tensor) -> Tensor:
    return x.new_empty((*rows_like.shape[:2], 4), dtype=wide_type(x))
