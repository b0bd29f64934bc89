"""Predictions of an AlphaFold2: the structure of a chain and its confidence."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from bevatron.data.proteins.chain_batch import collate_chain
from bevatron.data.proteins.chain_samples import fitted, sample_chain
from bevatron.data.proteins.clusters_of_rows import AlignmentRows
from bevatron.models.alphafold2.config import whole_chains
from bevatron.models.alphafold2.model import AlphaFold2
from bevatron.models.alphafold2.task import CYCLES, AlphaFold2Task
from bevatron.models.common.folding.metrics import (
    contact_probability,
    expected_error,
    expected_lddt,
    ptm,
)
from bevatron.typing import Array, Arrays


@dataclass(frozen=True)
class PredictedChain:
    """The structure of a chain of L residues.

    Attributes
    ----------
    position : float32 [L, 37, 3]
        Å, in the order of ``constants.ATOM37``.
    plddt : float32 [L]
        Expected lDDT, 0 to 100.
    contacts : float32 [L, L]
        Probability that CB atoms are within 8 Å.
    pae : float32 [L, L], or None
        Expected error of a column's residue in the frame of a row's, Å, of a model with a head for
        the aligned error.
    ptm : float or None
        Expected TM-score, of such a model.
    """

    position: npt.NDArray[np.float32]
    plddt: npt.NDArray[np.float32]
    contacts: Array
    pae: Array | None = None
    ptm: float | None = None


def predict(
    model: AlphaFold2,
    chain: Arrays,
    rows: AlignmentRows,
    seed: int = 0,
    activations: torch.dtype | None = None,
) -> PredictedChain:
    """Predict a chain.

    Parameters
    ----------
    model : in eval mode
    chain
        With `bevatron.data.proteins.chains.CHAIN_FIELDS`, whose atoms are not read, and
        `template_atoms.TEMPLATE_FIELDS` if it has templates; the first four are shown.
    rows : its alignment
    seed : seed of the choice of rows
    activations : type of alignment and pair; None for that of the weights
    """
    length = len(chain["aatype"])
    sizes = fitted(whole_chains(length), rows, chain.get("template_aatype"))
    sample = sample_chain(chain, rows, seed, sizes, CYCLES)
    batch = collate_chain([sample], np.zeros(1, dtype=np.int64), [1.0])
    task = AlphaFold2Task(CYCLES, activations=activations)
    found = task.predict(model, batch.to(next(model.parameters()).device))
    contacts = contact_probability(found["distogram_logits"].float())
    arrays = (
        found["final_atom_positions"], expected_lddt(found["lddt_logits"]), contacts
    )  # fmt: skip
    position, plddt, near = (x[:length].float().cpu().numpy() for x in arrays)
    return PredictedChain(position, plddt, near[:, :length], *_errors(found, length))


def _errors(found: Mapping[str, torch.Tensor], length: int) -> tuple[Array | None, float | None]:
    """Return the expected aligned errors and TM-score, if there is a head for them."""
    if "tm_logits" not in found:
        return None, None
    logits = found["tm_logits"][:length, :length]
    everything = torch.ones(length, dtype=torch.bool, device=logits.device)
    pae: Array = expected_error(logits).cpu().numpy()
    return pae, float(ptm(logits, everything, everything))
