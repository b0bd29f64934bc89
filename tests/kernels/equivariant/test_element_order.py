"""Atoms sorted by element, whatever the numbers are stored in."""

import pytest
import torch

from bevatron.kernels.equivariant.element_order import ElementOrder


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.int64])
@pytest.mark.parametrize("num_elements", [3, 200])
def test_elements_may_be_of_any_integer_type(dtype, num_elements):
    order = ElementOrder(torch.tensor([2, 0, 2, 1], dtype=dtype), num_elements)
    assert order.order.tolist() == [1, 3, 0, 2]
    assert order.ptr.tolist() == [0, 1, 2, *[4] * (num_elements - 2)]
    assert order.counts == [1, 1, 2, *[0] * (num_elements - 3)]


def test_unknown_elements_belong_to_none():
    order = ElementOrder(torch.tensor([7, 1, -3, 0, 70_000]), 2)
    assert order.ptr.tolist() == [1, 2, 3]
    assert order.order[1:3].tolist() == [3, 1]
