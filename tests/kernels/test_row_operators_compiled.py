"""Operators on rows under torch.compile, in CUDA graphs, and with more than 2^31 numbers."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bevatron import kernels

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


def test_compiled_operators_give_the_same_bits():
    script = Path(__file__).with_name("compiled_pair_operators.py")
    command = [sys.executable, script, *SHAPES]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("name", list(SHAPES))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_both_passes_are_captured_in_a_graph_and_follow_new_numbers(name, dtype):
    generator = torch.Generator().manual_seed(0)

    def draw():
        drawn = [torch.randn(shape, generator=generator) for shape in SHAPES[name]]
        return [(t / t.shape[-1] ** 0.5 if t.ndim > 1 else t).to("cuda", dtype) for t in drawn]

    leaves = [tensor.requires_grad_() for tensor in draw()]

    def both():
        y = getattr(kernels, name)(*leaves)
        return y.detach(), *torch.autograd.grad(y, leaves, torch.ones_like(y))

    with kernels.use("triton"):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            both()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = both()
        with torch.no_grad():
            for leaf, other in zip(leaves, draw(), strict=True):
                leaf.copy_(other)
        graph.replay()
        assert all(map(torch.equal, captured, both()))


MANY = 2**24 + 100
"""Rows: with 128 channels more numbers than 32 bits count."""


def _room(tensors):
    return GPU and torch.cuda.mem_get_info()[0] > tensors * MANY * 256 + 2**31


@pytest.mark.parametrize("name", ["layer_norm", "transition"])
def test_more_numbers_than_32_bits_count(name):
    if not _room(7):
        pytest.skip("needs a CUDA device with 32 GB of free memory")
    x = torch.randn(MANY, 128, device="cuda", dtype=torch.bfloat16).requires_grad_()
    shapes = [(128,), (128,)]
    shapes += [(128, 128)] * 3 if name == "transition" else []
    rest = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]
    operator, last = getattr(kernels, name), slice(MANY - 64, MANY)
    with kernels.use("triton"):
        y = operator(x, *rest)
        (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
        few = x.detach()[last].clone().requires_grad_()
        expected = operator(few, *rest)
        (dfew,) = torch.autograd.grad(expected, few, torch.ones_like(expected))
    assert torch.equal(y[last], expected)
    assert torch.equal(dx[last], dfew)
