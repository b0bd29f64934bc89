"""Weights of OpenFold, MLPerf HPC and DeepMind, taken over and given back."""

from collections.abc import Mapping

import torch
from torch import Tensor

from bevatron.errors import CheckpointError
from bevatron.models.alphafold2.config import AlphaFold2Config
from bevatron.models.alphafold2.model import AlphaFold2
from bevatron.models.alphafold2.openfold_layout import in_openfold_layout, openfold_name


def from_openfold(
    state: Mapping[str, Tensor], config: AlphaFold2Config, dtype: torch.dtype | None = None
) -> AlphaFold2:
    """Build a model from OpenFold's state dict, of any version, or from that of MLPerf HPC.

    Parameters
    ----------
    state
        Weights by name.
    config
        Sizes of the model.
    dtype
        Floating-point type of the weights.

    Raises
    ------
    CheckpointError
        If a tensor is missing, unknown or of another shape; it names the tensor.
    """
    model = AlphaFold2(config, dtype)
    load_openfold(model, state)
    return model


def load_openfold(model: AlphaFold2, state: Mapping[str, Tensor]) -> None:
    """Load OpenFold's state dict into a model; see `from_openfold`."""
    theirs = in_openfold_layout(state)
    found = {}
    for name, own in model.state_dict().items():
        key = openfold_name(name)
        if key not in theirs:
            raise CheckpointError(f"{key}: this tensor is missing from the weights")
        value = theirs.pop(key)
        if value.shape != own.shape:
            raise CheckpointError(
                f"{key}: the weights have shape {tuple(value.shape)}, the configuration asks for "
                f"{tuple(own.shape)}"
            )
        found[name] = value
    if theirs:
        raise CheckpointError(f"{next(iter(theirs))}: the model has no such tensor")
    model.load_state_dict(found)


def to_openfold(model: AlphaFold2) -> dict[str, Tensor]:
    """Return the weights with OpenFold's names."""
    return {openfold_name(name): value for name, value in model.state_dict().items()}
