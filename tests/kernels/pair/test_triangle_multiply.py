"""The triangle multiplication: the reference everywhere, the kernels interpreted or compiled."""

from functools import partial
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from pair_operators import DEVICE, GPU, HALF
from triangle_pairs import BIASES, OthersRows, check, dropped, make

from bevatron.errors import KernelError
from bevatron.kernels import triangle_multiply, use
from bevatron.kernels.pair.triangle_multiply.tiles import MEASURED, replaced
from bevatron.kernels.shared.tiles import Tiles
from bevatron.testing import assert_close
from half_precision import check_no_worse
from replayed import captured

pytest.importorskip("triton", reason="the kernels need the package triton")

ON_GPU = pytest.mark.skipif(not GPU, reason="needs a CUDA device")
KEYS = {
    "norm_in_weight": "layer_norm_in.weight",
    "norm_in_bias": "layer_norm_in.bias",
    "a_weight": "linear_a_p.weight",
    "a_gate_weight": "linear_a_g.weight",
    "b_weight": "linear_b_p.weight",
    "b_gate_weight": "linear_b_g.weight",
    "norm_out_weight": "layer_norm_out.weight",
    "norm_out_bias": "layer_norm_out.bias",
    "out_weight": "linear_z.weight",
    "out_gate_weight": "linear_g.weight",
}


@pytest.fixture
def small_blocks(monkeypatch):
    """End blocks, and parts of rows, anywhere even in a small pair."""
    monkeypatch.setattr("bevatron.kernels.pair.triangle_multiply.triton_launch.FEWEST_BLOCKS", 1)
    small = Tiles(32, 16, 4, 1, per_sm=64, hold=True)
    with replaced(**dict.fromkeys(MEASURED, small)):
        yield


@pytest.mark.parametrize("outgoing", [True, False])
@pytest.mark.parametrize(
    ("length", "width", "hidden", "biases"),
    [(5, 24, 20, ()), (8, 16, 24, BIASES), (1, 8, 4, BIASES[1:4]), (0, 8, 8, BIASES)],
)
def test_result_and_gradients_are_right(length, width, hidden, biases, outgoing, small_blocks):
    check(make(length, width, hidden, biases) | {"outgoing": outgoing})


@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize(("length", "width", "batch"), [(5, 24, ()), (8, 16, (2,)), (3, 12, (3,))])
def test_a_dropped_update_added_to_the_pair_is_right(length, width, batch, residual, small_blocks):
    inputs = make(length, width, 16, BIASES[3:], batch=batch)
    mask = dropped(inputs["z"])

    def run(z, **others):
        return triangle_multiply(z, drop=mask.to(z.dtype), residual=residual, **others)

    check(inputs, run, strided=True)


@pytest.mark.parametrize("choice", ["reference", "triton"])
@pytest.mark.parametrize("residual", [True, False])
def test_a_wider_dropout_mask_does_not_widen_the_result(choice, residual, small_blocks):
    inputs = make(5, 16, 8, dtype=HALF)
    with use(triangle_multiply=choice):
        y = triangle_multiply(**inputs, drop=dropped(inputs["z"]).float(), residual=residual)
    assert y.dtype == HALF


def test_a_dropout_mask_may_have_gaps(small_blocks):
    inputs = make(5, 16, 8)
    drop = dropped(inputs["z"])
    with use(triangle_multiply="triton"):
        wanted = triangle_multiply(**inputs, drop=drop)
        assert torch.equal(triangle_multiply(**inputs, drop=drop.t().contiguous().t()), wanted)


def test_the_pair_is_added_without_dropout(small_blocks):
    check(make(5, 16, 8) | {"residual": True})


def test_the_epsilon_of_the_call_is_used(small_blocks):
    check(make(5, 16, 8) | {"eps": 0.5})


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("outgoing", [True, False])
@pytest.mark.parametrize(("length", "hidden", "biases"), [(5, 24, BIASES), (8, 6, ())])
def test_rows_of_a_sharded_pair_are_right(
    length, hidden, biases, outgoing, kept, small_blocks, monkeypatch
):
    limit = "bevatron.kernels.pair.triangle_multiply.triton.LARGE_PAIR"
    monkeypatch.setattr(limit, 2**30 if kept else 0)
    inputs = make(length, 16, hidden, biases, batch=(2,))
    rows = slice(1, 4)
    inputs["z"], inputs["mask"] = inputs["z"][:, rows].clone(), inputs["mask"][:, rows]
    given = {"outgoing": outgoing, "contraction": OthersRows(length - 3, rows.start)}
    given |= {"residual": outgoing, "drop": dropped(inputs["z"])}
    results = []
    for choice, dtype in (("triton", torch.float32), ("reference", torch.float64)):
        leaves = {
            name: value.to(dtype).requires_grad_()
            for name, value in inputs.items()
            if name != "mask"
        }
        with use(triangle_multiply=choice):
            given["drop"] = given["drop"].to(dtype)
            y = triangle_multiply(**leaves, mask=inputs["mask"], **given)
        weight = torch.linspace(-1.0, 1.0, y.numel(), device=y.device).to(dtype).view(y.shape)
        results.append((y, *torch.autograd.grad((weight * y).sum(), [*leaves.values()])))
    for got, want in zip(*results, strict=True):
        assert_close(got, want, 2e-5)


