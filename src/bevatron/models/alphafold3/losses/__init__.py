r"""The loss of AlphaFold3: section 4 and equation 15 of its supplement.

:math:`\alpha_{conf} (plddt + pde + resolved + \alpha_{pae}\,pae) + 4 \cdot (\frac{s^2 +
s_d^2}{(s\,s_d)^2} (mse + \alpha_{bond}\,bond) + smooth\_lddt) + 0.03\,distogram`

What the model gives (`outputs`, D noisy copies, R rollouts; leading axes of a batch before them):

==============  ======================  =======================================================
``denoised``    float [D, A, 3]         denoised copies, Å; own ones where processes share a sample
``sigma``       float [D]               their noise, Å
``distogram``   float [I, N, 64]        logits, own rows I where processes share a sample
``rollout``     float [R, A, 3]         coordinates of the mini-rollout, Å
``plddt``       float [R, A, 50]        logits
``resolved``    float [R, A, 2]         logits
``pae``         float [R, I, N, 64]     logits, frame i by token j
``pde``         float [R, I, N, 64]     logits
==============  ======================  =======================================================

A step without the confidence head leaves out the last five; its terms are left out too. The batch
is a `bevatron.data.proteins.complex_batch.ComplexBatch`, or any mapping of its tensors; its
``position`` and ``resolved`` are the truth after `permutation.permute_truth`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from bevatron.errors import ConfigError
from bevatron.models.alphafold3.edm import loss_weight
from bevatron.models.alphafold3.losses import confidence, diffusion
from bevatron.models.alphafold3.losses.smooth_lddt import smooth_lddt
from bevatron.models.common.hyper_parameters import check_ranges
from bevatron.parallel.axial import all_of, own

BEST_RESOLUTION = 0.1
WORST_RESOLUTION = 4.0
"""Å; the confidences learn from structures of a resolution between them, NMR has none."""

CONFIDENCES = ("plddt", "pde", "resolved", "pae")
"""Terms of the confidence head."""


@dataclass(frozen=True)
class LossWeights:
    """Weights of the terms: equation 15 and table 6 of the AlphaFold3 supplement.

    Attributes
    ----------
    confidence : weight of pLDDT, PDE and experimentally resolved
    pae : weight of PAE relative to the other confidences; 1 in the last stage only
    diffusion : weight of the diffusion loss: squared error, bonds and smooth lDDT
    bond : weight of bonds relative to the squared error; 1 in fine-tuning
    smooth_lddt
        Weight of smooth lDDT relative to the squared error, independent of the noise level.
    distogram : weight of the distogram

    Raises
    ------
    ConfigError
        For negative weights, or none above zero.
    """

    confidence: float = 1e-4
    pae: float = 0.0
    diffusion: float = 4.0
    bond: float = 0.0
    smooth_lddt: float = 1.0
    distogram: float = 0.03

    def __post_init__(self) -> None:
        check_ranges(self, [(name, 0, math.inf) for name in vars(self)])
        if not any(self.of_terms().values()):
            raise ConfigError("diffusion: all weights are 0, nothing would be learnt")

    @property
    def of_trunk(self) -> bool:
        """Whether anything but the confidence head is trained."""
        return self.diffusion > 0 or self.distogram > 0

    def of_terms(self) -> dict[str, float]:
        """Return the weight of each term by its name."""
        return {
            "mse": self.diffusion,
            "bond": self.diffusion * self.bond,
            "smooth_lddt": self.diffusion * self.smooth_lddt,
            "distogram": self.distogram,
            "plddt": self.confidence,
            "pde": self.confidence,
            "resolved": self.confidence,
            "pae": self.confidence * self.pae,
        }


STAGES = {
    "initial": LossWeights(),
    "fine_tuning_1": LossWeights(bond=1.0, smooth_lddt=0.0),
    "fine_tuning_2": LossWeights(bond=1.0, smooth_lddt=0.0),
    "fine_tuning_3": LossWeights(pae=1.0, smooth_lddt=0.0, diffusion=0.0, distogram=0.0),
}
"""Weights of the four stages of training, in their order; the last trains the confidence head
alone."""


@dataclass(frozen=True)
class Term:
    """One term of the loss: its mean over all micro-batches and ranks is sum(sum) / sum(count).

    Attributes
    ----------
    sum : sum over structures, weighted: scalar to differentiate
    count : number of structures, those of weight 0 left out: float64 scalar
    """

    sum: Float[Tensor, ""]
    count: Float[Tensor, ""]


def total_loss(
    outputs: Mapping[str, Tensor],
    batch: Mapping[str, Tensor],
    weights: LossWeights,
) -> dict[str, Term]:
    """Compute every weighted term of the loss as a sum over structures and their number.

    A structure without bonds, or of no resolution for the confidences, has 0 for that term and
    counts: so the mean over a step is that of the losses of its structures, as published.

    Parameters
    ----------
    outputs : what the model gives, as this module says
    batch
        A sample, or several with a leading axis; its ``weight`` is 0 of a structure that must not
        count, and 1 otherwise.

    Returns
    -------
    The terms with a weight above zero, by name.
    """
    counted = batch["weight"]
    count = counted.double().sum()
    of_terms = weights.of_terms()
    values = structure_losses(outputs, batch, [name for name, w in of_terms.items() if w > 0])
    return {
        name: Term((value * counted).sum() * of_terms[name], count)
        for name, value in values.items()
    }


def structure_losses(
    outputs: Mapping[str, Tensor], batch: Mapping[str, Tensor], names: list[str]
) -> dict[str, Float[Tensor, "*batch"]]:
    """Compute the named terms of every structure, without their weights.

    Those of the confidence head are 0 where the resolution is unknown or not from 0.1 to 4 Å, and
    left out if the outputs have none.
    """
    losses: dict[str, Tensor] = {}
    if "denoised" in outputs:
        losses |= _diffusion_losses(outputs, batch, names)
    if "distogram" in names and "distogram" in outputs:
        truth, resolved = batch["position"], batch["resolved"]
        losses["distogram"] = confidence.distogram_loss(
            outputs["distogram"],
            truth,
            resolved,
            batch["representative_atom"],
            batch["token_mask"],
        )
    if "rollout" in outputs:
        losses |= _confidence_losses(outputs, batch, names)
    return losses


def _diffusion_losses(
    outputs: Mapping[str, Tensor], batch: Mapping[str, Tensor], names: list[str]
) -> dict[str, Tensor]:
    predicted, truth, resolved = outputs["denoised"], batch["position"], batch["resolved"]
    predicted = predicted.to(torch.promote_types(predicted.dtype, torch.float32))
    sigma = outputs["sigma"].to(predicted.dtype)
    noise = loss_weight(own(sigma, -1))

    def mean(of_copies: Tensor) -> Tensor:
        return all_of(of_copies, -1, sigma.shape[-1]).mean(-1)

    losses = {}
    if "mse" in names:
        weight = diffusion.atom_weights(
            batch["molecule_type"], batch["atom_to_token"], resolved, predicted.dtype
        )
        error = diffusion.aligned_squared_error(predicted, truth, resolved, weight)
        losses["mse"] = mean(noise * error)
    if "bond" in names:
        error = diffusion.bond_error(predicted, truth, resolved, batch["polymer_ligand_bonds"])
        losses["bond"] = mean(noise * error)
    if "smooth_lddt" in names:
        nucleic = diffusion.is_nucleic(batch)
        losses["smooth_lddt"] = 1 - mean(smooth_lddt(predicted, truth, resolved, nucleic))
    return losses


def _confidence_losses(
    outputs: Mapping[str, Tensor], batch: Mapping[str, Tensor], names: list[str]
) -> dict[str, Tensor]:
    rollout, truth, resolved = outputs["rollout"].detach(), batch["position"], batch["resolved"]
    token_mask, centre = batch["token_mask"], batch["centre_atom"]
    kind = batch["molecule_type"]
    losses = {}
    if "plddt" in names:
        losses["plddt"] = confidence.plddt_loss(
            outputs["plddt"],
            rollout,
            truth,
            resolved,
            centre,
            is_standard_residue(batch),
            (kind == 1) | (kind == 2),
        )
    if "pde" in names:
        losses["pde"] = confidence.pde_loss(
            outputs["pde"], rollout, truth, resolved, batch["representative_atom"], token_mask
        )
    if "resolved" in names:
        losses["resolved"] = confidence.resolved_loss(
            outputs["resolved"], resolved, batch["atom_mask"]
        )
    if "pae" in names:
        losses["pae"] = confidence.pae_loss(
            outputs["pae"],
            rollout,
            truth,
            resolved,
            batch["frame_atoms"],
            batch["has_frame"],
            centre,
            token_mask,
        )
    resolution = batch["resolution"]
    learns = (resolution >= BEST_RESOLUTION) & (resolution <= WORST_RESOLUTION)
    return {name: value * learns for name, value in losses.items()}


def is_standard_residue(batch: Mapping[str, Tensor]) -> Tensor:
    """Whether a token is a whole residue of a polymer: it has several atoms."""
    atoms = torch.zeros_like(batch["molecule_type"])
    atoms.scatter_add_(-1, batch["atom_to_token"], batch["atom_mask"].to(atoms.dtype))
    return (atoms > 1) & (batch["molecule_type"] != 3) & batch["token_mask"]
