"""Smooth lDDT in plain PyTorch: the specification, in tiles of rows of atoms.

All pairs of 7,000 atoms in 48 copies take 9 GB per float32 intermediate. The reference therefore
works on one block of rows at a time and computes its gradient along with it, so the backward pass
needs one number per coordinate.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from bevatron.kernels.shared.dtypes import wide

THRESHOLDS = (0.5, 1.0, 2.0, 4.0)
"""Å."""

PAIRS_IN_A_TILE = 1 << 24
"""Pairs of atoms, over all copies, in memory at once: 64 MB in float32."""


def smooth_lddt(
    predicted: Tensor, truth: Tensor, radius: Tensor, pairs_in_a_tile: int = PAIRS_IN_A_TILE
) -> Tensor:
    """Compute the score of every copy; the tile size does not affect it."""
    each = zip(wide(predicted), wide(truth.detach()), wide(radius.detach()), strict=True)
    return torch.stack([_SmoothLDDT.apply(x, y, r, pairs_in_a_tile) for x, y, r in each])


class _SmoothLDDT(torch.autograd.Function):
    """Smooth lDDT [D] of copies [D, A, 3] of one structure."""

    @staticmethod
    def forward(
        ctx: Any, predicted: Tensor, truth: Tensor, radius: Tensor, pairs_in_a_tile: int
    ) -> Tensor:
        copies, atoms = predicted.shape[:2]
        rows = max(1, pairs_in_a_tile // max(copies * atoms, 1))
        wants_gradient = ctx.needs_input_grad[0]
        score = predicted.new_zeros(copies)
        count = predicted.new_zeros(())
        gradient = torch.zeros_like(predicted) if wants_gradient else None
        for start in range(0, atoms, rows):
            tile = slice(start, start + rows)
            weight, true_distance = _counted(truth, radius, tile)
            count += weight.sum() / 2
            distance = _distances(predicted, tile)
            error = distance - true_distance
            closeness = torch.zeros_like(error)
            slope = torch.zeros_like(error) if wants_gradient else None
            size = error.abs()
            for threshold in THRESHOLDS:
                near = torch.sigmoid(threshold - size)
                closeness += near
                if slope is not None:
                    slope += near * (1 - near)
            score += (closeness * weight).sum((-2, -1)) / 8
            if gradient is not None and slope is not None:
                # (l, m) and (m, l) both contain l, and weight counts both: no factor 1/2.
                slope *= error.sign() * weight / -4
                slope /= distance.clamp(min=torch.finfo(distance.dtype).tiny)
                for k in range(3):
                    x = predicted[..., k]
                    step = x[:, tile, None] - x[:, None, :]
                    gradient[:, tile, k] = (slope * step).sum(-1)
        count += 1e-10
        if gradient is not None:
            ctx.save_for_backward(gradient / count)
        return score / count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, score_gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * score_gradient[:, None, None], None, None, None


def _counted(truth: Tensor, radius: Tensor, tile: slice) -> tuple[Tensor, Tensor]:
    """Return how often each pair of a tile counts, as (l, m) and as (m, l), and its distance."""
    distance = _distances(truth, tile)
    here = torch.arange(len(truth), device=truth.device)
    other = here[tile, None] != here
    # Both atoms are resolved, and they differ.
    counts = other & (radius[tile, None] > 0) & (radius > 0)
    weight = (distance < radius[tile, None]).to(truth.dtype) + (distance < radius)
    return weight * counts, distance


def _distances(points: Tensor, tile: slice) -> Tensor:
    """Distances from a tile's points to all [..., A, 3], by differences to avoid cancellation."""
    squared = points.new_zeros(())
    for k in range(3):
        x = points[..., k]
        squared = squared + (x[..., tile, None] - x[..., None, :]).square_()
    return squared.sqrt_()
