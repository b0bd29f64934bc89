"""The channelwise tensor product in Triton, interpreted on a CPU or compiled on a GPU."""

import os

import pytest
import torch

# Before anything imports triton, which reads it once.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from bevatron.kernels import channelwise_tensor_product, use
from bevatron.kernels.channelwise_tensor_product import EdgeOrder, paths
from bevatron.kernels.channelwise_tensor_product.reference import (
    channelwise_tensor_product as reference,
)
from bevatron.maths.irreps import Irreps
from bevatron.testing import awkward_graphs, check_op

pytest.importorskip("triton", reason="the kernels need the package triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TRITON = ("channelwise_tensor_product", "triton")
SMALL = ("3x0e+3x1o", "0e+1o", "0e+1o")
MACE = ("5x0e+5x1o", "0e+1o+2e+3o", "0e+1o+2e+3o")
NEQUIP = ("3x0e+2x0o+1x1o+4x1e", "0e+1o+2e", "0e+0o+1o+1e+2e+2o")
GRAPHS = awkward_graphs(hub=12)


def make(irreps, graph, dtype):
    """Random tensors for one set of irreps and one graph."""
    num_edges = graph.edges.shape[1]
    inputs = {
        "x": torch.randn(graph.num_nodes, Irreps.parse(irreps[0]).dim, dtype=dtype),
        "harmonics": torch.randn(num_edges, Irreps.parse(irreps[1]).dim, dtype=dtype),
        "weights": torch.randn(num_edges, paths(*irreps).num_weights, dtype=dtype),
        "edges": graph.edges,
    }
    return {name: value.to(DEVICE) for name, value in inputs.items()}


def product(irreps):
    return lambda **inputs: channelwise_tensor_product(
        **inputs, irreps_in=irreps[0], irreps_harmonics=irreps[1], irreps_out=irreps[2]
    )


def check(irreps, inputs, **options):
    check_op(product(irreps), product(irreps), inputs, ran=TRITON, **options)


@pytest.mark.parametrize("graph", GRAPHS, ids=lambda graph: graph.name)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_result_and_derivatives_are_right_on_awkward_graphs(graph, dtype):
    check(SMALL, make(SMALL, graph, dtype))
