"""A formula over vertices, evaluated only on the edges; only its result is stored.

For one chunk of edges at a time, the formula reads values of the row, values of the column, inner
products of both, and edge values. The backward pass evaluates it again, so an edge costs one number
per head however long the formula is.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from bevatron.kernels.graph.csr import Csr
from bevatron.kernels.graph.graph_blocks.pieces import accumulator, pieces
from bevatron.kernels.graph.graph_blocks.products import weighted_sum
from bevatron.kernels.graph.graph_blocks.reference import column_sum, row_sum, sum_over_heads

# torch prescribes the signatures of autograd.Function.
# mypy: disable-error-code="no-untyped-call"

Leaf = (
    tuple[Literal["row", "column", "edge", "everywhere"], Tensor]
    | tuple[Literal["dot"], Tensor, Tensor]
)
"""An input of a formula: ``("row", u [n, H])``, ``("column", v [m, H])``, ``("edge", values
[nnz, H])``, ``("everywhere", s [H])`` or ``("dot", x [n, H, K], y [m, H, K])``."""

Formula = Callable[[Sequence[Tensor]], Tensor]
"""Maps one tensor [edges, H] (or [H]) per leaf to the values [edges, H]."""


def sampled(csr: Csr, formula: Formula, leaves: Sequence[Leaf], heads: int) -> Tensor:
    """Evaluate ``formula`` on every entry of ``csr``: [nnz, H].

    Differentiable once with respect to the tensors of the leaves.
    """
    kinds = tuple(leaf[0] for leaf in leaves)
    tensors = [tensor for leaf in leaves for tensor in leaf[1:]]
    result: Tensor = _Sampled.apply(csr, formula, kinds, heads, *tensors)
    return result


def _split(kinds: Sequence[str], tensors: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Bind tensors to the leaves."""
    remaining = iter(tensors)
    return [
        (next(remaining), next(remaining)) if kind == "dot" else (next(remaining),)
        for kind in kinds
    ]


def _width(kinds: Sequence[str], tensors: Sequence[Tensor], heads: int) -> int:
    widest = 1
    for kind, held in zip(kinds, _split(kinds, tensors), strict=True):
        if kind == "dot":
            widest = max(widest, int(held[0].shape[-1]))
    return heads * widest


def _gather(
    kind: str, held: tuple[Tensor, ...], place: slice, row: Tensor, col: Tensor, dtype: torch.dtype
) -> Tensor:
    if kind == "row":
        return held[0][row].to(dtype)
    if kind == "column":
        return held[0][col].to(dtype)
    if kind == "edge":
        return held[0][place].to(dtype)
    if kind == "everywhere":
        return held[0].to(dtype)
    x, y = held
    return (x[row].to(dtype) * y[col].to(dtype)).sum(-1)


class _Sampled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, csr: Csr, formula: Formula, kinds: tuple[str, ...], heads: int, *tensors: Tensor
    ) -> Tensor:
        ctx.csr, ctx.formula, ctx.kinds, ctx.heads = csr, formula, kinds, heads
        ctx.save_for_backward(*tensors)
        dtype = accumulator(*tensors)
        values = torch.empty((csr.nnz, heads), dtype=dtype, device=csr.device)
        leaves = _split(kinds, tensors)
        for place, row, col in pieces(csr, _width(kinds, tensors, heads)):
            here = [
                _gather(kind, held, place, row, col, dtype)
                for kind, held in zip(kinds, leaves, strict=True)
            ]
            values[place] = formula(here)
        return values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        csr, kinds, tensors = ctx.csr, ctx.kinds, ctx.saved_tensors
        leaves = _split(kinds, tensors)
        needed = [any(n) for n in _split(kinds, ctx.needs_input_grad[4:])]
        per_edge = _edge_gradients(ctx, grads[0], leaves, needed)
        found: list[Tensor | None] = []
        for kind, held, grad in zip(kinds, leaves, per_edge, strict=True):
            found += _reduce(csr, kind, held, grad)
        return (None, None, None, None, *found)


def _edge_gradients(
    ctx: Any, grad: Tensor, leaves: Sequence[tuple[Tensor, ...]], needed: Sequence[bool]
) -> list[Tensor | None]:
    """Differentiate the formula by chunks: [nnz, h] for every leaf, [H] for "everywhere"."""
    csr, kinds = ctx.csr, ctx.kinds
    dtype = grad.dtype
    out: list[Tensor | None] = [None] * len(kinds)
    for place, row, col in pieces(csr, _width(kinds, ctx.saved_tensors, ctx.heads)):
        here = [
            _gather(kind, held, place, row, col, dtype).detach().requires_grad_(need)
            for kind, held, need in zip(kinds, leaves, needed, strict=True)
        ]
        with torch.enable_grad():
            values = ctx.formula(here).expand(-1, ctx.heads)
        wanted = [value for value, need in zip(here, needed, strict=True) if need]
        parts = iter(torch.autograd.grad(values, wanted, grad[place], allow_unused=True))
        for number, need in enumerate(needed):
            part = next(parts) if need else None
            if part is None:
                continue
            if kinds[number] == "everywhere":
                before = out[number]
                out[number] = part if before is None else before + part
                continue
            if out[number] is None:
                out[number] = part.new_zeros(csr.nnz, part.shape[1])
            out[number][place] = part  # type: ignore[index]
    return out


def _reduce(
    csr: Csr, kind: str, held: tuple[Tensor, ...], grad: Tensor | None
) -> list[Tensor | None]:
    """Sum gradients of edges over the tensors from which the edges were gathered."""
    if grad is None:
        return [None] * len(held)
    if kind == "row":
        return [row_sum(csr, grad).to(held[0].dtype)]
    if kind == "column":
        return [column_sum(csr, grad).to(held[0].dtype)]
    if kind == "dot":
        x, y = held
        dx = weighted_sum(csr, grad, y.to(grad.dtype))
        dy = weighted_sum(csr.transpose(), grad[csr.position], x.to(grad.dtype))
        return [sum_over_heads(dx, x), sum_over_heads(dy, y)]
    return [grad.to(held[0].dtype)]
