"""Accuracy of predicted chains, as sums over batches and ranks."""

from collections.abc import Mapping
from dataclasses import fields

import torch
from torch import Tensor

from bevatron.data.proteins.chain_batch import ChainBatch
from bevatron.data.proteins.chain_geometry import reference_geometry
from bevatron.data.proteins.constants import CA
from bevatron.models.alphafold2.losses import LossWeights, distogram_loss
from bevatron.models.common.folding.metrics import (
    ca_lddt,
    contact_precision,
    contact_probability,
    expected_lddt,
    lddt,
    rmsd,
    tm_score,
)
from bevatron.models.common.metrics import Means
from bevatron.parallel.axial import own_rows

NAMES = (
    "loss", *(f"loss_{term.name}" for term in fields(LossWeights)), "lddt_ca", "lddt", "tm_score",
    "rmsd", "plddt", "distogram", "contact_precision",
)  # fmt: skip


class ChainMetrics(Means):
    """Means over chains.

    Names: ``loss`` and its weighted terms ``loss_fape`` and so on; ``lddt_ca`` and, of all heavy
    atoms, ``lddt``, 0 to 1; of the superposed chains ``tm_score``, 0 to 1, and ``rmsd`` of CA, Å;
    ``plddt``, what the model expects of the lDDT, 0 to 100; ``distogram``, cross entropy;
    ``contact_precision`` of the surest L long-range contacts. What no chain has is left out.
    """

    def __init__(self) -> None:
        super().__init__(NAMES)

    def update(self, batch: ChainBatch, outputs: Mapping[str, Tensor]) -> None:
        """Add a chain."""
        given = batch.tensors()
        known = given["all_atom_mask"].bool() & given["seq_mask"][:, None]
        found = {name: value for name, value in outputs.items() if name in NAMES}
        found["loss"] = torch.stack([*found.values()]).sum()
        backbone = (
            outputs["final_atom_positions"][:, CA],
            given["all_atom_positions"][:, CA],
            known[:, CA],
        )
        found |= {"lddt_ca": ca_lddt(*backbone), "rmsd": rmsd(*backbone)}
        residue, _ = known.nonzero(as_tuple=True)
        atoms = outputs["final_atom_positions"][known], given["all_atom_positions"][known]
        kept, counted = lddt(*atoms, torch.ones_like(residue, dtype=torch.bool), residue)
        found["lddt"] = kept.sum() / counted.sum()
        found["tm_score"] = tm_score(*backbone)
        surest = expected_lddt(outputs["lddt_logits"])
        real = given["seq_mask"].to(surest.dtype)
        found["plddt"] = (surest * real).sum() / real.sum().clamp(min=1.0)
        found |= _pairs(given, outputs["distogram_logits"], known)
        self.add(found, batch.weight)


def _pairs(given: Mapping[str, Tensor], logits: Tensor, known: Tensor) -> dict[str, Tensor]:
    """Judge the distogram by the distances of CB atoms."""
    positions, aatype = given["all_atom_positions"], given["aatype"].long()
    geometry = reference_geometry(positions, known.to(positions.dtype), aatype)
    beta, has_beta = geometry["pseudo_beta"], geometry["pseudo_beta_mask"]
    index = given["residue_index"].long()
    return {
        "distogram": distogram_loss(own_rows(logits), beta, has_beta),
        "contact_precision": contact_precision(
            contact_probability(logits), beta, has_beta > 0, index
        ),
    }
