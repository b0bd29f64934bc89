"""Gaussian kernels in plain PyTorch: the specification."""

from math import pi, sqrt

import torch
from torch import Tensor

from bevatron.kernels.shared.dtypes import wide_type


def gaussian_basis(
    distances: Tensor, mean: Tensor, std: Tensor, scale: float, epsilon: float, dtype: torch.dtype
) -> Tensor:
    """Compute ``scale N(r; mean, |std| + epsilon)``."""
    wide = wide_type(mean)
    width = std.to(wide).abs() + epsilon
    z = (distances.to(wide)[:, None] - mean.to(wide)) / width
    psi: Tensor = torch.exp(-0.5 * z.square()) * (scale / sqrt(2 * pi) / width)
    return psi.to(dtype)
