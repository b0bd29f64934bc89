"""Coupling coefficients, harmonics and rotation matrices, with e3nn as the oracle."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bevatron.maths.irreps import Irreps
from bevatron.maths.so3 import rotate, spherical_harmonics, wigner_3j, wigner_d
from bevatron.testing import assert_close, random_rotation

o3 = pytest.importorskip("e3nn.o3", reason="e3nn is the oracle for coefficients and harmonics")

DEGREES = range(7)
TRIPLES = [
    (l1, l2, l3)
    for l1 in DEGREES
    for l2 in DEGREES
    for l3 in range(abs(l1 - l2), min(l1 + l2, 6) + 1)
]


def unit_vectors(count: int = 40) -> torch.Tensor:
    vectors = torch.randn(count, 3, dtype=torch.float64)
    # Poles and axes, where angles are not defined.
    return torch.cat([vectors, torch.eye(3, dtype=torch.float64), -torch.eye(3).double()])


def test_coupling_coefficients_equal_e3nn_in_value_and_sign():
    for triple in TRIPLES:
        expected = o3.wigner_3j(*triple, dtype=torch.float64)
        assert (wigner_3j(*triple) - expected).abs().max() < 1e-13, triple


@pytest.mark.parametrize("triple", [(1, 1, 1), (1, 2, 2), (2, 3, 4), (6, 5, 4)])
def test_coupling_coefficients_do_not_change_when_all_three_axes_turn(triple):
    rotation = random_rotation(3)
    d1, d2, d3 = (wigner_d(degree, rotation) for degree in triple)
    c = wigner_3j(*triple)
    assert_close(torch.einsum("ijk,ai,bj,ck->abc", c, d1, d2, d3), c, 1e-12)
    assert c.norm().item() == pytest.approx(1.0, abs=1e-14)


def test_a_changed_copy_of_the_coefficients_does_not_change_the_next():
    wigner_3j(1, 1, 2).zero_()
    assert wigner_3j(1, 1, 2).norm() > 0.99


def test_degrees_that_form_no_triangle_are_refused():
    with pytest.raises(ValueError, match="triangle"):
        wigner_3j(1, 1, 3)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("l_max", range(7))
def test_harmonics_equal_e3nn(l_max, normalize):
    vectors = unit_vectors()
    expected = o3.spherical_harmonics(list(range(l_max + 1)), vectors, normalize, "component")
    assert_close(spherical_harmonics(l_max, vectors, normalize), expected, 1e-13)


@pytest.mark.parametrize("degree", range(5))
def test_squares_of_the_harmonics_add_up_to_the_number_of_components(degree):
    y = spherical_harmonics(4, unit_vectors())[:, degree**2 : (degree + 1) ** 2]
    assert_close(y.square().sum(1), torch.full((len(y),), 2.0 * degree + 1.0).double())


def test_degree_one_is_the_vector_itself():
    vectors = torch.randn(5, 3, dtype=torch.float64)
    assert_close(spherical_harmonics(1, vectors, False)[:, 1:], 3**0.5 * vectors)


def test_harmonics_have_exact_first_and_second_derivatives():
    vectors = unit_vectors(3).requires_grad_()
    assert torch.autograd.gradcheck(lambda v: spherical_harmonics(4, v), vectors)
    assert torch.autograd.gradgradcheck(lambda v: spherical_harmonics(4, v), vectors)


def test_harmonics_of_float32_vectors_are_float32_and_of_no_vectors_empty():
    assert spherical_harmonics(3, torch.randn(4, 2, 3)).dtype == torch.float32
    assert spherical_harmonics(3, torch.randn(0, 3)).shape == (0, 16)


@given(seed=st.integers(0, 2**31), mirrored=st.booleans())
def test_harmonics_turn_with_their_vector(seed, mirrored):
    rotation = random_rotation(seed) * (-1 if mirrored else 1)
    vector = torch.randn(3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    here, there = spherical_harmonics(4, vector), spherical_harmonics(4, rotation @ vector)
    assert_close(rotate(here, Irreps.harmonics(4), rotation), there, 1e-11)


@pytest.mark.parametrize("parity", [1, -1])
def test_rotation_matrices_equal_e3nn(parity, float64):
    for matrix in (random_rotation(1), -random_rotation(2)):
        for degree in range(5):
            expected = o3.Irrep(degree, parity).D_from_matrix(matrix)
            assert_close(wigner_d(degree, matrix, parity), expected, 1e-10)


def test_rotation_matrices_multiply_like_rotations():
    a, b = random_rotation(1), random_rotation(2)
    both = torch.stack([a, b])
    assert wigner_d(3, both).shape == (2, 7, 7)
    assert_close(wigner_d(3, a) @ wigner_d(3, b), wigner_d(3, a @ b), 1e-12)
