"""A block's sums and gradients in plain PyTorch, from the formulas rather than by autograd."""

import torch
from torch import Tensor
from torch.nn import functional as F

from bevatron.kernels.graph.csr import Csr
from bevatron.kernels.graph.csr.dropout import keep_mask
from bevatron.kernels.graph.csr.sums import weighted_sum
from bevatron.kernels.shared.dtypes import wide


@torch.no_grad()
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
    """Compute m, s, the positive part of s, Z and the positive part of Z.

    If no backward pass follows, the positive parts are empty.
    """
    row, col, count = csr.row_index, csr.col, csr.shape[0]
    score = wide(row_score)[row] + wide(col_score)[col]
    logits = F.leaky_relu(score, negative_slope)
    largest = logits.new_full((count, x.shape[1]), -torch.inf)
    largest = largest.scatter_reduce(0, row.long()[:, None].expand_as(logits), logits, "amax")
    weights = torch.exp(logits - largest[row])
    factor = _factor(csr, weights, seed, dropout)
    zero = torch.zeros_like(largest)
    total = zero.index_add(0, row, weights)
    z = weighted_sum(weights * factor, wide(x), row, col, count)
    if not backward:
        return largest, total, total.new_empty(0), z, z.new_empty(0)
    weights = weights * (score > 0)
    z_positive = weighted_sum(weights * factor, wide(x), row, col, count)
    return largest, total, zero.index_add(0, row, weights), z, z_positive


@torch.no_grad()
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
    """Compute the gradients of x and of the column scores."""
    row, col, count = csr.row_index, csr.col, csr.shape[1]
    score = wide(row_score)[row] + wide(col_score)[col]
    weights = torch.exp(F.leaky_relu(score, negative_slope) - lse[row])
    sloped = torch.where(score > 0, weights, negative_slope * weights)
    factor = _factor(csr, weights, seed, dropout)
    along = weighted_sum(sloped * factor, wide(grad), col, row, count)
    by_score = (wide(x) * along).sum(-1).index_add(0, col, -sloped * delta[row])
    return weighted_sum(weights * factor, wide(grad), col, row, count), by_score


def _factor(csr: Csr, weights: Tensor, seed: Tensor | None, dropout: float) -> Tensor:
    """Return the factor of the attention after the softmax: value times mask."""
    factor = torch.ones_like(weights)
    if csr.values is not None:
        factor = factor * csr.values.to(weights.dtype)[:, None]
    if seed is not None:
        factor = factor * keep_mask(csr, seed, weights.shape[1], dropout).to(weights.dtype)
    return factor
