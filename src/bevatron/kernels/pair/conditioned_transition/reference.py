"""The conditioned transition in plain PyTorch: the specification."""

import torch.nn.functional as F
from torch import Tensor

from bevatron.kernels.pair.layer_norm.reference import layer_norm
from bevatron.kernels.pair.swiglu.reference import swiglu


def conditioned_transition(
    x: Tensor,
    s: Tensor,
    norm_weight: Tensor,
    scale_weight: Tensor,
    scale_bias: Tensor,
    shift_weight: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    down_weight: Tensor,
    out_weight: Tensor,
    out_bias: Tensor,
    eps: float,
) -> Tensor:
    """Compute ``sigmoid(out(s)) * down(silu(gate(n)) * up(n))`` with n the adaptive norm."""

    def linear(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        rows = rows.to(x.dtype)
        return F.linear(rows, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))

    condition = layer_norm(s, norm_weight, None, None, None, eps, False)
    scale = linear(condition, scale_weight, scale_bias)
    shift = linear(condition, shift_weight)
    n = layer_norm(x, None, None, scale, shift, eps, True)
    hidden = swiglu(linear(n, gate_weight), linear(n, up_weight))
    return linear(s, out_weight, out_bias).sigmoid() * linear(hidden, down_weight)
