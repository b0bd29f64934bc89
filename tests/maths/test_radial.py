"""Radial functions: values, smoothness at the cutoff, derivatives."""

import numpy as np
import pytest
import torch

from bevatron.maths.radial import (
    agnesi_transform,
    bessel_basis,
    bessel_parameters,
    polynomial_cutoff,
)
from bevatron.testing import assert_close


def lengths() -> torch.Tensor:
    return torch.linspace(0.3, 4.4, 9, dtype=torch.float64)


def test_bessel_functions_are_orthonormal_inside_the_cutoff():
    frequencies, prefactor = bessel_parameters(4.5, 6)
    r = (torch.arange(20000, dtype=torch.float64) + 0.5) * (4.5 / 20000)
    b = bessel_basis(r, frequencies, prefactor)
    overlap = torch.einsum("ri,rj,r->ij", b, b, r**2) * (4.5 / 20000)
    assert_close(overlap, torch.eye(6, dtype=torch.float64), 1e-7)


def test_bessel_functions_vanish_at_the_cutoff():
    frequencies, prefactor = bessel_parameters(4.5, 6)
    at_cutoff = bessel_basis(torch.tensor(4.5, dtype=torch.float64), frequencies, prefactor)
    assert at_cutoff.abs().max() < 1e-14


@pytest.mark.parametrize("p", [2, 5, 6])
def test_the_cutoff_is_the_polynomial_of_the_paper(p):
    x = (lengths() / 4.5).numpy()
    expected = (
        1
        - (p + 1) * (p + 2) / 2 * x**p
        + p * (p + 2) * x ** (p + 1)
        - p * (p + 1) / 2 * x ** (p + 2)
    )
    assert np.abs(polynomial_cutoff(lengths(), 4.5, p).numpy() - expected).max() < 1e-13


def test_the_cutoff_ends_with_two_zero_derivatives_and_stays_zero():
    r = torch.tensor([4.5 - 1e-4, 4.5, 4.6, 9.0], dtype=torch.float64, requires_grad=True)
    value = polynomial_cutoff(r, 4.5, 5)
    (slope,) = torch.autograd.grad(value.sum(), r, create_graph=True)
    (bend,) = torch.autograd.grad(slope.sum(), r)
    assert value[0].abs() < 1e-11
    assert slope[0].abs() < 1e-7
    assert bend[0].abs() < 2e-3
    assert not value[1:].any()
    assert not slope[1:].any()
    assert not bend[1:].any()


def test_the_cutoff_may_differ_from_edge_to_edge():
    r, r_max = torch.full((2,), 2.0).double(), torch.tensor([1.5, 3.0], dtype=torch.float64)
    assert_close(polynomial_cutoff(r, r_max, 6)[1], polynomial_cutoff(r[1], 3.0, 6))
    assert polynomial_cutoff(r, r_max, 6)[0] == 0


def test_agnesi_maps_short_bonds_to_one_and_falls_with_length():
    t = agnesi_transform(lengths(), torch.tensor(1.1, dtype=torch.float64))
    assert (t.diff() < 0).all()
    assert t.max() < 1
    tiny = agnesi_transform(torch.tensor(1e-3).double(), torch.tensor(1.0).double())
    assert abs(tiny - 1) < 1e-6


def test_radial_functions_have_exact_second_derivatives():
    r = lengths().requires_grad_()
    frequencies, prefactor = bessel_parameters(4.5, 4)

    def edge(r: torch.Tensor) -> torch.Tensor:
        t = agnesi_transform(r, torch.tensor(1.1, dtype=torch.float64))
        return bessel_basis(t, frequencies, prefactor) * polynomial_cutoff(r, 4.5, 5)[:, None]

    assert torch.autograd.gradcheck(edge, r)
    assert torch.autograd.gradgradcheck(edge, r)
