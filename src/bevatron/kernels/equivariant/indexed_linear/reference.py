"""The specification of the indexed linear map: one matmul per element."""

import torch
from torch import Tensor

from bevatron.kernels.equivariant.element_order import ElementOrder


def indexed_linear(x: Tensor, weights: Tensor, order: ElementOrder, scale: float) -> Tensor:
    """Multiply the atoms of each element by its matrix."""
    x = x * scale
    parts = x.index_select(0, order.order).split(order.counts)
    present = [(part, w) for part, w in zip(parts, weights.unbind(0), strict=True) if len(part)]
    if len(present) == 1:
        return _mix(x, present[0][1])
    if not present:
        return x.new_zeros(0, weights.shape[2], x.shape[2])
    mixed = torch.cat([_mix(part, w) for part, w in present])
    return mixed.index_select(0, order.inverse)


def _mix(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply the channels by a matrix, the same for every component."""
    if x.shape[-1] == 1:
        return (x.squeeze(-1) @ weight).unsqueeze(-1)
    return (x.transpose(1, 2) @ weight).transpose(1, 2)
