"""LayerNorm and a linear layer: the reference everywhere, the kernels interpreted or compiled."""

import pytest
import torch
from pair_operators import DEVICE, HALF, check_kernels, saved

from bevatron.kernels import layer_norm_linear, use
from bevatron.kernels.shared import chunked_linear as products
from bevatron.testing import Tolerance, assert_close

pytest.importorskip("triton", reason="the kernels need the package triton")

TOLERANCES = {torch.float32: Tolerance(2e-6, 2e-5), HALF: Tolerance(2e-2, 4e-2)}


def make(rows, width, out, *names, dtype=torch.float32):
    generator = torch.Generator().manual_seed(7)
    shapes = {
        "x": (*rows, width),
        "weight": (out, width),
        "norm_weight": (width,),
        "norm_bias": (width,),
        "bias": (out,),
    }
    drawn = {n: torch.randn(shapes[n], generator=generator) for n in ("x", "weight", *names)}
    drawn["weight"] /= width**0.5
    inputs = dict.fromkeys(("norm_weight", "norm_bias"))
    return inputs | {name: value.to(DEVICE, dtype) for name, value in drawn.items()}


def check(inputs, **options):
    check_kernels(layer_norm_linear, inputs, TOLERANCES[inputs["x"].dtype], **options)


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    """Cut even a few rows."""
    monkeypatch.setattr(products, "CHUNK_MULTIPLE", 4)
    monkeypatch.setattr(products, "CHUNK_BYTES", 0)


@pytest.mark.parametrize("names", [(), ("norm_weight",), ("norm_weight", "norm_bias", "bias")])
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_result_and_gradients_are_right(names, dtype):
    check(make((3, 5), 24, 17, *names, dtype=dtype))


@pytest.mark.parametrize(("width", "out"), [(40, 16), (3, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_few_channels_are_right(width, out, dtype):
    check(make((70, 2), width, out, "norm_weight", "bias", dtype=dtype), strided=True)


def test_rows_and_their_gradient_are_read_in_place():
    """Attention's gradient of a pair bias has its heads in front, the pair may be transposed."""
    inputs = make((3, 5), 24, 4, "norm_weight", "norm_bias")
    inputs["x"] = inputs["x"].transpose(0, 1)
    results = []
    for choice, dtype in (("triton", torch.float32), ("reference", torch.float64)):
        leaves = {n: v.to(dtype).requires_grad_() for n, v in inputs.items()}
        with use(layer_norm_linear=choice):
            y = layer_norm_linear(**leaves).movedim(-1, 0)
        weight = torch.linspace(-1.0, 1.0, y.numel(), device=y.device).to(dtype).view(y.shape)
        results.append((y, *torch.autograd.grad((weight * y).sum(), list(leaves.values()))))
    for got, want in zip(*results, strict=True):
        assert_close(got, want, 2e-5)


@pytest.mark.parametrize("rows", [0, 1, 8])
def test_any_number_of_rows_is_right(rows):
    check(make((rows,), 10, 33, "norm_weight", "bias"), strided=True)


def test_the_normalised_rows_are_not_saved():
    _, kept = saved(layer_norm_linear, make((10,), 16, 4, "norm_weight", "norm_bias", "bias"))
    assert sum(t.numel() for t in kept) == 2 * 10


def test_custom_operators_pass_opcheck():
    from bevatron.kernels.pair.layer_norm_linear.triton import project

    inputs = make((4,), 8, 3, "norm_weight", "norm_bias", "bias")
    names = ("x", "norm_weight", "norm_bias", "weight", "bias")
    torch.library.opcheck(project.op, (*(inputs[name].requires_grad_() for name in names), 1e-5))
