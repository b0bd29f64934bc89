"""Rows of any strides, as libraries and kernels can address them."""

import pytest
import torch

from bevatron.kernels.shared.rows import FARTHEST, indexable_by_32_bits


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
