"""The transition: the reference everywhere, the kernels interpreted or compiled."""

import numpy as np
import pytest
import torch
from pair_operators import DEVICE, GPU, HALF, check_kernels, saved

from bevatron.kernels import transition, use
from bevatron.kernels.pair.transition.tiles import TILES
from bevatron.kernels.shared import chunked_linear as products
from bevatron.kernels.shared.tiles import Tiles
from bevatron.testing import Tolerance, assert_close
from half_precision import check_no_worse

pytest.importorskip("triton", reason="the kernels need the package triton")

NAMES = ("x", "norm_weight", "norm_bias", "up_weight", "down_weight")
EXACT = Tolerance(2e-6, 2e-5)
ROUNDED = Tolerance(2e-2, 4e-2) if GPU else Tolerance(3e-3, 6e-3)


def make(rows, width, hidden, *names, dtype=torch.float32, out=None, seed=7):
    """Random inputs whose hidden channels are of order one."""
    generator = torch.Generator().manual_seed(seed)
    out = out or width
    shapes = {
        "x": (*rows, width),
        "norm_weight": (width,),
        "norm_bias": (width,),
        "up_weight": (hidden, width),
        "gate_weight": (hidden, width),
        "down_weight": (out, hidden),
        "up_bias": (hidden,),
        "down_bias": (out,),
    }
    drawn = {name: torch.randn(shapes[name], generator=generator) for name in (*NAMES, *names)}
    for name in ("up_weight", "gate_weight", "down_weight"):
        if name in drawn:
            drawn[name] /= drawn[name].shape[1] ** 0.5
    drawn["norm_weight"] = 1.0 + 0.1 * drawn["norm_weight"]
    return {name: value.to(DEVICE, dtype) for name, value in drawn.items()}


def check(inputs, **options):
    tolerance = EXACT if inputs["x"].dtype == torch.float32 else ROUNDED
    check_kernels(transition, inputs, tolerance, **options)


@pytest.fixture
def small_chunks(monkeypatch):
    """Cut even a few rows."""
    monkeypatch.setattr(products, "CHUNK_MULTIPLE", 4)
    monkeypatch.setattr(products, "CHUNK_BYTES", 0)


GATED, PLAIN = ("gate_weight",), ("up_bias", "down_bias")


@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("names", [GATED, (), PLAIN, GATED + PLAIN])
def test_chunks_of_rows_give_the_right_result(names, residual, small_chunks):
    check(make((3, 5), 12, 24, *names) | {"residual": residual})


@pytest.mark.parametrize("names", [GATED, PLAIN])
@pytest.mark.parametrize("width", [16, 24])
def test_weights_may_be_wider_than_rows(width, names):
    inputs = make((9,), width, 64, *names)
    if "up_bias" in inputs:
        # No rounded hidden channel changes its sign, where the gradient of relu jumps.
        inputs["up_bias"] = 6 * inputs["up_bias"].sign()
    check(inputs | {"x": inputs["x"].to(HALF)})


@pytest.mark.parametrize("rows", [0, 1, 4, 5])
def test_any_number_of_rows_is_right(rows, small_chunks):
    check(make((rows,), 8, 16, *GATED))


def test_the_result_may_be_narrower_and_the_input_strided(small_chunks):
    check(make((6,), 12, 20, *GATED, out=4), strided=True)


# Without a gate the gradient jumps where a rounded hidden channel changes its sign: compared below.
@pytest.mark.parametrize("names", [GATED, GATED + PLAIN])
@pytest.mark.parametrize(("rows", "residual"), [(1, True), (16, False), (45, True), (45, False)])
def test_fused_kernels_give_the_right_result(names, rows, residual):
    small = {"forward": (32, 32), "input": (32, 32), "weight": (16, 32)}
    with TILES.replaced(**{k: Tiles(*v, warps=4, stages=1) for k, v in small.items()}):
        check(make((rows,), 16, 64, *names, dtype=HALF) | {"residual": residual}, strided=residual)


@pytest.mark.parametrize(("rows", "hidden", "out"), [(0, 64, 16), (5, 96, 16), (5, 64, 32)])
def test_sixteen_bits_that_fused_kernels_do_not_take_are_right(rows, hidden, out, small_chunks):
    check(make((rows,), 16, hidden, *GATED, dtype=HALF, out=out))


def test_a_norm_may_have_only_a_bias():
    check(make((9,), 16, 64, *GATED, dtype=HALF) | {"norm_weight": None})


def transposed(weight):
    """The same weight, its columns contiguous in memory."""
    return weight.t().contiguous().t()


@pytest.mark.parametrize("names", [GATED, ()])
@pytest.mark.parametrize("change", [transposed, torch.Tensor.float])
@pytest.mark.parametrize("which", ["up_weight", "down_weight"])
def test_fused_kernels_take_weights_of_any_strides_and_types(names, change, which):
    inputs, found = make((9,), 16, 64, *names, dtype=HALF), []
    for given in (inputs, inputs | {which: change(inputs[which])}):
        leaves = {name: value.detach().requires_grad_() for name, value in given.items()}
        with use(transition="triton"):
            y = transition(**leaves)
        gradients = torch.autograd.grad(y.square().sum(), list(leaves.values()))
        found.append((y, *(each.to(HALF) for each in gradients)))
    for got, want in zip(*found, strict=True):
        assert torch.equal(got, want)


