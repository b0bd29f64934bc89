"""Golden files of modules of AlphaFold2 and AlphaFold3: values and all gradients in float64."""

from dataclasses import dataclass

import numpy as np
import torch

from bevatron.testing import assert_close

EXACT = 1e-9


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
    """Compare outputs and every gradient of the file.

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
    expected, compare = golden.of("out"), golden.of("cmp")
    for name, value in outputs.items():
        kept = compare.get(name, torch.ones(value.shape[:1])).bool()
        assert_close(value[kept], expected[name][kept], tolerance, name)
    cotangents = golden.of("cot")
    assert sorted(cotangents) == sorted(outputs)
    total = sum((value * cotangents[name]).sum() for name, value in outputs.items())
    total.backward()
    for name, value in wanted.items():
        assert_close(inputs[name].grad, value, tolerance, f"gradient of {name}")
    gradients = golden.of("gw")
    assert sorted(gradients) == sorted(names.values())
    for key, parameter in module.named_parameters():
        found, value = parameter.grad, gradients[names[key]]
        if any(part in key for part in zero):
            assert found.abs().max() < 1e-9
            assert value.abs().max() < 1e-9
        else:
            assert_close(found, value, tolerance, f"gradient of {key}")
