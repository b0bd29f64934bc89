"""Dot-product attention in plain PyTorch: the specification."""

from torch import Tensor

from bevatron.kernels.graph.csr import Csr
from bevatron.kernels.graph.csr.sums import entry_dot, segment_softmax, weighted_sum
from bevatron.kernels.shared.dtypes import wide


def dot_attention(
    csr: Csr,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    row_scale: Tensor | None,
    col_scale: Tensor | None,
    softmax: bool,
) -> Tensor:
    """Compute ``sum_j a_ij f(s_i c_j <q_i, k_j>) v_j`` with f the row softmax or the identity."""
    row, col = csr.row_index, csr.col
    weights = entry_dot(wide(query), wide(key), row, col)
    if row_scale is not None:
        weights = weights * row_scale.to(weights.dtype)[row]
    if col_scale is not None:
        weights = weights * col_scale.to(weights.dtype)[col]
    if softmax:
        weights = segment_softmax(weights, row, csr.shape[0])
    if csr.values is not None:
        weights = weights * csr.values.to(weights.dtype)[:, None]
    return weighted_sum(weights, wide(value), row, col, csr.shape[0]).to(value.dtype)
