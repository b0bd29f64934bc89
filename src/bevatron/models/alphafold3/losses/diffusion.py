"""Losses of the denoised copies: weighted squared error after superposition, bonded distances."""

from collections.abc import Mapping

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from bevatron.maths.superposition import superposed
from bevatron.models.alphafold3.losses.atoms import gather_atoms


def atom_weights(
    molecule_type: Int[Tensor, "*batch N"],
    atom_to_token: Int[Tensor, "*batch A"],
    resolved: Bool[Tensor, "*batch A"],
    dtype: torch.dtype,
) -> Float[Tensor, "*batch A"]:
    r"""Weights of atoms: 1 + 5 RNA + 5 DNA + 10 ligand, 0 where not resolved (equation 4)."""
    kind = molecule_type.take_along_dim(atom_to_token, -1)
    nucleic, ligand = (kind == 1) | (kind == 2), kind == 3
    return (1 + 5 * nucleic.to(dtype) + 10 * ligand.to(dtype)) * resolved


def aligned_squared_error(
    predicted: Float[Tensor, "*batch D A 3"],
    truth: Float[Tensor, "*batch A 3"],
    resolved: Bool[Tensor, "*batch A"],
    weight: Float[Tensor, "*batch A"],
) -> Float[Tensor, "*batch D"]:
    r"""Compute the weighted mean squared error of every copy to the superposed truth, Å^2.

    :math:`\frac13 \sum_l w_l |x_l - x_l^{aligned}|^2 / (10^{-6} + n_{resolved})`: equations 2 and
    3 of the AlphaFold3 supplement. The divisor is the number of resolved atoms, not the sum of
    weights. The superposition has no gradient.
    """
    target = superposed(truth[..., None, :, :], predicted.detach(), weight[..., None, :])
    squared = (predicted - target).square().sum(-1)
    total = (squared * weight[..., None, :]).sum(-1)
    return total / (3 * (resolved.sum(-1, keepdim=True).to(total.dtype) + 1e-6))


def bond_error(
    predicted: Float[Tensor, "*batch D A 3"],
    truth: Float[Tensor, "*batch A 3"],
    resolved: Bool[Tensor, "*batch A"],
    bonds: Int[Tensor, "*batch P 2"],
) -> Float[Tensor, "*batch D"]:
    r"""Compute the mean squared error of bonds' lengths in every copy, Å^2; 0 without bonds.

    :math:`\frac1{|B|} \sum_{(l, m) \in B} (|x_l - x_m| - |x_l^{true} - x_m^{true}|)^2` over the
    bonds of a polymer to a ligand of which both atoms are resolved: equation 5 of the AlphaFold3
    supplement. A bond is listed once; a row with a negative number is padding.
    """
    first, second = bonds.clamp(min=0).unbind(-1)
    counts = (bonds >= 0).all(-1)
    counts &= resolved.take_along_dim(first, -1) & resolved.take_along_dim(second, -1)
    true_length = _lengths(truth[..., None, :, :], first, second, counts)
    error = (_lengths(predicted, first, second, counts) - true_length).square()
    return (error * counts[..., None, :]).sum(-1) / counts.sum(-1, keepdim=True).clamp(min=1)


def _lengths(points: Tensor, first: Tensor, second: Tensor, counts: Tensor) -> Tensor:
    step = gather_atoms(points, first) - gather_atoms(points, second)
    # The root has no gradient at zero, so a bond that does not count, or an atom bonded to itself
    # in padding, must not produce one.
    squared = step.square().sum(-1)
    return torch.where(counts[..., None, :] & (squared > 0), squared, 1.0).sqrt()


def is_nucleic(batch: Mapping[str, Tensor]) -> Bool[Tensor, "*batch A"]:
    """Whether an atom belongs to RNA or DNA."""
    kind = batch["molecule_type"].take_along_dim(batch["atom_to_token"], -1)
    return (kind == 1) | (kind == 2)
