"""Layout of weights and rows of a gated unit: all gates before all values, or by blocks."""

import torch
from torch import Tensor


def gate_and_value(both: Tensor) -> tuple[Tensor, Tensor]:
    """Return views of the gates and of the values that follow them."""
    width = both.shape[-1] // 2
    return both[..., :width], both[..., width:]


def interleaved(gate: Tensor, up: Tensor, block: int) -> Tensor:
    """Place the gates of every ``block`` hidden channels before their values: [2 H, C]."""
    blocks = (up.shape[0] // block, block, up.shape[1])
    return torch.cat([gate.view(blocks), up.view(blocks)], dim=1).view(-1, up.shape[1])
