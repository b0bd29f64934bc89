"""A trained AlphaFold2 in use, and its predictions as structures to write."""

from pathlib import Path

import numpy as np
import torch

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
from bevatron.models.alphafold2.predict import PredictedChain, predict
from bevatron.models.alphafold2.task import CYCLES, AlphaFold2Task
from bevatron.recipes.devices import announce, device_to_use
from bevatron.recipes.kinds import newest_model
from bevatron.typing import Arrays


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
        self.activations = torch.bfloat16 if self.device.type == "cuda" else None
        self.task = AlphaFold2Task(CYCLES, activations=self.activations)
        self.model.to(self.device).eval()
        announce(self.device, self.activations or next(self.model.parameters()).dtype)

    def predict(self, chain: Arrays, rows: AlignmentRows, seed: int = 0) -> PredictedChain:
        """Predict a chain; see `bevatron.models.alphafold2.predict`."""
        return predict(self.model, chain, rows, seed, self.activations)


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
