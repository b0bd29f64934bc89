"""The task of learning an interatomic potential: batches, loss and errors of MACE."""

from collections.abc import Hashable, Mapping, Sequence

import torch
from torch import Tensor

from bevatron.data.samples import StructureBatch, collate_structures
from bevatron.models.common.metrics import ErrorSums, error_rows
from bevatron.models.mace.losses import (
    LossConfig,
    atoms_per_structure,
    label_counts,
    label_stress,
    loss_sum,
)
from bevatron.task import Loss
from bevatron.typing import Arrays, IntArray

QUANTITIES = ("energy", "energy_per_atom", "forces", "stress", "virials_per_atom")
"""Quantities whose errors are reported, in eV, eV, eV/Å, eV/Å^3 and eV; forces by component."""


class MaceTask:
    """Loss and metrics of an interatomic potential (the protocol `bevatron.task.Task`).

    Parameters
    ----------
    loss : the loss and its weights
    heads : names of the model's heads; with more than one, errors are reported for each
    """

    def __init__(self, loss: LossConfig | None = None, heads: Sequence[str] = ("default",)) -> None:
        self.config = loss if loss is not None else LossConfig()
        self.heads = tuple(heads)
        self.weights = self.config.weights(0)
        """Factors of the terms in the current stage."""

    def collate(
        self, samples: Sequence[Arrays], indices: IntArray, weights: Sequence[float]
    ) -> StructureBatch:
        """Collate structures into a batch."""
        return collate_structures(samples, indices, weights)

    def begin_epoch(self, epoch: int) -> None:
        """Choose the weights of the stage that the epoch belongs to."""
        self.weights = self.config.weights(epoch)

    def constants(self) -> Hashable:
        """Return the weights of the stage, which a captured step holds as constants."""
        return tuple(self.weights.items())

    def normalisers(self, batch: StructureBatch) -> dict[str, Tensor]:
        """Count the labels that each term averages over."""
        return label_counts(batch)

    def loss(
        self, model: torch.nn.Module, batch: StructureBatch, normalisers: Mapping[str, Tensor]
    ) -> Loss:
        """Compute the loss; each term is a sum over this batch divided by the step's count.

        A term without any label in the whole step is zero.
        """
        active = {term: weight for term, weight in self.weights.items() if weight > 0}
        compute = {"energy", *active} | ({"stress", "virials"} if "stress" in active else set())
        compute |= {"stress"} if "virials" in active else set()
        outputs = model(batch, compute=compute, create_graph=True)
        total = torch.zeros((), dtype=outputs["energy"].dtype, device=outputs["energy"].device)
        terms = {}
        for term, weight in active.items():
            count = normalisers[term].to(total.device).clamp(min=1.0)
            sums = loss_sum(term, self.config.kind, batch, outputs, self.config.huber_delta)
            value = weight * sums / count
            terms[term] = value.detach()
            total = total + value
        return Loss(total=total, terms=terms)

    def predict(self, model: torch.nn.Module, batch: StructureBatch) -> dict[str, Tensor]:
        """Compute energies and forces, and stress and virials of structures with a cell."""
        compute = ["energy", "forces"]
        if bool(batch.pbc.all(dim=1).any()) or bool(batch.has_stress.any()):
            compute += ["stress", "virials"]
        outputs = model(batch, compute=compute, create_graph=False)
        return {name: value.detach() for name, value in outputs.items()}

    def metrics(self) -> "MaceMetrics":
        """Begin new running sums."""
        return MaceMetrics(self.heads)


class MaceMetrics(ErrorSums):
    """Mean absolute and root mean square errors, per head if there are several.

    Names are ``energy_per_atom_mae``, ``forces_rmse``, ...; see `QUANTITIES` for units.
    """

    def __init__(self, heads: Sequence[str] = ("default",)) -> None:
        super().__init__(QUANTITIES, heads)

    def update(self, batch: StructureBatch, outputs: Mapping[str, Tensor]) -> None:
        """Add a batch."""
        self.add(per_structure_errors(batch, outputs), batch.head)


def per_structure_errors(batch: StructureBatch, outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Sum up the errors of each structure; `group_errors` groups them.

    Returns
    -------
    For each of `QUANTITIES` [G, 3]: number of values compared (0 without a label), sum of
    absolute and of squared errors; `bevatron.models.common.metrics.group_errors`
    makes a table of it.
    """
    num_atoms = atoms_per_structure(batch)
    energy = outputs["energy"] - batch.energy
    rows = {
        "energy": error_rows(energy, batch.has_energy),
        "energy_per_atom": error_rows(energy / num_atoms, batch.has_energy),
    }
    nothing = torch.zeros_like(rows["energy"])
    rows["forces"] = rows["stress"] = rows["virials_per_atom"] = nothing
    if "forces" in outputs:
        error = outputs["forces"] - batch.forces
        rows["forces"] = error_rows(error, batch.has_forces, batch.graph, batch.num_graphs)
    if "stress" in outputs:
        rows["stress"] = error_rows(label_stress(batch, outputs) - batch.stress, batch.has_stress)
    if "virials" in outputs:
        volume = torch.linalg.det(batch.cell).abs()[:, None, None]
        error = (outputs["virials"] + batch.stress * volume) / num_atoms[:, None, None]
        rows["virials_per_atom"] = error_rows(error, batch.has_stress)
    return rows
