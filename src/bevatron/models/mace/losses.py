"""The losses of MACE: errors, weights and divisors of each term.

Every term is a sum over the labels of this batch divided by the number of labels of the whole
step, so that unequal batches stay unbiased. With a label on every structure each equals the
reduction of mace-torch (mace/modules/loss.py); structures without a label, and repeated samples of
weight zero, count neither in the sum nor in the number.

Weights: `StructureBatch.energy_weight` and its like are the structure's weight times the label's.

=========  ==================================================================================
weighted   w ((E - E_ref)/N)^2, w (F - F_ref)^2, w (stress - stress_ref)^2, w ((virial -
           virial_ref)/N)^2
huber      w h_d of the same differences, unsquared (mace-torch leaves w out here)
universal  h_d(w x, w x_ref); for forces d shrinks with the size of the reference force:
           d, 0.7 d, 0.4 d, 0.1 d below 100, 200, 300 eV/Å and above
l1l2       w |E - E_ref|/N and the length of the force error of an atom
=========  ==================================================================================

h_d(x) = x^2/2 for |x| < d, d (|x| - d/2) beyond.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import huber_loss

from bevatron.data.samples import StructureBatch
from bevatron.errors import ConfigError


@dataclass(frozen=True)
class StageTwo:
    """Weights of the second stage of training, which emphasises energies.

    Attributes
    ----------
    start_epoch
        First epoch of the stage, counted from 0; None = no second stage. In a run it is the same as
        ``schedule.stage_two_start``, which also sets the learning rate.
    energy_weight : weight of the energy term
    forces_weight : weight of the forces term
    stress_weight : weight of the stress term; None = as in the first stage
    virials_weight : weight of the virials term; None = as in the first stage
    """

    start_epoch: int | None = None
    energy_weight: float = 1000.0
    forces_weight: float = 100.0
    stress_weight: float | None = None
    virials_weight: float | None = None


@dataclass(frozen=True)
class LossConfig:
    """The loss and its weights.

    Attributes
    ----------
    kind
        Kind of loss, see the table of this module.
    energy_weight
        Weight of the energy term; a term of weight 0 is not computed.
    forces_weight
        Weight of the forces term.
    stress_weight
        Weight of the stress term.
    virials_weight
        Weight of the virials term.
    huber_delta
        Threshold of ``huber`` and ``universal``.
    stage_two
        The weights of the second stage; None = no second stage, with the defaults of `StageTwo`.

    Raises
    ------
    ConfigError
        For negative weights, none above zero, or virials with a loss that has no such term.
    """

    kind: Literal["weighted", "huber", "universal", "l1l2"] = "weighted"
    energy_weight: float = 1.0
    forces_weight: float = 100.0
    stress_weight: float = 0.0
    virials_weight: float = 0.0
    huber_delta: float = 0.01
    stage_two: StageTwo | None = field(default_factory=StageTwo)

    def __post_init__(self) -> None:
        if self.stage_two is None:
            object.__setattr__(self, "stage_two", StageTwo())
        stages = {"loss.": self.weights(0)}
        if self.stage_two_start is not None:
            stages["loss.stage_two."] = self._second_weights()
        for where, weights in stages.items():
            for name, weight in weights.items():
                if weight < 0:
                    raise ConfigError(f"{where}{name}_weight: expected 0 or more, got {weight}")
            if not any(weights.values()):
                raise ConfigError(
                    f"{where}energy_weight: all weights are 0, nothing would be learnt"
                )
            if weights["virials"] and self.kind != "weighted":
                raise ConfigError(
                    f"{where}virials_weight: loss '{self.kind}' has no virials; use stress_weight"
                )
            if weights["stress"] and self.kind == "l1l2":
                raise ConfigError(f"{where}stress_weight: loss 'l1l2' has energies and forces only")
        if self.huber_delta <= 0:
            raise ConfigError(
                f"loss.huber_delta: expected a number above 0, got {self.huber_delta}"
            )

    @property
    def stage_two_start(self) -> int | None:
        """First epoch of the second stage; None without one."""
        return None if self.stage_two is None else self.stage_two.start_epoch

    def weights(self, epoch: int) -> dict[str, float]:
        """Return the factors of the terms in an epoch, by name."""
        start = self.stage_two_start
        if start is not None and epoch >= start:
            return self._second_weights()
        return {
            "energy": self.energy_weight,
            "forces": self.forces_weight,
            "stress": self.stress_weight,
            "virials": self.virials_weight,
        }

    def _second_weights(self) -> dict[str, float]:
        two = self.stage_two or StageTwo()
        stress, virials = two.stress_weight, two.virials_weight
        return {
            "energy": two.energy_weight,
            "forces": two.forces_weight,
            "stress": self.stress_weight if stress is None else stress,
            "virials": self.virials_weight if virials is None else virials,
        }


def label_counts(batch: StructureBatch) -> dict[str, Tensor]:
    """Count the labels that each term averages over: energies, force and stress components."""
    stress = 9.0 * batch.has_stress.sum(dtype=torch.float64)
    return {
        "energy": batch.has_energy.sum(dtype=torch.float64),
        "forces": 3.0 * (batch.graph_ptr.diff() * batch.has_forces).sum(dtype=torch.float64),
        "stress": stress,
        "virials": stress,
    }


def atoms_per_structure(batch: StructureBatch) -> Tensor:
    """Return the divisor of energies: a structure's number of atoms, 1 if empty (padding)."""
    return (batch.graph_ptr[1:] - batch.graph_ptr[:-1]).clamp(min=1)


