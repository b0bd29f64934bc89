"""Normalisation and activation: the reference everywhere, the kernels interpreted or compiled."""

import pytest
import torch
from molecule_inputs import DEVICE, HALF, TOLERANCES, draw, pointers

from bevatron.errors import KernelError
from bevatron.kernels import norm_gelu, use
from bevatron.testing import check_op

pytest.importorskip("triton", reason="the kernels need the package triton")


def check(inputs, **options):
    fixed = {name: inputs.pop(name) for name in ("activation",) if name in inputs}

    def run(**tensors):
        return norm_gelu(**({"weight": None, "bias": None} | tensors), **fixed)

    tolerance = TOLERANCES.get(inputs["x"].dtype)
    check_op(run, run, inputs, order=1, tolerance=tolerance, ran=("norm_gelu", "triton"), **options)


def make(rows, width, *names, dtype=torch.float32):
    vectors = {name: draw(width, dtype=dtype, seed=9 + len(name)) for name in names}
    return {"x": draw(rows, width, dtype=dtype), **vectors}


@pytest.mark.parametrize("width", [5, 23, 64, 256, 1000, 1024])
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_any_width_is_right(width, dtype):
    check(make(5, width, "weight", "bias", "linear_bias", dtype=dtype))


@pytest.mark.parametrize("rows", [0, 1, 130])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_any_number_of_rows_is_right(rows, dtype):
    check(make(rows, 64, "weight", "bias", dtype=dtype))


@pytest.mark.parametrize("names", [(), ("linear_bias",), ("weight", "bias")])
@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_parts_may_be_left_out(names, activation):
    check(make(5, 24, *names) | {"activation": activation})


@pytest.mark.parametrize("counts", [[6], [1, 0, 20], []])
def test_every_segment_gets_its_row(counts):
    num = sum(counts)
    index = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts, dtype=int))
    segments = {
        "rows": draw(len(counts), 24, seed=3),
        "index": index.to(DEVICE),
        "ptr": pointers(*counts),
    }
    check(make(num, 24, "weight", "bias", "linear_bias") | segments)


def test_gradients_of_float32_vectors_are_not_rounded_to_the_type_of_the_rows():
    inputs = make(130, 24, "weight", "bias")
    weight, bias = (inputs[name].requires_grad_() for name in ("weight", "bias"))
    with use(norm_gelu="triton"):
        y = norm_gelu(inputs["x"].to(HALF), weight, bias)
    for gradient in torch.autograd.grad(y.float().sum(), (weight, bias)):
        assert not gradient.equal(gradient.to(HALF).float())


def test_large_numbers_do_not_overflow():
    inputs = make(4, 8)
    inputs["x"] *= 1e4
    check(inputs)


def test_strided_inputs_are_right():
    check(make(6, 20, "weight", "bias"), strided=True)


def test_custom_operators_pass_opcheck():
    from bevatron.kernels.molecule.norm_gelu.triton import normalise

    inputs = make(4, 8, "weight", "bias", "linear_bias")
    x, weight, bias, linear = (tensor.requires_grad_() for tensor in inputs.values())
    rows, graph = draw(2, 8).requires_grad_(), torch.tensor([0, 0, 1, 1], device=DEVICE)
    lists = (*(None,) * 4, graph, pointers(2, 2))
    torch.library.opcheck(normalise.op, (x, None, rows, linear, weight, bias, *lists, 1e-3, False))


def test_mismatched_arguments_are_reported():
    x = torch.zeros(3, 8, device=DEVICE)
    with pytest.raises((ValueError, TypeError), match="weight"):
        norm_gelu(x, torch.ones(7, device=DEVICE), None)
    with pytest.raises(ValueError, match="together"):
        norm_gelu(x, torch.ones(8, device=DEVICE), None)
    with pytest.raises(ValueError, match="index and a ptr"):
        norm_gelu(x, None, None, rows=torch.ones(1, 8, device=DEVICE))
    with use(norm_gelu="triton"), pytest.raises(KernelError, match="8192"):
        norm_gelu(torch.zeros(1, 8200, device=DEVICE), None, None)
