"""Compiles the triangle multiplication's kernels for Hopper, for a GPU that is not there."""

import torch
import triton
from compiled_ahead import as_on_hopper

from bevatron.kernels.pair.triangle_multiply import triton_launch
from bevatron.kernels.pair.triangle_multiply.triton import triangle_multiply
from bevatron.kernels.shared.triton_compile import rehearse

SHARED = 227 * 1024
"""Most bytes of shared memory that a program may have."""


def work() -> None:
    """Both passes with everything that may be given, and with nothing of it."""
    z = torch.zeros(8, 8, 128, dtype=torch.bfloat16, requires_grad=True)
    mask, drop = torch.ones(8, 8, dtype=torch.bool), torch.ones(8, 128)
    one, weight = torch.ones(128), torch.ones(128, 128)
    weights = one, one, *[weight] * 4, one, one, weight, weight
    for given, bias, residual in [((mask, drop), one, True), ((None, None), None, False)]:
        how = *[bias] * 6, True, 1e-5, residual, None
        triangle_multiply(z, *given, *weights, *how).sum().backward()


def main() -> None:
    target = as_on_hopper()
    triton_launch.is_hopper, triton_launch.FEWEST_TILES = lambda _: True, 1
    for found in rehearse(work):
        if (name := found.kernel.__name__).startswith("hopper"):
            compiled = triton.compile(found.source, target, found.options)
            assert compiled.metadata.shared <= SHARED
            print(name, compiled.metadata.num_warps)


if __name__ == "__main__":
    main()
