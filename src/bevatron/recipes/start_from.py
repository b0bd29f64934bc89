"""Weights to start from: of a run or a model folder, or in files of other packages."""

import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from bevatron.errors import CheckpointError
from bevatron.files import atomic_write
from bevatron.models.common import model_folder
from bevatron.recipes.kinds import newest_model
from bevatron.recipes.system import System

Model = TypeVar("Model", bound=nn.Module)

NO_WEIGHTS = "holds no weights by name"
DAMAGED = "copy or download it again"


@contextmanager
def named(where: str) -> Iterator[None]:
    """Prefix an error with the origin of the weights."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{where}: {error}") from None


@contextmanager
def of_preset(preset: str, presets: Iterable[str]) -> Iterator[None]:
    """Say of weights that do not fit which preset they were compared with, and name the others."""
    try:
        yield
    except CheckpointError as error:
        others = " or ".join(f'`preset="{name}"`' for name in presets if name != preset)
        raise CheckpointError(
            f"{error} (preset {preset}); weights of other sizes need {others}"
        ) from None


def with_weights_of(path: Path, model: Model, system: System) -> Model:
    """Give a model the weights of a run or a model folder; CheckpointError if they do not fit."""
    folder = model_folder.load_model_folder(newest_model(path))
    if folder.kind != system.kind:
        raise CheckpointError(f"{path}: is a model of {folder.kind}, not of {system.name}")
    try:
        model.load_state_dict(folder.state)
    except RuntimeError as error:
        raise CheckpointError(f"{path}: {model_folder.misfit(error)}") from None
    return model


def contents(path: Path) -> Mapping[str, Any]:
    """Read a file of torch, in which only tensors are unpickled, or of safetensors.

    Raises CheckpointError if it cannot be read, or holds nothing by name.
    """
    if path.is_dir():
        raise CheckpointError(
            "is a folder, not a file of weights; runs and model folders are used as they are"
        )
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        with warnings.catch_warnings():
            # Of a protocol of pickle that others use; what cannot be read raises an error.
            warnings.simplefilter("ignore", UserWarning)
            found = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise CheckpointError(
            f"cannot be read ({error.strerror or error}); check the path"
        ) from None
    except (RuntimeError, SafetensorError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0].partition(". ")[0]
        raise CheckpointError(f"cannot be read ({reason}); {DAMAGED}") from None
    except Exception:  # noqa: BLE001  bytes that are not a pickle are read as any opcodes of one
        raise CheckpointError(
            "cannot be read (no file of torch, or with more than tensors and plain values)"
        ) from None
    if not (isinstance(found, Mapping) and found and all(isinstance(key, str) for key in found)):
        raise CheckpointError(NO_WEIGHTS)
    return found


def tensors(found: object) -> Mapping[str, Tensor]:
    """Return the tensors by name; CheckpointError if there is anything else."""
    if isinstance(found, Mapping) and all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in found.items()
    ):
        return found
    raise CheckpointError(NO_WEIGHTS)


def write_tensors(path: Path, values: Mapping[str, Any]) -> str:
    """Write a file of torch and return a line about it."""
    with atomic_write(path, CheckpointError) as stream:
        torch.save(dict(values), stream)
    return f"written to {path}"


def refuse_existing(out: Path) -> None:
    """Refuse to write a model folder where something is already, with a CheckpointError."""
    if out.exists() and any(out.iterdir() if out.is_dir() else [out]):
        raise CheckpointError(f"{out}: exists already; choose another folder")


def said_of(model: nn.Module, name: str, out: Path) -> str:
    """Return a line about a model that was written into a folder."""
    millions = sum(weight.numel() for weight in model.parameters()) / 1e6
    return f"{out}: {name}, {millions:.1f} million parameters"
