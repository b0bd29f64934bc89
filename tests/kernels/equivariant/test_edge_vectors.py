"""Vectors along edges against the float64 reference, with repeatable sums."""

import inspect

import pytest
import torch

pytest.importorskip("triton")

from bevatron import kernels
from bevatron.kernels.equivariant.channelwise_tensor_product import EdgeOrder
from bevatron.kernels.equivariant.edge_vectors import edge_vectors
from bevatron.testing import awkward_graphs, check_op

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
RAN = ("edge_vectors", "triton")
GRAPHS = awkward_graphs() if GPU else awkward_graphs(hub=70)


@pytest.mark.parametrize("graph", GRAPHS, ids=lambda graph: graph.name)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("strained", [False, True])
def test_vectors_and_their_derivatives(graph, dtype, strained):
    draw = {"dtype": dtype, "device": DEVICE}
    edges = graph.edges.to(DEVICE)
    shifts = torch.randint(-1, 2, (edges.shape[1], 3), device=DEVICE)
    structures = torch.arange(graph.num_nodes, device=DEVICE) % 2
    fixed = torch.randn(2, 3, 3, **draw)

    def call(positions, cells=None):
        cells = fixed.to(positions) if cells is None else cells
        return edge_vectors(positions, edges, shifts.to(positions), cells, structures)

    inputs = {"positions": torch.randn(graph.num_nodes, 3, **draw)}
    inputs |= {"cells": torch.randn(2, 3, 3, **draw)} if strained else {}
    check_op(call, call, inputs, ran=RAN, strided=graph is GRAPHS[0])


@pytest.mark.parametrize("by_receiver", [False, True])
def test_sums_over_edges_repeat_bit_for_bit(by_receiver):
    edges = torch.randint(0, 40, (2, 3000), device=DEVICE)
    if by_receiver:
        edges = edges[:, edges[1].argsort(stable=True)].contiguous()
    order = EdgeOrder(edges, 40, by_receiver=by_receiver)
    positions = torch.randn(40, 3, device=DEVICE, requires_grad=True)
    g = torch.randn(3000, 3, device=DEVICE)

    def gradient(positions):
        shifts, cells = positions.new_zeros(3000, 3), positions.new_zeros(1, 3, 3)
        vectors = edge_vectors(positions, order, shifts, cells, order.edges.new_zeros(40))
        return torch.autograd.grad(vectors, positions, g.to(vectors))[0]

    with kernels.use("triton"):
        found = gradient(positions)
        assert torch.equal(gradient(positions), found)
    with kernels.use("reference"):
        expected = gradient(positions.detach().double().requires_grad_())
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-4)


def test_operators_pass_opcheck():
    operators = pytest.importorskip("bevatron.kernels.equivariant.edge_vectors.triton")
    edges = torch.tensor([[2, 0, 2, 1], [0, 0, 1, 2]], device=DEVICE)
    order = EdgeOrder(edges, 3)
    index = (edges, order.receiver_ptr, order.permutation, *order.by_sender(4))
    positions = torch.randn(3, 3, device=DEVICE, requires_grad=True)
    shifts, cells = torch.randn(4, 3, device=DEVICE), torch.randn(1, 3, 3, device=DEVICE)
    structures = torch.zeros(3, dtype=torch.int64, device=DEVICE)
    torch.library.opcheck(operators.difference.op, (positions, *index, shifts, cells, structures))
    torch.library.opcheck(operators.difference.op, (positions, *index, None, None, None))
    vectors = torch.randn(4, 3, device=DEVICE, requires_grad=True)
    torch.library.opcheck(operators.totals.op, (vectors, *index))


def test_a_wrong_shape_is_named():
    positions, edges = torch.zeros(2, 3), torch.zeros(2, 1, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"shifts \(2, 3\) .* of 1 edges and 2 nodes"):
        inspect.unwrap(edge_vectors)(
            positions, edges, torch.zeros(2, 3), torch.zeros(1, 3, 3), torch.zeros(2, dtype=int)
        )
