"""Sums over segments."""

import inspect

import pytest
import torch

from bevatron import kernels
from bevatron.kernels import scatter_sum
from bevatron.testing import awkward_graphs, check_op

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def plainly(values, index, num_segments):
    return torch.stack([values[index == segment].sum(0) for segment in range(num_segments)])


@pytest.mark.parametrize("graph", awkward_graphs(), ids=lambda graph: graph.name)
@pytest.mark.parametrize("shape", [(), (3,), (2, 5)])
def test_sums_and_their_derivatives_are_right(graph, shape):
    index = graph.edges[1]
    values = torch.randn(len(index), *shape)
    inputs = {"values": values, "index": index, "num_segments": graph.num_nodes}
    check_op(scatter_sum, plainly, inputs, ran=("scatter_sum", "reference"))
    check_op(scatter_sum, plainly, {**inputs, "values": values.double()}, strided=True)


def test_rows_may_come_in_any_order():
    index = torch.tensor([2, 0, 2, 1, 0], dtype=torch.int32)
    assert scatter_sum(torch.arange(5.0), index, 4).tolist() == [5.0, 3.0, 2.0, 0.0]


def test_mismatched_lengths_are_refused():
    with pytest.raises(ValueError, match=r"\(3,\) values do not go with \(2,\) indices"):
        inspect.unwrap(scatter_sum)(torch.ones(3), torch.tensor([0, 1]), 2)


@pytest.mark.parametrize("graph", awkward_graphs(hub=600), ids=lambda graph: graph.name)
@pytest.mark.parametrize(("shape", "dtype"), [((), torch.float64), ((3,), torch.float32)])
@pytest.mark.parametrize("ordered", [False, True])
def test_fast_sums_are_right_in_any_order(graph, shape, dtype, ordered):
    pytest.importorskip("triton")
    index = graph.edges[1].sort().values if ordered else graph.edges[1]
    index = index.to(DEVICE)
    values = torch.randn(len(index), *shape, dtype=dtype, device=DEVICE)
    inputs = {"values": values, "index": index, "num_segments": graph.num_nodes}

    def call(**given):
        return scatter_sum(**given, ordered=ordered)

    check_op(call, plainly, inputs, ran=("scatter_sum", "triton"), strided=True)


def test_fast_sums_repeat_bit_for_bit():
    pytest.importorskip("triton")
    index, values = torch.randint(0, 9, (5000,), device=DEVICE), torch.randn(5000, device=DEVICE)
    with kernels.use("triton"):
        found = [scatter_sum(values, index, 9) for _ in range(3)]
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_operators_pass_opcheck():
    operators = pytest.importorskip("bevatron.kernels.equivariant.scatter_sum.triton")
    index, ptr = torch.tensor([1, 0, 1]), torch.tensor([0, 1, 3, 3])
    index, ptr, order = index.to(DEVICE), ptr.to(DEVICE), index.argsort(stable=True).to(DEVICE)
    for operator, rows in ((operators.total, 3), (operators.spread, 3)):
        values = torch.randn(rows, 2, device=DEVICE, requires_grad=True)
        torch.library.opcheck(operator.op, (values, index, ptr, order))
