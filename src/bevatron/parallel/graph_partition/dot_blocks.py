"""One rank's block of dot-product attention, with the gradients of lengths.

The sums over a block are those of `bevatron.kernels.graph.dot_attention.partial`; this module
passes the scale of the scores and the lengths of the vectors into them, and their gradients back.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from bevatron.kernels.graph.csr import Csr
from bevatron.kernels.graph.dot_attention import inverse_norm, partial
from bevatron.kernels.shared.dtypes import wide


def block_scores(
    x_row: Float[Tensor, "I H C"],
    x_col: Float[Tensor, "J H C"],
    scale: Float[Tensor, "_"],
    *,
    normalize: bool,
    softmax: bool,
) -> partial.Scores:
    """Describe the scores of a block: scale x (cosine or dot product) of row and column."""
    beta = wide(scale).expand(len(x_row), x_row.shape[1])
    if not normalize:
        return partial.Scores(x_row, x_col, None, beta.contiguous(), None, softmax)
    return partial.Scores(
        x_row, x_col, None, beta * inverse_norm(x_row), inverse_norm(x_col), softmax
    )


def row_gradients(
    block: Csr,
    scores: partial.Scores,
    scale: Float[Tensor, "_"],
    grad: Float[Tensor, "I H C"],
    log_total: Float[Tensor, "I H"] | None,
    delta: Float[Tensor, "I H"] | None,
) -> tuple[Tensor, Tensor]:
    """Return this block's part of the gradients of the rows' x and of the scale."""
    by_row, by_row_scale = partial.row_backward(block, scores, grad, log_total, delta)
    if scores.col_scale is not None:
        inverse = inverse_norm(scores.query)
        by_row = by_row - _by_length(by_row_scale * wide(scale), inverse, scores.query)
        by_row_scale = by_row_scale * inverse
    by_scale = by_row_scale.sum(0)
    by_scale = by_scale if scale.numel() > 1 else by_scale.sum().reshape(scale.shape)
    return by_row, by_scale.to(scale.dtype)


def col_gradients(
    block: Csr,
    scores: partial.Scores,
    grad: Float[Tensor, "I H C"],
    log_total: Float[Tensor, "I H"] | None,
    delta: Float[Tensor, "I H"] | None,
) -> Tensor:
    """Return this block's part of the gradient of the columns' x, from scores and from sums."""
    by_col, _, by_col_scale = partial.col_backward(block, scores, grad, log_total, delta)
    if scores.col_scale is None:
        return by_col
    return by_col - _by_length(by_col_scale, scores.col_scale, scores.key)


def _by_length(by_inverse: Tensor, inverse: Tensor, x: Tensor) -> Tensor:
    """Backpropagate from 1/||x|| to x unless it is capped: 1/||x||^3 x."""
    capped = torch.where(inverse < 1e12, inverse, 0.0)
    return (by_inverse * capped**3)[..., None] * wide(x)
