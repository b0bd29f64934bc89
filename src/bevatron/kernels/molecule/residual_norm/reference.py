"""Residual, row dropout and normalisation in plain PyTorch: the specification."""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from bevatron.kernels.shared.dtypes import wide_type


def residual_norm(
    x: Tensor,
    branches: Sequence[Tensor],
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    scales: Sequence[Tensor | None],
    eps: float,
) -> Tensor:
    """Compute ``sum_k layer_norm_k(x + scale_k * branch_k)``."""
    wide = wide_type(x)
    total: Tensor | None = None
    for branch, weight, bias, scale in zip(branches, weights, biases, scales, strict=True):
        u = branch.to(wide)
        if scale is not None:
            u = u * scale.detach().to(wide)[:, None]
        z = F.layer_norm(x.to(wide) + u, x.shape[-1:], weight.to(wide), bias.to(wide), eps)
        total = z if total is None else total + z
    assert total is not None
    return total.to(x.dtype)
