"""What one rank computes on its block: parts of attention that add up over the ranks of a row.

A row's softmax runs over columns that lie on several ranks. So the forward pass of a block gives,
for every row and head, the largest logit m there and sums relative to it. The backward pass takes
what is known of the whole row: L, the logarithm of its sum of exponentials, and delta = <G, Z>.
No tensor of entries x features is made.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from bevatron.kernels.csr import Csr
from bevatron.kernels.csr.dropout import as_seed, keep_mask
from bevatron.kernels.csr.sums import entry_dot, weighted_sum
from bevatron.kernels.dot_attention import inverse_norm


@dataclass
class Statistics:
    """Sums over a block's entries of each row, relative to its largest logit there.

    Attributes
    ----------
    largest
        [I, H] m, -inf for a row without entries here.
    total
        [I, H] sum of exp(e - m).
    sums
        [I, H, C] sum of exp(e - m) x, with dropout and edge weights.
    total_positive, sums_positive
        The same over entries whose logit is positive, for the gradient of the row's score.
    """

    largest: Tensor
    total: Tensor
    sums: Tensor
    total_positive: Tensor
    sums_positive: Tensor


def attention_statistics(
    block: Csr,
    x: Float[Tensor, "J H C"],
    row_score: Float[Tensor, "I H"],
    col_score: Float[Tensor, "J H"],
    negative_slope: float,
    dropout: float,
    seed: int,
) -> Statistics:
    """Sum up one block of graph attention."""
    row, col, rows = block.row_index.long(), block.col.long(), block.shape[0]
    logit = row_score[row] + col_score[col]
    score = F.leaky_relu(logit, negative_slope)
    largest = _row_maxima(score, row, rows)
    weight = torch.exp(score - largest[row])
    positive = weight * (logit > 0)
    factor = _factor(block, weight, dropout, seed)
    return Statistics(
        largest,
        _sum_rows(weight, row, rows),
        weighted_sum(weight * factor, x, row, col, rows),
        _sum_rows(positive, row, rows),
        weighted_sum(positive * factor, x, row, col, rows),
    )


def attention_column_gradients(
    block: Csr,
    x: Float[Tensor, "J H C"],
    row_score: Float[Tensor, "I H"],
    col_score: Float[Tensor, "J H"],
    log_total: Float[Tensor, "I H"],
    grad: Float[Tensor, "I H C"],
    delta: Float[Tensor, "I H"],
    negative_slope: float,
    dropout: float,
    seed: int,
) -> tuple[Tensor, Tensor]:
    """Return this block's part of the gradients of x and of the columns' scores."""
    row, col, cols = block.row_index.long(), block.col.long(), block.shape[1]
    logit = row_score[row] + col_score[col]
    weight = torch.exp(F.leaky_relu(logit, negative_slope) - log_total[row])
    spread = weight * _factor(block, weight, dropout, seed)
    slope = torch.where(logit > 0, 1.0, negative_slope).to(weight.dtype)
    both = spread * entry_dot(grad, x, row, col) - weight * delta[row]
    return weighted_sum(spread, grad, col, row, cols), _sum_rows(slope * both, col, cols)


@dataclass
class DotStatistics:
    """Sums over a block's entries for attention by dot products.

    ``largest`` and ``total`` are None without a softmax.
    """

    sums: Tensor
    largest: Tensor | None = None
    total: Tensor | None = None


def dot_statistics(
    block: Csr,
    x_row: Float[Tensor, "I H C"],
    x_col: Float[Tensor, "J H C"],
    scale: Float[Tensor, "_"],
    *,
    normalize: bool,
    softmax: bool,
) -> DotStatistics:
    """Sum up one block of attention by dot products (VA) or cosines (AGNN)."""
    row, col, rows = block.row_index.long(), block.col.long(), block.shape[0]
    weight = scale * _dots(block, x_row, x_col, normalize=normalize)
    largest = total = None
    if softmax:
        largest = _row_maxima(weight, row, rows)
        weight = torch.exp(weight - largest[row])
        total = _sum_rows(weight, row, rows)
    weight = weight * _factor(block, weight, 0.0, 0)
    return DotStatistics(weighted_sum(weight, x_col, row, col, rows), largest, total)


def dot_gradients(
    block: Csr,
    x_row: Float[Tensor, "I H C"],
    x_col: Float[Tensor, "J H C"],
    scale: Float[Tensor, "_"],
    grad: Float[Tensor, "I H C"],
    log_total: Float[Tensor, "I H"] | None,
    delta: Float[Tensor, "I H"] | None,
    *,
    normalize: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return this block's parts of the gradients.

    The first two are those of the features in the scores, of rows and of columns, divided by
    ``scale``; the third is that of the features summed up. With ``normalize`` the first two are
    taken with the lengths of the vectors fixed: `without_length` completes them.
    """
    row, col = block.row_index.long(), block.col.long()
    rows, cols = block.shape
    weight = scale * _dots(block, x_row, x_col, normalize=normalize)
    factor = _factor(block, weight, 0.0, 0)
    pulled = factor * entry_dot(grad, x_col, row, col)
    if log_total is not None and delta is not None:
        weight = torch.exp(weight - log_total[row])
        pulled = weight * (pulled - delta[row])
    weight = weight * factor
    if normalize:
        pulled = pulled * inverse_norm(x_row)[row] * inverse_norm(x_col)[col]
    return (
        weighted_sum(pulled, x_col, row, col, rows),
        weighted_sum(pulled, x_row, col, row, cols),
        weighted_sum(weight, grad, col, row, cols),
    )


def without_length(grad: Float[Tensor, "N H C"], x: Float[Tensor, "N H C"]) -> Tensor:
    """Take off a gradient what would change the length of x: cosines do not depend on it."""
    unit = x * inverse_norm(x)[:, :, None]
    return grad - unit * (unit * grad).sum(-1, keepdim=True)


def _dots(block: Csr, x_row: Tensor, x_col: Tensor, *, normalize: bool) -> Tensor:
    row, col = block.row_index.long(), block.col.long()
    dots = entry_dot(x_row, x_col, row, col)
    if normalize:
        dots = dots * inverse_norm(x_row)[row] * inverse_norm(x_col)[col]
    return dots


def _factor(block: Csr, weight: Tensor, dropout: float, seed: int) -> Tensor:
    """Return what multiplies the attention after the softmax: edge weights and dropout."""
    factor = torch.ones_like(weight)
    if block.values is not None:
        factor = factor * block.values.to(weight.dtype)[:, None]
    if dropout > 0:
        word = as_seed(seed, weight.device)
        factor = factor * keep_mask(block, word, weight.shape[1], dropout).to(weight.dtype)
    return factor


def _row_maxima(score: Tensor, row: Tensor, rows: int) -> Tensor:
    largest = score.new_full((rows, score.shape[1]), -torch.inf)
    return largest.scatter_reduce(0, row[:, None].expand_as(score), score, "amax")


def _sum_rows(values: Tensor, index: Tensor, count: int) -> Tensor:
    return values.new_zeros((count, *values.shape[1:])).index_add_(0, index, values)
