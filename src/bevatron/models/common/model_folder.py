"""Folders that hold one model: ``model.json`` (kind and configuration) and ``weights.safetensors``.

A folder describes itself, holds no pickle and is written completely or not at all. model.json holds
the checksum of the weights, which are read only if they match it and are finite.
"""

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, Self, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from bevatron.config import from_dict, to_dict
from bevatron.errors import CheckpointError, ConfigError
from bevatron.files import (
    MODEL_FILE,
    atomic_write,
    checksum,
    explained,
    read_description,
    write_json_atomically,
)

FORMAT = 1
"""Version of the layout."""

WEIGHTS_FILE = "weights.safetensors"


class Configuration(Protocol):
    """The frozen dataclass that defines a model apart from its weights."""

    @classmethod
    def preset(cls, name: str, **changes: Any) -> Self:
        """Return a configuration by its name, with changes."""


Config = TypeVar("Config", bound=Configuration)
Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True)
class ModelFolder:
    """A model as read: its kind, configuration as plain values, weights."""

    kind: str
    config: dict[str, Any]
    state: dict[str, Tensor]


def save_model(
    path: Path | str, kind: str, config: Mapping[str, Any], state_dict: Mapping[str, Tensor]
) -> None:
    """Write a model into a folder, which is created if needed; other files in it are untouched.

    Raises CheckpointError if a weight is NaN or infinite, naming it, or the folder cannot be
    written.

    Parameters
    ----------
    path : the folder
    kind : name of the model, ``mace``
    config : plain values from which the model can be built
    state_dict : its weights and buffers by name
    """
    folder = Path(path)
    bad = not_finite(state_dict)
    if bad is not None:
        raise CheckpointError(
            f"{folder}: the model is not saved, its '{bad}' holds NaN or infinity; the training "
            "has diverged (a lower learning rate or clipping may help)"
        )
    with explained(folder, CheckpointError):
        folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: value.detach().cpu().contiguous() for name, value in state_dict.items()}
    description = folder / MODEL_FILE
    weights = save({name: value.clone() for name, value in tensors.items()})
    # The description is written last, and an older one is removed before its weights: a folder
    # without one is not a model, so a kill never leaves weights with the wrong checksum.
    with atomic_write(folder / WEIGHTS_FILE, CheckpointError) as file:
        file.write(weights)
        file.flush()
        os.fsync(file.fileno())  # some file systems find out only now that they are full
        description.unlink(missing_ok=True)
    values = {
        "format": FORMAT,
        "kind": kind,
        "files": {WEIGHTS_FILE: checksum(weights)},
        "config": dict(config),
    }
    write_json_atomically(description, values, CheckpointError)


def not_finite(state_dict: Mapping[str, Tensor]) -> str | None:
    """Return the name of the first tensor that holds NaN or infinity, None if there is none.

    Examples
    --------
    >>> not_finite({"a": torch.zeros(2), "b": torch.tensor([0.0, torch.nan])})
    'b'
    """
    for name, value in state_dict.items():
        if value.is_floating_point() and not bool(value.isfinite().all()):
            return name
    return None


def load_model_folder(path: Path | str) -> ModelFolder:
    """Read a model folder.

    Raises CheckpointError if it is missing, damaged, of a newer version or its weights are not
    finite, naming the file.
    """
    folder = Path(path)
    description, weights = folder / MODEL_FILE, folder / WEIGHTS_FILE
    for file in (description, weights):
        if not file.is_file():
            raise CheckpointError(f"{folder}: is not a model folder, it has no {file.name}")
    values = read_description(description)
    for key, kind in (("format", int), ("config", dict)):
        if not isinstance(values.get(key), kind):
            raise CheckpointError(f"{description}: is damaged, it has no '{key}'; copy it again")
    if values["format"] != FORMAT:
        raise CheckpointError(
            f"{description}: has format {values['format']}, this version of bevatron reads "
            f"{FORMAT}; update it"
        )
    files = values.get("files")
    # Folders of 0.1.0 have no checksums.
    expected = files.get(WEIGHTS_FILE) if isinstance(files, dict) else None
    return ModelFolder(values["kind"], values["config"], _read_weights(weights, expected))


