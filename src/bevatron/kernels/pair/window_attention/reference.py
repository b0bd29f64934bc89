"""Attention in windows of atoms in plain PyTorch: the specification."""

import torch
import torch.nn.functional as F
from torch import Tensor


def window_attention(
    q: Tensor, k: Tensor, v: Tensor, gate: Tensor, bias: Tensor, mask: Tensor
) -> Tensor:
    """Compute the gated attention of every window; of float64 the result is exact."""
    A, D = q.shape[2], q.shape[-1]
    W, _, Q, K = bias.shape[1:]
    before = (K - Q) // 2
    behind = max(W, 1) * Q - A + K - Q - before  # `unfold` needs one window

    def around(x: Tensor) -> Tensor:
        """Return the rows around each window [B, M, W, H, D, K]."""
        return F.pad(x, (0, 0, 0, 0, before, behind)).unfold(2, K, Q)

    queries = F.pad(q * D**-0.5, (0, 0, 0, 0, 0, W * Q - A)).unflatten(2, (W, Q))
    logits = torch.einsum("bmwqhd,bmwhdk->bmwhqk", queries, around(k))
    logits = logits + bias.to(logits.dtype)[:, None]
    keep = F.pad(mask, (before, behind)).unfold(1, K, Q)[:, None, :, None, None]
    logits = logits.masked_fill(~keep, float("-inf"))
    # Of a query without keys any finite logits: softmax of minus infinities is NaN.
    empty = (logits == float("-inf")).all(-1, keepdim=True)
    weights = logits.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)
    result = torch.einsum("bmwhqk,bmwhdk->bmwqhd", weights, around(v)).flatten(2, 3)
    return gate.sigmoid() * result[:, :, :A]
