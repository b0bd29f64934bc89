"""Vectors along edges against the float64 reference, with repeatable sums."""

import pytest
import torch

pytest.importorskip("triton")

from bevatron import kernels
from bevatron.kernels.channelwise_tensor_product import EdgeOrder
from bevatron.kernels.edge_vectors import edge_vectors
from bevatron.testing import awkward_graphs, check_op

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
RAN = ("edge_vectors", "triton")
GRAPHS = awkward_graphs() if GPU else awkward_graphs(hub=70)


@pytest.mark.parametrize("graph", GRAPHS, ids=lambda graph: graph.name)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_vectors_and_their_derivatives(graph, dtype):
    positions = torch.randn(graph.num_nodes, 3, dtype=dtype, device=DEVICE)
    edges = graph.edges.to(DEVICE)

    def call(positions):
        return edge_vectors(positions, edges)

    check_op(call, call, {"positions": positions}, ran=RAN, strided=graph is GRAPHS[0])


@pytest.mark.parametrize("by_receiver", [False, True])
def test_sums_over_edges_repeat_bit_for_bit(by_receiver):
    edges = torch.randint(0, 40, (2, 3000), device=DEVICE)
    if by_receiver:
        edges = edges[:, edges[1].argsort(stable=True)].contiguous()
    order = EdgeOrder(edges, 40, by_receiver=by_receiver)
    positions = torch.randn(40, 3, device=DEVICE, requires_grad=True)
    g = torch.randn(3000, 3, device=DEVICE)
    with kernels.use("triton"):
        found = [torch.autograd.grad(edge_vectors(positions, order), positions, g) for _ in "ab"]
        assert torch.equal(found[0][0], found[1][0])
        exact = positions.detach().double().requires_grad_()
    with kernels.use("reference"):
        (expected,) = torch.autograd.grad(edge_vectors(exact, order), exact, g.double())
    torch.testing.assert_close(found[0][0].double(), expected, rtol=0, atol=1e-4)
