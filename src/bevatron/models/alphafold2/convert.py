"""Conversion of weights from and to OpenFold, MLPerf HPC and DeepMind."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bevatron.errors import CheckpointError
from bevatron.models.alphafold2.config import AlphaFold2Config
from bevatron.models.alphafold2.deepmind_layout import place, their_shape
from bevatron.models.alphafold2.mlperf_layout import in_mlperf_layout
from bevatron.models.alphafold2.model import AlphaFold2
from bevatron.models.alphafold2.openfold_layout import in_openfold_layout, openfold_name
from bevatron.typing import Array, Arrays


def from_openfold(
    state: Mapping[str, Tensor], config: AlphaFold2Config, dtype: torch.dtype | None = None
) -> AlphaFold2:
    """Build a model from a state dict of OpenFold, of any version, or of MLPerf HPC.

    Raises CheckpointError if a tensor is missing, unknown or of another shape, naming the tensor.

    Parameters
    ----------
    state : weights by name
    config : sizes of the model
    dtype : floating-point type of the weights
    """
    model = AlphaFold2(config, dtype)
    model.load_state_dict(_ours(in_openfold_layout(state), model))
    return model


def to_openfold(model: AlphaFold2) -> dict[str, Tensor]:
    """Return the weights under OpenFold's names."""
    return {openfold_name(name): value for name, value in model.state_dict().items()}


def from_mlperf(
    checkpoint: Mapping[str, Any], config: AlphaFold2Config
) -> tuple[AlphaFold2, dict[str, Tensor]]:
    """Build a model from a resumable checkpoint of MLPerf HPC or ScaleFold, with Adam's moments.

    Raises CheckpointError as `from_openfold`.

    Parameters
    ----------
    checkpoint
        ``alphafold_state_dict`` and ``optimizer_state_dict``, whose state is numbered in the order
        of the former; merged layers of attention are split.
    config : sizes of the model

    Returns
    -------
    tuple
        The model, and ``parameter/exp_avg``, ``parameter/exp_avg_sq`` and ``parameter/step`` as
        `bevatron.train.optim.load_optimizer_tensors` takes them.
    """
    weights = checkpoint["alphafold_state_dict"]
    state = checkpoint["optimizer_state_dict"]["state"]
    model = from_openfold(weights, config)
    found: dict[str, Tensor] = {}
    for moment in ("exp_avg", "exp_avg_sq"):
        theirs = {name: state[number][moment] for number, name in enumerate(weights)}
        ours = _ours(in_openfold_layout(theirs), model)
        found |= {f"{name}/{moment}": value for name, value in ours.items()}
    step = torch.as_tensor(state[0]["step"], dtype=torch.float32)
    return model, found | {f"{name}/step": step.clone() for name, _ in model.named_parameters()}


def to_mlperf(
    model: AlphaFold2, moments: Mapping[str, Tensor], iteration: int, *, merged: bool = False
) -> dict[str, Any]:
    """Return a resumable checkpoint of MLPerf HPC, or with merged layers of ScaleFold.

    Parameters
    ----------
    moments : Adam's moments, see `from_mlperf`
    iteration : number of training steps
    merged : see `in_mlperf_layout`
    """

    def theirs(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        named = {openfold_name(name): value for name, value in values.items()}
        return in_mlperf_layout(named, merged=merged)

    weights = theirs(model.state_dict())
    # A weight that no loss has reached has no moments.
    parts = {
        moment: theirs(
            {
                name: moments.get(f"{name}/{moment}", torch.zeros_like(value))
                for name, value in model.state_dict().items()
            }
        )
        for moment in ("exp_avg", "exp_avg_sq")
    }
    steps = (value for name, value in moments.items() if name.endswith("/step"))
    step = next(steps, torch.zeros(()))
    state = {
        number: {"step": step.clone(), **{moment: part[name] for moment, part in parts.items()}}
        for number, name in enumerate(weights)
    }
    # It loads a group as it is, without defaults of its own.
    adam = torch.optim.Adam([torch.zeros(1)], lr=1e-3, eps=1e-6).state_dict()["param_groups"]
    groups = [{**adam[0], "params": [*range(len(weights))]}]
    return {
        "iteration": iteration,
        "alphafold_state_dict": weights,
        "optimizer_state_dict": {"state": state, "param_groups": groups},
    }


def from_deepmind(
    arrays: Arrays, config: AlphaFold2Config, dtype: torch.dtype | None = None
) -> AlphaFold2:
    """Build a model from the arrays of one of DeepMind's parameter files (``params_model_*.npz``).

    Raises CheckpointError if an array is missing, unknown or of another shape, naming the array.

    Parameters
    ----------
    arrays : by their names in the file
    config, dtype : see `from_openfold`
    """
    model = AlphaFold2(config, dtype)
    found: dict[str, Tensor] = {}
    used = set()
    for name, own in model.state_dict().items():
        array, block = place(name)
        if array not in arrays:
            raise CheckpointError(f"{array}: this array is missing from the file")
        used.add(array)
        shape = their_shape(name, array, tuple(own.shape), config)
        value = np.asarray(arrays[array])
        if block is not None:
            value = value[block] if block < len(value) else value[:0]
        if value.shape != shape:
            raise CheckpointError(
                f"{array}: the array has shape {np.shape(arrays[array])}, the configuration asks "
                f"for {shape}" + ("" if block is None else f" in block {block}")
            )
        matrix = value.reshape(tuple(own.shape)[::-1]).T
        found[name] = torch.from_numpy(np.ascontiguousarray(matrix))
    unknown = sorted(set(arrays) - used)
    if unknown:
        raise CheckpointError(f"{unknown[0]}: the model has no such array")
    model.load_state_dict(found)
    return model


def to_deepmind(model: AlphaFold2) -> dict[str, Array]:
    """Return the weights as the arrays of one of DeepMind's parameter files."""
    blocks: dict[str, list[Array]] = {}
    single: dict[str, Array] = {}
    for name, value in model.state_dict().items():
        array, block = place(name)
        shape = their_shape(name, array, tuple(value.shape), model.config)
        theirs = value.detach().cpu().numpy().T.reshape(shape)
        if block is None:
            single[array] = theirs
        else:
            blocks.setdefault(array, []).append(theirs)
    return single | {array: np.stack(stack) for array, stack in blocks.items()}


def _ours(theirs: Mapping[str, Tensor], model: AlphaFold2) -> dict[str, Tensor]:
    """Find the tensors of a model in OpenFold's present layout."""
    left, found = dict(theirs), {}
    for name, own in model.state_dict().items():
        key = openfold_name(name)
        if key not in left:
            raise CheckpointError(f"{key}: this tensor is missing from the weights")
        value = left.pop(key)
        if value.shape != own.shape:
            raise CheckpointError(
                f"{key}: the weights have shape {tuple(value.shape)}, the configuration asks for "
                f"{tuple(own.shape)}"
            )
        found[name] = value
    if left:
        raise CheckpointError(f"{next(iter(left))}: the model has no such tensor")
    return found
