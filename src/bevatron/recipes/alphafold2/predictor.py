"""A trained AlphaFold2 in use: the structure of a chain and how sure the model is."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from bevatron.data.proteins.chain_batch import collate_chain
from bevatron.data.proteins.chain_samples import ChainSizes, sample_chain
from bevatron.data.proteins.clusters_of_rows import AlignmentRows
from bevatron.data.proteins.constants import ATOM37, ATOM37_MASK, RESIDUES
from bevatron.data.readers.elements import ATOMIC_NUMBERS
from bevatron.data.readers.proteins.structure import (
    UNKNOWN_NUMBER,
    Atoms,
    Chains,
    Links,
    Residues,
    Structure,
)
from bevatron.models.alphafold2 import load_model
from bevatron.models.alphafold2.task import AlphaFold2Task
from bevatron.models.common.folding.metrics import (
    contact_probability,
    expected_error,
    expected_lddt,
    ptm,
)
from bevatron.recipes.alphafold2.data import fitted
from bevatron.recipes.alphafold2.run import CYCLES
from bevatron.recipes.devices import announce, device_to_use
from bevatron.recipes.kinds import newest_model
from bevatron.typing import Array, Arrays

ROWS, EXTRA_ROWS = 508, 5120
"""Rows of the alignment of a prediction, as in fine-tuning."""


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


class ChainPredictor:
    """A model on a device; CheckpointError or ConfigError if there is no such model or device.

    Parameters
    ----------
    device
        cpu, cuda, cuda:N or auto. On a GPU alignment and pair are in bfloat16, as in training.
    """

    def __init__(self, model: str | Path, device: str = "auto") -> None:
        self.model = load_model(newest_model(Path(model)))
        self.device = device_to_use(device)
        activations = torch.bfloat16 if self.device.type == "cuda" else None
        self.task = AlphaFold2Task(CYCLES, activations=activations)
        self.model.to(self.device).eval()
        announce(self.device, activations or next(self.model.parameters()).dtype)

    def predict(self, chain: Arrays, rows: AlignmentRows, seed: int = 0) -> PredictedChain:
        """Predict a chain.

        Parameters
        ----------
        chain
            With `bevatron.data.proteins.chains.CHAIN_FIELDS`, whose atoms are not read, and
            `template_atoms.TEMPLATE_FIELDS` if it has templates; the first four are shown.
        rows
            Its alignment.
        seed
            Of the rows that are drawn.
        """
        length = len(chain["aatype"])
        sizes = ChainSizes(length, ROWS, EXTRA_ROWS, best_templates=True)
        sizes = fitted(sizes, rows, chain.get("template_aatype"))
        sample = sample_chain(chain, rows, seed, sizes, CYCLES)
        batch = collate_chain([sample], np.zeros(1, dtype=np.int64), [1.0]).to(self.device)
        found = self.task.predict(self.model, batch)
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


def structure_of(name: str, chain: Arrays, label: str, found: PredictedChain) -> Structure:
    """Return a predicted chain as a structure, pLDDT as B-factors, to be written as mmCIF."""
    types = np.asarray(chain["aatype"])
    names = [*RESIDUES[:20], "UNK"]
    residue, slot = np.nonzero(ATOM37_MASK[types])
    length, atoms = len(types), len(residue)
    components = np.array([names[kind] for kind in types.tolist()], dtype=np.str_)
    atom_names = np.array([ATOM37[place] for place in slot.tolist()], dtype=np.str_)
    elements = [ATOMIC_NUMBERS[atom[0]] for atom in atom_names.tolist()]
    texts = np.full(length, "", dtype=np.str_)
    return Structure(
        name=name,
        atoms=Atoms(
            name=atom_names,
            element=np.array(elements, dtype=np.uint8),
            position=found.position[residue, slot],
            b_factor=found.plddt[residue],
            occupancy=np.ones(atoms, dtype=np.float32),
            charge=np.zeros(atoms, dtype=np.int8),
            altloc=np.full(atoms, "", dtype=np.str_),
            residue=residue.astype(np.int32),
        ),
        residues=Residues(
            component=components,
            parent=components,
            letter=texts,
            chain=np.zeros(length, dtype=np.int32),
            number=np.arange(1, length + 1, dtype=np.int32),
            author_number=np.full(length, UNKNOWN_NUMBER, dtype=np.int32),
            insertion=texts,
            atom_ptr=np.searchsorted(residue, np.arange(length + 1)).astype(np.int64),
        ),
        chains=Chains(
            label=np.array([label]),
            author=np.array([label]),
            entity=np.array(["1"]),
            kind=np.array(["protein"]),
            residue_ptr=np.array([0, length], dtype=np.int64),
        ),
        links=Links(np.zeros((0, 2), dtype=np.int32), np.zeros(0, dtype=np.str_)),
    )  # fmt: skip
