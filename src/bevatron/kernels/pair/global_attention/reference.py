"""Attention with one query per column in plain PyTorch: the specification."""

import torch
import torch.nn.functional as F
from torch import Tensor

from bevatron.kernels.pair.layer_norm.reference import layer_norm
from bevatron.kernels.shared.dtypes import wide_type


def global_attention(
    m: Tensor,
    mask: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    v_weight: Tensor,
    gate_weight: Tensor,
    gate_bias: Tensor,
    out_weight: Tensor,
    out_bias: Tensor,
    eps: float,
    mask_eps: float,
) -> Tensor:
    """Compute ``out(sigmoid(gate(n)) * softmax(q k) v)`` with q from the mean of the rows n."""

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, weight.to(m.dtype), None if bias is None else bias.to(m.dtype))

    D = k_weight.shape[0]
    n = layer_norm(m, norm_weight, norm_bias, None, None, eps, False)
    kept = mask.to(wide_type(m))
    share = kept / (mask_eps + kept.sum(-2, keepdim=True))
    mean = torch.einsum("...sn,...snc->...nc", share.to(m.dtype), n)
    q = D**-0.5 * linear(mean, q_weight).unflatten(-1, (-1, D))
    logits = torch.einsum("...nhd,...snd->...nhs", q, linear(n, k_weight))
    keep = (mask > 0).transpose(-1, -2)[..., None, :]
    # A column without rows: any finite logits, since softmax of minus infinity is NaN.
    logits = logits.masked_fill(~keep, float("-inf"))
    logits = logits.masked_fill(~keep.any(-1, keepdim=True), 0.0)
    weights = logits.softmax(-1).masked_fill(~keep, 0.0)
    o = torch.einsum("...nhs,...snd->...nhd", weights, linear(n, v_weight)).flatten(-2)
    gate = linear(n, gate_weight, gate_bias).sigmoid()
    return linear(gate * o.unsqueeze(-3), out_weight, out_bias)
