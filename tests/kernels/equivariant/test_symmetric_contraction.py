"""The symmetric contraction: against its equation, derivatives, symmetry, elements, refusals."""

import inspect

import pytest
import torch
from contractions import ELEMENTS, contraction, make, nested
from hypothesis import given, settings
from hypothesis import strategies as st

from bevatron.errors import ConfigError
from bevatron.kernels import symmetric_contraction
from bevatron.kernels.equivariant.element_order import ElementOrder
from bevatron.maths.irreps import Irreps
from bevatron.maths.symmetric_product import CouplingTensor, symmetric_coefficients
from bevatron.testing import assert_close, check_equivariant, check_op, check_permutation


def equation(irreps, correlation):
    """The sum of the docstring over all products of components, dense."""

    def evaluate(a, elements, **weights):
        l_max = round(a.shape[2] ** 0.5) - 1
        results = []
        for degree, orders in nested(weights, correlation).items():
            result = a.new_zeros(*a.shape[:2], 2 * degree + 1)
            for nu, weight in enumerate(orders, start=1):
                u = symmetric_coefficients(l_max, degree, nu).dense(a.dtype)
                u = u if degree else u[None]
                term = torch.einsum("m...p,npk->nkm...", u, weight[elements])
                for _ in range(nu):
                    factor = a.reshape(*a.shape[:2], *[1] * (term.ndim - 3), a.shape[2])
                    term = (term * factor).sum(-1)
                result = result + term
            results.append(result.flatten(1))
        return torch.cat(results, 1)

    return evaluate


@pytest.mark.parametrize(
    ("l_max", "irreps", "correlation"),
    [
        (3, "2x0e+2x1o", 3),
        (3, "2x0e+2x1o", 2),
        (2, "3x0e+3x1o+3x2e+3x3o", 3),
        (1, "2x0e+2x1o", 4),
        (1, "2x0e+2x2e", 1),
        (0, "2x0e", 3),
        (4, "1x0e+1x1o", 2),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_result_and_derivatives_are_those_of_the_equation(l_max, irreps, correlation, dtype):
    check_op(
        contraction(irreps, correlation),
        equation(irreps, correlation),
        make(l_max, irreps, correlation, dtype=dtype),
        ran=("symmetric_contraction", "reference"),
        strided=dtype == torch.float32,
    )


@settings(max_examples=10, deadline=None)
@given(st.lists(st.integers(0, 4), max_size=9), st.integers(0, 2), st.integers(1, 3))
def test_any_number_of_atoms_of_any_elements(elements, degree, correlation):
    irreps = f"3x{degree}{'eo'[degree % 2]}"
    inputs = make(2, irreps, correlation, torch.tensor(elements, dtype=torch.int64))
    check_op(contraction(irreps, correlation), equation(irreps, correlation), inputs)


def test_derivatives_agree_with_finite_differences():
    inputs = make(1, "1x0e+1x1o", 3, torch.tensor([1, 0]))
    elements = inputs.pop("elements")
    tensors = [value.requires_grad_() for value in inputs.values()]

    def call(*values):
        named = dict(zip(inputs, values, strict=True))
        return contraction("1x0e+1x1o", 3)(elements=elements, **named)

    assert torch.autograd.gradcheck(call, tensors)
    assert torch.autograd.gradgradcheck(call, tensors)


@pytest.mark.parametrize("correlation", [2, 3])
def test_rotates_and_reflects_with_its_features(correlation):
    irreps = "2x0e+2x1o+2x2e"
    inputs = make(2, irreps, correlation)
    check_equivariant(contraction(irreps, correlation), inputs, {"a": Irreps.harmonics(2)}, irreps)


def test_does_not_depend_on_the_order_of_atoms():
    check_permutation(contraction("2x0e+2x1o", 2), make(2, "2x0e+2x1o", 2), ["a", "elements"])


def test_an_element_that_no_atom_has_gets_a_zero_gradient():
    inputs = make(2, "2x0e", 2)
    weight = inputs["w0_2"].requires_grad_()
    contraction("2x0e", 2)(**inputs).sum().backward()
    assert [bool(weight.grad[z].any()) for z in range(5)] == [True, False, True, True, False]


def test_coefficients_in_another_basis_of_paths_are_used_as_given():
    own = [symmetric_coefficients(2, 1, nu) for nu in (1, 2)]
    flipped = [CouplingTensor.from_dense(-part.dense().flip(-1), 1) for part in own]
    inputs = make(2, "2x1o", 2)
    turned = {k: -v.flip(1) if k.startswith("w") else v for k, v in inputs.items()}
    expected = contraction("2x1o", 2)(**inputs)
    assert_close(contraction("2x1o", 2, {1: flipped})(**turned), expected, 1e-13)
    with pytest.raises(AssertionError):
        assert_close(contraction("2x1o", 2)(**turned), expected, 1e-3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"a": torch.ones(7, 2, 8)}, r"a has shape \(7, 2, 8\), expected"),
        ({"a": torch.ones(7, 3, 9)}, "'2x0e' cannot be made from 3 channels"),
        ({"a": torch.ones(6, 2, 9)}, r"\(7,\) elements for 6 atoms"),
        ({"w0_2": torch.ones(6, 3, 2)}, "are of 5, 6 elements; all must be of as many"),
        ({"elements": ElementOrder(ELEMENTS, 4)}, "are of 4, 5 elements"),
        ({"w0_2": torch.ones(5, 4, 2)}, r"degree 0, order 2 have shape \(5, 4, 2\), expected"),
    ],
)
def test_a_wrong_shape_is_named(change, message):
    inputs = {**make(2, "2x0e", 2, dtype=torch.float32), **change}
    a, elements = inputs.pop("a"), inputs.pop("elements")
    # What a user meets, who does not check annotations.
    unchecked = inspect.unwrap(symmetric_contraction)
    with pytest.raises(ValueError, match=message):
        unchecked(a, nested(inputs, 2), elements, "2x0e", 2)


def test_weights_and_coefficients_of_another_order_are_refused():
    inputs = make(2, "2x0e", 2)
    short = [symmetric_coefficients(2, 0, 1)]
    with pytest.raises(ValueError, match="2 weights and 1 coefficient tensors for correlation 2"):
        contraction("2x0e", 2, {0: short})(**inputs)
    other = [symmetric_coefficients(1, 0, nu) for nu in (1, 2)]
    with pytest.raises(ValueError, match=r"expected|l_max 1"):
        contraction("2x0e", 2, {0: other})(**inputs)


def test_unnatural_parity_is_refused():
    with pytest.raises(ValueError, match=r"parity \(-1\)\^L"):
        contraction("2x1e", 1)(**make(1, "2x1o", 1))


def test_a_too_large_contraction_is_refused_with_its_size():
    a = torch.ones(1, 1, 25)
    with pytest.raises(ConfigError, match="GiB of coefficients"):
        symmetric_contraction(a, {2: []}, torch.zeros(1).long(), "1x2e", 4)
