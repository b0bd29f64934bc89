"""Compares compiled with eager operators; run by a test, in a process without shape checks."""

import torch
import torch._dynamo

from bevatron import kernels
from bevatron.kernels.equivariant.channelwise_tensor_product import EdgeOrder, paths
from bevatron.kernels.equivariant.element_order import ElementOrder
from bevatron.maths.symmetric_product import symmetric_coefficients

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EDGES = torch.tensor([[2, 0, 2, 1, 2], [0, 0, 0, 2, 2]], device=DEVICE)
NODES = torch.zeros(3, dtype=torch.int64, device=DEVICE)
ELEMENTS = torch.tensor([2, 0, 2, 1], device=DEVICE)
COUPLINGS = {0: [symmetric_coefficients(1, 0, nu) for nu in (1, 2)]}
IRREPS = ("3x0e+2x1o", "0e+1o", "0e+1o")


def vectors(positions, scale):
    order = EdgeOrder(EDGES, 3, by_receiver=True)
    shifts, cells = positions.new_zeros(5, 3), positions.new_zeros(1, 3, 3)
    return kernels.edge_vectors(positions, order, shifts, cells, NODES).square() * scale


def sums(values, scale):
    return kernels.scatter_sum(values.square() * scale, EDGES[1], 3, ordered=True)


def mixed(x, weight):
    return kernels.equivariant_linear(x.square(), [weight[:2], weight[2:]])


def network(lengths, weight):
    pi = torch.pi
    constants = (torch.tensor([pi, 2 * pi]), torch.tensor(1.0), torch.tensor(1.2))
    constants = tuple(t.to(lengths) for t in constants)
    weights = [weight[:2], weight[:3] * 2, weight[1:]]
    return kernels.radial_network(lengths.square().sum(1) + 0.4, *constants, 5, weights)


def linear(x, weights):
    return kernels.indexed_linear(x, weights, ElementOrder(ELEMENTS, 3), 0.3)


def contraction(a, *weights):
    order = ElementOrder(ELEMENTS, 3)
    return kernels.symmetric_contraction(a, {0: list(weights)}, order, "2x0e", 2, COUPLINGS)


def messages(harmonics, x, *weights):
    product = (kernels.channelwise_tensor_product, kernels.radial_tensor_product)[len(weights) - 1]
    return product(x, harmonics, *weights, EdgeOrder(EDGES, 3, by_receiver=True), *IRREPS)


def compare(operator, *shapes):
    """A loss on an inner gradient, as on forces: all its gradients, bit for bit."""

    def loss(x, *others):
        out = operator(x, *others)
        (inner,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        return inner.square().sum() + out.sum()

    tensors = [torch.randn(shape, device=DEVICE).requires_grad_() for shape in shapes]
    torch.compiler.reset()  # of one function only a few variants are compiled
    eager = torch.autograd.grad(loss(*tensors), tensors)
    traced = torch.compile(loss, backend="aot_eager", fullgraph=True)
    compiled = torch.autograd.grad(traced(*tensors), tensors)
    assert all(map(torch.equal, compiled, eager)), (operator, len(shapes))


if __name__ == "__main__":
    torch._dynamo.config.trace_autograd_ops = True
    with kernels.use("triton"):
        compare(vectors, (3, 3), (1,))
        compare(sums, (5, 2), (1,))
        compare(mixed, (3, 8), (4, 2))
        compare(kernels.silu_linear, (5, 3), (3, 4))
        compare(network, (5, 1), (4, 3))
        compare(linear, (4, 2, 3), (3, 2, 2))
        numbers = [coupling.num_paths for coupling in COUPLINGS[0]]
        compare(contraction, (4, 2, 4), *((3, number, 2) for number in numbers))
        width = paths(*IRREPS).num_weights
        compare(messages, (5, 4), (3, 9), (5, width))
        compare(messages, (5, 4), (3, 9), (5, 4), (4, width))
