"""Initial weights of a run: new, or from another run, OpenFold, MLPerf HPC or DeepMind."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from bevatron.errors import CheckpointError
from bevatron.files import atomic_write
from bevatron.models.alphafold2 import load_model, save_model
from bevatron.models.alphafold2.config import PRESETS, AlphaFold2Config
from bevatron.models.alphafold2.convert import (
    from_deepmind,
    from_mlperf,
    from_openfold,
    to_deepmind,
    to_mlperf,
    to_openfold,
)
from bevatron.models.alphafold2.model import AlphaFold2
from bevatron.recipes.alphafold2 import SYSTEM
from bevatron.recipes.kinds import newest_model
from bevatron.recipes.start_from import (
    DAMAGED,
    NO_WEIGHTS,
    contents,
    named,
    of_preset,
    refuse_existing,
    said_of,
    tensors,
    with_weights_of,
    write_tensors,
)
from bevatron.train.checkpoint import list_checkpoints, read_checkpoint, read_tensors
from bevatron.train.run_folder import RunFolder

OPENFOLD, MLPERF, MOMENTS = "ema", "alphafold_state_dict", "optimizer_state_dict"
"""Keys of checkpoints of OpenFold's training and of MLPerf HPC that hold the weights, and of the
latter that holds Adam's moments."""

ALIGNED_ERROR = ("aux_heads.tm.", "predicted_aligned_error_head")
"""The head for the aligned error in OpenFold's names and in DeepMind's."""


class Started(NamedTuple):
    """The starting point of a run.

    Attributes
    ----------
    optimizer_tensors
        Adam's moments as `bevatron.train.optim.optimizer_tensors` names them; none = zeros.
    """

    model: AlphaFold2
    optimizer_tensors: Mapping[str, Tensor]


def started_from(path: Path, config: AlphaFold2Config) -> Started:
    """Build a model with the weights of a run, a model folder or another package's file.

    A resumable checkpoint of MLPerf HPC also has Adam's moments, with which training goes on.
    Raises CheckpointError if it cannot be read or is of a model of other sizes.

    Parameters
    ----------
    path : a folder; ``params_model_*.npz`` of DeepMind; a file of torch of OpenFold or MLPerf HPC
    config : sizes of the model
    """
    if path.is_dir():
        with named("start_from"):
            return Started(with_weights_of(path, AlphaFold2(config), SYSTEM), {})
    with named(f"start_from: {path}"):
        return _built(_read(path), config)


def to_folder(file: Path, out: Path, preset: str | None) -> str:
    """Write the weights in a file of OpenFold, MLPerf HPC or DeepMind into a model folder.

    Raises CheckpointError as `started_from`, or if ``out`` exists.
    """
    refuse_existing(out)
    with named(str(file)):
        found = _read(file)
        names = " ".join(found if _is_deepminds(found) else tensors(_weights(found)))
        if preset is None:
            has_errors = any(name in names for name in ALIGNED_ERROR)
            preset = "alphafold2-ptm" if has_errors else "alphafold2"
        config = AlphaFold2Config.preset(preset)
        if "template" not in names:
            config = replace(config, templates=replace(config.templates, num_blocks=0))
        with of_preset(preset, PRESETS):
            model = _built(found, config).model
    save_model(model, out)
    without = "" if config.templates.num_blocks else " without templates"
    return said_of(model, preset + without, out)


def to_openfold_file(model: Path, out: Path) -> str:
    """Write the weights of a run or a model folder as OpenFold reads them."""
    return write_tensors(out, to_openfold(load_model(newest_model(model))))


def to_mlperf_file(run: Path, out: Path, *, merged: bool) -> str:
    """Write the newest checkpoint of a run as MLPerf HPC resumes it: weights and Adam's moments.

    Raises CheckpointError if the run has none.
    """
    checkpoints = list_checkpoints(RunFolder(run).checkpoints)
    if not checkpoints:
        raise CheckpointError(f"{run}: has no checkpoint; convert to-openfold writes weights alone")
    newest = read_checkpoint(checkpoints[-1])
    model = load_model(newest_model(run))
    model.load_state_dict(read_tensors(newest, "model.safetensors"))
    moments = read_tensors(newest, "optimizer.safetensors")
    return write_tensors(out, to_mlperf(model, moments, newest.progress.step, merged=merged))


def to_deepmind_file(model: Path, out: Path) -> str:
    """Write the weights of a run or a model folder as the arrays of DeepMind's files."""
    arrays: dict[str, Any] = to_deepmind(load_model(newest_model(model)))
    with atomic_write(out, CheckpointError) as stream:
        np.savez(stream, **arrays)
    return f"written to {out}"


def _read(path: Path) -> Mapping[str, Any]:
    return _arrays(path) if path.suffix == ".npz" else contents(path)


def _built(found: Mapping[str, Any], config: AlphaFold2Config) -> Started:
    if _is_deepminds(found):
        return Started(from_deepmind(found, config), {})
    if MLPERF in found and MOMENTS in found:
        return Started(*from_mlperf(found, config))
    return Started(from_openfold(tensors(_weights(found)), config), {})


def _is_deepminds(found: Mapping[str, Any]) -> bool:
    return all(isinstance(value, np.ndarray) for value in found.values())


def _arrays(path: Path) -> dict[str, Any]:
    try:
        with np.load(path) as file:
            found = dict(file)
    except OSError as error:
        raise CheckpointError(
            f"cannot be read ({error.strerror or error}); check the path"
        ) from None
    except Exception as error:  # noqa: BLE001  of zip, zlib, pickle or NumPy, as it is damaged
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"cannot be read ({reason}); {DAMAGED}") from None
    if not found:
        raise CheckpointError(NO_WEIGHTS)
    return found


def _weights(found: Mapping[str, Any]) -> object:
    """Return the state dict in a file of torch, whichever of the known keys it is under."""
    if MLPERF in found:
        return found[MLPERF]
    averages = found.get(OPENFOLD)
    return averages.get("params") if isinstance(averages, Mapping) else found
