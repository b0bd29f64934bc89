"""Distances of points as one-hot bins."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from bevatron.parallel.axial import own


def distance_bins(
    positions: Float[Tensor, "*batch N 3"],
    first: float,
    last: float,
    count: int,
    farthest: float = 1e4,
) -> Bool[Tensor, "*batch R N count"]:
    """Return the bin of the distance of each pair of points, for own rows of pairs.

    Bins begin at ``count`` equally spaced distances from ``first`` to ``last``; the last one ends
    at ``farthest``. A distance below ``first``, or on an edge, is in no bin: AlphaFold2, algorithm
    32 and section 1.2.9; AlphaFold3, table 5, compares squares, and strictly on both sides.

    Parameters
    ----------
    positions, first, last, farthest : Å
    count : bins
    """
    between = own(positions, -2)[..., :, None, :] - positions[..., None, :, :]
    squares = between.square().sum(-1, keepdim=True)
    edges = torch.linspace(first, last, count, dtype=positions.dtype, device=positions.device)
    lower = edges.square()
    upper = torch.cat([lower[1:], lower.new_full((1,), farthest**2)])
    return (squares > lower) & (squares < upper)
