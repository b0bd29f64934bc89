"""The type that sums are kept in."""

import torch
from torch import Tensor


def wide(tensor: Tensor) -> Tensor:
    """Return 16-bit types as float32, others as they are."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
