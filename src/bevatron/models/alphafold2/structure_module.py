"""The structure module: backbone frames, torsion angles and atoms from the representations.

Supplement of AlphaFold2, section 1.8, algorithms 20, 22 and 23; `bevatron.data.proteins` has 24.
Internal translations are in units of ``position_scale`` (10 Å); all results are in Å.
"""

from collections.abc import Iterable
from math import sqrt
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from bevatron.data.proteins.rigid_groups import atoms_of_frames, frames_of_torsions
from bevatron.kernels import invariant_point_attention, linear
from bevatron.kernels.shared.parts import split
from bevatron.maths import rigid
from bevatron.maths.rigid import Rigid
from bevatron.models.alphafold2.config import StructureConfig
from bevatron.models.alphafold2.drops import Drops
from bevatron.models.alphafold2.embedders import Projection
from bevatron.models.common.folding import LayerNorm, Linear
from bevatron.parallel.axial import all_of, own

MASKED = 1e5
"""Subtracted from the logits of masked residues."""
UNIT_HEAD_WEIGHT = 0.541324854612918
"""Softplus of it is 1."""


class Prepared(NamedTuple):
    """What all blocks of invariant point attention share, H heads.

    Attributes
    ----------
    bias : the terms of pair and mask in the logits
    weight, offset
        All projections of the single representation as one layer. Its rows are queries, keys and
        values, then the points of all three: first their x, then y, then z.
    """

    bias: Float[Tensor, "*batch H R N"]
    weight: Float[Tensor, "O C"]
    offset: Float[Tensor, " O"]


class InvariantPointAttention(nn.Module):
    """Attention over residues that sees points in each other's frames; algorithm 22.

    If processes share a sample, each attends from its own R residues.
    """

    def __init__(self, c_s: int, c_z: int, config: StructureConfig) -> None:
        super().__init__()
        H, D = config.num_heads, config.head_width
        P, V = config.num_query_points, config.num_value_points
        self.sizes = (H, D, P, V)
        self.head_weights = nn.Parameter(torch.full((H,), UNIT_HEAD_WEIGHT))
        self.q = Linear(c_s, H * D)
        self.kv = Linear(c_s, H * 2 * D)
        self.q_points = Linear(c_s, H * P * 3)
        self.kv_points = Linear(c_s, H * (P + V) * 3)
        self.bias = Linear(c_z, H)
        self.out = Linear(H * (c_z + D + V * 4), c_s, init="final")

    def prepare(self, z: Float[Tensor, "*batch R N Z"], mask: Bool[Tensor, "*batch N"]) -> Prepared:
        """Compute what is the same for all blocks: the terms of pair and mask, the joint layer."""
        both = own(mask, -1)[..., None, :, None] & mask[..., None, None, :]
        bias: Tensor = sqrt(1 / 3) * self.bias(z).movedim(-1, -3)
        layers = (self.q, self.kv, self.q_points, self.kv_points)
        weight = self._joined(layer.weight for layer in layers)
        offset = self._joined(layer.bias for layer in layers)
        return Prepared((bias - MASKED * ~both).contiguous(), weight, offset)

    def _joined(self, rows: Iterable[Tensor]) -> Tensor:
        q, kv, *points = rows
        by_axis = [each.unflatten(0, (3, self.sizes[0], -1)) for each in points]
        return torch.cat([q, kv, torch.cat(by_axis, dim=2).flatten(0, 2)])

    def forward(
        self,
        s: Float[Tensor, "*batch N C"],
        z: Float[Tensor, "*batch R N Z"],
        prepared: Prepared,
        frames: Rigid,
    ) -> Float[Tensor, "*batch N C"]:
        """Return the update of s."""
        H, D, P, V = self.sizes
        projected = linear(s, prepared.weight, prepared.offset)
        q, kv, local = projected.split([H * D, 2 * H * D, 3 * H * (2 * P + V)], dim=-1)
        k, v = split(kv.unflatten(-1, (H, 2 * D)), [D, D])
        points = _turned(frames.rotation, local.unflatten(-1, (3, H, -1)))
        points = points + frames.translation[..., None, None]
        q_points, k_points, v_points = points.split([P, P, V], dim=-1)
        scalars, points, pairs = invariant_point_attention(
            own(q, -2).unflatten(-1, (H, D)),
            *(k, v, own(q_points, -4), k_points, v_points, prepared.bias, z, self.head_weights),
        )
        points = points - own(frames.translation, -2)[..., None, None]
        points = _turned(own(frames.rotation, -3).mT, points)
        norms = torch.sqrt(points.square().sum(-3) + 1e-8)
        parts = [scalars.flatten(-2), points.flatten(-3), norms.flatten(-2), pairs.flatten(-2)]
        return all_of(self.out(torch.cat(parts, dim=-1)), -2, s.shape[-2])


