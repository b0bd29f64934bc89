"""Invariant point attention: the reference against the formula, the kernels against it."""

import inspect
import math

import pytest
import torch
import torch.nn.functional as F

from bevatron.kernels import invariant_point_attention, use
from bevatron.testing import Tolerance, assert_close, check_op

pytest.importorskip("triton", reason="the kernels need the package triton")

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
SIZES = {
    "one residue": ((), 1, 1, 2, 4, 3, 4, 8),
    "a prime number": ((), 37, 37, 3, 5, 3, 4, 20),
    "two samples": ((2,), 18, 18, 2, 16, 4, 8, 16),
    "rows of a process": ((2, 1), 5, 19, 3, 8, 1, 2, 12),
    "one head of each": ((), 3, 70, 1, 1, 1, 1, 1),
}
"""Batch, queries, keys, heads, channels, points of queries and of values, channels of the pair."""
if GPU:
    SIZES["as published"] = ((), 211, 211, 12, 16, 4, 8, 128)


def draw(size, dtype=torch.float32, spread=1.0, away=0.0, masked=0, seed=3):
    """Inputs by name; the first ``masked`` residues are masked as keys."""
    batch, Nq, Nk, H, D, P, V, Z = size
    torch.manual_seed(seed)
    shapes = {
        "q": (Nq, H, D),
        "k": (Nk, H, D),
        "v": (Nk, H, D),
        "q_points": (Nq, 3, H, P),
        "k_points": (Nk, 3, H, P),
        "v_points": (Nk, 3, H, V),
        "bias": (H, Nq, Nk),
        "z": (Nq, Nk, Z),
    }
    found = {name: torch.randn(*batch, *shape) for name, shape in shapes.items()}
    found["head_weights"] = torch.randn(H)
    for name in ("q_points", "k_points", "v_points"):
        found[name] = found[name] * spread + away
    found["bias"] = found["bias"] - 1e5 * (torch.arange(Nk) < masked)
    return {name: tensor.to(DEVICE, dtype) for name, tensor in found.items()}


def as_written(q, k, v, q_points, k_points, v_points, bias, z, head_weights):
    """Lines 7 to 10 of algorithm 22."""
    D, P = q.shape[-1], q_points.shape[-1]
    gaps = q_points[..., :, None, :, :, :] - k_points[..., None, :, :, :, :]
    squared = gaps.square().sum((-3, -1)).movedim(-1, -3)
    gamma = F.softplus(head_weights)[:, None, None]
    logits = torch.einsum("...ihd,...jhd->...hij", q, k) / math.sqrt(3 * D) + bias
    weights = (logits - gamma / 2 * math.sqrt(2 / (27 * P)) * squared).softmax(-1)
    return (
        torch.einsum("...hij,...jhd->...ihd", weights, v),
        torch.einsum("...hij,...jxhp->...ixhp", weights, v_points),
        torch.einsum("...hij,...ijz->...ihz", weights, z),
    )


def joined(operator):
    """The three results as one."""

    def run(**inputs):
        scalars, points, pairs = operator(**inputs)
        return torch.cat([scalars.flatten(-2), points.flatten(-3), pairs.flatten(-2)], -1)

    return run


CASES = {
    "plain": {},
    "coordinates of 100 Å": {"spread": 10.0},
    "1000 Å away": {"away": 100.0},
    "some masked": {"masked": 2},
}


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES.keys())
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_the_reference_is_the_formula(size, case):
    inputs = {k: v.requires_grad_() for k, v in draw(size, torch.float64, **case).items()}
    with use("reference"):
        found = joined(invariant_point_attention)(**inputs)
    expected = joined(as_written)(**inputs)
    cotangent = torch.randn_like(found)
    assert_close(found, expected, 1e-10)
    gradients = [torch.autograd.grad(y, inputs.values(), cotangent) for y in (found, expected)]
    for name, got, want in zip(inputs, *gradients, strict=True):
        assert_close(got, want, 1e-9, name)


@pytest.mark.parametrize(
    ("size", "case"),
    [(size, "plain") for size in SIZES]
    + [("a prime number", case) for case in list(CASES)[1:]]
    + [("two samples", "coordinates of 100 Å")],
)
@pytest.mark.parametrize("strided", [False, True], ids=["packed", "strided"])
def test_the_kernels_are_right(size, case, strided):
    # Logits of hundreds keep five digits in float32, also as the formula is written.
    far = case == "coordinates of 100 Å"
    check_op(
        joined(invariant_point_attention),
        joined(as_written),
        draw(SIZES[size], **CASES[case]),
        order=1,
        tolerance=Tolerance(2e-5, 5e-5) if far else Tolerance(5e-6, 2e-5),
        ran=("invariant_point_attention", "triton"),
        strided=strided,
    )


