"""Layer normalisation in plain PyTorch: the specification."""

import torch
from torch import Tensor

from bevatron.kernels.shared.dtypes import wide_type


def add_norm(
    x: Tensor, update: Tensor, gate: Tensor, scale: Tensor, shift: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Compute ``x + gate * update`` and the norm of this sum, scaled and shifted."""
    total = torch.addcmul(x, gate, update)
    return total, layer_norm(total, None, None, scale, shift, eps, sigmoid=True)


def layer_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    eps: float,
    sigmoid: bool,
) -> Tensor:
    """Compute ``scale * (weight * (x - mean) / sqrt(var + eps) + bias) + shift``.

    16-bit types are computed in float32 and rounded once.
    """
    wide = wide_type(x)
    y = x.to(wide)
    y = y - y.mean(-1, keepdim=True)
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * weight.to(wide)
    if bias is not None:
        y = y + bias.to(wide)
    if scale is not None:
        y = y * (scale.to(wide).sigmoid() if sigmoid else scale.to(wide))
    if shift is not None:
        y = y + shift.to(wide)
    return y.to(x.dtype)
