"""Rows of any strides, as libraries and kernels can address them."""

import pytest
import torch

from bevatron.kernels import add_dropped, layer_norm, layer_norm_linear, qkvg, use
from bevatron.kernels.shared.rows import FARTHEST, indexable_by_32_bits
from bevatron.testing import assert_close

pytest.importorskip("triton", reason="the kernels need the package triton")

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
HALF = torch.bfloat16 if GPU else torch.float16


@pytest.mark.parametrize("shape", [(3, 8), (2, 3, 8)])
def test_rows_too_far_apart_are_copied(shape):
    strides = torch.empty(shape, device="meta").stride()
    apart = FARTHEST // (shape[0] - 1)
    for first, copied in ((apart, True), (apart - 32, False)):
        view = torch.empty_strided(shape, (first, *strides[1:]), device="meta")
        assert (indexable_by_32_bits(view) is not view) is copied
        assert indexable_by_32_bits(view).stride() == (strides if copied else view.stride())


@pytest.mark.parametrize("transposed", [False, True])
def test_rows_without_gaps_are_left_alone_whatever_their_number(transposed):
    rows = torch.empty(FARTHEST // 2, 3, device="meta")
    rows = rows.t() if transposed else rows
    assert indexable_by_32_bits(rows) is rows


def test_no_rows_and_broadcast_rows_are_left_alone():
    assert (
        indexable_by_32_bits(rows := torch.empty_strided((0, 8), (FARTHEST, 1), device="meta"))
        is rows
    )
    assert indexable_by_32_bits(rows := torch.empty(1, 8, device="meta").expand(5, 8)) is rows


SHAPE, ORDER = (2, 3, 2, 5, 16), (3, 2, 1, 0, 4)
"""Rows with four axes, and an order in which none of these folds into another."""


def draw(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, HALF)


def scattered(tensor):
    """The same tensor, in memory in another order of axes."""
    return tensor.permute(ORDER).contiguous().permute(ORDER)


def normed(x):
    return layer_norm(scattered(x))


def scaled(x, scale):
    return layer_norm(x, scale=scattered(scale))


def projected(x, weight):
    return layer_norm_linear(scattered(x), None, None, weight)


def added(x, update, weight):
    return add_dropped(x, scattered(update), weight=weight)


def queried(x, weight, bias_weight):
    *parts, bias, rows = qkvg(x, *[weight] * 4, norm=(None, None), bias_weight=bias_weight)
    return 100 * rows + sum(parts) * bias.sum(-1, keepdim=True)  # of one size


@pytest.mark.parametrize("arrange", [torch.Tensor.contiguous, scattered])
@pytest.mark.parametrize(
    ("operator", "sizes"),
    [
        (normed, ()),
        (scaled, (SHAPE,)),
        (projected, ((16, 16),)),
        (added, (SHAPE, (16, 16))),
        (queried, ((16, 16), (4, 16))),
    ],
)
def test_rows_of_more_axes_than_kernels_know_are_right_beside_contiguous_ones(
    operator, sizes, arrange
):
    drawn = [draw(*shape, seed=seed) for seed, shape in enumerate((SHAPE, SHAPE, *sizes))]
    found = []
    for choice, dtype in (("triton", HALF), ("reference", torch.float64)):
        weight, *leaves = [each.to(dtype).requires_grad_() for each in drawn]
        with use(choice):
            y = operator(*leaves)
            found.append((y, *torch.autograd.grad(y, leaves, arrange(weight))))
    for got, want in zip(*found, strict=True):
        assert_close(got, want, 4e-2)
