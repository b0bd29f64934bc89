"""Tensors of any strides reach the receiver of a batch as they were."""

from multiprocessing import Pipe

import pytest
import torch

from bevatron.data.loader.transfer import load, received_file, send

TENSORS = {
    "one number, broadcast": torch.tensor([[3.0]]).expand(1, 1).as_strided((1,), (0,)),
    "broadcast rows": torch.arange(3).expand(4, 3),
    "transposed": torch.arange(6.0).reshape(2, 3).T,
    "part of a larger one": torch.arange(10, dtype=torch.int16)[3:4],
    "no rows": torch.empty(0, 5, dtype=torch.bfloat16),
    "a scalar": torch.tensor(7, dtype=torch.int8),
    "flags": torch.tensor([True, False]),
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_arrives_as_it_was(name):
    ours, theirs = Pipe()
    send(ours, 5, {"x": TENSORS[name]})
    key, extents = theirs.recv()
    with received_file(theirs) as file:
        found = load(file, extents)["x"]
    assert key == 5
    assert found.dtype == TENSORS[name].dtype
    assert torch.equal(found, TENSORS[name])
