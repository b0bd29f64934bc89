"""The gated unit in plain PyTorch: the specification."""

import torch
from torch import Tensor


def swiglu(gate: Tensor, value: Tensor | None) -> Tensor:
    """Compute ``silu(gate) * value``; 16-bit types in float32, rounded once."""
    if value is None:
        gate, value = gate.chunk(2, -1)
    wide = torch.promote_types(gate.dtype, torch.float32)
    g, v = gate.to(wide), value.to(wide)
    return (g * g.sigmoid() * v).to(gate.dtype)