def test_few_rows_are_added_to_the_result():
    check(make((5,), 12, 24, *GATED) | {"residual": True})


def test_fused_kernels_take_rows_and_channels_with_gaps():
    check(make((9,), 16, 64, *GATED, dtype=HALF), strided=True)
    wide = make((9,), 32, 64, *GATED, dtype=HALF)["x"]
    inputs = make((9,), 16, 64, *GATED, dtype=HALF)
    with use(transition="triton"):
        actual = transition(**inputs | {"x": wide[:, 3:19]})
        assert torch.equal(actual, transition(**inputs | {"x": wide[:, 3:19].contiguous()}))


@pytest.mark.parametrize("parts", [1, 16, 37])
@pytest.mark.parametrize("gated", [False, True])
def test_partial_weight_gradients_are_added(parts, gated):
    from bevatron.kernels.pair.transition import triton_fused

    H, C = 64, 16
    shares = torch.randn(parts, 3 if gated else 2, H * C).to(DEVICE)
    norm_shares = torch.randn(100 * parts, 2, C).to(DEVICE)
    up, down = (torch.empty(shape, dtype=HALF, device=DEVICE) for shape in ((H, C), (C, H)))
    gate = torch.empty(H, C, device=DEVICE) if gated else None
    dweight, dbias = (torch.empty(C, device=DEVICE) for _ in range(2))
    given = {"HAS_WEIGHT": True, "HAS_BIAS": True}
    add = triton_fused.sum_of_shares(C, H * C, len(shares[0]), parts, len(norm_shares), given)
    found = (up, down, torch.empty(0, device=DEVICE) if gate is None else gate)
    add(shares, *found, norm_shares, dweight, dbias)
    for got, want in zip(found, shares.double().sum(0), strict=False):
        assert_close(got.float(), want.view(got.shape).float(), 4e-3)
    assert_close(dweight, norm_shares[:, 0].double().sum(0), 1e-5)
    assert_close(dbias, norm_shares[:, 1].double().sum(0), 1e-5)


@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("width", "hidden"), [(64, 128), (64, 256), (128, 512), (128, 256), (256, 1024)]
)
def test_fused_kernels_are_right_at_full_size(dtype, width, hidden):
    check(make((37, 71), width, hidden, *GATED, dtype=dtype))


SIZES = [(16, 64), (24, 48)] + ([(128, 512)] if GPU else [])


@pytest.mark.parametrize(("width", "hidden"), SIZES)
@pytest.mark.parametrize("names", [GATED, PLAIN])
def test_sixteen_bits_are_no_worse_than_the_reference(width, hidden, names, small_chunks):
    inputs = make((300,) if GPU else (40,), width, hidden, *names, dtype=HALF)
    check_no_worse("transition", transition, inputs)


@pytest.mark.parametrize(("least", "numbers"), [(10, 2), (11, 2 + 12 + 2 * 48)])
def test_only_few_rows_save_more_than_the_input_and_two_numbers(least, numbers, monkeypatch):
    monkeypatch.setattr(products, "CHUNK_MULTIPLE", least)
    _, kept = saved(transition, make((10,), 12, 48, *GATED))
    assert sum(t.numel() for t in kept) == numbers * 10


@pytest.mark.parametrize("choice", ["reference", "triton"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_reference_values_of_other_implementations_are_reproduced(choice, dtype, shared):
    if choice == "triton" and dtype == torch.float64:
        pytest.skip("the kernels compute in float32")
    golden = np.load(shared / "golden" / "pair" / "transition.npz")
    keys = {
        "x": "in__x",
        "norm_weight": "w__layernorm1.weight",
        "norm_bias": "w__layernorm1.bias",
        "up_weight": "w__linear_no_bias_b.weight",
        "down_weight": "w__linear_no_bias.weight",
        "gate_weight": "w__linear_no_bias_a.weight",
    }
    leaves = {
        name: torch.tensor(golden[key]).to(DEVICE, dtype).requires_grad_()
        for name, key in keys.items()
    }
    with use(transition=choice):
        y = transition(**leaves)
        cotangent = torch.tensor(golden["cot__y"]).to(y)
        found = torch.autograd.grad(y, list(leaves.values()), cotangent)
    exact = dtype == torch.float64
    assert_close(y, torch.tensor(golden["out__y"]), 1e-12 if exact else 2e-6)
    for key, gradient in zip(keys.values(), found, strict=True):
        assert_close(gradient, torch.tensor(golden[f"g{key}"]), 1e-6 if exact else 2e-5, key)


@pytest.mark.parametrize("keeps", [False, True])
def test_custom_operators_pass_opcheck(keeps):
    from bevatron.kernels.pair.transition.triton import widen

    leaves = {k: v.requires_grad_() for k, v in make((4,), 8, 16, *GATED).items()}
    arguments = [leaves.get(name) for name in (*NAMES, "gate_weight", "up_bias", "down_bias")]
    torch.library.opcheck(widen.op, (*arguments, 1e-5, True, keeps))