@pytest.mark.parametrize("choice", ["triton", "reference"])
def test_a_process_without_rows_still_joins_the_exchange(choice):
    inputs = make(5, 16, 8, BIASES)
    inputs["z"], inputs["mask"] = inputs["z"][:0].requires_grad_(), inputs["mask"][:0]
    contraction = Mock(wraps=OthersRows(5, 2))
    with use(triangle_multiply=choice):
        y = triangle_multiply(**inputs, contraction=contraction)
    torch.autograd.grad(y.sum(), inputs["z"])
    contraction.contract.assert_called_once()
    contraction.contract_backward.assert_called_once()


def test_padding_behind_lines_does_not_matter(small_blocks):
    torch.use_deterministic_algorithms(mode=True, warn_only=True)  # new memory is full of NaN
    try:
        check(make(5, 16, 16, BIASES, masked=False))
    finally:
        torch.use_deterministic_algorithms(mode=False)


@pytest.mark.parametrize("outgoing", [True, False])
@pytest.mark.parametrize(("width", "hidden", "dtype"), [(12, 8, torch.float32), (16, 32, HALF)])
def test_batches_and_strided_inputs_are_right(width, hidden, dtype, outgoing, small_blocks):
    inputs = make(3, width, hidden, BIASES[4:], batch=(2, 1), masked=False, dtype=dtype)
    check(inputs | {"outgoing": outgoing}, strided=True)


@pytest.mark.parametrize("outgoing", [True, False])
@pytest.mark.parametrize(("width", "hidden"), [(16, 32)] + ([(128, 128), (64, 64)] if GPU else []))
def test_sixteen_bits_are_right(width, hidden, outgoing):
    inputs = make(37 if GPU else 9, width, hidden, BIASES, dtype=HALF)
    check(inputs | {"outgoing": outgoing})


def test_float32_weights_of_a_pair_in_sixteen_bits_have_float32_gradients(small_blocks):
    inputs = make(5, 16, 24, BIASES)
    mask = inputs.pop("mask")
    results = []
    for choice, wide in (("triton", torch.float32), ("reference", torch.float64)):
        leaves = {name: value.to(wide) for name, value in inputs.items()}
        leaves["z"] = inputs["z"].to(HALF if choice == "triton" else wide)
        leaves = {name: value.requires_grad_() for name, value in leaves.items()}
        with use(triangle_multiply=choice):
            y = triangle_multiply(**leaves, mask=mask)
        along = torch.linspace(-1.0, 1.0, y.numel(), device=DEVICE).view(y.shape).to(y.dtype)
        results.append((y, *torch.autograd.grad(y, list(leaves.values()), along)))
    assert {g.dtype for g in results[0][2:]} == {torch.float32}
    for got, want in zip(*results, strict=True):
        assert_close(got, want, 2e-2)


