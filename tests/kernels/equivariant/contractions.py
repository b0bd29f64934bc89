"""Random inputs of the symmetric contraction, and a function of them by name."""

import torch

from bevatron.kernels import symmetric_contraction
from bevatron.maths.irreps import Irreps
from bevatron.maths.symmetric_product import symmetric_coefficients

ELEMENTS = torch.tensor([2, 0, 2, 3, 0, 2, 2])


def make(l_max, irreps, correlation, elements=ELEMENTS, dtype=torch.float64, device="cpu"):
    """Random features and weights, flat, so that derivatives can be taken by each."""
    irreps = Irreps.parse(irreps)
    num_channels = irreps[0].mul
    inputs = {"a": torch.randn(len(elements), num_channels, (l_max + 1) ** 2, dtype=dtype)}
    for block in irreps:
        for nu in range(1, correlation + 1):
            num_paths = symmetric_coefficients(l_max, block.l, nu).num_paths
            inputs[f"w{block.l}_{nu}"] = torch.randn(5, num_paths, num_channels, dtype=dtype)
    inputs["elements"] = elements.clone()
    return {name: value.to(device) for name, value in inputs.items()}


def nested(weights, correlation):
    degrees = dict.fromkeys(int(name[1]) for name in weights)
    return {d: [weights[f"w{d}_{nu}"] for nu in range(1, correlation + 1)] for d in degrees}


def contraction(irreps, correlation, coefficients=None):
    return lambda a, elements, **weights: symmetric_contraction(
        a, nested(weights, correlation), elements, irreps, correlation, coefficients
    )