def misfit(error: RuntimeError) -> str:
    r"""Shorten torch's message on a state dict that does not fit, which lists every key.

    Examples
    --------
    >>> misfit(RuntimeError('Error(s) for Net:\n\tMissing key(s): "a.weight", "b.weight", "c"'))
    'Missing key(s): "a.weight" and 2 more'
    >>> misfit(RuntimeError(
    ...     "Error(s) for Net:\n\tsize mismatch for a.weight: copying a param with shape "
    ...     "torch.Size([2, 3]) from checkpoint, the shape in current model is torch.Size([2, 4])."
    ... ))
    'a.weight has shape [2, 3], in this model [2, 4]'
    """
    last = str(error).splitlines()[-1].strip().rstrip(". ")
    if found := re.match(r"size mismatch for (\S+): .*Size\((.*)\) from .*Size\((.*)\)", last):
        return "{} has shape {}, in this model {}".format(*found.groups())
    first, *others = last.split('", "')
    return f'{first}" and {len(others)} more' if others else first


def _read_weights(file: Path, expected: str | None) -> dict[str, Tensor]:
    try:
        data = file.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read ({error.strerror})") from None
    if expected is not None and checksum(data) != expected:
        raise CheckpointError(
            f"{file}: is damaged, it does not match the checksum in {MODEL_FILE}; copy both files "
            "or make the model again"
        )
    try:
        state = load(data)
    except (SafetensorError, ValueError, KeyError) as error:
        raise CheckpointError(f"{file}: is damaged ({error}); copy or make it again") from None
    bad = not_finite(state)
    if bad is not None:
        raise CheckpointError(
            f"{file}: '{bad}' holds NaN or infinity; the training had diverged or the file is "
            "damaged, take another model"
        )
    return state


class ModelKind(Generic[Config, Model]):
    """One kind of model: its name in folders, its configuration, its constructor.

    Parameters
    ----------
    kind : the name in ``model.json``
    config : class of the configuration, which the model keeps as ``config``
    model : makes a model from its configuration and a floating-point type
    absent : values of keys that folders of earlier versions lack, unless they are the defaults
    """

    def __init__(
        self,
        kind: str,
        config: type[Config],
        model: Callable[[Config, torch.dtype | None], Model],
        absent: Mapping[str, Any] | None = None,
    ) -> None:
        self.kind, self.config, self.model = kind, config, model
        self.absent = dict(absent or {})

    def build(
        self, name: str | None = None, dtype: torch.dtype | None = None, **changes: object
    ) -> Model:
        """Build a model with new weights.

        Raises ConfigError if there is no such preset or entry.

        Parameters
        ----------
        name : a preset of the configuration; by default the one named after the kind
        dtype : floating-point type
        **changes : entries of the configuration to change
        """
        return self.model(self.config.preset(name or self.kind, **changes), dtype)

    def save(self, model: Model, path: Path | str) -> None:
        """Write a model into a folder (``model.json``, ``weights.safetensors``).

        Raises CheckpointError if it is no model, a weight is NaN or infinite, or the folder cannot
        be written.
        """
        if not isinstance(model, nn.Module):
            raise CheckpointError(
                "save_model takes the model first and the folder second, the first argument is a "
                f"{type(model).__name__}"
            )
        save_model(path, self.kind, to_dict(model.config), model.state_dict())

    def load(self, path: Path | str, dtype: torch.dtype | None = None) -> Model:
        """Read a model from a folder, ready for predictions.

        Raises CheckpointError if the folder cannot be read, holds another kind of model, its
        configuration is invalid or its weights do not fit it.

        Parameters
        ----------
        path : the folder
        dtype : floating-point type of the model; that of the weights by default
        """
        folder = load_model_folder(path)
        if folder.kind != self.kind:
            raise CheckpointError(
                f"{path}: holds a model of kind '{folder.kind}', expected '{self.kind}'"
            )
        stored = (value.dtype for value in folder.state.values() if value.is_floating_point())
        try:
            config = from_dict(self.config, {**self.absent, **folder.config}, "config")
            model = self.model(config, dtype or next(stored, None))
            model.load_state_dict(folder.state)
        except ConfigError as error:
            raise CheckpointError(f"{Path(path) / MODEL_FILE}: {error}") from None
        except RuntimeError as error:
            raise CheckpointError(
                f"{path}: the weights do not fit the configuration ({misfit(error)})"
            ) from None
        return model.eval()
