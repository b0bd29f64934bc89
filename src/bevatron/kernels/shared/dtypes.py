"""The type that sums are accumulated in: float64 for float64, float32 for all narrower types."""

import torch
from torch import Tensor


def wide(tensor: Tensor) -> Tensor:
    """Return 16-bit types as float32, others as they are."""
    return tensor.to(wide_type(tensor))


def wide_type(tensor: Tensor) -> torch.dtype:
    """Return the type that sums over a tensor are accumulated in."""
    return torch.promote_types(tensor.dtype, torch.float32)
