"""Conversion of checkpoints between mace-torch and model folders, file to file."""

import json
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bevatron.errors import CheckpointError, ConfigError
from bevatron.files import atomic_write, write_json_atomically
from bevatron.models.mace import (
    from_mace_torch,
    load_mace_torch_file,
    save_mace_torch_file,
    save_model,
    to_mace_torch,
)
from bevatron.models.mace.mace_torch_file import refuse_other_content
from bevatron.recipes.mace.potential import trained_model
from bevatron.recipes.start_from import contents, refuse_existing, tensors


def from_mace_torch_file(
    file: Path, out: Path, *, trust: bool = False, config: Path | None = None
) -> str:
    """Convert a mace-torch checkpoint to a model folder and describe it in one line.

    Raises TrustError or MissingPackageError for a ``.model`` file without ``trust`` or without
    mace-torch; CheckpointError or ConfigError if a file has the wrong content, or ``out`` exists.

    Parameters
    ----------
    file : a ``.model`` file, or with ``config`` a state dict (``.pt``, ``.safetensors``)
    out : the model folder
    trust : unpickle a ``.model`` file
    config : JSON file of mace-torch's configuration
    """
    if not file.is_file():
        raise CheckpointError(f"{file}: the file does not exist")
    refuse_existing(out)
    if config is None and file.suffix in {".pt", ".safetensors"} and not trust:
        raise ConfigError(
            f"{file}: a state dict has no configuration; give mace-torch's "
            "configuration with --config FILE.json (or --trust, if it is a pickled model)"
        )
    refuse_other_content(file)
    if config is None:
        with warnings.catch_warnings(action="ignore"):  # of e3nn and mace-torch
            model = load_mace_torch_file(file, trust=trust)
    else:
        given, state = _read_config(config), _read_state_dict(file)
        try:
            model = from_mace_torch(state, given)
        except CheckpointError as error:
            raise CheckpointError(f"{file}: {error}") from None
        except ConfigError as error:
            raise ConfigError(f"{config}: {error}") from None
    save_model(model, out)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    return (
        f"{out}: {model.config.hidden_irreps}, {model.config.num_elements} elements, "
        f"cutoff {model.config.r_max:g} Å, {parameters:,} parameters in {dtype}"
    )


def to_mace_torch_file(model: Path, out: Path) -> str:
    """Write a run or a model folder as a mace-torch checkpoint; return a line that names the file.

    Raises MissingPackageError for ``NAME.model`` without mace-torch.

    Parameters
    ----------
    out : ``NAME.model`` (needs mace-torch) or ``NAME.pt`` (a state dict, with ``NAME.json``)
    """
    found = trained_model(model)
    if out.suffix == ".model":
        with warnings.catch_warnings(action="ignore"):  # of e3nn and mace-torch
            save_mace_torch_file(found, out)
        return f"{out}: written for mace-torch"
    if out.suffix != ".pt":
        raise ConfigError(f"{out}: expected a name that ends with .model or .pt")
    state, config = to_mace_torch(found)
    with atomic_write(out, CheckpointError) as file:
        torch.save(state, file)
    write_json_atomically(out.with_suffix(".json"), config, CheckpointError)
    return f"{out}: state dict written, configuration in {out.with_suffix('.json')}"


def _read_state_dict(file: Path) -> dict[str, Tensor]:
    try:
        return dict(tensors(contents(file)))
    except CheckpointError as error:
        raise CheckpointError(
            f"{file}: {error}; a whole model is converted without --config, with --trust"
        ) from None


def _read_config(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as JSON ({error})") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected keys and values")
    return values
