"""The dropped residual update in plain PyTorch: the specification."""

import torch
from torch import Tensor


def add_dropped(x: Tensor, update: Tensor, mask: Tensor | None, columns: bool) -> Tensor:
    """Compute ``x + mask * update``; columns share the mask, or rows."""
    if mask is None:
        return x + update
    return torch.addcmul(x, update, mask.unsqueeze(-2 if columns else -3))
