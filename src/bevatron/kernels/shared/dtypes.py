"""The type in which sums accumulate."""

import torch
from torch import Tensor


def wide(tensor: Tensor) -> Tensor:
    """Return 16-bit types as float32, others as they are."""
    return tensor.to(wide_type(tensor))


def wide_type(tensor: Tensor) -> torch.dtype:
    """Return the type in which sums over a tensor accumulate."""
    return torch.promote_types(tensor.dtype, torch.float32)
