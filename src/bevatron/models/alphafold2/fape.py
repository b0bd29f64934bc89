"""Frame-aligned point error of backbone and side chains (algorithm 28, sections 1.9.2, 1.9.3).

Where processes share a sample, each looks from its own R of the F frames.
"""

from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from bevatron.maths.rigid import Rigid, rigid_of_matrix, rigid_of_quaternion
from bevatron.models.alphafold2.naming import Renamed
from bevatron.parallel.axial import all_together, own

CLAMP = 10.0
"""Largest error that counts, Å."""
UNIT = 10.0
"""Error that counts as 1, Å."""
_EPS = 1e-4


def local_errors(
    frames: Rigid, reference_frames: Rigid, points: Tensor, reference_points: Tensor
) -> Float[Tensor, "*batch R P"]:
    """Error of each point seen from each own frame, Å.

    One coordinate at a time: nothing of frames x points x 3 is kept.
    """
    squared = torch.full((), _EPS, dtype=points.dtype, device=points.device)
    frames, reference_frames = (
        Rigid(own(x.rotation, -3), own(x.translation, -2)) for x in (frames, reference_frames)
    )
    for axis in range(3):
        gap = _coordinate(frames, points, axis) - _coordinate(
            reference_frames, reference_points, axis
        )
        squared = squared + gap.square()
    return squared.sqrt()


def _coordinate(frames: Rigid, points: Tensor, axis: int) -> Tensor:
    """One coordinate of R^T (x - t) of all points in all frames."""
    found = None
    for k in range(3):
        shifted = points[..., None, :, k] - frames.translation[..., :, None, k]
        part = frames.rotation[..., :, None, k, axis] * shifted
        found = part if found is None else found + part
    assert found is not None
    return found


def _masked_mean(
    error: Tensor, frames_mask: Tensor, points_mask: Tensor, clamp: float | None = CLAMP
) -> Tensor:
    r"""Mean error of points seen from frames that the masks keep, in units of 10 Å.

    .. math::
        \frac{1}{10 F P} \sum_{ij} \min\Big(\sqrt{\|T_i^{-1} x_j - T_i^{*-1} x^*_j\|^2 + 10^{-4}},
        \mathrm{clamp}\Big)
    """
    if clamp is not None:
        error = error.clamp(max=clamp)
    weighted = error / UNIT * own(frames_mask, -1)[..., :, None] * points_mask[..., None, :]
    by_point = weighted.sum(-1) / (_EPS + frames_mask.sum(-1, keepdim=True))
    return all_together(by_point.sum(-1)) / (_EPS + points_mask.sum(-1))


def backbone_fape(
    frames: Float[Tensor, "K *batch N 7"], batch: Mapping[str, Tensor]
) -> Float[Tensor, "*batch"]:
    """FAPE of CA in the backbone frames of all blocks, averaged; section 1.9.2.

    Parameters
    ----------
    frames : backbone frames of all blocks: unit quaternion and translation in Å
    batch
        ``backbone_rigid_tensor``, ``backbone_rigid_mask`` and ``use_clamped_fape``: per sample, 1
        clamps errors, 0 does not; without it all are clamped.
    """
    predicted = rigid_of_quaternion(frames)
    reference = rigid_of_matrix(batch["backbone_rigid_tensor"])
    mask = batch["backbone_rigid_mask"]
    error = local_errors(predicted, reference, predicted.translation, reference.translation)
    clamped = _masked_mean(error, mask, mask).mean(0)
    if "use_clamped_fape" not in batch:
        return clamped
    share = batch["use_clamped_fape"]
    return clamped * share + _masked_mean(error, mask, mask, None).mean(0) * (1 - share)


def sidechain_fape(
    frames: Float[Tensor, "*batch N 8 4 4"],
    position: Float[Tensor, "*batch N 14 3"],
    reference: Renamed,
    batch: Mapping[str, Tensor],
) -> Float[Tensor, "*batch"]:
    """FAPE of all atoms in all rigid groups of the last block, clamped; section 1.9.3.

    Parameters
    ----------
    frames, position : rigid groups and atoms that the last block predicts, Å
    reference : atoms under the names that `naming` chose; frames are renamed alike
    batch : ``rigidgroups_gt_frames``, ``rigidgroups_alt_gt_frames``, ``rigidgroups_gt_exists``
    """
    swapped = reference.swapped[..., None, None, None] > 0
    true_frames = torch.where(
        swapped, batch["rigidgroups_alt_gt_frames"], batch["rigidgroups_gt_frames"]
    )
    error = local_errors(
        rigid_of_matrix(frames.flatten(-4, -3)),
        rigid_of_matrix(true_frames.flatten(-4, -3)),
        position.flatten(-3, -2),
        reference.position.flatten(-3, -2),
    )
    exists = batch["rigidgroups_gt_exists"].flatten(-2)
    return _masked_mean(error, exists, reference.resolved.flatten(-2))
