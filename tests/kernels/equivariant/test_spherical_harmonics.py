"""Spherical harmonics in Triton against the float64 reference."""

import pytest
import torch

pytest.importorskip("triton")

from bevatron.kernels import spherical_harmonics
from bevatron.testing import check_op

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RAN = ("spherical_harmonics", "triton")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("l_max", "num"), [(0, 3), (1, 1), (2, 63), (3, 5), (3, 0), (4, 130)])
def test_harmonics_and_their_derivatives(dtype, l_max, num):
    inputs = {"vectors": torch.randn(num, 3, dtype=dtype, device=DEVICE), "l_max": l_max}
    check_op(spherical_harmonics, spherical_harmonics, inputs, ran=RAN, strided=num == 5)


def test_harmonics_do_not_depend_on_lengths():
    directions = torch.nn.functional.normalize(torch.randn(20, 3, device=DEVICE), dim=1)
    lengths = torch.logspace(-3, 3, 20, device=DEVICE)[:, None]
    check_op(
        spherical_harmonics,
        spherical_harmonics,
        {"vectors": directions * lengths, "l_max": 3},
        order=1,
        ran=RAN,
    )
