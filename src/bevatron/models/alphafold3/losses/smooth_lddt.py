"""Smooth lDDT of many noisy copies of one structure, computed in tiles of atom pairs.

All pairs of 7,000 atoms in 48 copies are 9 GB in float32 for every intermediate. Here one block of
rows is looked at at a time, and its gradient is computed with it: what backward needs is one number
per coordinate.
"""

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.autograd.function import once_differentiable

THRESHOLDS = (0.5, 1.0, 2.0, 4.0)
"""Å."""

RADIUS_NUCLEIC = 30.0
RADIUS_OTHER = 15.0
"""Å; pairs further apart in the truth do not count. The row's atom decides."""

PAIRS_IN_A_TILE = 1 << 24
"""Pairs of atoms, over all copies, that are in memory at a time: 64 MB in float32."""


def smooth_lddt(
    predicted: Float[Tensor, "*batch D A 3"],
    truth: Float[Tensor, "*batch A 3"],
    resolved: Bool[Tensor, "*batch A"],
    is_nucleic: Bool[Tensor, "*batch A"],
    pairs_in_a_tile: int = PAIRS_IN_A_TILE,
) -> Float[Tensor, "*batch D"]:
    r"""Compute the smooth lDDT of every copy.

    :math:`\sum_{lm} c_{lm} \frac14 \sum_t \sigma(t - |d_{lm} - d_{lm}^{true}|) /
    (10^{-10} + \sum_{lm} c_{lm})` over resolved pairs l, m (l not m) with
    :math:`d_{lm}^{true}` below 30 Å if l is nucleic, 15 Å otherwise, and t of 0.5, 1, 2, 4 Å:
    Algorithm 27 of the AlphaFold3 supplement; its loss is 1 minus the mean over copies.

    Parameters
    ----------
    predicted
        D denoised copies, Å.
    truth
        Å; any finite value where not resolved.
    resolved, is_nucleic
        Of every atom; padding is not resolved.
    pairs_in_a_tile
        How many pairs are in memory at a time; the result does not depend on it.
    """
    dtype = torch.promote_types(predicted.dtype, torch.float32)
    shape = predicted.shape[:-2]
    flat = predicted.to(dtype).flatten(0, -4) if predicted.ndim > 3 else predicted.to(dtype)[None]
    radius = torch.where(is_nucleic, RADIUS_NUCLEIC, RADIUS_OTHER).to(dtype)
    radius = torch.where(resolved, radius, 0.0).reshape(flat.shape[0], -1)
    each = zip(flat, truth.to(dtype).reshape(-1, *truth.shape[-2:]), radius, strict=True)
    scores = [_SmoothLDDT.apply(x, true, r, pairs_in_a_tile) for x, true, r in each]
    return torch.stack(scores).reshape(shape)


class _SmoothLDDT(torch.autograd.Function):
    """Smooth lDDT [D] of copies [D, A, 3]; ``radius`` [A] is 0 of atoms that are not resolved."""

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
                # Both (l, m) and (m, l) hold l: weight has them both, 1/2 is not applied.
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
    # Two resolved atoms, and not one with itself.
    counts = other & (radius[tile, None] > 0) & (radius > 0)
    weight = (distance < radius[tile, None]).to(truth.dtype) + (distance < radius)
    return weight * counts, distance


def _distances(points: Tensor, tile: slice) -> Tensor:
    """Distances of the points [..., A, 3] of a tile to all: differences first, so none cancels."""
    squared = points.new_zeros(())
    for k in range(3):
        x = points[..., k]
        squared = squared + (x[..., tile, None] - x[..., None, :]).square_()
    return squared.sqrt_()
