"""Rigid groups of residues: their frames from atoms, and atoms from torsions (algorithm 24)."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from bevatron.data.proteins.atoms14 import gather_atoms, of_residues
from bevatron.maths.rigid import (
    Rigid,
    apply,
    compose,
    compose_rotations,
    orthonormal_axes,
    rigid_of_matrix,
    rotation_about_x,
    select,
)

_EPS = 1e-8


class GroupFrames(NamedTuple):
    """Reference frames of the 8 rigid groups of residues.

    Attributes
    ----------
    frames, alternative
        [..., 8] motions; the alternative has interchangeable names exchanged. Zero rotations where
        the group does not exist.
    resolved : [..., 8], 1 where the three atoms of a group that exists are known
    """

    frames: Rigid
    alternative: Rigid
    resolved: Float[Tensor, "*residues 8"]


def group_frames(
    position: Float[Tensor, "*residues 37 3"],
    resolved: Float[Tensor, "*residues 37"],
    aatype: Int[Tensor, "*residues"],
) -> GroupFrames:
    """Compute the frames of all rigid groups from reference atoms (section 1.8.4)."""
    slots = of_residues("GROUP_ATOMS", aatype)
    flat = slots.flatten(-2)
    back, origin, in_xy = gather_atoms(position, flat).unflatten(-2, (8, 3)).unbind(-2)
    atoms_resolved = gather_atoms(resolved, flat).unflatten(-1, (8, 3)).amin(-1)
    x_axis = origin - back
    x_axis = torch.cat([-x_axis[..., :1, :], x_axis[..., 1:, :]], dim=-2)
    rotation = orthonormal_axes(x_axis, in_xy - origin, _EPS)
    ambiguous = of_residues("GROUP_AMBIGUOUS", aatype)[..., None, None]
    half_turn = torch.cat([rotation[..., :1], -rotation[..., 1:]], dim=-1)
    exchanged = torch.where(ambiguous, half_turn, rotation)
    exists = of_residues("GROUP_MASK", aatype) * atoms_resolved
    return GroupFrames(Rigid(rotation, origin), Rigid(exchanged, origin), exists)


def frames_of_torsions(
    backbone: Rigid, sin_cos: Float[Tensor, "*residues 7 2"], aatype: Int[Tensor, "*residues"]
) -> Rigid:
    """Place the 8 rigid groups of residues (algorithm 24, lines 1 to 10).

    Parameters
    ----------
    backbone : backbone frames, [...]
    sin_cos : torsions as (sine, cosine): pre-omega, phi, psi, chi 1 to 4

    Returns
    -------
    Frames, [..., 8].
    """
    table = of_residues("GROUP_FRAME", aatype).to(sin_cos.dtype)
    straight = rigid_of_matrix(table)
    none = F.pad(sin_cos.new_ones(1), (1, 0))
    turns = torch.cat([none.expand(*sin_cos.shape[:-2], 1, 2), sin_cos], dim=-2)
    rotation = compose_rotations(straight.rotation, rotation_about_x(turns))
    local = Rigid(rotation, straight.translation)
    chi = select(local, (..., 4))
    chain = [chi]
    for group in range(5, 8):
        chi = compose(chi, select(local, (..., group)))
        chain.append(chi)
    groups = Rigid(
        torch.cat(
            [local.rotation[..., :4, :, :], torch.stack([x.rotation for x in chain], -3)], -3
        ),
        torch.cat(
            [local.translation[..., :4, :], torch.stack([x.translation for x in chain], -2)], -2
        ),
    )
    return compose(select(backbone, (..., None)), groups)


def atoms_of_frames(
    groups: Rigid, aatype: Int[Tensor, "*residues"]
) -> Float[Tensor, "*residues 14 3"]:
    """Put the literature atoms of each residue into its rigid groups (algorithm 24, line 11).

    Zero where a residue has no atom.
    """
    # A sum, not an index: the gradient of an index is added up in any order on a GPU.
    member = of_residues("ATOM14_MEMBER", aatype).to(groups.translation.dtype)
    origin = (member[..., None] * groups.translation[..., None, :, :]).sum(-2)
    rotation = (member[..., None, None] * groups.rotation[..., None, :, :, :]).sum(-3)
    frames = Rigid(rotation, origin)
    atoms = apply(frames, of_residues("ATOM14_POSITION", aatype).to(groups.translation.dtype))
    return atoms * of_residues("ATOM14_MASK", aatype)[..., None]
