"""Residual, row dropout and normalisation in plain PyTorch: the specification."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def residual_norm(
    x: Tensor,
    branches: Sequence[Tensor],
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    scales: Sequence[Tensor | None],
    linear_biases: Sequence[Tensor | None],
    eps: float,
    readers: int,
) -> tuple[Tensor, ...]:
    """Compute ``sum_k layer_norm_k(x + scale_k * (branch_k + linear_bias_k))``."""
    wide = torch.promote_types(x.dtype, torch.float32)
    total: Tensor | None = None
    of_each = zip(branches, weights, biases, scales, linear_biases, strict=True)
    for branch, weight, bias, scale, linear_bias in of_each:
        u = branch.to(wide)
        if linear_bias is not None:
            u = u + linear_bias.to(wide)
        if scale is not None:
            u = u * scale.detach().to(wide)[:, None]
        z = F.layer_norm(x.to(wide) + u, x.shape[-1:], weight.to(wide), bias.to(wide), eps)
        total = z if total is None else total + z
    assert total is not None
    return (total.to(x.dtype),) * readers
