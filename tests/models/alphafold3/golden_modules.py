"""Reference values of modules: inputs, weights under Protenix's names, outputs and gradients."""

import numpy as np
import torch

from bevatron.models.alphafold3.convert import protenix_names
from bevatron.testing import assert_close

TOLERANCE = 1e-9
"""Relative to the largest value; large arrays are stored in float32."""
TOLERANCE_OF_FLOAT32 = 1e-7


def reference(shared, name):
    """Read the arrays of a file."""
    with np.load(shared / f"golden/alphafold3/{name}.npz") as arrays:
        return {key: arrays[key] for key in arrays.files}


def tensor(array):
    """Numbers in float64, others as they are."""
    found = torch.from_numpy(array)
    return found.double() if found.is_floating_point() else found


def load(module, golden):
    """Give a module the file's weights, all of them, in float64."""
    module.double()
    theirs = protenix_names(module)
    stored = {key.removeprefix("w__") for key in golden if key.startswith("w__")}
    assert set(theirs.values()) == stored
    assert set(theirs) == set(module.state_dict())
    module.load_state_dict({ours: tensor(golden[f"w__{key}"]) for ours, key in theirs.items()})
    return module


def inputs(golden, *names):
    """Inputs that want gradients."""
    return [tensor(golden[f"in__{name}"]).requires_grad_() for name in names]


def check(golden, module, outputs, **sources):
    """Compare outputs, and gradients of all weights and of the given inputs."""
    total = 0.0
    for name, value in outputs.items():
        assert_same(value.detach(), golden[f"out__{name}"], name)
        if f"cot__{name}" in golden:
            total = total + (value * tensor(golden[f"cot__{name}"])).sum()
    total.backward()
    for name, source in sources.items():
        assert_same(source.grad, golden[f"gin__{name}"], f"gradient of {name}")
    weights = dict(module.named_parameters())
    for ours, theirs in protenix_names(module).items():
        if f"gw__{theirs}" in golden:
            gradient = weights[ours].grad
            gradient = torch.zeros_like(weights[ours]) if gradient is None else gradient
            assert_same(gradient, golden[f"gw__{theirs}"], f"gradient of {ours}")


def assert_same(value, stored, name):
    """Compare with a stored array as exactly as it is stored."""
    tolerance = TOLERANCE if stored.dtype == np.float64 else TOLERANCE_OF_FLOAT32
    assert_close(value, tensor(stored).reshape(value.shape), tolerance, name)


def sample(golden):
    """Features of atoms and tokens under our names; one-hot ones as integers."""
    given = {key.removeprefix("in__"): tensor(golden[key]) for key in golden if key[:4] == "in__"}
    token = given.pop("atom_to_token_idx")
    given["atom_to_token"] = token
    given["atom_mask"] = torch.ones(len(token), dtype=torch.bool)
    given["token_mask"] = torch.ones(int(token.max()) + 1, dtype=torch.bool)
    for name in ("ref_element", "ref_atom_name_chars"):
        if name in given:
            given[name] = given[name].argmax(-1)
    return given
