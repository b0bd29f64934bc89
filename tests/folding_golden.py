"""Golden files of modules of AlphaFold2 and AlphaFold3: values and all gradients in float64."""

from dataclasses import dataclass

import numpy as np
import torch

from bevatron.testing import assert_close

EXACT = 1e-9
"""Relative to the largest value."""
OF_FLOAT32 = 1e-7
"""Large arrays are stored in float32."""


@dataclass
class Golden:
    """Arrays of one file by prefix: ``of("in")`` are its inputs as tensors."""

    arrays: dict

    def of(self, prefix):
        found = {}
        for name, array in self.arrays.items():
            if name.startswith(f"{prefix}__"):
                tensor = torch.from_numpy(array)
                wide = tensor.double() if tensor.is_floating_point() else tensor
                found[name.removeprefix(f"{prefix}__")] = wide
        return found

    def close(self, value, name, tolerance=EXACT):
        """Compare with a stored array as exactly as it is stored."""
        array = self.arrays[name]
        exact = tolerance if array.dtype == np.float64 else max(tolerance, OF_FLOAT32)
        compare = self.arrays.get(name.replace("out__", "cmp__"), np.ones(1))
        kept = torch.from_numpy(compare).bool().expand(array.shape[: compare.ndim])
        assert_close(value[kept], torch.from_numpy(array)[kept], exact, name)


def read(shared, name):
    """Read ``alphafold3/transition``, for example."""
    with np.load(shared / "golden" / f"{name}.npz") as file:
        return Golden(dict(file))


def published(module, names):
    """Names of a module's weights as published: layers of the table, weight or bias."""
    return {
        key: f"{names[key.rpartition('.')[0]]}.{key.rpartition('.')[2]}"
        for key in module.state_dict()
    }


def load(module, golden, names):
    """Give a module the file's weights; ``names`` maps each of its keys to a published one."""
    weights = golden.of("w")
    assert sorted(names.values()) == sorted(weights), "the file has other weights"
    module.double().load_state_dict({key: weights[name] for key, name in names.items()})
    return module.train()


def check(module, golden, names, run, *, tolerance=EXACT, zero=()):
    """Compare outputs and every gradient of the file; files of stacks have those of some weights.

    Parameters
    ----------
    names
        Maps every key of the module to the file's name of the weight.
    run
        Takes the module and the inputs by name; returns the outputs by name.
    zero
        Gradients that vanish in exact arithmetic, so that only their size is compared.
    """
    load(module, golden, names)
    inputs = golden.of("in")
    wanted = golden.of("gin")
    for name in wanted:
        inputs[name].requires_grad_()
    outputs = run(module, inputs)
    for name, value in outputs.items():
        golden.close(value, f"out__{name}", tolerance)
    cotangents = golden.of("cot")
    assert sorted(cotangents) == sorted(outputs)
    total = sum((value * cotangents[name]).sum() for name, value in outputs.items())
    total.backward()
    for name in wanted:
        golden.close(inputs[name].grad, f"gin__{name}", tolerance)
    gradients = golden.of("gw")
    assert set(gradients) <= set(names.values())
    assert gradients
    for key, parameter in module.named_parameters():
        if names[key] not in gradients:
            continue
        if any(part in key for part in zero):
            assert parameter.grad.abs().max() < 1e-9
            assert gradients[names[key]].abs().max() < 1e-9
        else:
            golden.close(parameter.grad, f"gw__{names[key]}", tolerance)
