"""Attention with a shared bias: the reference's mathematics, and what it refuses."""

import numpy as np
import pytest
import torch

from bevatron import kernels
from bevatron.kernels import pair_attention


@pytest.fixture(autouse=True)
def _reference():
    with kernels.use(pair_attention="reference"):
        yield


def draw(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def test_golden_triangle_attention(shared):
    file = np.load(shared / "golden" / "pair" / "core_tri_attn.npz")
    q, k, v, bias = (
        torch.from_numpy(file[f"in__{name}"]).double().requires_grad_()
        for name in ("q", "k", "v", "bias")
    )
    mask = torch.from_numpy(file["in__mask"])[:, :, 0, 0] > 0
    result = pair_attention(q, k, v, bias, mask, layout="BSNHD")
    expected = torch.from_numpy(file["out__y"])
    assert (result - expected).abs().max() <= 1e-12 * expected.abs().max()
    (result * torch.from_numpy(file["cot__y"])).sum().backward()
    for name, tensor in zip(("q", "k", "v", "bias"), (q, k, v, bias), strict=True):
        gradient = torch.from_numpy(file[f"gin__{name}"]).double()
        assert (tensor.grad - gradient).abs().max() <= 1e-6 * gradient.abs().max()


def test_against_an_explicit_sum():
    q, k, v, bias = (
        draw(1, 2, 1, 2, 8),
        draw(1, 2, 1, 3, 8),
        draw(1, 2, 1, 3, 8),
        draw(1, 1, 1, 2, 3),
    )
    gate, mask = draw(1, 2, 1, 2, 8), torch.tensor([[[True, True, False], [True, False, True]]])
    result = pair_attention(q, k, v, bias, mask, 0.7, gate)
    for s in range(2):
        for i in range(2):
            kept = [j for j in range(3) if mask[0, s, j]]
            weights = [
                torch.exp(0.7 * (q[0, s, 0, i] @ k[0, s, 0, j]) + bias[0, 0, 0, i, j]) for j in kept
            ]
            mean = sum(w * v[0, s, 0, j] for w, j in zip(weights, kept, strict=True)) / sum(weights)
            torch.testing.assert_close(result[0, s, 0, i], gate[0, s, 0, i].sigmoid() * mean)


def test_a_row_without_keys_gives_zero_and_no_gradient():
    q, k, v, bias = (
        draw(1, 2, 2, 3, 8),
        draw(1, 2, 2, 4, 8),
        draw(1, 2, 2, 4, 8),
        draw(1, 2, 2, 3, 4),
    )
    mask = torch.tensor([[[True] * 4, [False] * 4]])
    result = pair_attention(q, k, v, bias, mask)
    assert result[0, 1].eq(0).all()
    result.square().sum().backward()
    for tensor in (q, k, v, bias):
        assert tensor.grad.isfinite().all()
        assert tensor.grad[0, 1].eq(0).all()
        assert tensor.grad[0, 0].ne(0).any()


@pytest.mark.parametrize("which", ["reference", "triton"])
@pytest.mark.parametrize("masked", [None, 3])
def test_a_query_whose_keys_have_a_bias_of_minus_infinity_gives_zero_and_no_gradient(which, masked):
    if which == "triton":
        pytest.importorskip("triton", reason="the kernels need the package triton")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shapes = [(1, 2, 2, 5, 8)] * 3 + [(1, 1, 2, 5, 5)]
    q, k, v, bias = (torch.randn(shape).to(device) for shape in shapes)
    bias[0, 0, 1, 3, :masked] = float("-inf")
    mask = None
    if masked is not None:
        mask = (torch.arange(5, device=device) < masked).expand(1, 2, -1)
    leaves = [tensor.requires_grad_() for tensor in (q, k, v, bias)]
    with kernels.use(pair_attention=which):
        result = pair_attention(*leaves, mask)
    assert result[:, :, 1, 3].eq(0).all()
    assert result[:, :, 1, 2].ne(0).any()
    gradients = torch.autograd.grad(result.square().sum(), leaves)
    assert all(each.isfinite().all() for each in gradients)
    assert gradients[0][:, :, 1, 3].eq(0).all()
    assert gradients[3][:, :, 1, 3].eq(0).all()


def test_layouts_agree():
    q, k, v, gate = (draw(1, 3, 5, 2, 8) for _ in range(4))
    bias = draw(1, 1, 2, 5, 5)
    other = pair_attention(
        *(t.transpose(2, 3) for t in (q, k, v)), bias, gate=gate.transpose(2, 3)
    ).transpose(2, 3)
    torch.testing.assert_close(
        pair_attention(q, k, v, bias, gate=gate, layout="BSNHD"), other, rtol=1e-13, atol=1e-13
    )


def test_second_derivatives_of_the_reference():
    q, k, v, bias = (
        draw(1, 2, 1, 2, 8),
        draw(1, 2, 1, 3, 8),
        draw(1, 2, 1, 3, 8),
        draw(1, 1, 1, 2, 3),
    )
    assert torch.autograd.gradgradcheck(pair_attention, (q, k, v, bias))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": torch.zeros(1, 2, 3, 4, 16)}, "k has shape"),
        ({"bias": torch.zeros(1, 2, 4, 4)}, "bias has shape"),
        ({"mask": torch.ones(1, 2, 5, dtype=torch.bool)}, "mask has shape"),
        ({"mask": torch.ones(1, 2, 4)}, "expected bool"),
        ({"gate": torch.zeros(1, 2, 3, 4, 1)}, "gate has shape"),
        ({"v": torch.zeros(1, 2, 3, 4, 8, dtype=torch.float16)}, "make them one type"),
        ({"layout": "SBHND"}, "expected BSHND or BSNHD"),
    ],
)
def test_mismatched_arguments_are_refused(change, message):
    inputs = {name: torch.zeros(1, 2, 3, 4, 8) for name in "qkv"}
    function = getattr(pair_attention, "__wrapped__", pair_attention)
    with pytest.raises(ValueError, match=message):
        function(**{**inputs, **change})
