"""The gated unit: the reference everywhere, the kernels interpreted or compiled."""

import pytest
import torch
from pair_operators import DEVICE, DTYPES, check_kernels

from bevatron.kernels import swiglu, use
from bevatron.testing import Tolerance, assert_close

pytest.importorskip("triton", reason="the kernels need the package triton")

TOLERANCES = {torch.float32: Tolerance(2e-6, 2e-5)}


def draw(*shape, dtype=torch.float32, seed=7):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


def check(inputs, **options):
    check_kernels(swiglu, inputs, TOLERANCES.get(inputs["gate"].dtype), **options)


@pytest.mark.parametrize("shape", [(5, 24), (0, 8), (3, 1), (2, 3, 65), (7, 1030)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("strided", [False, True])
def test_it_is_right_from_two_tensors(shape, dtype, strided):
    tensors = {"gate": draw(*shape, dtype=dtype), "value": draw(*shape, dtype=dtype, seed=8)}
    check(tensors, strided=strided)


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_right_from_one_tensor(dtype):
    check({"gate": draw(3, 4, 20, dtype=dtype)})


def test_views_of_a_wider_tensor_are_read_in_place():
    both = draw(6, 5, 32).transpose(0, 1).requires_grad_()
    gate, value = both.chunk(2, -1)
    exact = both.detach().double().requires_grad_()
    with use("reference"):
        expected = swiglu(exact)
    with use(swiglu="triton"):
        actual = swiglu(gate, value)
    assert_close(actual, expected, 2e-6)
    found = torch.autograd.grad(actual.sum(), both)[0]
    assert_close(found, torch.autograd.grad(expected.sum(), exact)[0], 2e-5)


def test_large_gates_do_not_overflow():
    gate = torch.tensor([-200.0, -90.0, 90.0, 200.0], device=DEVICE).requires_grad_()
    with use(swiglu="triton"):
        y = swiglu(gate, torch.ones_like(gate))
    assert_close(y, torch.tensor([0.0, 0.0, 90.0, 200.0]), 1e-6)
    assert torch.autograd.grad(y.sum(), gate)[0].isfinite().all()


def test_a_second_backward_pass_gives_the_same():
    gate, value = draw(4, 8).requires_grad_(), draw(4, 8, seed=8).requires_grad_()
    with use(swiglu="triton"):
        y = swiglu(gate, value)
    first = torch.autograd.grad(y.sum(), (gate, value), retain_graph=True)
    second = torch.autograd.grad(y.sum(), (gate, value))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_custom_operators_pass_opcheck():
    from bevatron.kernels.pair.swiglu.triton import gated

    torch.library.opcheck(gated.op, (draw(4, 8).requires_grad_(), draw(4, 8).requires_grad_()))
    torch.library.opcheck(gated.op, (draw(4, 8).requires_grad_(), None))


def test_mismatched_shapes_are_reported():
    with pytest.raises((ValueError, TypeError)):
        swiglu(torch.zeros(3, 4), torch.zeros(3, 5))
    with pytest.raises(ValueError, match="2C"):
        swiglu(torch.zeros(3, 5))
