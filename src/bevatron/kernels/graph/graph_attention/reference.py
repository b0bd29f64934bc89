"""Attention of GAT and GATv2 in plain PyTorch: the specification."""

from torch import Tensor
from torch.nn import functional as F

from bevatron.kernels.graph.csr import Csr
from bevatron.kernels.graph.csr.dropout import keep_mask
from bevatron.kernels.graph.csr.sums import by_pieces, segment_softmax, weighted_sum
from bevatron.kernels.shared.dtypes import wide


def graph_attention(
    csr: Csr,
    x: Tensor,
    row_score: Tensor,
    col_score: Tensor,
    negative_slope: float,
    dropout: float,
    seed: Tensor | None,
) -> Tensor:
    """Compute ``sum_j softmax_j(leaky_relu(l_i + r_j)) d_ij a_ij x_j``."""
    row, col = csr.row_index, csr.col
    logits = F.leaky_relu(wide(row_score)[row] + wide(col_score)[col], negative_slope)
    return _attend(csr, x, logits, row, dropout, seed)


def graph_attention_v2(
    csr: Csr,
    x: Tensor,
    query: Tensor,
    weight: Tensor,
    negative_slope: float,
    dropout: float,
    seed: Tensor | None,
) -> Tensor:
    """Compute ``sum_j softmax_j(w . leaky_relu(q_i + x_j)) d_ij a_ij x_j``."""
    row, col = csr.row_index, csr.col

    def score(query: Tensor, x: Tensor, weight: Tensor, entries: slice) -> Tensor:
        hidden = F.leaky_relu(query[row[entries]] + x[col[entries]], negative_slope)
        return (hidden * weight).sum(-1)

    logits = by_pieces(score, (wide(query), wide(x), wide(weight)), row, x)
    return _attend(csr, x, logits, row, dropout, seed)


def _attend(
    csr: Csr, x: Tensor, logits: Tensor, row: Tensor, dropout: float, seed: Tensor | None
) -> Tensor:
    weights = segment_softmax(logits, row, csr.shape[0])
    if csr.values is not None:
        weights = weights * csr.values.to(weights.dtype)[:, None]
    if seed is not None:
        weights = weights * keep_mask(csr, seed, x.shape[1], dropout).to(weights.dtype)
    return weighted_sum(weights, wide(x), row, csr.col, csr.shape[0]).to(x.dtype)
