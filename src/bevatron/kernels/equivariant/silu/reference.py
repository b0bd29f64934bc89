"""The specification of silu."""

import torch
from torch import Tensor


def silu(x: Tensor) -> Tensor:
    """Compute x sigma(x)."""
    return torch.nn.functional.silu(x)
