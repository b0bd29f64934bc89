"""The type that sums are kept in."""

import torch
from torch import Tensor


def wide(tensor: Tensor) -> Tensor:
    """Return 16-bit types as float32, others as they are."""
    return tensor.to(wide_type(tensor))


def wide_type(tensor: Tensor) -> torch.dtype:
    """Return the type that sums over a tensor are kept in."""
    return torch.promote_types(tensor.dtype, torch.float32)
