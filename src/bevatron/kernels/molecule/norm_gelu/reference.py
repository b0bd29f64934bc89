"""Normalisation and activation in plain PyTorch: the specification."""

import torch.nn.functional as F
from torch import Tensor

from bevatron.kernels.shared.dtypes import wide_type


def norm_gelu(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    linear_bias: Tensor | None,
    rows: Tensor | None,
    index: Tensor | None,
    ptr: Tensor | None,
    eps: float,
    activation: str,
) -> Tensor:
    """Compute ``activation(layer_norm(x + linear_bias + rows[index]))``."""
    del ptr
    wide = wide_type(x)
    z = x.to(wide)
    if rows is not None and index is not None:
        z = z + rows.to(wide)[index]
    if linear_bias is not None:
        z = z + linear_bias.to(wide)
    return activated_norm(z, weight, bias, eps, activation).to(x.dtype)


def activated_norm(
    z: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, activation: str
) -> Tensor:
    """Normalise, if there is a weight, and activate."""
    if weight is not None and bias is not None:
        z = F.layer_norm(z, z.shape[-1:], weight.to(z.dtype), bias.to(z.dtype), eps)
    return F.relu(z) if activation == "relu" else F.gelu(z, approximate="tanh")
