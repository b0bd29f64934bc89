"""A MACE in a model folder."""

from pathlib import Path

import torch

from bevatron.config import from_dict, to_dict
from bevatron.models.common import model_folder
from bevatron.models.mace.config import MaceConfig
from bevatron.models.mace.model import MACE

KIND = "mace"
"""How a model folder names this model."""


def save_model(model: MACE, path: Path | str) -> None:
    """Write a model into a folder (``model.json``, ``weights.safetensors``)."""
    model_folder.save_model(path, KIND, to_dict(model.config), model.state_dict())


def load_model(path: Path | str, dtype: torch.dtype | None = None) -> MACE:
    """Read a model from a folder.

    Parameters
    ----------
    path
        The folder.
    dtype
        Floating-point type of the model; that of the weights by default.

    Raises
    ------
    CheckpointError
        If the folder holds another kind of model or its weights do not fit its configuration.
    """
    return build(model_folder.load_kind(path, KIND), str(path), dtype)


def build(folder: model_folder.ModelFolder, name: str, dtype: torch.dtype | None = None) -> MACE:
    """Build the model of a folder that was read."""
    stored = folder.state["embedding.weight"].dtype if "embedding.weight" in folder.state else None
    model = MACE(from_dict(MaceConfig, folder.config), dtype or stored)
    model_folder.fill(model, folder, name)
    return model
