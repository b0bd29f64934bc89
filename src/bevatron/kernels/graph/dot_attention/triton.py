"""Attention whose score takes all channels in Triton: custom operators for VA, AGNN and GATv2."""

from typing import Any

import torch
from torch import Tensor

from bevatron.kernels.graph.csr import Csr
from bevatron.kernels.graph.csr.direct import direct, is_traced
from bevatron.kernels.graph.csr.launch import columns_of, ids_of, rows_of
from bevatron.kernels.graph.dot_attention.partial import Scores
from bevatron.kernels.graph.dot_attention.triton_launch import (
    Problem,
    launch_columns,
    launch_forward,
    launch_rows,
)
from bevatron.kernels.shared.dtypes import wide, wide_type

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
    """Compute what the reference computes; see `bevatron.kernels.graph.dot_attention`."""
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
    """Call the operator with the matrix's parts; a query that is None is the key."""
    by_column = csr.values_by_column
    launch = attend if is_traced(key) else _attend_directly
    z: Tensor = launch(
        *(query, key, value, row_scale, col_scale, vector, csr.values),
        None if by_column is None else by_column.detach(),
        *(*rows_of(csr), *columns_of(csr), ids_of(csr) if seed is not None else [], seed),
        *(csr.shape[0], slope, dropout, softmax, symmetric, False),
    )[0]
    return z


def _attend(
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
    """Return z and, with a softmax, L times log2(e); of a block Z, m and s."""
    del values_by_column, columns, column_numbers, symmetric  # for the backward pass
    outputs = _outputs(key, value, num_rows, softmax, partial)
    problem = Problem(
        *(key if query is None else query, key, value, row_scale, col_scale, vector),
        *(softmax, ids, seed, slope, dropout),
    )
    launch_forward(problem, values, rows, row_numbers, outputs, partial)
    return outputs


attend = torch.library.custom_op("bevatron::dot_attention", _attend, mutates_args=())


@attend.register_fake
def _(
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
    del query, row_scale, col_scale, vector, values, values_by_column, rows, row_numbers
    del columns, column_numbers, ids, seed, slope, dropout, symmetric
    return _outputs(key, value, num_rows, softmax, partial)


def _attend_backward(
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

    What is absent gets an empty tensor; of a symmetric matrix the key's is the query's too.
    """
    given = query if query is not None else key
    problem = Problem(
        *(given, key, value, row_scale, col_scale, vector, softmax, ids, seed, slope, dropout),
    )
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
    return found


attend_backward = torch.library.custom_op(
    "bevatron::dot_attention_backward", _attend_backward, mutates_args=()
)


@attend_backward.register_fake
def _(
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
    del grad, lse, row_scale, col_scale, values_by_column, rows, row_numbers, columns
    del column_numbers, ids, seed, slope, dropout, softmax
    given = query if query is not None else key
    return _gradients(given, key, value, vector, values, z, symmetric, want_values)


def sums(csr: Csr, scores: Scores) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Compute a block's Z, and m and s where there is a softmax."""
    values = None if csr.values is None else csr.values.detach()
    problem = _problem(scores)
    outputs = _outputs(scores.key, scores.value, csr.shape[0], scores.softmax, True)
    launch_forward(problem, values, *rows_of(csr), outputs, True)
    z, largest, total = outputs
    return (z, largest, total) if scores.softmax else (z, None, None)


def row_gradients(
    csr: Csr, scores: Scores, grad: Tensor, lse: Tensor | None, delta: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Compute a block's share of the gradients of the query and of the rows' scale."""
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
    """Compute a block's share of the gradients of key, value and the columns' scale."""
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
    """Return L times log2(e) and delta as kernels read them."""
    if lse is None or delta is None:
        return grad, grad
    return (wide(lse) * LOG2E).contiguous(), wide(delta).contiguous()


def _outputs(
    key: Tensor, value: Tensor | None, num_rows: int, softmax: bool, partial: bool
) -> tuple[Tensor, Tensor, Tensor]:
    dtype, heads = wide_type(key), key.shape[1]
    width = (key if value is None else value).shape[2]
    z = key.new_empty((num_rows, heads, width), dtype=dtype if partial else key.dtype)
    first = key.new_empty((num_rows, heads) if softmax else 0, dtype=dtype)
    second = key.new_empty((num_rows, heads) if softmax and partial else 0, dtype=dtype)
    return z, first, second


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


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    rows, row_numbers, columns, column_numbers, ids, seed = inputs[8:14]
    ctx.slope, ctx.dropout, ctx.softmax, ctx.symmetric = inputs[15:19]
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.numbers, ctx.counts = (row_numbers, column_numbers), (len(rows), len(columns), len(ids))
    ctx.save_for_backward(*output[:2], *inputs[:8], seed, *rows, *columns, *ids)


def _backward(ctx: Any, grad: Tensor | None, *unused: Tensor | None) -> tuple[Any, ...]:
    del unused
    rows, columns, ids = ([None] * count for count in ctx.counts)
    tail = (None, rows, None, columns, None, ids, *(None,) * 7)
    if grad is None:
        return (None,) * 7 + tail
    saved = ctx.saved_tensors  # once: a recomputed tensor is handed out once
    z, lse, *inputs, seed = saved[:11]
    lists = list(saved[11:])
    ends = ctx.counts[0], ctx.counts[0] + ctx.counts[1]
    run: Any = attend_backward if is_traced(grad) else _attend_backward
    found = run(
        *(grad, z, lse, *inputs, lists[: ends[0]], ctx.numbers[0], lists[ends[0] : ends[1]]),
        *(ctx.numbers[1], lists[ends[1] :], seed, ctx.slope, ctx.dropout, ctx.softmax),
        *(ctx.symmetric, ctx.needs_input_grad[6]),
    )
    dquery, dkey = found[:2]
    query, *_, values, _ = inputs
    if query is None and not ctx.symmetric:
        dkey = dkey + dquery
    given: list[Tensor | None] = [None if query is None else dquery, dkey]
    given += [
        None if before is None else gradient.to(before.dtype)
        for before, gradient in zip(inputs[2:6], found[2:6], strict=True)
    ]
    given.append(found[6] if values is not None and ctx.needs_input_grad[6] else None)
    return (*given, *tail)


attend.register_autograd(_backward, setup_context=_save)
_attend_directly = direct(_attend, _save, _backward)
