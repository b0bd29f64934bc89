"""A GPS++ in a model folder."""

from pathlib import Path

import torch

from bevatron.config import from_dict, to_dict
from bevatron.models.common import model_folder
from bevatron.models.gpspp.config import GPSPlusPlusConfig
from bevatron.models.gpspp.model import GPSPlusPlus

KIND = "gpspp"
"""How a model folder names this model."""


def save_model(model: GPSPlusPlus, path: Path | str) -> None:
    """Write a model into a folder (``model.json``, ``weights.safetensors``)."""
    model_folder.save_model(path, KIND, to_dict(model.config), model.state_dict())


def load_model(path: Path | str, dtype: torch.dtype | None = None) -> GPSPlusPlus:
    """Read a model from a folder, ready for predictions.

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
    return from_folder(model_folder.load_kind(path, KIND), str(path), dtype)


def from_folder(
    folder: model_folder.ModelFolder, name: str, dtype: torch.dtype | None = None
) -> GPSPlusPlus:
    """Build the model of a folder that was read."""
    stored = next((value.dtype for value in folder.state.values()), None)
    model = GPSPlusPlus(from_dict(GPSPlusPlusConfig, folder.config), dtype or stored)
    model_folder.fill(model, folder, name)
    return model.eval()
