"""A trained AlphaFold3 in use."""

from pathlib import Path

import torch

from bevatron.models.alphafold3 import load_model
from bevatron.models.alphafold3.predict import Predicted, predict
from bevatron.recipes.devices import announce, device_to_use
from bevatron.recipes.forward_progress import Stages
from bevatron.recipes.kinds import newest_model
from bevatron.typing import Arrays


class ComplexPredictor:
    """A model on a device; CheckpointError or ConfigError if there is no such model or device.

    Parameters
    ----------
    device
        cpu, cuda, cuda:N or auto. On a GPU trunk and diffusion run in bfloat16, as in training.
    """

    def __init__(self, model: str | Path, device: str = "auto") -> None:
        folder = newest_model(Path(model))
        self.model = load_model(folder)
        self.device = device_to_use(device)
        self.activations = torch.bfloat16 if self.device.type == "cuda" else None
        self.model.to(self.device)
        announce(self.device, self.activations or next(self.model.parameters()).dtype)

    def stages(self, samples: int, steps: int) -> Stages:
        """Return what the progress of a prediction counts."""
        model = self.model
        stacks = (model.trunk.msa, model.trunk.pairformer)
        blocks = [block for stack in stacks if stack is not None for block in stack.blocks]
        return {
            "block of the trunk": (blocks, model.config.cycles * len(blocks)),
            "step of the diffusion": ([model.diffusion], steps),
            "confidence of structure": ([model.confidence], samples),
        }

    def predict(self, sample: Arrays, samples: int = 5, steps: int = 200) -> list[Predicted]:
        """Sample structures and judge them; see `bevatron.models.alphafold3.predict`."""
        return predict(self.model, sample, samples, steps, self.activations)
