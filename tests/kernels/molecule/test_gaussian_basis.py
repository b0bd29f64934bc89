"""Gaussian kernels: the reference everywhere, the kernels interpreted or compiled."""

import pytest
import torch
from molecule_inputs import HALF, TOLERANCES, draw

from bevatron.kernels import gaussian_basis, use
from bevatron.testing import assert_close, check_op

pytest.importorskip("triton", reason="the kernels need the package triton")


def basis(distances, mean, std, dtype=None):
    return gaussian_basis(distances, mean, std, scale=0.1, epsilon=0.01, dtype=dtype)


def make(count, kernels, dtype=torch.float32):
    names = {"distances": count, "mean": kernels, "std": kernels}
    return {n: draw(size, seed=i).to(dtype) for i, (n, size) in enumerate(names.items())}


def check(inputs, **options):
    inputs["std"] += inputs["std"].sign() * 0.2
    ran = ("gaussian_basis", "triton")
    tolerance = TOLERANCES.get(inputs["mean"].dtype)
    check_op(basis, basis, inputs, order=1, tolerance=tolerance, ran=ran, **options)


@pytest.mark.parametrize("shape", [(0, 8), (1, 1), (70, 20), (300, 128)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_any_number_of_distances_and_kernels_is_right(shape, dtype):
    check(make(*shape, dtype))


def test_strided_inputs_are_right():
    check(make(9, 5), strided=True)


def test_the_result_may_be_narrower():
    inputs = make(40, 8)
    with use("reference"):
        exact = basis(**inputs)
    with use(gaussian_basis="triton"):
        found = basis(**inputs, dtype=HALF)
    assert found.dtype == HALF
    assert_close(found, exact, 1e-2)


def test_it_is_the_normal_density():
    inputs = make(9, 5, torch.float64)
    normal = torch.distributions.Normal(inputs["mean"], inputs["std"].abs() + 0.01)
    with use("reference"):
        found = basis(**inputs)
    assert_close(found, 0.1 * normal.log_prob(inputs["distances"][:, None]).exp(), 1e-13)


def test_custom_operators_pass_opcheck():
    from bevatron.kernels.molecule.gaussian_basis.triton import evaluate

    leaves = [tensor.requires_grad_() for tensor in make(6, 4).values()]
    torch.library.opcheck(evaluate.op, (*leaves, 0.1, 0.01, torch.float32))
