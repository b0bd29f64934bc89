"""The products over edges in Triton, interpreted on a CPU or compiled on a GPU."""

import importlib
import os

import pytest
import torch

# Before anything imports triton, which reads it once.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from bevatron.kernels import channelwise_tensor_product, radial_tensor_product, use
from bevatron.kernels.channelwise_tensor_product import EdgeOrder, paths
from bevatron.maths.irreps import Irreps
from bevatron.testing import AwkwardGraph, assert_close, awkward_graphs, check_op

pytest.importorskip("triton", reason="the kernels need the package triton")

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
DTYPES = [torch.float64, torch.float32]
SMALL = ("3x0e+2x1o", "0e+1o", "0e+1o")
MACE = ("5x0e+5x1o", "0e+1o+2e+3o", "0e+1o+2e+3o")
NEQUIP = ("3x0e+2x0o+1x1o+4x1e", "0e+1o+2e", "0e+0o+1o+1e+2e+2o")
# Interpreted, an edge takes a tenth of a second.
GRAPHS = awkward_graphs() if GPU else awkward_graphs(hub=4)[:6]
TINY = AwkwardGraph("three edges", 3, torch.tensor([[2, 0, 2], [0, 2, 2]]))


def make(irreps, graph, dtype=torch.float64, hidden=0):
    """Random tensors for one set of irreps and one graph."""
    num_edges, num_weights = graph.edges.shape[1], paths(*irreps).num_weights
    shapes = {
        "x": (graph.num_nodes, Irreps.parse(irreps[0]).dim),
        "harmonics": (num_edges, Irreps.parse(irreps[1]).dim),
    }
    if hidden:
        shapes |= {"hidden": (num_edges, hidden), "last_weight": (hidden, num_weights)}
    else:
        shapes |= {"weights": (num_edges, num_weights)}
    inputs = {name: torch.randn(shape, dtype=dtype) for name, shape in shapes.items()}
    return {name: value.to(DEVICE) for name, value in {**inputs, "edges": graph.edges}.items()}


def check(irreps, inputs, **options):
    """Compare with the reference: result, first and second derivatives, every pair of inputs."""
    operator = radial_tensor_product if "hidden" in inputs else channelwise_tensor_product

    def product(**tensors):
        return operator(
            **tensors, irreps_in=irreps[0], irreps_harmonics=irreps[1], irreps_out=irreps[2]
        )

    check_op(product, product, inputs, ran=(operator.__name__, "triton"), **options)


@pytest.fixture
def small_chunks(monkeypatch):
    """Cut even small graphs, in the midst of a receiver's edges."""
    module = importlib.import_module("bevatron.kernels.radial_tensor_product.triton")
    monkeypatch.setattr(module, "CHUNK", 4)


@pytest.mark.parametrize("graph", GRAPHS, ids=lambda graph: graph.name)
@pytest.mark.parametrize("dtype", DTYPES)
def test_result_and_derivatives_are_right_on_awkward_graphs(graph, dtype):
    check(SMALL, make(SMALL, graph, dtype))


@pytest.mark.parametrize("graph", GRAPHS, ids=lambda graph: graph.name)
@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_made_in_chunks_give_the_same(graph, dtype, small_chunks):
    check(SMALL, make(SMALL, graph, dtype, hidden=5))
