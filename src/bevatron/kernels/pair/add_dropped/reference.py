"""The dropped residual update in plain PyTorch: the specification."""

import torch
import torch.nn.functional as F
from torch import Tensor


def add_dropped(
    x: Tensor,
    update: Tensor,
    mask: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    columns: bool = False,
) -> Tensor:
    """Compute ``x + mask * (weight update + bias)``; columns share the mask, or rows."""
    if weight is not None:
        update = linear(update, weight, bias)
    if mask is None:
        return x + update
    return torch.addcmul(x, update, mask.unsqueeze(-2 if columns else -3))


def linear(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Apply a linear layer in the type of the rows."""
    return F.linear(rows, weight.to(rows.dtype), None if bias is None else bias.to(rows.dtype))