def _turned(
    rotation: Float[Tensor, "*batch N 3 3"], points: Float[Tensor, "*batch N 3 H P"]
) -> Float[Tensor, "*batch N 3 H P"]:
    return (rotation[..., None, None] * points[..., None, :, :, :]).sum(-3)


class SingleTransition(nn.Module):
    """Three layers with a residual; lines 8 and 9 of algorithm 20."""

    def __init__(self, c_s: int) -> None:
        super().__init__()
        self.linear_1 = Linear(c_s, c_s, init="he")
        self.linear_2 = Linear(c_s, c_s, init="he")
        self.linear_3 = Linear(c_s, c_s, init="final")

    def forward(self, s: Float[Tensor, "*rows C"]) -> Float[Tensor, "*rows C"]:
        """Return s with its update added."""
        hidden = self.linear_2(self.linear_1(s).relu()).relu()
        update: Tensor = self.linear_3(hidden)
        return s + update


class StructureTransition(nn.Module):
    """Transitions, dropout and norm after invariant point attention."""

    def __init__(self, c_s: int, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(SingleTransition(c_s) for _ in range(num_layers))
        self.norm = LayerNorm(c_s)

    def forward(
        self, s: Float[Tensor, "*rows C"], drop: Float[Tensor, "*rows C"] | None
    ) -> Float[Tensor, "*rows C"]:
        """Return the new s."""
        for layer in self.layers:
            s = layer(s)
        normalised: Tensor = self.norm(_dropped(s, drop))
        return normalised


def moved_frames(
    frames: Float[Tensor, "*rows 7"],
    rotation: Float[Tensor, "*rows 3 3"],
    update: Float[Tensor, "*rows 6"],
) -> Float[Tensor, "*rows 7"]:
    """Move frames of known rotations by (1, b, c, d) and (x, y, z); algorithm 23."""
    quaternion, origin = frames.split([4, 3], dim=-1)
    turn, shift = update.split([3, 3], dim=-1)
    whole = F.pad(turn, (1, 0), value=1.0)
    turned = rigid.normalise_quaternion(rigid.compose_quaternions(quaternion, whole))
    shift = rigid.rotate(rotation, shift)
    return torch.cat([turned, origin + shift], dim=-1)


class AngleBlock(nn.Module):
    """A residual block of the network of torsion angles; lines 12 and 13 of algorithm 20."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear_1 = Linear(width, width, init="he")
        self.linear_2 = Linear(width, width, init="final")

    def forward(self, a: Float[Tensor, "*rows C"]) -> Float[Tensor, "*rows C"]:
        """Return a with its update added."""
        update: Tensor = self.linear_2(self.linear_1(a.relu()).relu())
        return a + update


class AngleResnet(nn.Module):
    """Seven torsion angles per residue as (sine, cosine); lines 11 to 14 of algorithm 20."""

    def __init__(self, c_s: int, width: int, num_blocks: int) -> None:
        super().__init__()
        self.linear_in = Linear(c_s, width)
        self.linear_initial = Linear(c_s, width)
        self.layers = nn.ModuleList(AngleBlock(width) for _ in range(num_blocks))
        self.linear_out = Linear(width, 14)

    def forward(
        self, s: Float[Tensor, "*blocks N C"], initial: Float[Tensor, "*batch N C"]
    ) -> tuple[Float[Tensor, "*blocks N 7 2"], Float[Tensor, "*blocks N 7 2"]]:
        """Return the raw angles, and the angles as points of the unit circle.

        ``initial`` is the same for all blocks; s may have a leading axis of blocks.
        """
        a = self.linear_in(s.relu()) + self.linear_initial(initial.relu())
        for layer in self.layers:
            a = layer(a)
        raw: Tensor = self.linear_out(a.relu()).unflatten(-1, (7, 2))
        return raw, raw / torch.sqrt(raw.square().sum(-1, keepdim=True).clamp(min=1e-8))


class StructureModule(nn.Module):
    """Frames, torsion angles and atoms of every residue; algorithm 20.

    Parameters
    ----------
    c_s, c_z : channels of the single and the pair representation
    config : sizes; all blocks share their weights
    """

    def __init__(self, c_s: int, c_z: int, config: StructureConfig) -> None:
        super().__init__()
        self.config = config
        self.norm_s = LayerNorm(c_s)
        self.norm_z = LayerNorm(c_z)
        self.linear_in = Linear(c_s, c_s)
        self.ipa = InvariantPointAttention(c_s, c_z, config)
        self.norm_ipa = LayerNorm(c_s)
        self.transition = StructureTransition(c_s, config.num_transition_layers)
        self.bb_update = Projection(c_s, 6, "final")
        self.angle_resnet = AngleResnet(c_s, config.angle_width, config.num_angle_blocks)

    def forward(
        self,
        single: Float[Tensor, "*batch N C"],
        pair: Float[Tensor, "*batch R N Z"],
        aatype: Int[Tensor, "*batch N"],
        mask: Bool[Tensor, "*batch N"],
        drops: Drops,
    ) -> dict[str, Tensor]:
        """Compute the structure after every block, the blocks as first axis.

        Returns
        -------
        dict
            ``frames`` [blocks, ..., N, 7] (unit quaternion w, x, y, z and translation),
            ``sidechain_frames`` [blocks, ..., N, 8, 4, 4], ``unnormalized_angles`` and ``angles``
            [blocks, ..., N, 7, 2] (sine, cosine), ``positions`` [blocks, ..., N, 14, 3] in Å and
            ``states`` [blocks, ..., N, C], the single representation.
        """
        initial = self.norm_s(single)
        z = self.norm_z(pair)
        s = self.linear_in(initial)
        frames = F.pad(s.new_ones(*s.shape[:-1], 1), (0, 6))
        count = self.config.num_blocks
        masks = drops.draw(s[..., None, :, :], 2 * count, self.config.dropout)
        prepared = self.ipa.prepare(z, mask)
        blocks = []
        for block in range(count):
            moved = rigid.rigid_of_quaternion(frames)
            s = s + self.ipa(s, z, prepared, moved)
            s = self.norm_ipa(_dropped(s, masks[2 * block]))
            s = self.transition(s, masks[2 * block + 1])
            frames = moved_frames(frames, moved.rotation, self.bb_update(s))
            blocks.append((frames, s))
            # Gradients through the rotations of several blocks destabilise training.
            frames = torch.cat([frames[..., :4].detach(), frames[..., 4:]], dim=-1)
        all_frames, states = (torch.stack(found) for found in zip(*blocks, strict=True))
        # No block reads another's angles, so one pass computes those of all blocks.
        raw, angles = self.angle_resnet(states, initial)
        return self._structure(aatype, all_frames, raw, angles, states)

    def _structure(
        self, aatype: Tensor, frames: Tensor, raw: Tensor, angles: Tensor, states: Tensor
    ) -> dict[str, Tensor]:
        quaternion, origin = frames.split([4, 3], dim=-1)
        frames = torch.cat([quaternion, origin * self.config.position_scale], dim=-1)
        aatype = aatype.expand(frames.shape[:-1])
        groups = frames_of_torsions(rigid.rigid_of_quaternion(frames), angles, aatype)
        return {
            "frames": frames,
            "sidechain_frames": rigid.matrix_of_rigid(groups),
            "unnormalized_angles": raw,
            "angles": angles,
            "positions": atoms_of_frames(groups, aatype),
            "states": states,
        }


def _dropped(s: Tensor, mask: Tensor | None) -> Tensor:
    return s if mask is None else s * mask
