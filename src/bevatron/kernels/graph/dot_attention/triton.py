"""Attention whose score takes all channels in Triton: custom operators for VA, AGNN and GATv2."""

import torch
from torch import Tensor

from bevatron.kernels.graph.csr import Csr
from bevatron.kernels.graph.csr.launch import Mask, columns_of, ids_of, rows_of
from bevatron.kernels.graph.dot_attention.partial import Scores
from bevatron.kernels.graph.dot_attention.triton_launch import (
    Problem,
    launch_columns,
    launch_forward,
    launch_rows,
)
from bevatron.kernels.shared.custom_op import custom_op
from bevatron.kernels.shared.dtypes import wide, wide_type

__all__ = ["col_gradients", "dot_attention", "row_gradients", "run", "sums"]
"""Names that other operators may use."""

LOG2E = 1.4426950408889634


def dot_attention(
    csr: Csr,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    row_scale: Tensor | None,
    col_scale: Tensor | None,
    softmax: bool,
) -> Tensor:
    """Compute the same as the reference; see `bevatron.kernels.graph.dot_attention`."""
    itself = query is key and value is key
    return run(
        *(csr, None if query is key else query, key, None if value is key else value),
        *(row_scale, col_scale, None, softmax),
        symmetric=itself and torch.is_grad_enabled() and csr.is_symmetric,
    )


def run(
    csr: Csr,
    query: Tensor | None,
    key: Tensor,
    value: Tensor | None,
    row_scale: Tensor | None,
    col_scale: Tensor | None,
    vector: Tensor | None,
    softmax: bool,
    *,
    seed: Tensor | None = None,
    slope: float = 0.2,
    dropout: float = 0.0,
    symmetric: bool = False,
) -> Tensor:
    """Unpack the matrix and call the operator; a query of None is the key."""
    by_column = csr.values_by_column
    z: Tensor = attend(
        *(query, key, value, row_scale, col_scale, vector, csr.values),
        None if by_column is None else by_column.detach(),
        *(*rows_of(csr), *columns_of(csr), ids_of(csr) if seed is not None else [], seed),
        *(csr.shape[0], slope, dropout, softmax, symmetric, False),
    )[0]
    return z


def _outputs(
    key: Tensor, value: Tensor | None, num_rows: int, softmax: bool, partial: bool
) -> tuple[Tensor, Tensor, Tensor]:
    dtype, heads = wide_type(key), key.shape[1]
    width = (key if value is None else value).shape[2]
    z = key.new_empty((num_rows, heads, width), dtype=dtype if partial else key.dtype)
    first = key.new_empty((num_rows, heads) if softmax else 0, dtype=dtype)
    second = key.new_empty((num_rows, heads) if softmax and partial else 0, dtype=dtype)
    return z, first, second


