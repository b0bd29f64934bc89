"""LayerNorm and a linear layer in plain PyTorch: the specification."""

import torch.nn.functional as F
from torch import Tensor

from bevatron.kernels.pair.layer_norm.reference import layer_norm


def layer_norm_linear(
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
) -> Tensor:
    """Compute ``weight LayerNorm(x) + bias``."""
    n = layer_norm(x, norm_weight, norm_bias, None, None, eps, False)
    return F.linear(n, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
