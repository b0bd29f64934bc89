"""Sums over segments."""

import inspect

import pytest
import torch

from bevatron.kernels import scatter_sum
from bevatron.testing import awkward_graphs, check_op


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


def test_the_order_of_the_rows_does_not_have_to_follow_the_segments():
    index = torch.tensor([2, 0, 2, 1, 0], dtype=torch.int32)
    assert scatter_sum(torch.arange(5.0), index, 4).tolist() == [5.0, 3.0, 2.0, 0.0]


def test_lengths_that_do_not_go_together_are_refused():
    with pytest.raises(ValueError, match=r"\(3,\) values do not go with \(2,\) indices"):
        inspect.unwrap(scatter_sum)(torch.ones(3), torch.tensor([0, 1]), 2)
