"""A node classifier in a model folder."""

from pathlib import Path

import torch

from bevatron.config import from_dict, to_dict
from bevatron.models.common import model_folder
from bevatron.models.graph_attention.config import GraphAttentionConfig
from bevatron.models.graph_attention.model import NodeClassifier

KIND = "graph_attention"
"""How a model folder names this model."""


def save_model(model: NodeClassifier, path: Path | str) -> None:
    """Write a model into a folder (``model.json``, ``weights.safetensors``)."""
    model_folder.save_model(path, KIND, to_dict(model.config), model.state_dict())


def load_model(path: Path | str, dtype: torch.dtype | None = None) -> NodeClassifier:
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


def build(
    folder: model_folder.ModelFolder, name: str, dtype: torch.dtype | None = None
) -> NodeClassifier:
    """Build the model of a folder that was read."""
    floating = [v.dtype for v in folder.state.values() if v.is_floating_point()]
    model = NodeClassifier(from_dict(GraphAttentionConfig, folder.config))
    model = model.to(dtype or (floating[0] if floating else torch.get_default_dtype()))
    model_folder.fill(model, folder, name)
    return model
