"""Pair-weighted averaging in plain PyTorch: the specification."""

import torch
from torch import Tensor


def pair_weighted_averaging(v: Tensor, gate: Tensor, weights: Tensor) -> Tensor:
    """Compute ``sigmoid(gate) * sum_j weights v``; of float64 the result is exact."""
    heads = v.unflatten(-1, (weights.shape[-3], -1))
    average = torch.einsum("...hij,...sjhd->...sihd", weights, heads)
    return gate.sigmoid() * average.flatten(-2).to(v.dtype)
