"""A trained AlphaFold2 in use, and its predictions as structures to write."""

from pathlib import Path

import numpy as np
import torch

from bevatron.data.proteins.clusters_of_rows import AlignmentRows
from bevatron.data.proteins.constants import ATOM37, ATOM37_MASK, RESIDUES
from bevatron.data.readers.elements import ATOMIC_NUMBERS
from bevatron.data.readers.proteins.alphabet import CLASSES
from bevatron.data.readers.proteins.structure import Structure, structure_of_columns
from bevatron.models.alphafold2 import load_model
from bevatron.models.alphafold2.predict import PredictedChain, predict
from bevatron.models.alphafold2.task import CYCLES, AlphaFold2Task
from bevatron.recipes.devices import announce, device_to_use
from bevatron.recipes.forward_progress import Stages
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

    @property
    def stages(self) -> Stages:
        """What the progress of a prediction counts."""
        blocks = [*self.model.extra_msa_stack.blocks, *self.model.evoformer.blocks]
        return {"block of the Evoformer": (blocks, CYCLES * len(blocks))}

    def predict(self, chain: Arrays, rows: AlignmentRows, seed: int = 0) -> PredictedChain:
        """Predict a chain; see `bevatron.models.alphafold2.predict`."""
        return predict(self.model, chain, rows, seed, self.activations)


def structure_of(name: str, chain: Arrays, label: str, found: PredictedChain) -> Structure:
    """Return a predicted chain as a structure, pLDDT as B-factors, to be written as mmCIF."""
    types = np.asarray(chain["aatype"])
    names = [*RESIDUES[:20], "UNK"]
    residue, slot = np.nonzero(ATOM37_MASK[types])
    components = [names[kind] for kind in types.tolist()]
    atoms = [ATOM37[place] for place in slot.tolist()]
    return structure_of_columns(
        name,
        {
            "name": atoms,
            "element": [ATOMIC_NUMBERS[atom[0]] for atom in atoms],
            "position": found.position[residue, slot],
            "b_factor": found.plddt[residue],
            "residue": residue,
        },
        {
            "component": components,
            "parent": components,
            "letter": [CLASSES[kind] for kind in types.tolist()],
            "chain": np.zeros(len(types)),
            "number": np.arange(1, len(types) + 1),
        },
        {"label": [label], "author": [label], "entity": ["1"], "kind": ["protein"]},
    )
