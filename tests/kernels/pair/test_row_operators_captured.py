"""Operators on rows in CUDA graphs, and with more than 2^31 numbers."""

import pytest
import torch

from bevatron import kernels
from bevatron.testing import assert_close
from replayed import check_replay

pytest.importorskip("triton", reason="the kernels need the package triton")

GPU = torch.cuda.is_available()
C, D, H = 64, 48, 128
NORM = [(C,), (C,)]
SHAPES = {
    "layer_norm": [(300, C), *NORM],
    "layer_norm_linear": [(300, C), *NORM, (H, C)],
    "swiglu": [(300, C), (300, C)],
    "transition": [(300, C), *NORM, (H, C), (C, H), (H, C)],
    "conditioned_transition": [
        *((300, C), (300, D), (D,), (C, D), (C,), (C, D), (H, C), (H, C), (C, H), (C, D), (C,)),
    ],
}


@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("name", list(SHAPES))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_both_passes_are_captured_in_a_graph_and_follow_new_values(name, dtype):
    generator = torch.Generator().manual_seed(0)

    def draw():
        drawn = [torch.randn(shape, generator=generator) for shape in SHAPES[name]]
        return [(t / t.shape[-1] ** 0.5 if t.ndim > 1 else t).to("cuda", dtype) for t in drawn]

    leaves = [tensor.requires_grad_() for tensor in draw()]

    def both():
        y = getattr(kernels, name)(*leaves)
        return y.detach(), *torch.autograd.grad(y, leaves, torch.ones_like(y))

    with kernels.use("triton"):
        others = draw()

        @torch.no_grad()
        def change():
            for leaf, other in zip(leaves, others, strict=True):
                leaf.copy_(other)

        check_replay(both, change)


MANY = 2**24 + 100
"""Rows: with 128 channels more numbers than 32 bits count."""
NORM_128 = [(128,), (128,)]


def _room(tensors):
    return GPU and torch.cuda.mem_get_info()[0] > tensors * MANY * 256 + 2**31


LARGE = {
    "layer_norm": NORM_128,
    "swiglu": [(MANY, 128)],
    "layer_norm_linear": [*NORM_128, (64, 128)],
    "transition": [*NORM_128, *[(128, 128)] * 3],
    "conditioned_transition": [
        *((MANY, 16), (16,), (128, 16), (128,), (128, 16)),
        *((128, 128), (128, 128), (128, 128), (128, 16), (128,)),
    ],
}
"""What comes behind the rows [MANY, 128]."""


@pytest.mark.parametrize("name", list(LARGE))
def test_more_than_2_to_the_31_elements(name):
    if not _room(9):
        pytest.skip("needs a CUDA device with 42 GB of free memory")

    def both(rows, others):
        rows = [tensor.requires_grad_() for tensor in rows]
        y = getattr(kernels, name)(*rows, *others)
        return y, *torch.autograd.grad(y, rows, torch.ones_like(y))

    given = [
        torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        for shape in ((MANY, 128), *LARGE[name])
    ]
    rows = [tensor for tensor in given if len(tensor) == MANY]
    others = [tensor for tensor in given if len(tensor) != MANY]
    with kernels.use("triton"):
        found = [tensor.detach()[-64:] for tensor in both(rows, others)]
        expected = both([tensor.detach()[-64:].clone() for tensor in rows], others)
    for got, want in zip(found, expected, strict=True):
        if name in {"layer_norm", "transition", "swiglu"}:
            assert torch.equal(got, want)
        else:
            # The device's library chooses its kernel by the number of rows.
            assert_close(got.float(), want.detach().float(), 2e-2)
