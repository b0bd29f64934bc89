"""Reference values of OpenFold: a module is given its weights and inputs and checked in float64."""

from pathlib import Path

import numpy as np
import torch

from bevatron.models.alphafold2.openfold_layout import openfold_name

TOLERANCE = 1e-9
"""Of the largest compared number."""


class Golden:
    """The arrays of one file."""

    def __init__(self, path: Path) -> None:
        self.arrays = dict(np.load(path))

    def __getitem__(self, name):
        array = torch.from_numpy(self.arrays[name])
        return array.double() if array.is_floating_point() else array

    def part(self, prefix):
        """The arrays whose names begin so, without that beginning."""
        return {n.removeprefix(prefix): self[n] for n in self.arrays if n.startswith(prefix)}

    def check(self, module, run, prefix=""):
        """Compare results and all gradients.

        ``run(module, **inputs)`` returns results by name; ``prefix`` is where the module is in a
        block, without which OpenFold's names are not clear.
        """
        inputs = self.part("in__")
        for value in inputs.values():
            value.requires_grad_(value.is_floating_point())
        parameters = {} if module is None else dict(module.double().named_parameters())
        parameters = {theirs(name, prefix): p for name, p in parameters.items()}
        weights = self.part("w__")
        assert parameters.keys() == weights.keys()
        for name, parameter in parameters.items():
            parameter.data.copy_(weights[name])
        found = run(module, **inputs)
        self.check_results(found)
        wanted = self.part("cot__")
        sum((found[name] * cotangent).sum() for name, cotangent in wanted.items()).backward()
        gradients = {f"gin__{name}": value.grad for name, value in inputs.items()}
        gradients |= {f"gw__{name}": parameter.grad for name, parameter in parameters.items()}
        names = [name for name in self.arrays if name.startswith(("gin__", "gw__"))]
        assert names
        largest = max(self[name].abs().max() for name in names)
        for name in names:
            # Those of an offset in front of a softmax are zero but for rounding.
            close(gradients[name], self[name], name, floor=1e-3 * largest)

    def check_results(self, found):
        """Compare results where they may be compared."""
        for name, reference in self.part("out__").items():
            keep = self[f"cmp__{name}"].bool() if f"cmp__{name}" in self.arrays else ...
            close(found[name][keep], reference[keep], name)


def theirs(name, prefix):
    """OpenFold's name of a parameter of a module."""
    return openfold_name(prefix + name).removeprefix(prefix)


def close(result, reference, name, tolerance=TOLERANCE, floor=0.0):
    """Assert that two arrays agree, relative to the largest number of the reference."""
    assert result.shape == reference.shape, name
    scale = max(float(reference.abs().max()), float(floor))
    error = float((result.detach() - reference).abs().max())
    assert error <= tolerance * scale, f"{name}: {error:.1e} of {scale:.1e}"