@ON_GPU
@pytest.mark.parametrize(
    ("width", "dtype"), [(128, torch.float32), (128, torch.bfloat16), (256, torch.bfloat16)]
)
def test_wide_pairs_are_right(width, dtype):
    check(make(21, width, width, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_a_transposed_pair_is_read_in_place(dtype):
    inputs = make(6, 16, 16, dtype=dtype)
    z = inputs.pop("z").transpose(0, 1)
    results = []
    for choice, value in (("triton", z), ("reference", z.double())):
        leaf = value.requires_grad_()
        given = {
            name: None if tensor is None else tensor.to(leaf.dtype)
            for name, tensor in inputs.items()
        }
        with use(triangle_multiply=choice):
            y = triangle_multiply(leaf, **given)
        results.append((y, *torch.autograd.grad(y.square().sum(), leaf)))
    assert not z.is_contiguous()
    for got, want in zip(*results, strict=True):
        assert_close(got, want, 2e-5 if dtype == torch.float32 else 2e-2)


def test_masked_edges_change_nothing():
    inputs = make(7, 16, 16)
    inputs["mask"][:, 5:] = inputs["mask"][5:] = False
    changed = dict(inputs)
    changed["z"] = inputs["z"].clone()
    changed["z"][5:] = changed["z"][:, 5:] = 1e3
    for outgoing in (True, False):
        with use(triangle_multiply="triton"):
            before, after = (triangle_multiply(**i, outgoing=outgoing) for i in (inputs, changed))
        assert torch.equal(before[:5, :5], after[:5, :5])


@pytest.mark.parametrize("outgoing", [True, False])
def test_sixteen_bits_are_no_worse_than_the_reference(outgoing):
    inputs = make(64 if GPU else 20, 64 if GPU else 32, 64 if GPU else 32, BIASES, dtype=HALF)
    mask = inputs.pop("mask")
    check_no_worse(
        "triangle_multiply", partial(triangle_multiply, mask=mask, outgoing=outgoing), inputs
    )


@pytest.mark.parametrize("length", [16, 13])
def test_rounding_a_channel_that_hardly_varies_does_not_add_up_over_rows(length, small_blocks):
    """Rounded as it is, every row would be off by the same."""
    from bevatron.kernels.pair.triangle_multiply.triton_launch import padded, prepare

    generator = torch.Generator().manual_seed(3)
    x = torch.randn(32, 1, 1, 1, generator=generator).repeat(1, 1, length, padded(length))
    x = (x + 5e-4 * torch.randn(x.shape, generator=generator)).to(DEVICE, HALF)
    d = (1 + 0.1 * torch.randn(x.shape, generator=generator)).to(DEVICE, HALF)
    d[..., length:] = 0
    rows = x[..., :length].flatten(1).float()
    mean, deviation = rows.mean(0), rows.std(0, correction=0)
    z = torch.zeros(length, length, 32, device=DEVICE, dtype=HALF)
    one = torch.ones(32, device=DEVICE)
    _, launches = prepare(z, None, None, one, None, None, 1e-5, False, False)
    statistics = torch.stack([mean, 1 / deviation])
    sums, _ = launches.of_output((d, x, statistics), (torch.zeros_like(z), z, statistics))
    found = sums.sum(0)[: 32 * 32].reshape(32, 32)
    exact = d[..., :length].flatten(1).double() @ ((rows - mean) / deviation).double().T
    off = (found - exact).abs().amax(0) / exact.abs().amax(0)
    assert off.max() < torch.finfo(HALF).eps / 16


@pytest.mark.parametrize("sharded", [False, True])
def test_of_a_pair_that_is_not_long_a_b_and_the_rows_are_saved_too(sharded, monkeypatch):
    """Of a long one x and four numbers per edge are; the gradients have the same bits."""
    inputs = make(8, 16, 24)
    mask, how, edges = inputs.pop("mask").float(), {}, 64
    if sharded:
        how, edges = {"contraction": OthersRows(3, 0), "outgoing": False}, 40
        mask, inputs["z"] = mask[:5].clone(), inputs["z"][:5].clone()
    inputs = {name: value.requires_grad_() for name, value in inputs.items()}
    given = {value.data_ptr() for value in (*inputs.values(), mask)}
    weights = (4 * 24 + 24 + 16) * 16  # one after another
    found = []
    kept = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t)
    for per_edge in (3 * 24 + 16 + 4, 24 + 4):
        kept.clear()
        with hooks, use(triangle_multiply="triton"):
            y = triangle_multiply(**inputs, mask=mask, **how)
        assert (
            sum(t.numel() for t in kept if t.data_ptr() not in given) == edges * per_edge + weights
        )
        found.append(torch.autograd.grad(y, [*inputs.values()], y))
        monkeypatch.setattr("bevatron.kernels.pair.triangle_multiply.triton.LARGE_PAIR", 64 * 16)
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_without_gradients_the_result_has_the_same_bits(small_blocks):
    """The normalised rows lie where the result is written."""
    inputs = make(13, 16, 24)
    mask = inputs.pop("mask").float()
    inputs = {name: value.requires_grad_() for name, value in inputs.items()}
    with use(triangle_multiply="triton"):
        kept = triangle_multiply(**inputs, mask=mask)
        with torch.no_grad():
            assert torch.equal(triangle_multiply(**inputs, mask=mask), kept)


@pytest.mark.parametrize("choice", ["reference", "triton"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_reference_values_of_other_implementations_are_reproduced(choice, dtype, shared):
    if choice == "triton" and dtype == torch.float64:
        pytest.skip("the kernels compute in float32")
    golden = np.load(shared / "golden" / "pair" / "tri_mul_out.npz")
    leaves = {name: golden[f"w__{key}"] for name, key in KEYS.items()} | {"z": golden["in__z"]}
    leaves = {k: torch.tensor(v).to(DEVICE, dtype).requires_grad_() for k, v in leaves.items()}
    large = {} if GPU else dict.fromkeys(MEASURED, Tiles(256, 64, 4, 1))  # fewer are faster
    with use(triangle_multiply=choice), replaced(**large):
        y = triangle_multiply(**leaves, mask=torch.tensor(golden["in__mask"]).to(DEVICE, dtype))
        cotangent = torch.tensor(golden["cot__y"]).to(y)
        found = torch.autograd.grad(y, list(leaves.values()), cotangent)
    exact = dtype == torch.float64
    assert_close(y, torch.tensor(golden["out__y"]), 1e-12 if exact else 4e-6)
    for name, gradient in zip(leaves, found, strict=True):
        key = "gin__z" if name == "z" else f"gw__{KEYS[name]}"
        assert_close(gradient, torch.tensor(golden[key]), 1e-6 if exact else 2e-5, key)


def test_incoming_is_outgoing_of_transposed_projections():
    inputs = {
        name: value.double() if name != "mask" else value
        for name, value in make(4, 6, 6, masked=False).items()
        if value is not None
    } | {"mask": None}
    with use("reference"):
        incoming = triangle_multiply(**inputs, outgoing=False)
        flipped = inputs | {"z": inputs["z"].transpose(0, 1), "out_gate_weight": torch.zeros(6, 6)}
        plain = inputs | {"out_gate_weight": torch.zeros(6, 6)}
        flipped, plain = (
            {k: v if v is None else v.to(DEVICE) for k, v in i.items()} for i in (flipped, plain)
        )
        assert_close(
            triangle_multiply(**plain, outgoing=False), triangle_multiply(**flipped), 1e-12
        )
        assert not torch.allclose(incoming, triangle_multiply(**inputs))


def test_custom_operators_pass_opcheck():
    from bevatron.kernels.pair.triangle_multiply.triton import multiply

    inputs = make(8, 8, 4)  # without padding, whose content is anything
    del inputs["mask"]
    z, *rest = (value.requires_grad_() for value in inputs.values())
    biases = [torch.randn(16, device=DEVICE), torch.randn(16, device=DEVICE)]
    arguments = [z, torch.ones(8, 8, device=DEVICE), *rest[:6], biases[0], *rest[6:]]
    arguments.insert(2, dropped(z.detach()))
    torch.library.opcheck(multiply.op, (*arguments, biases[1], True, 1e-5, True, True))


def test_weights_of_different_types_get_gradients_of_their_types():
    inputs = make(5, 8, 8)
    inputs |= {"a_weight": inputs["a_weight"].to(HALF)}
    leaves = {k: v.requires_grad_() for k, v in inputs.items() if k != "mask"}

    def gradients(choice):
        with use(triangle_multiply=choice):
            y = triangle_multiply(**inputs)
            return torch.autograd.grad(y.square().sum(), list(leaves.values()))

    for name, ours, exact in zip(leaves, gradients("triton"), gradients("reference"), strict=True):
        assert ours.dtype == leaves[name].dtype
        assert_close(ours.float(), exact.float(), 2e-2 if name == "a_weight" else 1e-4, name)


@ON_GPU
def test_a_cuda_graph_gives_the_same_bits():
    inputs = make(40, 64, 64, dtype=torch.bfloat16)
    leaves = [v.requires_grad_() for n, v in inputs.items() if n != "mask"]
    plain = getattr(triangle_multiply, "__wrapped__", triangle_multiply)

    def step():
        y = plain(**inputs)
        return [y.detach(), *torch.autograd.grad(y, leaves, torch.ones_like(y))]

    expected = [tensor.clone() for tensor in step()]
    graph, found = captured(step)
    graph.replay()
    torch.cuda.synchronize()
    assert all(map(torch.equal, expected, found))


@ON_GPU
def test_more_than_2_to_the_31_elements():
    inputs = make(8, 128, 128, dtype=torch.bfloat16)
    inputs["z"] = torch.randn(4112, 4112, 128, device=DEVICE, dtype=torch.bfloat16)
    inputs["mask"] = torch.zeros(4112, 4112, device=DEVICE, dtype=torch.bool)
    inputs["mask"][-16:, -16:] = True
    corner = inputs | {name: inputs[name][-16:, -16:] for name in ("z", "mask")}
    with use(triangle_multiply="triton"), torch.no_grad():
        last = triangle_multiply(**inputs)[-16:, -16:]
        assert_close(last, triangle_multiply(**corner), 1e-2)


def test_channels_too_wide_for_the_kernel_are_refused():
    with use(triangle_multiply="triton"), pytest.raises(KernelError, match="256"):
        triangle_multiply(**make(1, 264, 8))
