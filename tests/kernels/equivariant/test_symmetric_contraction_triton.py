"""The symmetric contraction in Triton against the float64 reference: compiled on a GPU, else
interpreted.
"""

from functools import partial

import contractions
import pytest
import torch
from contractions import ELEMENTS, contraction
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from bevatron import kernels
from bevatron.kernels import symmetric_contraction
from bevatron.kernels.equivariant.element_order import ElementOrder
from bevatron.maths.symmetric_product import CouplingTensor, symmetric_coefficients
from bevatron.testing import assert_close, check_op
from replayed import check_replay

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RAN = ("symmetric_contraction", "triton")
make = partial(contractions.make, device=DEVICE)


def check(irreps, correlation, inputs, **options):
    call = contraction(irreps, correlation)
    check_op(call, call, inputs, ran=RAN, **options)


@pytest.mark.parametrize(
    ("l_max", "irreps", "correlation", "dtype"),
    [
        (3, "2x0e+2x1o", 3, torch.float64),
        (2, "3x0e+3x1o", 3, torch.float32),
        (2, "5x0e+5x1o+5x2e+5x3o", 2, torch.float64),
        (3, "33x0e+33x1o", 2, torch.float32),
        (1, "2x0e+2x1o", 4, torch.float64),
        (1, "2x0e+2x2e", 1, torch.float32),
        (0, "2x0e", 3, torch.float32),
        (4, "2x0e", 2, torch.float64),
    ],
)
def test_result_and_derivatives_are_those_of_the_reference(l_max, irreps, correlation, dtype):
    elements = torch.tensor([2, 0, 2]) if correlation == 3 else ELEMENTS
    inputs = make(l_max, irreps, correlation, elements, dtype)
    check(irreps, correlation, inputs, strided=dtype == torch.float32)


@settings(max_examples=8, deadline=None)
@given(st.lists(st.integers(0, 4), max_size=9), st.integers(0, 1), st.integers(1, 2))
def test_any_number_of_atoms_of_any_elements(elements, degree, correlation):
    irreps = f"3x{degree}{'eo'[degree % 2]}"
    inputs = make(1, irreps, correlation, torch.tensor(elements, dtype=torch.int64))
    check(irreps, correlation, inputs)


def test_more_atoms_of_an_element_than_a_tile_holds():
    elements = torch.tensor([3] * 70 + [1] * 3 + [3] * 60)
    check("2x0e+2x1o", 2, make(1, "2x0e+2x1o", 2, elements))


def test_channels_last_features_are_read_in_place():
    inputs = make(2, "3x0e+3x1o", 2)
    turned = {**inputs, "a": inputs["a"].transpose(1, 2).contiguous().transpose(1, 2)}
    results = []
    for case in (inputs, turned):
        a = case["a"].detach().requires_grad_()
        with kernels.use(symmetric_contraction="triton"):
            b = contraction("3x0e+3x1o", 2)(**{**case, "a": a})
        (da,) = torch.autograd.grad(b.square().sum(), a, create_graph=True)
        (h,) = torch.autograd.grad(da.square().sum(), a)
        assert da.stride() == a.stride()
        results.append((b, da, h))
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


def test_a_sorted_batch_gives_the_same_and_unknown_elements_give_nan():
    inputs = make(2, "2x0e", 2)
    a, elements = inputs["a"], inputs["elements"]
    with kernels.use(symmetric_contraction="triton"):
        expected = contraction("2x0e", 2)(**inputs)
        inputs["elements"] = ElementOrder(elements, 5)
        assert torch.equal(contraction("2x0e", 2)(**inputs), expected)
        elements[1] = 5
        unknown = contraction("2x0e", 2)(**{**inputs, "elements": elements})
    assert unknown.isnan().any(1).tolist() == [i == 1 for i in range(len(a))]


def test_coefficients_in_another_basis_of_paths_are_used_as_given():
    own = [symmetric_coefficients(2, 1, nu) for nu in (1, 2)]
    flipped = [CouplingTensor.from_dense(-part.dense().flip(-1), 1) for part in own]
    inputs = make(2, "2x1o", 2)
    turned = {k: -v.flip(1) if k.startswith("w") else v for k, v in inputs.items()}
    with kernels.use(symmetric_contraction="triton"):
        expected = contraction("2x1o", 2)(**inputs)
        assert_close(contraction("2x1o", 2, {1: flipped})(**turned), expected, 1e-13)


