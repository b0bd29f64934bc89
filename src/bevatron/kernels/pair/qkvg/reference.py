"""Queries, keys, values and gate in plain PyTorch: the specification."""

import torch.nn.functional as F
from torch import Tensor

from bevatron.kernels.pair.layer_norm.reference import layer_norm


def qkvg(
    x: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    v_weight: Tensor,
    gate_weight: Tensor,
    gate_bias: Tensor | None,
    q_bias: Tensor | None,
    has_norm: bool,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    bias_weight: Tensor | None,
    eps: float,
    head_width: int | None,
) -> tuple[Tensor, ...]:
    """Apply four linear layers to the rows, after the norm if there is one, or five."""
    n = layer_norm(x, norm_weight, norm_bias, None, None, eps, False) if has_norm else x
    layers = ((q_weight, q_bias), (k_weight, None), (v_weight, None), (gate_weight, gate_bias))
    parts = (
        F.linear(n, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
        for weight, bias in layers
    )
    others = () if bias_weight is None else (F.linear(n, bias_weight.to(x.dtype)), x)
    return *(
        part if head_width is None else part.unflatten(-1, (-1, head_width)) for part in parts
    ), *others
