"""Folders that hold one model: ``model.json`` (kind and configuration) and ``weights.safetensors``.

A folder says by itself what it is, holds no pickle and is written wholly or not at all.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn

from bevatron.config import from_dict, to_dict
from bevatron.errors import CheckpointError
from bevatron.files import MODEL_FILE, write_bytes_atomically, write_json_atomically

FORMAT = 1
"""Version of the layout."""

WEIGHTS_FILE = "weights.safetensors"


Config = TypeVar("Config")
Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True)
class ModelFolder:
    """A model as it was read: what it is, its configuration as plain values, its weights."""

    kind: str
    config: dict[str, Any]
    state: dict[str, Tensor]


def save_model(
    path: Path | str, kind: str, config: Mapping[str, Any], state_dict: Mapping[str, Tensor]
) -> None:
    """Write a model into a folder, which is made if need be; other files in it are left alone.

    Parameters
    ----------
    path
        The folder.
    kind
        Name of the model, ``mace``.
    config
        Plain values from which the model can be built.
    state_dict
        Its weights and buffers by name.

    Raises
    ------
    CheckpointError
        If the folder cannot be written.
    """
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be made ({error.strerror})") from None
    tensors = {name: value.detach().cpu().contiguous() for name, value in state_dict.items()}
    # The description comes last: a folder without one is not a model.
    description = folder / MODEL_FILE
    weights = save({name: value.clone() for name, value in tensors.items()})
    write_bytes_atomically(folder / WEIGHTS_FILE, weights, CheckpointError)
    write_json_atomically(
        description, {"format": FORMAT, "kind": kind, "config": dict(config)}, CheckpointError
    )


def load_model_folder(path: Path | str) -> ModelFolder:
    """Read a model folder.

    Raises
    ------
    CheckpointError
        If it is missing, damaged or of a newer version; the message says which file.
    """
    folder = Path(path)
    description, weights = folder / MODEL_FILE, folder / WEIGHTS_FILE
    for file in (description, weights):
        if not file.is_file():
            raise CheckpointError(f"{folder}: is not a model folder, it has no {file.name}")
    try:
        values = json.loads(description.read_text())
        found, kind, config = values["format"], values["kind"], values["config"]
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise CheckpointError(f"{description}: cannot be read ({error})") from None
    if found != FORMAT:
        raise CheckpointError(
            f"{description}: has format {found}, this version of bevatron reads {FORMAT}; update it"
        )
    try:
        state = load_file(weights)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{weights}: is damaged ({error}); copy or make it again") from None
    return ModelFolder(kind=str(kind), config=dict(config), state=state)


class ModelKind(Generic[Config, Model]):
    """One kind of model: how its folders name it, its configuration, how it is built.

    Parameters
    ----------
    kind
        The name in ``model.json``.
    config
        Class of the configuration, which the model keeps as ``config``.
    model
        Makes a model from its configuration and a floating-point type.
    """

    def __init__(
        self,
        kind: str,
        config: type[Config],
        model: Callable[[Config, torch.dtype | None], Model],
    ) -> None:
        self.kind, self.config, self.model = kind, config, model

    def save(self, model: Model, path: Path | str) -> None:
        """Write a model into a folder (``model.json``, ``weights.safetensors``)."""
        save_model(path, self.kind, to_dict(model.config), model.state_dict())

    def load(self, path: Path | str, dtype: torch.dtype | None = None) -> Model:
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
            If the folder cannot be read, holds another kind of model, or its weights do not fit its
            configuration.
        """
        folder = load_model_folder(path)
        if folder.kind != self.kind:
            raise CheckpointError(
                f"{path}: holds a model of kind '{folder.kind}', expected '{self.kind}'"
            )
        stored = (value.dtype for value in folder.state.values() if value.is_floating_point())
        model = self.model(from_dict(self.config, folder.config), dtype or next(stored, None))
        try:
            model.load_state_dict(folder.state)
        except RuntimeError as error:
            first = str(error).splitlines()[-1].strip()
            raise CheckpointError(
                f"{path}: the weights do not fit the configuration ({first})"
            ) from None
        return model.eval()
