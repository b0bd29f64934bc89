"""The conditioned transition: the reference everywhere, the kernels interpreted or compiled."""

import pytest
import torch
import torch.nn.functional as F
from pair_operators import DEVICE, GPU, HALF, check_kernels, saved

from bevatron.kernels import conditioned_transition, use
from bevatron.kernels.shared import chunked_linear as products
from bevatron.testing import Tolerance, assert_close
from half_precision import check_no_worse

pytest.importorskip("triton", reason="the kernels need the package triton")


def make(rows, width, conditions, hidden, dtype=torch.float32):
    """Random inputs whose intermediate rows are of order one."""
    generator = torch.Generator().manual_seed(7)
    shapes = {
        "x": (*rows, width),
        "s": (*rows, conditions),
        "norm_weight": (conditions,),
        "scale_weight": (width, conditions),
        "scale_bias": (width,),
        "shift_weight": (width, conditions),
        "gate_weight": (hidden, width),
        "up_weight": (hidden, width),
        "down_weight": (width, hidden),
        "out_weight": (width, conditions),
        "out_bias": (width,),
    }
    drawn = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    for name, shape in shapes.items():
        if name not in {"x", "s"} and len(shape) == 2:
            drawn[name] /= shape[1] ** 0.5
    return {name: value.to(DEVICE, dtype) for name, value in drawn.items()}


def check(inputs, **options):
    check_kernels(conditioned_transition, inputs, **options)


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    """Cut even a few rows, and let a program walk over several blocks of them."""
    from bevatron.kernels.pair.conditioned_transition import triton_launch
    from bevatron.kernels.pair.swiglu import triton_products

    monkeypatch.setattr(products, "CHUNK_MULTIPLE", 4)
    monkeypatch.setattr(products, "CHUNK_BYTES", 0)
    monkeypatch.setattr(triton_launch, "ELEMENTS", 256)
    for launching in (triton_launch, triton_products):
        monkeypatch.setattr(launching, "num_sms", lambda _device: 1)


@pytest.mark.parametrize("rows", [(0,), (1,), (2, 5)])
@pytest.mark.parametrize("strided", [False, True])
def test_result_and_gradients_are_right(rows, strided):
    check(make(rows, 12, 10, 24), tolerance=Tolerance(2e-6, 2e-5), strided=strided)


def test_matmuls_with_epilogues_take_rows_with_gaps():
    tolerance = Tolerance(2e-2, 4e-2) if GPU else Tolerance(3e-3, 6e-3)
    check(make((2, 5), 128, 64, 128, dtype=HALF), tolerance=tolerance, strided=True)


@pytest.mark.parametrize("multiple", [100, 1000])
@pytest.mark.parametrize(("width", "conditions", "hidden"), [(96, 60, 100), (128, 64, 128)])
def test_sixteen_bits_are_no_worse_than_the_reference(
    width, conditions, hidden, multiple, monkeypatch
):
    monkeypatch.setattr(products, "CHUNK_MULTIPLE", multiple)
    monkeypatch.setattr(products, "MANY_ROWS", 1)
    inputs = make((250,), width, conditions, hidden, dtype=HALF)
    check_no_worse("conditioned_transition", conditioned_transition, inputs)


def test_the_reference_is_the_published_algorithm():
    t = {name: value.double().cpu() for name, value in make((4,), 6, 5, 12).items()}
    with use("reference"):
        actual = conditioned_transition(**t)
    c = F.layer_norm(t["s"], (5,), t["norm_weight"])
    n = torch.sigmoid(c @ t["scale_weight"].T + t["scale_bias"]) * F.layer_norm(t["x"], (6,))
    n = n + c @ t["shift_weight"].T
    b = F.silu(n @ t["gate_weight"].T) * (n @ t["up_weight"].T)
    gate = torch.sigmoid(t["s"] @ t["out_weight"].T + t["out_bias"])
    assert_close(actual, gate * (b @ t["down_weight"].T), 1e-13)


def test_only_inputs_the_result_and_four_numbers_per_row_are_saved():
    result, kept = saved(conditioned_transition, make((10,), 12, 8, 24))
    assert sum(t.numel() for t in kept if t.data_ptr() != result.data_ptr()) == 4 * 10


def test_custom_operators_pass_opcheck():
    from bevatron.kernels.pair.conditioned_transition.triton import condition

    inputs = [value.requires_grad_() for value in make((4,), 6, 5, 12).values()]
    torch.library.opcheck(condition.op, (*inputs, 1e-5))