@custom_op("dot_attention", outputs="z lse total", fake=_outputs)
def attend(
    query: Tensor | None,
    key: Tensor,
    value: Tensor | None,
    row_scale: Tensor | None,
    col_scale: Tensor | None,
    vector: Tensor | None,
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
    softmax: bool,
    symmetric: bool,
    partial: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return z and, with a softmax, L times log2(e); for a block Z, m and s."""
    del values_by_column, columns, column_numbers, symmetric  # for the backward pass
    outputs = _outputs(key, value, num_rows, softmax, partial)
    problem = Problem(
        *(key if query is None else query, key, value, row_scale, col_scale, vector),
        *(softmax, Mask(ids, seed, slope, dropout)),
    )
    launch_forward(problem, values, rows, row_numbers, outputs, partial)
    return outputs


@attend.backward(
    "query key value row_scale col_scale vector values",
    fake=lambda query, key, value, vector, values, z, symmetric, want_values: _gradients(
        key if query is None else query, key, value, vector, values, z, symmetric, want_values
    ),
    asks={"want_values": "values"},
)
def attend_backward(
    grad: Tensor,
    z: Tensor,
    lse: Tensor,
    query: Tensor | None,
    key: Tensor,
    value: Tensor | None,
    row_scale: Tensor | None,
    col_scale: Tensor | None,
    vector: Tensor | None,
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
    softmax: bool,
    symmetric: bool,
    want_values: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of query, key, value, both scales, vector and values.

    An absent input gets an empty tensor. If query and key are one tensor, so is their gradient.
    """
    given = query if query is not None else key
    mask = Mask(ids, seed, slope, dropout)
    problem = Problem(given, key, value, row_scale, col_scale, vector, softmax, mask)
    delta = (wide(grad) * wide(z)).sum(-1) if softmax else lse
    found = _gradients(given, key, value, vector, values, z, symmetric, want_values)
    dquery, dkey, dvalue, drow, dcol, dvector, dvalues = found
    launch_columns(
        *(problem, values_by_column, columns, column_numbers, grad, lse, delta),
        (dkey, dvalue, dcol, drow if symmetric else drow.new_empty(0)),
        symmetric,
    )
    if not symmetric:
        by_entry = None
        if want_values and values is not None:
            by_entry = key.new_empty((len(values), key.shape[1]), dtype=wide_type(key))
        by_row = key.new_empty(given.shape if vector is not None else 0, dtype=wide_type(key))
        launch_rows(
            *(problem, values, rows, row_numbers, grad, lse, delta),
            (dquery, drow, by_row),
            by_entry,
        )
        if vector is not None:
            dvector.copy_(by_row.sum(0))
        if by_entry is not None:
            dvalues.copy_(by_entry.sum(1))
        if query is None:
            dkey.add_(dquery)
    return found


def sums(csr: Csr, scores: Scores) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Compute a block's Z and, with a softmax, m and s."""
    values = None if csr.values is None else csr.values.detach()
    problem = _problem(scores)
    outputs = _outputs(scores.key, scores.value, csr.shape[0], scores.softmax, True)
    launch_forward(problem, values, *rows_of(csr), outputs, True)
    z, largest, total = outputs
    return (z, largest, total) if scores.softmax else (z, None, None)


def row_gradients(
    csr: Csr, scores: Scores, grad: Tensor, lse: Tensor | None, delta: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Compute a block's part of the gradients of the query and of the row scale."""
    dtype = wide_type(scores.key)
    dquery = scores.query.new_empty(scores.query.shape, dtype=dtype)
    drow = dquery.new_empty(dquery.shape[:2])
    rows, numbers = rows_of(csr)
    values = None if csr.values is None else csr.values.detach()
    lse, delta = _statistics(grad, lse, delta)
    outputs = dquery, drow, drow.new_empty(0)
    launch_rows(_problem(scores), values, rows, numbers, grad, lse, delta, outputs, None)
    return dquery, drow


def col_gradients(
    csr: Csr, scores: Scores, grad: Tensor, lse: Tensor | None, delta: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Compute a block's part of the gradients of key, value and column scale."""
    dtype, key = wide_type(scores.key), scores.key
    dkey = key.new_empty(key.shape, dtype=dtype)
    shape = 0 if scores.value is None else scores.value.shape
    dvalue, dcol = key.new_empty(shape, dtype=dtype), dkey.new_empty(dkey.shape[:2])
    values = csr.values_by_column
    values = None if values is None else values.detach()
    columns, numbers = columns_of(csr)
    lse, delta = _statistics(grad, lse, delta)
    outputs = dkey, dvalue, dcol, dcol.new_empty(0)
    launch_columns(_problem(scores), values, columns, numbers, grad, lse, delta, outputs, False)
    return dkey, None if scores.value is None else dvalue, dcol


def _problem(scores: Scores) -> Problem:
    return Problem(
        *(scores.query, scores.key, scores.value, scores.row_scale, scores.col_scale, None),
        scores.softmax,
    )


def _statistics(grad: Tensor, lse: Tensor | None, delta: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return L times log2(e) and delta in the layout that kernels read."""
    if lse is None or delta is None:
        return grad, grad
    return (wide(lse) * LOG2E).contiguous(), wide(delta).contiguous()


def _gradients(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    vector: Tensor | None,
    values: Tensor | None,
    z: Tensor,
    symmetric: bool,
    want_values: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    dtype, additive = wide_type(key), vector is not None
    return (
        query.new_empty(0 if symmetric else query.shape),
        key.new_empty(key.shape),
        key.new_empty(0) if value is None else value.new_empty(value.shape),
        key.new_empty(0 if additive else z.shape[:2], dtype=dtype),
        key.new_empty(0 if additive else key.shape[:2], dtype=dtype),
        key.new_empty(0) if vector is None else vector.new_empty(vector.shape),
        key.new_empty(0) if values is None or not want_values else values.new_empty(values.shape),
    )
