"""The specification of the equivariant linear map."""

from collections.abc import Sequence
from math import sqrt

import torch
from torch import Tensor


def equivariant_linear(
    x: Tensor, weights: Sequence[Tensor], blocks: Sequence[int], scale: float
) -> Tensor:
    """Multiply the components of each degree, as rows, by its matrix."""
    dims = [2 * degree + 1 for degree in range(len(weights))]
    # One split, because the gradient of every slice would be a full-sized sum.
    parts = x.split([dim * len(w) for dim, w in zip(dims, weights, strict=True)], dim=1)
    mixed = []
    for part, weight, dim, number in zip(parts, weights, dims, blocks, strict=True):
        by_block = part.unflatten(1, (number, dim, len(weight) // number))
        rows = by_block.transpose(1, 2).flatten(2).flatten(0, 1)
        y = rows @ (weight * (scale / sqrt(len(weight))))
        mixed.append(y.reshape(x.shape[0], dim * weight.shape[1]))
    return torch.cat(mixed, dim=1)
