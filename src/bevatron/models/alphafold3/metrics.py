"""Accuracy of predicted complexes, as sums over batches and ranks."""

from collections.abc import Mapping

import torch
from torch import Tensor

from bevatron.data.proteins.complex_batch import ComplexBatch
from bevatron.models.alphafold3.losses.confidence import distogram_loss
from bevatron.models.common.folding.metrics.confidence import expected_lddt
from bevatron.models.common.folding.metrics.contacts import contact_precision, contact_probability
from bevatron.models.common.folding.metrics.lddt import KINDS, lddt_by_kind
from bevatron.models.common.metrics import Means
from bevatron.parallel.axial import all_of

PAIRS = [f"{a}_{b}" for i, a in enumerate(KINDS) for b in KINDS[i:]]
"""Interfaces, by the kinds of their molecules."""

NAMES = (
    "distogram", "contact_precision", "lddt", "lddt_interface", "plddt",
    *(f"lddt_{name}" for name in (*KINDS, *PAIRS)),
)  # fmt: skip


class ComplexMetrics(Means):
    """Means over structures, or for lDDT over pairs of atoms.

    Names: ``distogram``, cross entropy; ``contact_precision`` of the surest L long-range contacts
    of proteins; ``lddt`` of all pairs, ``lddt_interface`` of those of two chains, ``lddt_protein``,
    ``lddt_protein_ligand`` and so on by kind, 0 to 1; ``plddt``, what the model expects, 0 to 100.
    What no structure has is left out.
    """

    def __init__(self) -> None:
        super().__init__(NAMES)

    def update(self, batch: ComplexBatch, outputs: Mapping[str, Tensor]) -> None:
        """Add a structure."""
        given = batch.tensors()
        truth = outputs["position"], outputs["truth_resolved"]
        found: dict[str, Tensor | tuple[Tensor, Tensor]] = {
            "distogram": self._distogram(given, outputs, *truth),
            "contact_precision": self._contacts(given, outputs, *truth),
            **_lddt(given, outputs["rollout"][0], *truth),
        }
        plddt = expected_lddt(outputs["plddt"][0])
        counts = given["atom_mask"]
        found["plddt"] = ((plddt * counts).sum(), counts.sum())
        self.add(found, batch.weight)

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
    ) -> Tensor:
        """Compare contacts within protein chains; chains are moved apart by their numbers."""
        logits, representative = outputs["distogram"], given["representative_atom"]
        tokens = logits.shape[-2]
        probability = all_of(contact_probability(logits), -2, tokens)
        same = given["asym_id"][:, None] == given["asym_id"]
        counts = resolved[representative] & given["token_mask"] & (given["molecule_type"] == 0)
        precision: Tensor = contact_precision(
            torch.where(same, probability, 0.0),
            truth[representative],
            counts,
            given["residue_index"],
        )
        return precision


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
