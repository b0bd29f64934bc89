"""Where a run starts: new weights, or those of a run, OpenFold, MLPerf HPC or DeepMind."""

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bevatron.errors import CheckpointError
from bevatron.models.alphafold2.config import AlphaFold2Config
from bevatron.models.alphafold2.convert import from_deepmind, from_mlperf, from_openfold
from bevatron.models.alphafold2.model import AlphaFold2
from bevatron.models.common import model_folder
from bevatron.recipes.alphafold2 import SYSTEM
from bevatron.recipes.kinds import newest_model

OPENFOLD, MLPERF, MOMENTS = "ema", "alphafold_state_dict", "optimizer_state_dict"
"""Keys of checkpoints of OpenFold's training and of MLPerf HPC that hold the weights, and of the
latter that holds Adam's moments."""


class Started(NamedTuple):
    """What a run starts from.

    Attributes
    ----------
    optimizer_tensors
        Adam's moments as `bevatron.train.optim.optimizer_tensors` names them; none = zeros.
    """

    model: AlphaFold2
    optimizer_tensors: Mapping[str, Tensor]


def started_from(path: Path, config: AlphaFold2Config) -> Started:
    """Build a model with the weights of a run, a model folder or a file of others.

    A resumable checkpoint of MLPerf HPC also has Adam's moments, with which training goes on.
    Raises CheckpointError if it cannot be read or is of a model of other sizes.

    Parameters
    ----------
    path : a folder; ``params_model_*.npz`` of DeepMind; a file of torch of OpenFold or MLPerf HPC
    config : sizes of the model
    """
    if path.is_dir():
        return Started(_from_folder(path, config), {})
    try:
        if path.suffix == ".npz":
            return Started(from_deepmind(_arrays(path), config), {})
        found = _contents(path)
        if MLPERF in found and MOMENTS in found:
            return Started(*from_mlperf(found, config))
        return Started(from_openfold(_weights(found), config), {})
    except CheckpointError as error:
        raise CheckpointError(f"start_from: {path}: {error}") from None


def _from_folder(path: Path, config: AlphaFold2Config) -> AlphaFold2:
    folder = model_folder.load_model_folder(newest_model(path))
    if folder.kind != SYSTEM.kind:
        raise CheckpointError(f"start_from: {path}: is a model of {folder.kind}, not of AlphaFold2")
    model = AlphaFold2(config)
    try:
        model.load_state_dict(folder.state)
    except RuntimeError as error:
        raise CheckpointError(f"start_from: {path}: {model_folder.misfit(error)}") from None
    return model


def _arrays(path: Path) -> dict[str, Any]:
    try:
        with np.load(path) as file:
            return dict(file)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot be read ({error})") from None


def _contents(path: Path) -> Mapping[str, Any]:
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"cannot be read ({str(error).splitlines()[0]})") from None
    if not isinstance(found, Mapping):
        raise CheckpointError("holds no weights by name")
    return found


def _weights(found: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the state dict in a file of torch, whichever of the known keys it is under."""
    if MLPERF in found:
        found = found[MLPERF]
    elif OPENFOLD in found:
        found = found[OPENFOLD]["params"]
    return found
