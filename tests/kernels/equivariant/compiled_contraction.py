"""Compares compiled with eager maps by element; run by a test, in a process of its own."""

import torch
import torch._dynamo

from bevatron import kernels
from bevatron.kernels.equivariant.element_order import ElementOrder
from bevatron.maths.symmetric_product import symmetric_coefficients

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ELEMENTS = torch.tensor([2, 0, 2, 1], device=DEVICE)
COUPLINGS = {0: [symmetric_coefficients(1, 0, nu) for nu in (1, 2)]}


def contraction(a, *weights):
    order = ElementOrder(ELEMENTS, 3)
    return kernels.symmetric_contraction(a, {0: list(weights)}, order, "2x0e", 2, COUPLINGS)


def linear(x, weights):
    return kernels.indexed_linear(x, weights, ElementOrder(ELEMENTS, 3), 0.3)


def compare(operator, *shapes):
    """A loss on an inner gradient, as on forces: all its gradients, bit for bit."""

    def loss(x, *others):
        out = operator(x, *others)
        (inner,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        return inner.square().sum() + out.sum()

    tensors = [torch.randn(shape, device=DEVICE).requires_grad_() for shape in shapes]
    eager = torch.autograd.grad(loss(*tensors), tensors)
    traced = torch.compile(loss, backend="aot_eager", fullgraph=True)
    compiled = torch.autograd.grad(traced(*tensors), tensors)
    assert all(map(torch.equal, compiled, eager)), operator


if __name__ == "__main__":
    torch._dynamo.config.trace_autograd_ops = True
    with kernels.use("triton"):
        compare(linear, (4, 2, 3), (3, 2, 2))
        paths = [coupling.num_paths for coupling in COUPLINGS[0]]
        compare(contraction, (4, 2, 4), *((3, number, 2) for number in paths))
