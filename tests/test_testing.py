"""The test kit finds what it is there to find."""

import pytest
import torch

from bevatron import kernels
from bevatron.testing import (
    assert_close,
    awkward_graphs,
    check_equivariant,
    check_op,
    check_permutation,
    derivatives,
    guarded_allocations,
    poisoned,
    random_rotation,
)


def cube_sum(x, y):
    return (x**3).sum(1) * y


_RANDOM = torch.Generator().manual_seed(0)
INPUTS = {"x": torch.randn(3, 4, generator=_RANDOM), "y": torch.randn(3, generator=_RANDOM)}


def test_a_difference_is_reported_with_its_place_and_both_values():
    a = torch.zeros(2, 3)
    b = a.clone()
    b[1, 2] = 1.0
    with pytest.raises(AssertionError, match=r"energy: error 1.0.* at \(1, 2\): 0.0, expected 1.0"):
        assert_close(a, b, name="energy")
    with pytest.raises(AssertionError, match="shape"):
        assert_close(a, b[0])
    with pytest.raises(AssertionError, match="finite in one only"):
        assert_close(a + float("nan"), a)


def test_equal_infinities_and_empty_tensors_are_close():
    x = torch.tensor([1.0, float("inf"), float("nan")])
    assert_close(x, x.clone())
    assert_close(torch.zeros(0, 3), torch.zeros(0, 3))


@pytest.mark.parametrize("strided", [False, True])
def test_reading_past_the_end_of_a_poisoned_tensor_gives_nan(strided):
    view = poisoned(torch.arange(6.0).view(2, 3), strided)
    assert torch.equal(view, torch.arange(6.0).view(2, 3))
    assert view.is_contiguous() is not strided
    beyond = view.as_strided((8,), (2 if strided else 1,))
    assert beyond[6:].isnan().all()
    assert poisoned(torch.ones(2).requires_grad_()).is_leaf


def test_writing_past_the_end_of_a_guarded_tensor_is_found():
    allocations = torch.empty, torch.empty_like, torch.Tensor.new_empty
    with guarded_allocations():
        fine = torch.empty(5)
        assert fine.isnan().all()
        fine.zero_()

    def write(first: int, count: int) -> None:
        with guarded_allocations():
            out = torch.empty_like(fine) if first == 0 else fine.new_empty(5)
            out.as_strided((count,), (1,), out.storage_offset() + first).zero_()

    write(0, 5)
    with pytest.raises(AssertionError, match="written after a tensor of 5 elements"):
        write(0, 6)
    with pytest.raises(AssertionError, match="written before"):
        write(-1, 1)
    # Afterwards, errors or not, new tensors have no margins.
    assert (torch.empty, torch.empty_like, torch.Tensor.new_empty) == allocations
    assert torch.empty(5).untyped_storage().nbytes() == 5 * 4


def test_derivatives_are_those_of_autograd():
    x = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
    found = derivatives(lambda x: x**3, {"x": x})
    assert set(found) == {"result", "d/dx", "d2/dx", "d2/d(result)"}
    direction = found["d/dx"] / (3 * x**2)
    along = found["d2/dx"] / (6 * x * direction)
    assert_close(found["d2/d(result)"], 3 * x**2 * along)


def test_a_right_operator_passes():
    check_op(cube_sum, cube_sum, INPUTS)
    check_op(cube_sum, cube_sum, INPUTS, strided=True)


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        (lambda x, y: cube_sum(x, y) * (1 + 1e-4), "result"),
        (lambda x, y: cube_sum(x, y.detach()), "d/dy"),
        (lambda x, y: WrongSecond.apply(x) * y, "d2/dx"),
    ],
)
def test_a_wrong_operator_is_found_and_the_derivative_named(wrong, name):
    with pytest.raises(AssertionError, match=f"^{name}"):
        check_op(wrong, cube_sum, INPUTS)


def test_an_operator_that_gives_other_bits_each_time_is_found():
    def restless(x, y):
        return cube_sum(x, y) * (1 + 1e-7 * torch.rand(()))

    with pytest.raises(AssertionError, match="second run"):
        check_op(restless, cube_sum, INPUTS)


def test_an_operator_that_never_ran_is_found():
    with pytest.raises(AssertionError, match="was not launched"):
        check_op(cube_sum, cube_sum, INPUTS, ran=("scatter_sum", "reference"))
    index = torch.tensor([0, 1, 0])
    check_op(
        lambda y: kernels.scatter_sum(y, index, 2),
        lambda y: kernels.scatter_sum(y, index, 2),
        {"y": INPUTS["y"]},
        ran=("scatter_sum", "reference"),
    )


def test_what_is_not_equivariant_is_found():
    vectors = {"v": torch.randn(5, 3, dtype=torch.float64)}

    def forces(v):
        return {"energy": v.norm(dim=1).sum(), "forces": 2 * v, "stress": v.T @ v}

    kinds = {"energy": "0e", "forces": "1o", "stress": "tensor"}
    check_equivariant(forces, vectors, {"v": "1o"}, kinds)
    with pytest.raises(AssertionError, match="after rotation"):
        check_equivariant(lambda v: v.abs(), vectors, {"v": "1o"}, "1o")
    # A cross product turns like a vector but is not mirrored.
    with pytest.raises(AssertionError, match=r"after (reflection|inversion)"):
        check_equivariant(lambda v: v[:1].cross(v[1:2], dim=1), vectors, {"v": "1o"}, "1o")
    check_equivariant(lambda v: v[:1].cross(v[1:2], dim=1), vectors, {"v": "1o"}, "1e")


def test_what_depends_on_the_order_of_nodes_is_found():
    inputs = {"h": torch.randn(5, 2, dtype=torch.float64), "edges": torch.tensor([[0, 1], [2, 3]])}

    def messages(h, edges):
        return torch.zeros_like(h).index_add(0, edges[1], h[edges[0]])

    check_permutation(messages, inputs, ["h"], ["edges"])
    with pytest.raises(AssertionError, match="after reordering"):
        check_permutation(lambda h, edges: h.cumsum(0), inputs, ["h"], ["edges"])


def test_awkward_graphs_are_sorted_and_inside_their_nodes():
    graphs = awkward_graphs()
    assert {graph.edges.shape[1] for graph in graphs} >= {0, 1, 63, 65, 309}
    for graph in graphs:
        assert (graph.edges[1].diff() >= 0).all(), graph.name
        assert graph.edges.numel() == 0 or graph.edges.max() < graph.num_nodes, graph.name


def test_random_rotations_are_rotations():
    rotation = random_rotation(4)
    assert_close(rotation @ rotation.T, torch.eye(3, dtype=torch.float64))
    assert rotation.det() > 0


class WrongSecond(torch.autograd.Function):
    """The sum of cubes with a right gradient whose own gradient is wrong."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return (x**3).sum(1)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient[:, None] * 3 * x * x.detach()