@pytest.mark.skipif(not GPU, reason="bfloat16 is computed wrongly by the interpreter")
def test_bfloat16_is_rounded_once():
    check_op(
        joined(invariant_point_attention),
        joined(as_written),
        draw(SIZES["as published"], torch.bfloat16),
        order=1,
        tolerance=Tolerance(1e-2, 3e-2),
        ran=("invariant_point_attention", "triton"),
    )


@pytest.mark.parametrize("implementation", ["reference", "triton"])
def test_masked_rows_average(implementation):
    """Logits of -1e5 keep two digits; so do the weights."""
    inputs = draw(SIZES["a prime number"], masked=37)
    with use(invariant_point_attention=implementation):
        scalars, points, pairs = invariant_point_attention(**inputs)
    inputs["bias"] = inputs["bias"] + 1e5
    wanted = as_written(**{name: tensor.double() for name, tensor in inputs.items()})
    for found, want in zip((scalars, points, pairs), wanted, strict=True):
        assert_close(found, want, 2e-2)


def slices(size):
    """Inputs as slices of joint projections, which the kernels read in place."""
    found = draw(size)
    joint = torch.cat([found["k"], found["v"]], -1).requires_grad_()
    found["k"], found["v"] = joint.split(joint.shape[-1] // 2, -1)
    return found, joint


def test_gradients_of_keys_and_values_are_slices_of_one_tensor():
    inputs, joint = slices(SIZES["two samples"])
    with use(invariant_point_attention="triton"):
        found = joined(invariant_point_attention)(**inputs)
        dk, dv = torch.autograd.grad(found.sum(), (inputs["k"], inputs["v"]), retain_graph=True)
        (whole,) = torch.autograd.grad(found.sum(), joint)
    assert torch.equal(torch.cat([dk, dv], -1), whole)
    assert dk.untyped_storage().data_ptr() == dv.untyped_storage().data_ptr()
    want, exact = slices(SIZES["two samples"])
    (expected,) = torch.autograd.grad(joined(as_written)(**want).sum(), exact)
    assert_close(whole, expected, 2e-5)


@pytest.mark.parametrize("used", [0, 1, 2], ids=["scalars", "points", "pairs"])
def test_results_may_be_unused(used):
    inputs = {k: v.requires_grad_() for k, v in draw(SIZES["rows of a process"]).items()}
    found = []
    for implementation in ("triton", "reference"):
        with use(invariant_point_attention=implementation):
            loss = invariant_point_attention(**inputs)[used].square().sum()
        gradients = torch.autograd.grad(
            loss, inputs.values(), allow_unused=True, materialize_grads=True
        )
        found.append(gradients)
    for name, got, want in zip(inputs, *found, strict=True):
        assert_close(got, want, 2e-5, name)


def test_custom_operators_pass_opcheck():
    from bevatron.kernels.pair.invariant_point_attention.triton import attend, attend_backward

    inputs = [x.requires_grad_() for x in draw(SIZES["rows of a process"]).values()]
    torch.library.opcheck(attend.op, inputs)
    inputs = [x.detach() for x in inputs]
    scalars, points, pairs, relative, *softmax = attend(*inputs)
    saved = (scalars, pairs, relative, *softmax)
    torch.library.opcheck(attend_backward.op, (scalars, points, None, *inputs, *saved))


@pytest.mark.parametrize("name", ["k", "v", "q_points", "k_points", "v_points", "bias", "z"])
def test_mismatched_shapes_and_types_are_reported(name):
    unchecked = inspect.unwrap(invariant_point_attention)  # tests check annotations, users do not
    inputs = draw(SIZES["rows of a process"])
    with pytest.raises(ValueError, match=f"{name} is float64"):
        unchecked(**{**inputs, name: inputs[name].double()})
    with pytest.raises(ValueError, match=r"invariant_point_attention: .* has shape"):
        unchecked(**{**inputs, name: inputs[name][..., :2, :1]})
    with pytest.raises(ValueError, match="invariant_point_attention: q has shape"):
        unchecked(**{**inputs, "q_points": inputs["q"]})


@pytest.mark.parametrize("implementation", ["reference", "triton"])
def test_no_queries_have_empty_results_and_queries_without_keys_are_refused(implementation):
    with use(invariant_point_attention=implementation):
        found = invariant_point_attention(**draw(((), 0, 4, 2, 8, 1, 2, 12)))
        assert [tuple(each.shape) for each in found] == [(0, 2, 8), (0, 3, 2, 2), (0, 2, 12)]
        with pytest.raises(ValueError, match="invariant_point_attention: 4 queries and no key"):
            invariant_point_attention(**draw(((), 4, 0, 2, 8, 1, 2, 12)))