def loss_sum(
    term: str, kind: str, batch: StructureBatch, outputs: Mapping[str, Tensor], delta: float
) -> Tensor:
    """Sum one term over the labels of a batch; divided by its count it is mace's mean.

    Structures without the label have weight 0 and reference 0; their difference is masked before it
    is squared, so that even a huge one contributes no gradient.
    """
    if term == "energy":
        num_atoms = atoms_per_structure(batch)
        found, wanted = outputs["energy"] / num_atoms, batch.energy / num_atoms
        weight, counts = batch.energy_weight, batch.has_energy
    elif term == "forces":
        found, wanted = outputs["forces"], batch.forces
        weight = batch.forces_weight[batch.graph, None]
        counts = batch.has_forces[batch.graph, None]
    else:
        found, wanted = label_stress(batch, outputs), batch.stress
        weight, counts = batch.stress_weight[:, None, None], batch.has_stress[:, None, None]
        if term == "virials":
            num_atoms = atoms_per_structure(batch)[:, None, None]
            volume = torch.linalg.det(batch.cell).abs()[:, None, None]
            found, wanted = outputs["virials"] / num_atoms, -wanted * volume / num_atoms
    found = torch.where(counts, found, wanted)
    if kind == "weighted":
        return (weight * (found - wanted).square()).sum()
    if kind == "huber":
        return (weight * huber_loss(found, wanted, reduction="none", delta=delta)).sum()
    if kind == "universal":
        return _universal(found * weight, wanted * weight, delta, conditional=term == "forces")
    if term == "energy":
        return (weight * (found - wanted).abs()).sum()
    # mace-torch's mean is over atoms, the count here is of components.
    lengths: Tensor = torch.linalg.vector_norm(found - wanted, dim=-1)
    return 3.0 * (weight[:, 0] * lengths).sum()


def label_stress(batch: StructureBatch, outputs: Mapping[str, Tensor]) -> Tensor:
    """Return the stress to compare with labels: that of the cell as given in the file.

    It differs from the model's where an axis is open (see `model.stress_volume`).
    """
    stress = outputs["stress"]
    if "virials" not in outputs:
        return stress
    volume = torch.linalg.det(batch.cell).abs()
    partly = batch.pbc.any(dim=1) & ~batch.pbc.all(dim=1) & (volume > 0)
    by_cell = -outputs["virials"] / volume.clamp(min=1e-30)[:, None, None]
    return torch.where(partly[:, None, None], by_cell, stress)


def _universal(found: Tensor, wanted: Tensor, delta: float, *, conditional: bool) -> Tensor:
    """Huber loss whose delta shrinks for large forces."""
    if not conditional:
        return huber_loss(found, wanted, reduction="sum", delta=delta)
    size = torch.linalg.vector_norm(wanted, dim=-1, keepdim=True)
    limit = torch.full_like(size, 0.1 * delta)
    for bound, factor in ((300.0, 0.4), (200.0, 0.7), (100.0, 1.0)):
        limit = torch.where(size < bound, factor * delta, limit)
    difference = (found - wanted).abs()
    quadratic = 0.5 * difference.square()
    return torch.where(difference < limit, quadratic, limit * (difference - 0.5 * limit)).sum()
