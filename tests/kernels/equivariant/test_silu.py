"""Silu in Triton against the float64 reference."""

import pytest
import torch

pytest.importorskip("triton")

from bevatron.kernels import silu
from bevatron.testing import check_op

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RAN = ("silu", "triton")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("shape", [(63, 5), (1,), (0, 4), (1025,), (2, 3, 4)])
@pytest.mark.parametrize("strided", [False, True])
def test_silu_and_its_derivatives(dtype, shape, strided):
    inputs = {"x": 4 * torch.randn(shape, dtype=dtype, device=DEVICE)}
    check_op(silu, silu, inputs, ran=RAN, strided=strided)


def test_large_numbers_stay_finite():
    x = torch.tensor([-1000.0, -90.0, 0.0, 90.0, 1000.0], device=DEVICE)
    check_op(silu, silu, {"x": x}, ran=RAN)
