"""The loss of AlphaFold2: what each prediction is compared with, and the weights of the terms.

Supplement, section 1.9. Every function returns one number per sample, a mean within the sample;
the loss of a step is their mean over samples, so ranks add up sums and numbers of samples. Where
processes share a sample, logits of pairs are own rows R, and sums over pairs are added up.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from bevatron.data.proteins.atoms14 import of_residues
from bevatron.data.proteins.constants import CA
from bevatron.errors import ConfigError
from bevatron.maths.rigid import apply_inverse, rigid_of_matrix, rigid_of_quaternion, select
from bevatron.models.alphafold2.fape import backbone_fape, sidechain_fape
from bevatron.models.alphafold2.naming import renamed_reference
from bevatron.models.alphafold2.violation import violation_loss
from bevatron.models.common.folding.metrics import DISTOGRAM_EDGES
from bevatron.models.common.hyper_parameters import check_ranges
from bevatron.parallel.axial import all_together, own

_EPS = 1e-8
ERROR_EDGES = (0.0, 31.0, 63)
"""First, last and number of the edges between the 64 bins of the aligned error, Å."""
BEST_RESOLUTION, WORST_RESOLUTION = 0.1, 3.0
"""Å, of the structures that confidence is learnt from."""


@dataclass(frozen=True)
class LossWeights:
    """Weights of the terms; the defaults are those of initial training.

    A violation of weight 0 is not computed: it is the only term without a head of its own and takes
    the most memory.

    Attributes
    ----------
    fape : Frame-aligned point errors of backbone and side chains (algorithm 28)
    supervised_chi : torsion angles (algorithm 27)
    distogram : cross entropy of binned distances (section 1.9.8)
    masked_msa : cross entropy of masked residues of the alignment (section 1.9.9)
    plddt : cross entropy of binned lDDT of CA (section 1.9.6)
    experimentally_resolved : which atoms are resolved (section 1.9.10)
    violation : bonds, angles and clashes (section 1.9.11)
    tm : cross entropy of the binned aligned error (section 1.9.7)

    Raises
    ------
    ConfigError
        For negative weights, or none above zero.
    """

    fape: float = 1.0
    supervised_chi: float = 1.0
    distogram: float = 0.3
    masked_msa: float = 2.0
    plddt: float = 0.01
    experimentally_resolved: float = 0.0
    violation: float = 0.0
    tm: float = 0.0

    def __post_init__(self) -> None:
        check_ranges(self, [(name, 0, math.inf) for name in vars(self)])
        if not any(vars(self).values()):
            raise ConfigError("fape: all weights are 0, nothing would be learnt")


FINE_TUNING_WEIGHTS = LossWeights(experimentally_resolved=0.01, violation=1.0)
"""Weights of fine-tuning; models with a head for the aligned error add ``tm=0.1``."""


def loss_terms(
    outputs: Mapping[str, Tensor], batch: Mapping[str, Tensor], weights: LossWeights
) -> dict[str, Float[Tensor, "*batch"]]:
    r"""Compute the weighted terms of each sample, :math:`\sqrt{\min(L, N)}\, w\, \mathcal{L}`.

    L is the length of the chain, N that of the crop (section 1.9). Their sum over terms, averaged
    over samples, is the loss.

    Parameters
    ----------
    outputs, batch
        As for `unweighted_losses`; ``seq_length`` [...] is that of the chain, before or after the
        crop.
    """
    terms = unweighted_losses(outputs, batch, with_violation=weights.violation != 0)
    length = batch["seq_length"].clamp(max=batch["aatype"].shape[-1])
    scale = length.to(terms["fape"].dtype).sqrt()
    return {name: getattr(weights, name) * scale * term for name, term in terms.items()}


def unweighted_losses(
    outputs: Mapping[str, Tensor], batch: Mapping[str, Tensor], with_violation: bool = True
) -> dict[str, Float[Tensor, "*batch"]]:
    """Compute all losses of each sample by name; that of the aligned error if it is predicted.

    Parameters
    ----------
    outputs
        Those of the structure module, block first: ``frames`` [K, ..., N, 7], ``sidechain_frames``
        [K, ..., N, 8, 4, 4], ``positions`` [K, ..., N, 14, 3], ``angles`` and
        ``unnormalized_angles`` [K, ..., N, 7, 2]; ``final_atom_positions`` [..., N, 37, 3]; the
        logits of the heads.
    batch : reference and masks under the names of OpenFold's features, without the axis of cycles
    """
    last = outputs["positions"][-1]
    reference = renamed_reference(last, batch)
    side_chain = sidechain_fape(outputs["sidechain_frames"][-1], last, reference, batch)
    judged = well_resolved(batch["resolution"])
    terms = {
        "fape": 0.5 * backbone_fape(outputs["frames"], batch) + 0.5 * side_chain,
        "supervised_chi": supervised_chi_loss(
            outputs["angles"], outputs["unnormalized_angles"], batch
        ),
        "distogram": distogram_loss(
            outputs["distogram_logits"], batch["pseudo_beta"], batch["pseudo_beta_mask"]
        ),
        "masked_msa": masked_msa_loss(
            outputs["masked_msa_logits"], batch["true_msa"], batch["bert_mask"]
        ),
        "plddt": judged
        * plddt_loss(
            outputs["lddt_logits"],
            outputs["final_atom_positions"][..., CA, :],
            batch["all_atom_positions"][..., CA, :],
            batch["all_atom_mask"][..., CA],
        ),
        "experimentally_resolved": judged
        * experimentally_resolved_loss(
            outputs["experimentally_resolved_logits"],
            batch["all_atom_mask"],
            batch["atom37_atom_exists"],
        ),
    }
    if with_violation:
        terms["violation"] = violation_loss(last, batch)
    if "tm_logits" in outputs:
        terms["tm"] = judged * tm_loss(outputs["tm_logits"], outputs["frames"][-1], batch)
    return terms


def well_resolved(resolution: Float[Tensor, "*batch"]) -> Bool[Tensor, "*batch"]:
    """Whether a structure is accurate enough to judge confidence by; an unknown one is not."""
    return (resolution >= BEST_RESOLUTION) & (resolution <= WORST_RESOLUTION)


def supervised_chi_loss(
    angles: Float[Tensor, "K *batch N 7 2"],
    unnormalized: Float[Tensor, "K *batch N 7 2"],
    batch: Mapping[str, Tensor],
) -> Float[Tensor, "*batch"]:
    r"""Error of the side-chain torsions of all blocks and of the lengths of all (algorithm 27).

    .. math::
        \tfrac12 \langle \min(\|a - a^*\|^2, \|a - a^{alt}\|^2) \rangle
        + 0.01 \langle |\,\|\tilde a\| - 1| \rangle

    Parameters
    ----------
    batch : ``chi_angles_sin_cos``, ``chi_mask``, ``aatype``, ``seq_mask``
    """
    true, chi = batch["chi_angles_sin_cos"], angles[..., 3:, :]
    turn = 1 - 2 * of_residues("CHI_PI_PERIODIC", batch["aatype"]).to(true.dtype)
    error, turned = ((target - chi).square().sum(-1) for target in (true, true * turn[..., None]))
    length = torch.sqrt(unnormalized.square().sum(-1) + _EPS)
    norm = _block_mean((length - 1).abs(), batch["seq_mask"][..., None].expand(*length.shape[1:]))
    return 0.5 * _block_mean(torch.minimum(error, turned), batch["chi_mask"]) + 0.01 * norm


def _block_mean(
    values: Float[Tensor, "K *batch N A"], mask: Float[Tensor, "*batch N A"]
) -> Float[Tensor, "*batch"]:
    """Mean over blocks, residues and angles that the mask keeps."""
    count = len(values) * mask.sum((-1, -2))
    return (values * mask).sum((0, -1, -2)) / (1e-4 + count)


def distogram_loss(
    logits: Float[Tensor, "*batch R N K"],
    position: Float[Tensor, "*batch N 3"],
    mask: Float[Tensor, "*batch N"],
) -> Float[Tensor, "*batch"]:
    """Cross-entropy of the distances of pseudo-beta atoms, in 64 bins; section 1.9.8."""
    gap = own(position, -2)[..., :, None, :] - position[..., None, :, :]
    bins = _bin(gap.square().sum(-1), DISTOGRAM_EDGES)
    return _pair_mean(_cross_entropy(logits, bins), mask)


def tm_loss(
    logits: Float[Tensor, "*batch R N K"],
    frames: Float[Tensor, "*batch N 7"],
    batch: Mapping[str, Tensor],
) -> Float[Tensor, "*batch"]:
    """Cross-entropy of the aligned error, 64 bins from 0 to 31 Å; section 1.9.7.

    Parameters
    ----------
    frames : backbone frames of the last block
    batch : ``backbone_rigid_tensor`` and ``backbone_rigid_mask``
    """
    local = []
    true = batch["backbone_rigid_tensor"]
    for rigid_of, given, axis in ((rigid_of_quaternion, frames, -2), (rigid_of_matrix, true, -3)):
        seen_from = select(rigid_of(own(given, axis)), (..., slice(None), None))
        local.append(apply_inverse(seen_from, rigid_of(given).translation[..., None, :, :]))
    error = (local[0] - local[1]).square().sum(-1).detach()
    bins = _bin(error, ERROR_EDGES)
    return _pair_mean(_cross_entropy(logits, bins), batch["backbone_rigid_mask"])


def masked_msa_loss(
    logits: Float[Tensor, "*batch S N 23"],
    true: Int[Tensor, "*batch S N"],
    mask: Float[Tensor, "*batch S N"],
) -> Float[Tensor, "*batch"]:
    """Cross-entropy of the classes of rows at the positions drawn for prediction; section 1.9.9."""
    error = _cross_entropy(logits, true)
    return (error * mask).sum((-1, -2)) / (_EPS + mask.sum((-1, -2)))


def experimentally_resolved_loss(
    logits: Float[Tensor, "*batch N 37"],
    resolved: Float[Tensor, "*batch N 37"],
    exists: Float[Tensor, "*batch N 37"],
) -> Float[Tensor, "*batch"]:
    """Cross-entropy of whether an atom that exists is resolved; section 1.9.10."""
    error = F.binary_cross_entropy_with_logits(logits, resolved.to(logits.dtype), reduction="none")
    return (error * exists).sum((-1, -2)) / (_EPS + exists.sum((-1, -2)))


def plddt_loss(
    logits: Float[Tensor, "*batch N K"],
    position: Float[Tensor, "*batch N 3"],
    reference: Float[Tensor, "*batch N 3"],
    mask: Float[Tensor, "*batch N"],
) -> Float[Tensor, "*batch"]:
    """Cross-entropy of the lDDT of CA that the prediction has, 50 bins; section 1.9.6."""
    bins = logits.shape[-1]
    score = lddt_of_residues(position.detach(), reference, mask)
    label = (score * bins).floor().long().clamp(max=bins - 1)
    error = _cross_entropy(logits, label)
    return (error * mask).sum(-1) / (_EPS + mask.sum(-1))


def lddt_of_residues(
    position: Float[Tensor, "*batch N 3"],
    reference: Float[Tensor, "*batch N 3"],
    mask: Float[Tensor, "*batch N"],
) -> Float[Tensor, "*batch N"]:
    """Local distance difference test of each point, 0 to 1.

    Share of distances below 15 Å in the reference that are kept within 0.5, 1, 2 and 4 Å, averaged
    over the four; 1 for a point without neighbours.
    """
    true, found = (
        torch.sqrt(_EPS + (x[..., :, None, :] - x[..., None, :, :]).square().sum(-1))
        for x in (reference, position)
    )
    other = 1 - torch.eye(mask.shape[-1], dtype=mask.dtype, device=mask.device)
    counts = (true < 15.0) * mask[..., :, None] * mask[..., None, :] * other
    error = (true - found).abs()
    kept = sum((error < bound).to(error.dtype) for bound in (0.5, 1.0, 2.0, 4.0))
    return (_EPS + (counts * kept * 0.25).sum(-1)) / (_EPS + counts.sum(-1))


def _bin(squared: Tensor, edges: tuple[float, float, int]) -> Tensor:
    """Bin of a squared distance among those whose inner edges are evenly spaced in the distance."""
    inner = torch.linspace(*edges, dtype=squared.dtype, device=squared.device)
    return torch.bucketize(squared, inner.square())


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy over the last axis, one value per label."""
    each = F.cross_entropy(logits.flatten(0, -2), labels.flatten().long(), reduction="none")
    return each.view(labels.shape)


def _pair_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over pairs that the mask keeps."""
    pairs = own(mask, -1)[..., :, None] * mask[..., None, :]
    total = all_together((values * pairs).sum((-1, -2)))
    return total / (_EPS + mask.sum(-1).square())
