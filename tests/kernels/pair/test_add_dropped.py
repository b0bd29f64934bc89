"""The dropped residual update: the reference everywhere, the kernel interpreted or compiled."""

import pytest
import torch
from pair_operators import DEVICE, DTYPES, HALF

from bevatron.kernels import add_dropped, use
from bevatron.testing import Tolerance, assert_close, check_op

pytest.importorskip("triton", reason="the kernels need the package triton")

SHAPES = [(3, 5, 8), (2, 9, 17, 12), (1, 1, 1), (4, 0, 8), (2, 2, 3, 70), (2, 3, 1030)]


def draw(shape, dtype=torch.float32, seed=7):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


def mask_of(shape, shared, dtype=torch.float32):
    *batch, R, N, C = shape
    kept = draw((*batch, R if shared == "columns" else N, C), dtype, seed=9) > -0.7
    return kept.to(dtype) / 0.75


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shared", ["rows", "columns", None])
def test_it_is_right(shape, dtype, shared):
    given = {} if shared is None else {"mask": mask_of(shape, shared, dtype), "shared": shared}
    inputs = {"x": draw(shape, dtype), "update": draw(shape, dtype, seed=8)}
    tolerance = Tolerance(2e-6, 2e-6) if dtype == torch.float32 else None
    check_op(
        lambda x, update: add_dropped(x, update, **given),
        lambda x, update: add_dropped(x, update, **{**given, **_wide(given, x)}),
        inputs,
        order=1,
        tolerance=tolerance,
        ran=("add_dropped", "triton"),
    )


def _wide(given, like):
    return {"mask": given["mask"].to(like.dtype)} if "mask" in given else {}


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("shape", [(5, 5, 8), (2, 9, 9, 12)])
def test_a_transposed_update_is_read_in_place_and_its_gradient_keeps_the_layout(shape, masked):
    x, mask = draw(shape), mask_of(shape, "columns") if masked else None
    base, dy = draw(shape, seed=8).requires_grad_(), draw(shape, seed=10)
    with use(add_dropped="triton"):
        update = base.transpose(-2, -3)
        y = add_dropped(x, update, mask, "columns")
        (gradient,) = torch.autograd.grad(y, update, dy)
    kept = 1.0 if mask is None else mask.unsqueeze(-2)
    assert_close(y, x + kept * base.transpose(-2, -3), 1e-6)
    assert_close(gradient, kept * dy, 1e-6)
    assert gradient.transpose(-2, -3).is_contiguous()


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("order", [None, (1, 0, 2)])
@pytest.mark.parametrize(
    ("shape", "width", "shared", "biased"),
    [
        ((3, 5, 16), 32, "rows", True),
        ((4, 4, 32), 16, "columns", False),
        ((3, 7, 16), 16, None, True),
        ((2, 3, 9, 16), 16, "rows", False),
        ((3, 5, 16), 24, "rows", True),
    ],
)
def test_a_linear_layer_of_the_update_is_right(shape, width, shared, biased, order, dtype):
    inputs = {"x": draw(shape, dtype), "update": draw((*shape[:-1], width), dtype, seed=8)}
    inputs["weight"] = draw((shape[-1], width), dtype, seed=11) / width**0.5
    inputs |= {"bias": draw((shape[-1],), dtype, seed=12)} if biased else {}

    def run(x, update, **layer):
        given = {} if shared is None else {"mask": mask, "shared": shared}
        if order is not None and len(shape) == 3:
            x, update = x.permute(order), update.permute(order)
        return add_dropped(x, update, **{**given, **_wide(given, x)}, **layer)

    turned = order is not None and len(shape) == 3
    mask = shared and mask_of(tuple(shape[i] for i in order) if turned else shape, shared, dtype)
    check_op(
        *(run, run, inputs),
        order=1,
        tolerance=Tolerance(2e-6, 4e-6) if dtype == torch.float32 else Tolerance(2e-2, 2e-2),
        ran=("add_dropped", "triton"),
        strided=True,
    )


@pytest.mark.parametrize("weight", [None, draw((16, 16), HALF, seed=9)])
def test_a_mask_may_have_gaps(weight):
    x, update = draw((3, 5, 16), HALF), draw((3, 5, 16), HALF, seed=8)
    wide = draw((5, 2, 16), HALF, seed=10)
    with use(add_dropped="triton"):
        y = add_dropped(x, update, wide[:, 1], weight=weight)
        assert y.equal(add_dropped(x, update, wide[:, 1].contiguous(), weight=weight))


def test_the_result_of_a_layer_is_laid_out_as_the_rows():
    x, update = draw((5, 4, 16), HALF).transpose(0, 1), draw((4, 5, 16), HALF, seed=8)
    with use(add_dropped="triton"):
        y = add_dropped(x, update, weight=draw((16, 16), HALF, seed=9))
    assert y.stride() == x.stride()


def test_custom_operators_pass_opcheck():
    from bevatron.kernels.pair.add_dropped.triton import add_linear, added, dropped

    x, update = draw((2, 3, 8)).requires_grad_(), draw((2, 3, 8), seed=8).requires_grad_()
    mask = mask_of((2, 3, 8), "rows")
    torch.library.opcheck(added.op, (x, update, mask, False, False))
    torch.library.opcheck(dropped.op, (update.detach(), None, True, True))
    x, update, weight = (draw(shape, HALF) for shape in ((2, 3, 16), (2, 3, 32), (16, 32)))
    tensors = [tensor.requires_grad_() for tensor in (x, update, weight)]
    mask = mask_of((2, 3, 16), "rows", HALF)
    torch.library.opcheck(add_linear.op, (*tensors, None, mask, False))


def test_mismatched_shapes_and_types_are_reported():
    x = torch.zeros(2, 3, 4)
    with pytest.raises((ValueError, TypeError)):
        add_dropped(x, torch.zeros(2, 3, 5))
    with pytest.raises((ValueError, TypeError)):
        add_dropped(x, x, torch.zeros(2, 4))
    with pytest.raises((ValueError, TypeError)):
        add_dropped(x, x, torch.zeros(3, 4, dtype=torch.float64))
