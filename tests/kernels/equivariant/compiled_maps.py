"""Compares compiled with eager maps and sums of MACE; run by a test, in a process of its own."""

import torch
import torch._dynamo
from compiled_contraction import compare

from bevatron import kernels
from bevatron.kernels.equivariant.channelwise_tensor_product import EdgeOrder

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EDGES = torch.tensor([[2, 0, 2, 1, 2], [0, 0, 0, 2, 2]], device=DEVICE)
NODES = torch.zeros(3, dtype=torch.int64, device=DEVICE)


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


if __name__ == "__main__":
    torch._dynamo.config.trace_autograd_ops = True
    with kernels.use("triton"):
        compare(vectors, (3, 3), (1,))
        compare(sums, (5, 2), (1,))
        compare(mixed, (3, 8), (4, 2))
        compare(kernels.silu_linear, (5, 3), (3, 4))
        compare(network, (5, 1), (4, 3))
