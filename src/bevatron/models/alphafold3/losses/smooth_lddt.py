"""Smooth lDDT of the denoised copies, with the pairs of atoms that count."""

from math import prod

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from bevatron import kernels

THRESHOLDS = (0.5, 1.0, 2.0, 4.0)
"""Å."""

RADIUS_NUCLEIC = 30.0
RADIUS_OTHER = 15.0
"""Å; pairs further apart in the truth do not count. The row's atom decides."""


def smooth_lddt(
    predicted: Float[Tensor, "*batch D A 3"],
    truth: Float[Tensor, "*batch A 3"],
    resolved: Bool[Tensor, "*batch A"],
    is_nucleic: Bool[Tensor, "*batch A"],
) -> Float[Tensor, "*batch D"]:
    r"""Compute the smooth lDDT of every copy.

    Over resolved pairs l, m closer in the truth than 30 Å if l is nucleic, 15 Å otherwise:
    Algorithm 27 of the AlphaFold3 supplement; its loss is 1 minus the mean over copies. No tensor
    holds all pairs: see `bevatron.kernels.smooth_lddt`.

    Parameters
    ----------
    predicted : D denoised copies, Å
    truth : Å; any finite value where not resolved
    resolved, is_nucleic : one for every atom; padding is not resolved
    """
    dtype = torch.promote_types(predicted.dtype, torch.float32)
    copies, atoms = predicted.shape[-3:-1]
    radius = torch.where(is_nucleic, RADIUS_NUCLEIC, RADIUS_OTHER).to(dtype)
    score: Tensor = kernels.smooth_lddt(
        predicted.to(dtype).reshape(prod(predicted.shape[:-3]), copies, atoms, 3),
        truth.to(dtype).reshape(-1, atoms, 3),
        torch.where(resolved, radius, 0.0).reshape(-1, atoms),
    )
    return score.reshape(predicted.shape[:-2])
