"""The radial network: Triton against the float64 reference, to the second derivative."""

from itertools import pairwise

import pytest
import torch

pytest.importorskip("triton")

from bevatron import kernels
from bevatron.errors import KernelError
from bevatron.kernels import radial_network
from bevatron.maths.radial import bessel_parameters
from bevatron.testing import assert_close, check_op

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RAN = ("radial_network", "triton")
ORDER, R_MAX = 5, 5.0


def make(edges, widths, dtype=torch.float64):
    """Lengths on both sides of the cutoff, and weights under names of their own."""
    lengths = 0.7 + 4.6 * torch.rand(edges, dtype=dtype, device=DEVICE)
    weights = {
        f"w{i}": torch.randn(n, m, dtype=dtype, device=DEVICE) * (1.7 / n**0.5)
        for i, (n, m) in enumerate(pairwise(widths))
    }
    return {"lengths": lengths, **weights}


def network(lengths, **weights):
    w, c = bessel_parameters(R_MAX, len(weights["w0"]))
    constants = (w.to(lengths), c.to(lengths), torch.tensor(R_MAX).to(lengths))
    return radial_network(lengths, *constants, ORDER, list(weights.values()))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    ("edges", "widths"),
    [
        (63, (8, 64, 64, 64)),
        (70, (10, 17, 33, 5)),
        (1, (1, 1, 1, 1)),
        (0, (8, 16, 16, 16)),
        (40, (8, 64, 64)),
        (5, (3, 4, 66, 4)),
    ],
    ids=["published", "uneven", "one", "no-edge", "two-layers", "wide"],
)
@pytest.mark.parametrize("strided", [False, True])
def test_result_and_derivatives_are_those_of_the_reference(dtype, edges, widths, strided):
    torch.manual_seed(0)
    check_op(network, network, make(edges, widths, dtype), ran=RAN, strided=strided)


def test_derivatives_agree_with_finite_differences_for_every_pair_of_inputs():
    torch.manual_seed(1)
    inputs = make(4, (2, 3, 2, 3))
    inputs["lengths"] = torch.tensor([0.9, 2.0, 3.1, 4.2], dtype=torch.float64, device=DEVICE)
    tensors = [tensor.requires_grad_() for tensor in inputs.values()]

    def called(*values):
        return network(**dict(zip(inputs, values, strict=True)))

    with kernels.use(radial_network="triton"):
        assert torch.autograd.gradcheck(called, tensors, fast_mode=True)
        assert torch.autograd.gradgradcheck(called, tensors, fast_mode=True)


def losses_gradients(inputs, implementation):
    """Train on forces: the derivative of forces with respect to the weights."""
    given = {name: value.detach().clone().requires_grad_() for name, value in inputs.items()}
    with kernels.use(radial_network=implementation):
        h = network(**given)
        factor = torch.linspace(-1, 1, h.shape[1]).to(h)
        energy = (h * factor).square().sum()
        (forces,) = torch.autograd.grad(energy, given["lengths"], create_graph=True)
        weights = [value for name, value in given.items() if name != "lengths"]
        found = torch.autograd.grad(energy + forces.square().sum(), weights, retain_graph=True)
        (curvature,) = torch.autograd.grad(forces.sum(), given["lengths"])
    return [energy, forces, *found, curvature]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_loss_on_forces_has_the_reference_s_gradients(dtype):
    torch.manual_seed(2)
    inputs = make(300, (8, 64, 64, 64), dtype)
    exact = {name: value.double() for name, value in inputs.items()}
    names = ["energy", "forces", "w0", "w1", "w2", "curvature"]
    expected = losses_gradients(exact, "reference")
    limit = 1e-11 if dtype == torch.float64 else 1e-5
    for name, value, wanted in zip(
        names, losses_gradients(inputs, "triton"), expected, strict=True
    ):
        assert_close(value, wanted, limit, name)


def test_forces_alone_compute_no_weight_gradients(monkeypatch):
    from bevatron.kernels.equivariant.radial_network import triton as module

    # In float32, since in float64 a GPU goes layer by layer.
    given = make(9, (8, 16, 16, 16), torch.float32)
    given = {name: value.requires_grad_() for name, value in given.items()}
    monkeypatch.setattr(module, "backward", lambda *_: pytest.fail("weights' gradients computed"))
    with kernels.use(radial_network="triton"):
        torch.autograd.grad(network(**given).sum(), given["lengths"])


@pytest.mark.parametrize("implementation", ["reference", "triton"])
def test_without_edges_weight_gradients_are_zero(implementation):
    """Where a batch has no edges, optimisers and sums over ranks still find every gradient."""
    given = {name: value.requires_grad_() for name, value in make(0, (8, 16, 16, 16)).items()}
    with kernels.use(radial_network=implementation):
        h = network(**given)
    (by_r,) = torch.autograd.grad(h.sum(), given["lengths"], create_graph=True)
    weights = [value for name, value in given.items() if name != "lengths"]
    found = torch.autograd.grad(h.sum() + by_r.square().sum(), weights)
    assert [g.shape for g in found] == [w.shape for w in weights]
    assert not any(g.any() for g in found)


def test_constants_of_the_basis_have_no_gradient_in_triton():
    w, c = (constant.to(DEVICE) for constant in bessel_parameters(R_MAX, 2))
    given = (torch.ones(1), w.requires_grad_(), c, torch.tensor(R_MAX), torch.ones(2, 2))
    r, w, c, r_max, weight = (t.to(DEVICE, torch.float64) for t in given)
    with kernels.use("triton"), pytest.raises(KernelError, match="in the lengths and weights only"):
        radial_network(r, w, c, r_max, ORDER, [weight] * 3)


def test_weights_that_do_not_fit_are_named():
    w, c = bessel_parameters(R_MAX, 2)
    with pytest.raises(ValueError, match=r"\[\(3, 2\)\] do not go with 2 functions"):
        radial_network(torch.ones(1), w, c, torch.tensor(R_MAX), ORDER, [torch.ones(3, 2)])
