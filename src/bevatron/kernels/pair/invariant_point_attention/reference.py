"""Invariant point attention in plain PyTorch: the specification."""

from math import sqrt

import torch
import torch.nn.functional as F
from torch import Tensor

from bevatron.kernels.shared.dtypes import wide


def invariant_point_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_points: Tensor,
    k_points: Tensor,
    v_points: Tensor,
    bias: Tensor,
    z: Tensor,
    head_weights: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sum values, points and pairs.

    Of the squared distance only 2 q k - k^2 matters to the softmax: it becomes extra channels of q
    and k, so that no tensor of all pairs of points is allocated.
    """
    dtype, D, P, V = q.dtype, q.shape[-1], q_points.shape[-1], v_points.shape[-1]
    q, k, v, bias, z = (wide(each) for each in (q, k, v, bias, z))
    # Products of points lose digits with their distance from the origin, which is anywhere.
    centre = wide(k_points).mean((-4, -2, -1), keepdim=True).detach()
    gamma = F.softplus(wide(head_weights))[:, None, None] * sqrt(2 / (27 * P))
    from_q, from_k = _by_head(wide(q_points) - centre), _by_head(wide(k_points) - centre)
    lengths = from_k.square().sum(-1, keepdim=True)
    half = (-0.5 * gamma).expand(*from_q.shape[:-1], 1)
    q = torch.cat([q.transpose(-2, -3) * sqrt(1 / (3 * D)), gamma * from_q, half], dim=-1)
    k = torch.cat([k.transpose(-2, -3), from_k, lengths], dim=-1)
    weights = (q @ k.mT + bias).softmax(-1)
    values = torch.cat([v.transpose(-2, -3), _by_head(wide(v_points) - centre)], dim=-1)
    scalars, points = (weights @ values).transpose(-2, -3).split([D, 3 * V], dim=-1)
    points = points.unflatten(-1, (3, V)).transpose(-2, -3) + centre
    pairs = weights.transpose(-2, -3) @ z
    return scalars.to(dtype), points.to(dtype), pairs.to(dtype)


def _by_head(points: Tensor) -> Tensor:
    """[..., N, 3, H, P] to [..., H, N, 3 P]."""
    return points.movedim(-2, -4).flatten(-2)
