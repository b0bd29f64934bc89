"""Pair-weighted averaging: an explicit sum, all gradients, parts of a projection."""

import inspect
import itertools

import pytest
import torch

from bevatron import kernels
from bevatron.kernels import pair_weighted_averaging
from bevatron.kernels.shared.parts import parts_of_one
from bevatron.testing import assert_close, poisoned

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TYPES = [torch.float32, *([torch.bfloat16, torch.float16] if DEVICE == "cuda" else [])]


def draw(batch, rows, tokens, heads, width):
    generator = torch.Generator().manual_seed(rows + width)
    shapes = [(*batch, rows, tokens, heads * width)] * 2 + [(*batch, heads, tokens, tokens)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def outcome(tensors, which):
    generator = torch.Generator().manual_seed(0)
    cotangent = torch.randn(tensors[0].shape, generator=generator, dtype=torch.float64)
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    with kernels.use(pair_weighted_averaging=which):
        result = pair_weighted_averaging(*leaves)
    return [result.detach(), *torch.autograd.grad(result, leaves, cotangent.to(result))]


def test_against_an_explicit_sum():
    v, gate, weights = draw((), 2, 3, 2, 4)
    result = pair_weighted_averaging(v, gate, weights)
    for s in range(2):
        for i in range(3):
            for h in range(2):
                part = slice(4 * h, 4 * h + 4)
                average = sum(weights[h, i, j] * v[s, j, part] for j in range(3))
                assert_close(result[s, i, part], gate[s, i, part].sigmoid() * average, 1e-13)


@pytest.mark.parametrize(
    "shape",
    [
        ((), 3, 5, 2, 8),
        ((2,), 70, 3, 8, 8),
        ((1,), 1, 1, 1, 3),
        ((), 130, 4, 3, 5),
        ((), 0, 4, 1, 8),
        ((2,), 3, 4, 2, 0),
    ],
)
@pytest.mark.parametrize("dtype", TYPES)
def test_the_kernel_equals_the_reference(shape, dtype):
    pytest.importorskip("triton", reason="the kernels need the package triton")
    narrow = [poisoned(tensor.to(DEVICE, dtype)) for tensor in draw(*shape)]
    expected = outcome([each.double() for each in narrow], "reference")
    before = kernels.launches().get(("pair_weighted_averaging", "triton"), 0)
    found = outcome(narrow, "triton")
    assert kernels.launches()["pair_weighted_averaging", "triton"] > before
    tolerance = 2e-6 if dtype == torch.float32 else 0.02
    for name, one, other in zip(("o", "v", "gate", "weights"), found, expected, strict=True):
        assert one.dtype == dtype
        assert_close(one, other, tolerance, name)
    assert all(map(torch.equal, found, outcome(narrow, "triton")))


def test_gates_that_are_almost_closed_or_open_keep_their_gradient():
    pytest.importorskip("triton", reason="the kernels need the package triton")
    v, gate, weights = draw((), 3, 5, 2, 8)
    tensors = [each.to(DEVICE, torch.float32) for each in (v.abs(), 6 * gate, weights.abs())]
    expected = outcome([each.double() for each in tensors], "reference")[2]
    found = outcome(tensors, "triton")[2].double()
    assert ((found - expected) / expected).abs().max() < 1e-3


def test_gradients_of_parts_of_a_projection_are_parts_of_one_tensor():
    pytest.importorskip("triton", reason="the kernels need the package triton")
    joint = torch.randn(3, 5, 32, device=DEVICE, requires_grad=True)
    weights = torch.randn(2, 5, 5, device=DEVICE)
    v, gate = joint.chunk(2, -1)
    with kernels.use("triton"):
        result = pair_weighted_averaging(v, gate, weights)
    assert parts_of_one(torch.autograd.grad(result.square().sum(), (v, gate))) is not None


def test_weights_that_autocast_keeps_wider_are_rounded_to_the_type_of_the_rows():
    """A softmax is float32 under autocast; the backward pass runs without autocast."""
    pytest.importorskip("triton", reason="the kernels need the package triton")
    v, gate, weights = draw((), 3, 5, 2, 8)
    rows = [each.to(DEVICE, torch.bfloat16) for each in (v, gate)]
    leaves = [each.requires_grad_() for each in (*rows, weights.to(DEVICE, torch.float32))]
    with kernels.use("triton"), torch.autocast(DEVICE, torch.bfloat16):
        result = pair_weighted_averaging(*leaves)
    found = torch.autograd.grad(result.float().square().sum(), leaves)
    assert [each.dtype for each in found] == [torch.bfloat16, torch.bfloat16, torch.float32]
    exact = [each.detach().double().requires_grad_() for each in leaves]
    expected = torch.autograd.grad(pair_weighted_averaging(*exact).square().sum(), exact)
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other, 0.03)


