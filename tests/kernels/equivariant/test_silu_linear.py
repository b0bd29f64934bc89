"""An activation and the layer after it: Triton against the float64 reference."""

import pytest
import torch

pytest.importorskip("triton")

from bevatron import kernels
from bevatron.kernels import silu_linear
from bevatron.testing import check_op

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RAN = ("silu_linear", "triton")


def make(rows, hidden, width, dtype=torch.float64):
    x = 4 * torch.randn(rows, hidden, dtype=dtype, device=DEVICE)
    return {"x": x, "weight": torch.randn(hidden, width, dtype=dtype, device=DEVICE)}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("shape", [(63, 5, 7), (1, 1, 1), (0, 4, 3), (300, 64, 17), (2, 66, 3)])
@pytest.mark.parametrize("strided", [False, True])
def test_result_and_derivatives_are_those_of_the_reference(dtype, shape, strided):
    check_op(silu_linear, silu_linear, make(*shape, dtype), ran=RAN, strided=strided)


def test_derivatives_agree_with_finite_differences_for_every_pair_of_inputs():
    tensors = [tensor.requires_grad_() for tensor in make(5, 3, 2).values()]
    with kernels.use(silu_linear="triton"):
        assert torch.autograd.gradcheck(silu_linear, tensors, fast_mode=True)
        assert torch.autograd.gradgradcheck(silu_linear, tensors, fast_mode=True)


def test_shapes_that_do_not_fit_are_named():
    with pytest.raises(ValueError, match=r"\(2, 3\) do not go with a weight \(4, 3\)"):
        silu_linear(torch.ones(2, 3), torch.ones(4, 3))
