"""The radial basis in Triton against the float64 reference."""

import pytest
import torch

pytest.importorskip("triton")

from bevatron import kernels
from bevatron.errors import KernelError
from bevatron.kernels import radial_basis
from bevatron.maths.radial import bessel_parameters
from bevatron.testing import check_op

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RAN = ("radial_basis", "triton")


def basis(num_basis, dtype, order=5, r_max=4.0):
    frequencies, prefactor = bessel_parameters(r_max, num_basis, dtype)
    constants = [
        tensor.to(DEVICE) for tensor in (frequencies, prefactor, torch.tensor(r_max, dtype=dtype))
    ]

    def call(lengths):
        return radial_basis(lengths, *(tensor.to(lengths) for tensor in constants), order)

    return call


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    ("num", "num_basis", "order"), [(1, 8, 5), (63, 10, 2), (130, 3, 6), (0, 8, 5)]
)
def test_the_basis_and_its_derivatives(dtype, num, num_basis, order):
    # Also beyond the cutoff, and at it.
    lengths = 0.5 + 4.5 * torch.rand(num, dtype=dtype, device=DEVICE)
    lengths[num // 2 :][:1] = 4.0
    call = basis(num_basis, dtype, order)
    check_op(call, call, {"lengths": lengths}, ran=RAN, strided=num == 63)


def test_derivatives_with_respect_to_frequencies_are_refused():
    frequencies, prefactor = bessel_parameters(4.0, 3)
    lengths, r_max = torch.ones(2, dtype=torch.float64), torch.tensor(4.0)
    with kernels.use(radial_basis="triton"), pytest.raises(KernelError, match="lengths only"):
        radial_basis(
            lengths.to(DEVICE), frequencies.to(DEVICE).requires_grad_(), prefactor.to(DEVICE),
            r_max.to(DEVICE), 5,
        )  # fmt: skip