@pytest.mark.parametrize("kind", ["reference", "triton"])
@pytest.mark.parametrize("of_rows", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("of_gate", [torch.float32, torch.bfloat16])
def test_under_autocast_the_result_has_the_type_of_the_rows(kind, of_rows, of_gate):
    if kind == "triton":
        pytest.importorskip("triton", reason="the kernels need the package triton")
    v, gate, weights = (each.to(DEVICE, torch.float32) for each in draw((), 3, 5, 2, 8))
    with kernels.use(kind), torch.autocast(DEVICE, torch.bfloat16):
        found = pair_weighted_averaging(v.to(of_rows), gate.to(of_gate), weights)
    assert found.dtype == of_rows


@pytest.mark.skipif(DEVICE == "cuda", reason="the bytes of a CPU's tensors are counted")
def test_the_backward_pass_holds_half_a_tensor_beside_its_gradients(monkeypatch):
    pytest.importorskip("triton", reason="the kernels need the package triton")
    from bevatron.kernels.shared.triton_launch import Launch

    monkeypatch.setattr(Launch, "__call__", lambda *_: None)  # Triton's interpreter keeps tensors
    leaves = [tensor.float().requires_grad_() for tensor in draw((), 64, 8, 2, 16)]
    with kernels.use("triton"):
        result = pair_weighted_averaging(*leaves)
    along = torch.ones_like(result)
    with torch.profiler.profile(profile_memory=True) as profile:
        found = torch.autograd.grad(result, leaves, along)
    events = profile.profiler.kineto_results.events()
    steps = [each for each in events if each.name() == "[memory]"]
    steps.sort(key=lambda each: each.start_ns())
    held = list(itertools.accumulate(each.nbytes() for each in steps))
    gradients = sum(each.nbytes for each in found)
    assert held[-1] == gradients
    assert max(held) == gradients + along.nbytes / 2


def test_custom_operators_pass_opcheck():
    pytest.importorskip("triton", reason="the kernels need the package triton")
    from bevatron.kernels.pair.pair_weighted_averaging.triton import averaged

    tensors = [tensor.to(DEVICE, torch.float32) for tensor in draw((1,), 3, 5, 2, 8)]
    torch.library.opcheck(averaged.op, tuple(each.requires_grad_() for each in tensors))


def test_what_does_not_fit_is_refused():
    v, gate, weights = draw((), 3, 5, 2, 8)
    unchecked = inspect.unwrap(pair_weighted_averaging)  # tests check annotations, users do not
    with pytest.raises(ValueError, match=r"gate has shape \(3, 4, 16\), expected \(3, 5, 16\)"):
        unchecked(v, gate[:, :4], weights)
    with pytest.raises(ValueError, match="weights has shape"):
        unchecked(v, gate, weights[:, :4])
    with pytest.raises(ValueError, match="16 channels of v do not make 3 heads"):
        unchecked(v, gate, torch.cat([weights, weights[:1]]))
    with pytest.raises(ValueError, match="make them one"):
        unchecked(v, gate, weights.float())