def test_forces_do_not_pay_for_gradients_of_the_weights(monkeypatch):
    from bevatron.kernels.equivariant.symmetric_contraction import triton as ours

    launched = []
    launch = ours._launch
    monkeypatch.setattr(
        ours, "_launch", lambda kind, *rest: (launched.append(kind), launch(kind, *rest))
    )
    inputs = make(1, "2x0e", 2)
    a, weight = inputs["a"].requires_grad_(), inputs["w0_2"].requires_grad_()
    with kernels.use(symmetric_contraction="triton"):
        b = contraction("2x0e", 2)(**inputs)
    (da,) = torch.autograd.grad(b.sum(), a, create_graph=True)
    assert launched == ["forward", "backward"]
    da.square().sum().backward()
    assert weight.grad is not None
    assert launched[2:] == ["double_backward", "weights_along"]


def test_derivatives_agree_with_finite_differences_for_every_pair_of_inputs():
    inputs = make(1, "1x0e", 2, torch.tensor([1, 0]))
    elements = inputs.pop("elements")
    tensors = [value.requires_grad_() for value in inputs.values()]

    def call(*values):
        named = dict(zip(inputs, values, strict=True))
        return contraction("1x0e", 2)(elements=elements, **named)

    with kernels.use(symmetric_contraction="triton"):
        assert torch.autograd.gradcheck(call, tensors, fast_mode=True)
        assert torch.autograd.gradgradcheck(call, tensors, fast_mode=True)


def test_operators_pass_opcheck():
    from bevatron.kernels.equivariant.symmetric_contraction import triton as ours
    from bevatron.kernels.equivariant.symmetric_contraction.polynomial import (
        known_polynomial,
        polynomial_key,
    )

    inputs = make(1, "2x0e+2x1o", 2)
    key = polynomial_key([[symmetric_coefficients(1, d, nu) for nu in (1, 2)] for d in (0, 1)])
    polynomial = known_polynomial(key)
    order = ElementOrder(inputs["elements"], 5)
    a = inputs["a"].requires_grad_()
    c = torch.randn(5, len(polynomial.terms), 2, dtype=a.dtype, device=DEVICE, requires_grad=True)
    rest = (order.order, order.ptr, key)
    g = torch.randn_like(ours.forward(a, c, *rest)).requires_grad_()
    paths = torch.randn(5, polynomial.mixing.shape[1], 2, dtype=a.dtype, device=DEVICE)
    torch.library.opcheck(ours.fold.op, (paths.requires_grad_(), key))
    torch.library.opcheck(ours.unfold.op, (c, key))
    torch.library.opcheck(ours.forward.op, (a, c, *rest))
    torch.library.opcheck(ours.backward.op, (g, a, c, *rest))
    torch.library.opcheck(ours.weights.op, (g, a, *rest))
    v = torch.randn_like(a)
    inputs = [tensor.detach() for tensor in (v, g, a, c)]
    torch.library.opcheck(ours.double_backward.op, (*inputs, *rest))
    torch.library.opcheck(ours.weights_along.op, (*inputs[:3], *rest))


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_a_captured_step_follows_new_elements():
    """Atoms are sorted by element inside the graph: nothing of the first batch remains."""
    first, second = (
        make(2, "40x0e+40x1o", 3, torch.randint(0, 5, (300,)), torch.float32) for _ in range(2)
    )
    static = {name: value.clone() for name, value in first.items()}

    def step():
        tensors = {k: v.detach().requires_grad_() for k, v in static.items() if k != "elements"}
        wanted = list(tensors.values())
        order = ElementOrder(static["elements"], 5)
        out = contraction("40x0e+40x1o", 3)(elements=order, **tensors)
        grads = torch.autograd.grad(out.square().sum(), wanted, create_graph=True)
        return [out, *grads, *torch.autograd.grad(sum(g.square().sum() for g in grads), wanted)]

    with kernels.use(symmetric_contraction="triton"):
        check_replay(step, lambda: [static[name].copy_(value) for name, value in second.items()])


@pytest.mark.parametrize("implementation", ["reference", "triton"])
def test_both_layouts_hold_the_same_values(implementation):
    irreps, inputs = "3x0e+3x1o", make(1, "3x0e+3x1o", 2)
    call = contraction(irreps, 2)

    def other_layout(a, elements, **weights):
        orders = {d: [weights[f"w{d}_{nu}"] for nu in (1, 2)] for d in (0, 1)}
        return symmetric_contraction(a, orders, elements, irreps, 2, layout="ir_mul")

    def by_swapping(**inputs):
        scalars, vectors = call(**inputs).split([3, 9], dim=1)
        return torch.cat([scalars, vectors.unflatten(1, (3, 3)).mT.flatten(1)], dim=1)

    check_op(other_layout, by_swapping, inputs, ran=("symmetric_contraction", implementation))
