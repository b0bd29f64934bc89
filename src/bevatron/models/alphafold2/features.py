"""Features that the model computes from a sample on its device.

Supplement of AlphaFold2, section 1.2.9 and table 1.
"""

from math import sqrt

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from bevatron.maths import rigid
from bevatron.models.common.folding import distance_bins
from bevatron.parallel.axial import own

RESIDUE_CLASSES = 22
"""Types 0 to 20 and the gap."""
MSA_CLASSES = 23
"""The same and the mask."""
FARTHEST = sqrt(1e5)
"""End of the last bin of template distances, Å."""
N, CA, C = 0, 1, 2
"""Slots of atom37."""


def template_pair_features(
    aatype: Int[Tensor, "*templates N"],
    pseudo_beta: Float[Tensor, "*templates N 3"],
    pseudo_beta_mask: Float[Tensor, "*templates N"],
    positions: Float[Tensor, "*templates N 37 3"],
    mask: Float[Tensor, "*templates N 37"],
    *,
    unit_vectors: bool,
) -> Float[Tensor, "*templates R N 88"]:
    """Return distances, residue types and directions of templates: own rows of their pairs.

    Channels: 39 bins of the distance of CB atoms (of missing ones too, at the origin, as in the
    published code), whether both have one, one-hot types of j (22) and of i (22), the unit vector
    from i to j in the frame of i (3), whether both have a backbone; all 0 where one has none.

    Parameters
    ----------
    positions, mask : atoms in the 37 slots
    unit_vectors : whether they are computed; otherwise they are zero
    """
    backbone = mask[..., N] * mask[..., CA] * mask[..., C]
    both = own(backbone, -1)[..., :, None] * backbone[..., None, :]
    has_beta = own(pseudo_beta_mask, -1)[..., :, None] * pseudo_beta_mask[..., None, :]
    types = F.one_hot(aatype, RESIDUE_CLASSES).to(mask.dtype)
    shape = (*both.shape, RESIDUE_CLASSES)
    if unit_vectors:
        directions = template_unit_vectors(positions)
    else:
        directions = both.new_zeros(*both.shape, 3)
    parts = [
        distance_bins(pseudo_beta, 3.25, 50.75, 39, FARTHEST).to(mask.dtype),
        has_beta[..., None],
        types[..., None, :, :].expand(shape),
        own(types, -2)[..., :, None, :].expand(shape),
        directions,
        both[..., None],
    ]
    return torch.cat(parts, dim=-1) * both[..., None]


def template_unit_vectors(
    positions: Float[Tensor, "*templates N 37 3"],
) -> Float[Tensor, "*templates R N 3"]:
    """Return unit vectors to the CA of j in the backbone frame of i, of own rows of pairs."""
    origin = positions[..., CA, :]
    a, b, c = (own(positions[..., atom, :], -2) for atom in (CA, C, N))
    frames = rigid.frame_of_points(a, b, c)
    local = rigid.apply_inverse(rigid.select(frames, (..., None)), origin[..., None, :, :])
    return local * torch.rsqrt(local.square().sum(-1, keepdim=True) + 1e-8)


def template_angle_features(
    aatype: Int[Tensor, "*templates N"],
    angles: Float[Tensor, "*templates N 7 2"],
    alternative: Float[Tensor, "*templates N 7 2"],
    mask: Float[Tensor, "*templates N 7"],
) -> Float[Tensor, "*templates N 57"]:
    """Join one-hot types (22), torsions (14), the same after renaming (14), which exist (7)."""
    types = F.one_hot(aatype, RESIDUE_CLASSES).to(mask.dtype)
    return torch.cat([types, angles.flatten(-2), alternative.flatten(-2), mask], dim=-1)


def extra_msa_features(
    msa: Int[Tensor, "*batch S N"],
    has_deletion: Float[Tensor, "*batch S N"],
    deletion_value: Float[Tensor, "*batch S N"],
) -> Float[Tensor, "*batch S N 25"]:
    """Join one-hot rows of the extra alignment (23) and their deletions (2)."""
    classes = F.one_hot(msa, MSA_CLASSES).to(deletion_value.dtype)
    return torch.cat([classes, torch.stack([has_deletion, deletion_value], dim=-1)], dim=-1)
