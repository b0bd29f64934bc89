"""The building blocks in plain PyTorch, differentiable as often as needed.

The derivative of every block consists of the others: sampled products and weighted sums are each
other's derivative, and so are row sums and replications.
"""

from typing import Any

import torch
from torch import Tensor

from bevatron.kernels.graph.csr import Csr
from bevatron.kernels.graph.graph_blocks.pieces import accumulator, add_rows, pieces, segment_sum

# torch prescribes the signatures of autograd.Function.
# mypy: disable-error-code="no-untyped-call"


def sddmm(csr: Csr, x: Tensor, y: Tensor) -> Tensor:
    """[nnz, H] products of rows of x [n, H, K] with rows of y [m, H, K]."""
    result: Tensor = _Sddmm.apply(csr, x, y)
    return result


def weighted_sum(csr: Csr, values: Tensor | None, x: Tensor) -> Tensor:
    """[n, H, K] sums of rows of x [m, H, K] over the entries, times values [nnz, H]."""
    result: Tensor = _WeightedSum.apply(csr, values, x)
    return result


def row_sum(csr: Csr, values: Tensor) -> Tensor:
    """[n, H] sums of values [nnz, H] over each row."""
    result: Tensor = _RowSum.apply(csr, values)
    return result


def column_sum(csr: Csr, values: Tensor) -> Tensor:
    """[m, H] sums of values [nnz, H] over each column."""
    result: Tensor = _ColumnSum.apply(csr, values)
    return result


def replicate_rows(csr: Csr, u: Tensor) -> Tensor:
    """[nnz, H], u [n, H] of each entry's row."""
    result: Tensor = _ReplicateRows.apply(csr, u)
    return result


def replicate_columns(csr: Csr, v: Tensor) -> Tensor:
    """[nnz, H], v [m, H] of each entry's column."""
    result: Tensor = _ReplicateColumns.apply(csr, v)
    return result


def graph_softmax(csr: Csr, scores: Tensor) -> Tensor:
    """[nnz, H] softmax of scores [nnz, H] over each row."""
    row = csr.row_index.long()
    index = row[:, None].expand_as(scores)
    top = scores.new_full((csr.shape[0], scores.shape[1]), -torch.inf)
    top = top.scatter_reduce(0, index, scores.detach(), "amax")
    # A row of only -inf has no largest score; its attention is 0/0.
    exponent = torch.exp(scores - top[row])
    return exponent / replicate_rows(csr, row_sum(csr, exponent))


class _Sddmm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, csr: Csr, x: Tensor, y: Tensor) -> Tensor:
        ctx.csr = csr
        ctx.save_for_backward(x, y)
        dtype = accumulator(x, y)
        heads = max(x.shape[1], y.shape[1])
        values = x.new_empty((csr.nnz, heads), dtype=dtype)
        for place, row, col in pieces(csr, heads * x.shape[2]):
            values[place] = (x[row].to(dtype) * y[col].to(dtype)).sum(-1)
        return values

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, y = ctx.saved_tensors
        (grad,) = grads
        dx = dy = None
        if ctx.needs_input_grad[1]:
            dx = sum_over_heads(weighted_sum(ctx.csr, grad, y.to(grad.dtype)), x)
        if ctx.needs_input_grad[2]:
            dy = weighted_sum(ctx.csr.transpose(), grad[ctx.csr.position], x.to(grad.dtype))
            dy = sum_over_heads(dy, y)
        return None, dx, dy


class _WeightedSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, csr: Csr, values: Tensor | None, x: Tensor) -> Tensor:
        ctx.csr = csr
        ctx.save_for_backward(values, x)
        dtype = accumulator(x) if values is None else accumulator(values, x)
        heads = x.shape[1] if values is None else max(values.shape[1], x.shape[1])
        out = x.new_zeros((csr.shape[0], heads, x.shape[2]), dtype=dtype)
        for place, row, col in pieces(csr, heads * x.shape[2]):
            gathered = x[col].to(dtype)
            add_rows(out, row, gathered if values is None else values[place, :, None] * gathered)
        return out.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        values, x = ctx.saved_tensors
        (grad,) = grads
        dvalues = dx = None
        if ctx.needs_input_grad[1]:
            dvalues = sddmm(ctx.csr, grad, x)
            if values.shape[1] == 1 < dvalues.shape[1]:
                dvalues = dvalues.sum(1, keepdim=True)
            dvalues = dvalues.to(values.dtype)
        if ctx.needs_input_grad[2]:
            by_column = None if values is None else values[ctx.csr.position]
            dx = sum_over_heads(weighted_sum(ctx.csr.transpose(), by_column, grad), x)
        return None, dvalues, dx


class _RowSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, csr: Csr, values: Tensor) -> Tensor:
        ctx.csr = csr
        return segment_sum(values, csr.row_ptr)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, replicate_rows(ctx.csr, grads[0])


class _ColumnSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, csr: Csr, values: Tensor) -> Tensor:
        ctx.csr = csr
        return segment_sum(values[csr.position], csr.col_ptr)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, replicate_columns(ctx.csr, grads[0])


class _ReplicateRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, csr: Csr, u: Tensor) -> Tensor:
        ctx.csr = csr
        return u[csr.row_index]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, row_sum(ctx.csr, grads[0])


class _ReplicateColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, csr: Csr, v: Tensor) -> Tensor:
        ctx.csr = csr
        return v[csr.col]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, column_sum(ctx.csr, grads[0])


def sum_over_heads(grad: Tensor, like: Tensor) -> Tensor:
    """Sum over the heads that share an input and cast the gradient to its type."""
    if like.shape[1] == 1 < grad.shape[1]:
        grad = grad.sum(1, keepdim=True)
    return grad.to(like.dtype)
