"""How precisely a run computes, and that what was set before comes back."""

import pytest
import torch

from bevatron.train.precision import arithmetic
from bevatron.train.settings import TrainConfig


@pytest.mark.parametrize("told", ["tf32", "ieee"])
@pytest.mark.parametrize("wanted", [True, False])
def test_tf32_is_set_for_a_run_and_then_as_before(told, wanted):
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = told
    try:
        with arithmetic(TrainConfig(tf32=wanted), None):
            assert matmul.allow_tf32 == wanted
        assert matmul.fp32_precision == told
    finally:
        matmul.fp32_precision = before
