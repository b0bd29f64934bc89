"""A block's sums and gradients in plain PyTorch, from the formulas rather than by autograd."""

import torch
from torch import Tensor

from bevatron.kernels.graph.csr import Csr
from bevatron.kernels.graph.csr.sums import entry_dot, weighted_sum
from bevatron.kernels.graph.dot_attention.partial import Scores
from bevatron.kernels.shared.dtypes import wide


@torch.no_grad()
def sums(csr: Csr, scores: Scores) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Compute Z and, with a softmax, m and s."""
    row, col, count = csr.row_index, csr.col, csr.shape[0]
    weights = _product(csr, scores) * _scale(csr, scores)
    largest = total = None
    if scores.softmax:
        largest = weights.new_full((count, weights.shape[1]), -torch.inf)
        index = row.long()[:, None].expand_as(weights)
        largest = largest.scatter_reduce(0, index, weights, "amax")
        weights = torch.exp(weights - largest[row])
        total = torch.zeros_like(largest).index_add(0, row, weights)
    value = wide(scores.key if scores.value is None else scores.value)
    return weighted_sum(weights * _values(csr, weights), value, row, col, count), largest, total


@torch.no_grad()
def row_gradients(
    csr: Csr, scores: Scores, grad: Tensor, lse: Tensor | None, delta: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of the query and of the rows' scale."""
    row, col = csr.row_index, csr.col
    _, slope = _attention(csr, scores, grad, lse, delta)
    if scores.col_scale is not None:
        slope = slope * wide(scores.col_scale)[col]
    along = weighted_sum(slope, wide(scores.key), row, col, csr.shape[0])
    by_scale = (wide(scores.query) * along).sum(-1)
    if scores.row_scale is not None:
        along = along * wide(scores.row_scale)[..., None]
    return along, by_scale


@torch.no_grad()
def col_gradients(
    csr: Csr, scores: Scores, grad: Tensor, lse: Tensor | None, delta: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Compute the gradients of the key, the value and the columns' scale."""
    row, col = csr.row_index, csr.col
    weights, slope = _attention(csr, scores, grad, lse, delta)
    if scores.row_scale is not None:
        slope = slope * wide(scores.row_scale)[row]
    along = weighted_sum(slope, wide(scores.query), col, row, csr.shape[1])
    by_scale = (wide(scores.key) * along).sum(-1)
    if scores.col_scale is not None:
        along = along * wide(scores.col_scale)[..., None]
    by_value = weighted_sum(weights, wide(grad), col, row, csr.shape[1])
    return (
        (along + by_value, None, by_scale) if scores.value is None else (along, by_value, by_scale)
    )


def _attention(
    csr: Csr, scores: Scores, grad: Tensor, lse: Tensor | None, delta: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the weight of every entry and the gradient of its score."""
    row, col = csr.row_index, csr.col
    value = wide(scores.key if scores.value is None else scores.value)
    weights = _product(csr, scores) * _scale(csr, scores)
    factor = _values(csr, weights)
    slope = factor * entry_dot(wide(grad), value, row, col)
    if scores.softmax:
        assert lse is not None
        assert delta is not None
        weights = torch.exp(weights - lse[row])
        slope = weights * (slope - delta[row])
    return weights * factor, slope


def _product(csr: Csr, scores: Scores) -> Tensor:
    return entry_dot(wide(scores.query), wide(scores.key), csr.row_index, csr.col)


def _scale(csr: Csr, scores: Scores) -> Tensor:
    scale = wide(scores.key).new_ones((csr.nnz, scores.key.shape[1]))
    if scores.row_scale is not None:
        scale = scale * wide(scores.row_scale)[csr.row_index]
    if scores.col_scale is not None:
        scale = scale * wide(scores.col_scale)[csr.col]
    return scale


def _values(csr: Csr, weights: Tensor) -> Tensor:
    if csr.values is None:
        return torch.ones_like(weights)
    return csr.values.to(weights.dtype)[:, None]
