"""Accuracy of predicted complexes, as sums over batches and ranks."""

from collections.abc import Mapping

import torch
from torch import Tensor

from bevatron.data.proteins.complex_batch import ComplexBatch
from bevatron.models.alphafold3.losses.confidence import distogram_loss
from bevatron.models.common.folding.metrics.confidence import expected_lddt
from bevatron.models.common.folding.metrics.contacts import contact_precision, contact_probability
from bevatron.models.common.folding.metrics.lddt import KINDS, lddt_by_kind
from bevatron.parallel.axial import all_of

PAIRS = [f"{a}_{b}" for i, a in enumerate(KINDS) for b in KINDS[i:]]
"""Interfaces, by the kinds of their molecules."""

NAMES = (
    "distogram", "contact_precision", "lddt", "lddt_interface", "plddt",
    *(f"lddt_{name}" for name in (*KINDS, *PAIRS)),
)  # fmt: skip


class ComplexMetrics:
    """Means over structures, or for lDDT over pairs of atoms.

    Names: ``distogram``, cross entropy; ``contact_precision`` of the surest L long-range contacts
    of proteins; ``lddt`` of all pairs, ``lddt_interface`` of those of two chains, ``lddt_protein``,
    ``lddt_protein_ligand`` and so on by kind, 0 to 1; ``plddt``, what the model expects, 0 to 100.
    What no structure has is left out.
    """

    def __init__(self) -> None:
        self._sums = torch.zeros(len(NAMES), 2, dtype=torch.float64)

    def update(self, batch: ComplexBatch, outputs: Mapping[str, Tensor]) -> None:
        """Add a structure."""
        given = batch.tensors()
        truth = outputs["position"], outputs["truth_resolved"]
        found = {"distogram": self._distogram(given, outputs, *truth)}
        found |= self._contacts(given, outputs, *truth)
        found |= _lddt(given, outputs["rollout"][0], *truth)
        plddt = expected_lddt(outputs["plddt"][0])
        counts = given["atom_mask"]
        found["plddt"] = ((plddt * counts).sum(), counts.sum())
        self._sums = self._sums.to(batch.weight.device)
        for name, (total, count) in found.items():
            row = torch.stack([total.double(), count.double()]) * batch.weight.double()
            self._sums[NAMES.index(name)] += row

    def sums(self) -> Tensor:
        """Return all running sums as one float64 vector."""
        return self._sums.flatten()

    def load_sums(self, sums: Tensor) -> None:
        """Replace the running sums."""
        self._sums = sums.detach().double().reshape(len(NAMES), 2).clone()

    def compute(self) -> dict[str, float]:
        """Compute all metrics by name."""
        pairs = zip(NAMES, self._sums.tolist(), strict=True)
        return {name: total / count for name, (total, count) in pairs if count > 0}

    @staticmethod
    def _distogram(
        given: Mapping[str, Tensor], outputs: Mapping[str, Tensor], truth: Tensor, resolved: Tensor
    ) -> tuple[Tensor, Tensor]:
        representative, tokens = given["representative_atom"], given["token_mask"]
        value = distogram_loss(outputs["distogram"], truth, resolved, representative, tokens)
        seen = (resolved[representative] & tokens).sum()
        return value, (seen > 1).double()

    @staticmethod
    def _contacts(
        given: Mapping[str, Tensor], outputs: Mapping[str, Tensor], truth: Tensor, resolved: Tensor
    ) -> dict[str, tuple[Tensor, Tensor]]:
        """Compare contacts within protein chains; chains are moved apart by their numbers."""
        logits, representative = outputs["distogram"], given["representative_atom"]
        tokens = logits.shape[-2]
        probability = all_of(contact_probability(logits), -2, tokens)
        same = given["asym_id"][:, None] == given["asym_id"]
        counts = resolved[representative] & given["token_mask"] & (given["molecule_type"] == 0)
        precision = contact_precision(
            torch.where(same, probability, 0.0),
            truth[representative],
            counts,
            given["residue_index"],
        )
        known = precision == precision  # noqa: PLR0124  not NaN
        return {"contact_precision": (torch.where(known, precision, 0.0), known)}


def _lddt(
    given: Mapping[str, Tensor], predicted: Tensor, truth: Tensor, resolved: Tensor
) -> dict[str, tuple[Tensor, Tensor]]:
    token = given["atom_to_token"]
    by_kind = lddt_by_kind(
        predicted,
        truth,
        resolved,
        given["ref_space_uid"],
        given["asym_id"][token],
        given["molecule_type"][token],
    )

    def added(names: list[str]) -> tuple[Tensor, Tensor]:
        totals, counts = zip(*(by_kind[name] for name in names), strict=True)
        return torch.stack(totals).sum(), torch.stack(counts).sum()

    return {
        **{f"lddt_{name}": value for name, value in by_kind.items()},
        "lddt": added([*by_kind]),
        "lddt_interface": added(PAIRS),
    }
