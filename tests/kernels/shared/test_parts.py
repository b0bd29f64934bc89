"""Slices of one tensor are recognised, and nothing else is taken for them."""

import pytest
import torch

from bevatron.kernels.shared.parts import parts_of_one, split

X = torch.arange(24.0).view(2, 12)
A, B, C = X.split(4, -1)


def test_parts_are_found_in_one_tensor_in_their_order():
    assert parts_of_one([A, B, C]).equal(X)
    assert parts_of_one([part.unflatten(-1, (2, 2)) for part in (A, B, C)]).equal(X)
    one_of_many = torch.arange(72.0).view(2, 3, 12)[:1, :2]
    assert parts_of_one(one_of_many.split(4, -1)).equal(one_of_many)
    for parts in ([A, C, B], [A, B], [A, A, C], [A, B, C.clone()], [A[:0]] * 3):
        assert parts_of_one(parts) is None


def test_parts_of_other_types_shapes_or_strides_are_none_of_one_tensor():
    for other in (B.view(torch.int32), B[:1], B[:, :2], B.as_strided((2, 4), (8, 1), 4)):
        assert other.data_ptr() == B.data_ptr()
        assert parts_of_one([A, other, C]) is None


def test_tensors_that_are_neighbours_in_memory_by_chance_are_none():
    memory = bytearray(32)
    parts = [torch.frombuffer(memory, dtype=torch.float32, count=4, offset=n) for n in (0, 16)]
    assert parts[1].data_ptr() == parts[0].data_ptr() + 16
    assert parts_of_one(parts) is None


@pytest.mark.parametrize(
    "gradients",
    [
        [A, B],
        [B, A],
        [A, B.clone()],
        [A, B.as_strided((2, 4), (8, 1), 4)],
        [X.as_strided((2, 1), (12, 2), place) for place in (0, 1)],
        [torch.ones(()).expand(2, 4)],
    ],
)
def test_the_gradient_of_a_split_joins_those_of_its_parts(gradients):
    wanted = torch.cat(gradients, -1)
    x = torch.zeros(wanted.shape, requires_grad=True)
    parts = split(x, [each.shape[-1] for each in gradients])
    assert torch.autograd.grad(parts, x, gradients)[0].equal(wanted)


def test_the_gradient_of_a_split_has_gradients():
    x, leaf = torch.zeros(2, 8, requires_grad=True), X.clone().requires_grad_()
    parts = split(x, [4, 4])
    (found,) = torch.autograd.grad(parts, x, leaf[:, :8].split(4, -1), create_graph=True)
    (of_leaf,) = torch.autograd.grad(found, leaf, A.repeat(1, 2))
    assert of_leaf.equal(torch.cat([A, A, torch.zeros(2, 4)], -1))


def test_a_split_can_be_transformed():
    def weighted(x):
        first, second = split(x, [4, 8])
        return first.sum() + 2 * second.sum()

    assert torch.func.grad(weighted)(X).equal(torch.tensor([1.0] * 4 + [2.0] * 8).expand(2, 12))
