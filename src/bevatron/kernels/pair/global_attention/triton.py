"""Attention with one query per column, composed of LayerNorm, attention and gate kernels.

The heads of a column share keys and values: to `pair_attention` they are the queries of one head.
16-bit rows of few channels go to `triton_fused` instead.
"""

from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from bevatron.kernels.pair.global_attention import triton_fused
from bevatron.kernels.pair.layer_norm.triton import layer_norm
from bevatron.kernels.pair.pair_attention.triton import pair_attention
from bevatron.kernels.pair.swiglu.triton import launch_backward, launch_forward
from bevatron.kernels.shared.custom_op import custom_op


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
    """Compute the same as the reference; see `bevatron.kernels.pair.global_attention`."""
    if triton_fused.takes(m, gate_weight, k_weight, out_weight):
        weights = (q_weight, k_weight, v_weight, gate_weight, gate_bias, out_weight, out_bias)
        kept, norm = mask.detach().to(m.dtype), (norm_weight, norm_bias)
        y: Tensor = triton_fused.attend(m, kept, *norm, *weights, eps, mask_eps)[0]
        return y
    D, B, (S, N, C) = k_weight.shape[0], prod(m.shape[:-3]), m.shape[-3:]
    n = layer_norm(m, norm_weight, norm_bias, None, None, eps, False).view(B, S, N, C)
    kept_BNS = mask.detach().reshape(B, S, N).transpose(1, 2)
    share = kept_BNS.float() / (mask_eps + kept_BNS.sum(-1, keepdim=True, dtype=torch.float32))
    columns = n.transpose(1, 2)
    mean = torch.matmul(share.to(m.dtype)[:, :, None], columns)[:, :, 0]
    q = F.linear(mean, q_weight.to(m.dtype)).unflatten(-1, (-1, D))
    joint = torch.cat([k_weight, v_weight, gate_weight]).to(m.dtype)
    joint_bias = F.pad(gate_bias.to(m.dtype), (2 * D, 0))
    k, v, gate = F.linear(n, joint, joint_bias).split([D, D, len(gate_weight)], dim=-1)
    # With one query of a few heads float32 costs nothing, and the sums over all rows need it.
    heads, keys, values = (
        q.float()[:, :, None],
        k.float().transpose(1, 2)[:, :, None],
        v.float().transpose(1, 2)[:, :, None],
    )
    o = pair_attention(
        heads, keys, values, None, kept_BNS > 0, float(D**-0.5), None, layout="BSHND"
    )
    gated = sigmoid_gate(gate, o.flatten(2).to(m.dtype))
    y = F.linear(gated, out_weight.to(m.dtype), out_bias.to(m.dtype))
    return y.view(*m.shape[:-1], len(out_weight))


@custom_op("global_gate", fake="gate")
def sigmoid_gate(gate: Tensor, value: Tensor) -> Tensor:
    """Return ``sigmoid(gate) * value`` of a gate [B, S, N, C] and one value [B, N, C] for all S."""
    y = gate.new_empty(gate.shape)
    launch_forward(gate, value[:, None].expand(gate.shape), y, silu=False)
    return y


@sigmoid_gate.backward()
def sigmoid_gate_backward(dy: Tensor, gate: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return both gradients."""
    dgate, dvalue = gate.new_empty(gate.shape), gate.new_empty(gate.shape)
    launch_backward(dy, gate, value[:, None].expand(gate.shape), dgate, dvalue, silu=False)
    # A matmul reads long columns faster than torch's sum, and accumulates in float32 as well.
    ones = dy.new_ones(1, dy.shape[1])
    return dgate, torch.matmul(ones, dvalue.flatten(2)).view(value.shape).to(value.dtype)
