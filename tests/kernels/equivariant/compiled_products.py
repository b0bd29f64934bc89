"""Compares compiled with eager products; run by a test, in a process that checks no annotations."""

import torch
import torch._dynamo

from bevatron import kernels
from bevatron.kernels.equivariant.channelwise_tensor_product import EdgeOrder, paths

IRREPS = ("3x0e+2x1o", "0e+1o", "0e+1o")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EDGES = torch.tensor([[2, 0, 2, 1, 2], [0, 0, 0, 2, 2]], device=DEVICE)


def compare(operator, *last):
    """A loss on an inner gradient, as on forces: all its gradients, bit for bit."""

    def loss(x, harmonics, *others):
        order = EdgeOrder(EDGES, 3, by_receiver=True)
        out = operator(x, harmonics, *others, order, *IRREPS)
        (inner,) = torch.autograd.grad(out.square().sum(), harmonics, create_graph=True)
        return inner.square().sum() + out.sum()

    shapes = [(3, 9), (5, 4), *last]
    tensors = [torch.randn(shape, device=DEVICE).requires_grad_() for shape in shapes]
    eager = torch.autograd.grad(loss(*tensors), tensors)
    traced = torch.compile(loss, backend="aot_eager", fullgraph=True)
    compiled = torch.autograd.grad(traced(*tensors), tensors)
    assert all(map(torch.equal, compiled, eager)), operator


if __name__ == "__main__":
    torch._dynamo.config.trace_autograd_ops = True
    with kernels.use("triton"):
        width = paths(*IRREPS).num_weights
        compare(kernels.channelwise_tensor_product, (5, width))
        compare(kernels.radial_tensor_product, (5, 4), (4, width))
