"""Attention with a shared bias in Triton: interpreted on a CPU, compiled on a GPU."""

import importlib
import os
from contextlib import nullcontext

import numpy as np
import pytest
import torch

GPU = torch.cuda.is_available()
if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

from bevatron import kernels  # noqa: E402
from bevatron.errors import KernelError  # noqa: E402
from bevatron.kernels import pair_attention  # noqa: E402
from bevatron.kernels.pair.pair_attention.tiles import replaced  # noqa: E402
from bevatron.kernels.registry import load  # noqa: E402
from bevatron.kernels.shared import layouts  # noqa: E402
from bevatron.kernels.shared.standing_weights import standing_weights  # noqa: E402
from bevatron.kernels.shared.tiles import Tiles  # noqa: E402
from bevatron.testing import Tolerance, assert_close, check_op  # noqa: E402
from replayed import captured  # noqa: E402

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    not GPU and os.environ.get("TRITON_INTERPRET") != "1",
    reason="no GPU, and triton was imported without TRITON_INTERPRET=1",
)
DEVICE = "cuda" if GPU else "cpu"
RAN = ("pair_attention", "triton")
SINGLE = Tolerance(2e-6, 5e-6)
LIMITS = {
    torch.float32: SINGLE,
    torch.float16: Tolerance(2e-3, 4e-3),
    torch.bfloat16: Tolerance(1.2e-2, 2.4e-2),
}
SMALL = Tiles(16, 16, 4, 1)
TURNED = 8
"""Rows that share a bias, so that dk and dv read it transposed, in 16-bit types first."""
ON_GPU = pytest.mark.skipif(not GPU, reason="needs a CUDA device")


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch):
    if not GPU:
        monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.fixture(params=[1, 10**6], ids=["two launches", "one launch"])
def sms(request, monkeypatch):
    """SMs of the device: with one for every program a single launch takes all care."""
    load(*RAN)
    module = importlib.import_module("bevatron.kernels.pair.pair_attention.triton_launches")
    monkeypatch.setattr(module, "num_sms", lambda _: request.param)
    layouts.forget()
    yield
    layouts.forget()


def make(
    B=1, S=2, H=1, Nq=20, Nk=20, D=16, *, layout="BSHND", bias_rows=1, masked=True, gated=False,
    dtype=torch.float32,
):  # fmt: skip
    generator = torch.Generator().manual_seed(1)

    def draw(*shape):
        return torch.randn(*shape, generator=generator).to(DEVICE, dtype)

    def rows(count):
        return draw(*((B, S, H, count, D) if layout == "BSHND" else (B, S, count, H, D)))

    inputs = {"q": rows(Nq), "k": rows(Nk), "v": rows(Nk), "layout": layout}
    if bias_rows:
        inputs["bias"] = draw(B, bias_rows, H, Nq, Nk)
    if masked:
        mask = torch.rand(B, S, Nk, generator=generator) > 0.3
        mask[:, -1] = S == 1  # the last of several rows has no key at all
        inputs["mask"] = mask.to(DEVICE)
    if gated:
        inputs["gate"] = rows(Nq)
    return inputs


CASES = {
    "one block": {},
    "fewer queries than keys": {"Nq": 5, "Nk": 33},
    "heads of 24, gate, layout of projections": {"D": 24, "gated": True, "layout": "BSNHD", "H": 2},
    "heads of 8, three rows": {"D": 8, "S": 3, "masked": False},
    "heads of 48": {"D": 48, "Nq": 7, "Nk": 9, "H": 2},
    "a bias of each row": {"bias_rows": 3, "S": 3, "Nq": 9, "Nk": 18},
    "short rows with a bias of their own": {"S": 3, "Nq": 32, "Nk": 128, "D": 8, "bias_rows": 3},
    "no bias, no mask": {"bias_rows": 0, "masked": False, "Nk": 19},
    "no bias, mask, gate": {"bias_rows": 0, "gated": True},
    "one query, one key": {"Nq": 1, "Nk": 1, "S": 1},
    "two samples": {"B": 2, "S": 1, "H": 2, "Nq": 3, "Nk": 8},
    "no queries": {"Nq": 0},
    "no keys": {"Nk": 0, "gated": True},
    "no keys, no bias, no mask": {"Nk": 0, "bias_rows": 0, "masked": False},
    "no rows": {"S": 0, "masked": False},
}


@pytest.mark.parametrize("case", CASES)
def test_agrees_with_the_exact_reference(case):
    check_op(
        pair_attention, pair_attention, make(**CASES[case]), order=1, tolerance=SINGLE, ran=RAN
    )


@pytest.mark.parametrize(("S", "dtype"), [(3, torch.float32), (TURNED, torch.float16)], ids=str)
def test_blocks_end_anywhere(S, dtype):
    inputs = make(S=S, Nq=17, Nk=34, D=24, gated=True, layout="BSNHD", dtype=dtype)
    with replaced(forward=SMALL, dq=SMALL, dkv=SMALL, dkv_bias_first=SMALL, dbias=SMALL):
        check_op(
            pair_attention, pair_attention, inputs,
            order=1, tolerance=LIMITS[dtype], ran=RAN, strided=True,
        )  # fmt: skip


def test_a_masked_key_far_above_the_others_is_not_seen():
    inputs = make(S=1, D=8)
    inputs["bias"][..., 0], inputs["mask"][..., 0] = 300.0, False
    check_op(pair_attention, pair_attention, inputs, order=1, tolerance=SINGLE, ran=RAN)


@pytest.mark.usefixtures("sms")
def test_nothing_past_the_last_key_of_a_row_is_read():
    ends = torch.tensor([0, 16, 33])
    inputs = make(S=3, Nq=9, Nk=48, D=8, gated=True)
    inputs["mask"] = (torch.arange(48) < ends[:, None]).to(DEVICE)[None]
    unread = (torch.arange(48) >= (-(-ends // 16) * 16)[:, None]).to(DEVICE)[None, :, None, :, None]
    with replaced(forward=SMALL, dq=SMALL, dkv=SMALL):
        check_op(pair_attention, pair_attention, inputs, order=1, tolerance=SINGLE, ran=RAN)
        found = []
        for behind in (0.0, torch.nan):
            leaves = [inputs["q"].clone(), *(inputs[x].where(~unread, behind) for x in "kv")]
            given = dict(zip("qkv", (leaf.requires_grad_() for leaf in leaves), strict=True))
            with kernels.use(pair_attention="triton"):
                result = pair_attention(**inputs | given)
                found.append([result, *torch.autograd.grad(result.sum(), leaves)])
    assert all(map(torch.equal, *found))


FAR = {
    "a late key far above": (slice(-1, None), 100.0, 0),
    "late keys slightly above": (slice(20, None), 12.0, 0),
    "all far below, the first hidden": (slice(None), -100.0, 16),
    "all far above, the first hidden": (slice(None), 100.0, 16),
    "the first far below": (slice(0, 16), -100.0, 0),
    "the first far above": (slice(0, 16), 100.0, 0),
}


@pytest.mark.usefixtures("sms")
@pytest.mark.parametrize("case", FAR)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_logits_may_lie_anywhere(case, dtype):
    keys, added, hidden = FAR[case]
    inputs = make(S=2, Nq=17, Nk=40, D=16, gated=True, dtype=dtype)
    inputs["bias"][..., keys] += added
    inputs["mask"][:, 0] = True
    inputs["mask"][:, 0, :hidden] = False
    limit = Tolerance(2e-5, 2e-5) if dtype == torch.float32 else LIMITS[dtype]  # of logits of 100
    check_op(pair_attention, pair_attention, inputs, order=1, tolerance=limit, ran=RAN)


@pytest.mark.usefixtures("sms")
def test_any_block_is_recomputed_whatever_its_keys():
    inputs = make(S=36, Nq=3, Nk=150, D=8)
    inputs["q"][:, 34], inputs["k"][:, 34] = 10.0, 10.0  # logits of 283
    inputs["mask"][:, 34] = torch.arange(150, device=DEVICE) > 140
    limit = Tolerance(2e-5, 2e-5)  # of such logits
    check_op(pair_attention, pair_attention, inputs, order=0, tolerance=limit, ran=RAN)


@pytest.mark.usefixtures("sms")
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
@pytest.mark.parametrize("key", [0, 30])
def test_nan_and_infinity_propagate(number, key):
    inputs = make(S=2, Nq=5, Nk=40, D=8, masked=False)
    inputs["q"], inputs["k"][0, 1, 0, key] = inputs["q"].abs(), number
    with kernels.use(pair_attention="triton"):
        found = pair_attention(**inputs)
    with kernels.use(pair_attention="reference"):
        wanted = pair_attention(**inputs)
    assert wanted[:, 1].isnan().all()
    assert torch.equal(found.isnan(), wanted.isnan())


def test_a_small_scale_rounds_no_queries():
    inputs = make(S=1, Nq=4, Nk=20, D=16, dtype=torch.float16, bias_rows=0)
    inputs["q"], inputs["k"] = 30 * inputs["q"], 30 * inputs["k"]
    check_op(
        lambda **given: pair_attention(**given, scale=0.01),
        lambda **given: pair_attention(**given, scale=0.01),
        inputs, order=1, tolerance=LIMITS[torch.float16], ran=RAN,
    )  # fmt: skip


@pytest.mark.parametrize("scale", [-0.5, 0.0, 0.01])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_scale_may_be_any_number(scale, dtype):
    inputs = make(S=2, Nq=5, Nk=20, D=16, dtype=dtype)
    check_op(
        lambda **given: pair_attention(**given, scale=scale),
        lambda **given: pair_attention(**given, scale=scale),
        inputs, order=1, tolerance=LIMITS[dtype], ran=RAN,
    )  # fmt: skip


def test_a_mask_that_stands_is_written_once(monkeypatch):
    load(*RAN)
    module = importlib.import_module("bevatron.kernels.pair.pair_attention.triton_mask")
    written, launch = [], module.launch

    def noted(*given, **others):
        written.append(given)
        launch(*given, **others)

    monkeypatch.setattr(module, "launch", noted)
    inputs = make(S=3, Nq=5, Nk=20, D=8)
    shared = inputs.pop("mask")[:, :1]
    found = []
    with kernels.use(pair_attention="triton"), torch.no_grad():
        for most, block in (
            (60, standing_weights()),
            (60, nullcontext()),
            (59, standing_weights()),  # a larger mask is not kept
        ):
            monkeypatch.setattr(module, "MOST_KEPT", most)
            with block:
                masks = [mask.expand(1, 3, 20) for mask in (shared, shared, ~shared)]
                found += [pair_attention(**inputs, mask=mask) for mask in masks]
            found.append(len(written))
    assert found[3] == 2
    assert found[7] == 2 + 3
    assert found[11] == 2 + 3 + 3
    assert all(map(torch.equal, found[:3], found[4:7]))
    assert not torch.equal(found[0], found[2])


@pytest.mark.parametrize("bias_rows", [1, 7])
def test_many_rows_are_dealt_to_programs(bias_rows, monkeypatch):
    load(*RAN)
    module = importlib.import_module("bevatron.kernels.pair.pair_attention.triton_launches")
    monkeypatch.setattr(module, "PROGRAMS_PER_SM", 1000)
    monkeypatch.setattr(module, "FEWEST_ROWS", 2)
    layouts.forget()
    inputs = make(S=7, Nq=3, Nk=5, D=8, bias_rows=bias_rows, masked=False)
    check_op(pair_attention, pair_attention, inputs, order=1, tolerance=SINGLE, ran=RAN)


@pytest.mark.parametrize(
    "dtype", [torch.float16, pytest.param(torch.bfloat16, marks=ON_GPU)], ids=str
)
@pytest.mark.parametrize(
    ("S", "bias_rows", "D"), [(2, 0, 32), (2, 1, 32), (TURNED, 1, 32), (9, 1, 48)]
)
def test_16_bit_types(dtype, S, bias_rows, D):
    inputs = make(S=S, Nq=33, Nk=40, D=D, gated=True, dtype=dtype, bias_rows=bias_rows)
    check_op(pair_attention, pair_attention, inputs, order=1, tolerance=LIMITS[dtype], ran=RAN)


@pytest.mark.parametrize(
    "dtype", [torch.float16, pytest.param(torch.bfloat16, marks=ON_GPU)], ids=str
)
@pytest.mark.parametrize("S", [4, TURNED])
def test_error_is_at_most_that_of_the_same_in_plain_pytorch(dtype, S):
    def run(implementation, wider=None):
        inputs = make(S=S, Nq=48, Nk=64, D=32, masked=False, dtype=dtype)
        inputs = {
            name: value.to(wider or dtype).requires_grad_() if name != "layout" else value
            for name, value in inputs.items()
        }
        with kernels.use(pair_attention=implementation):
            result = pair_attention(**inputs)
        generator = torch.Generator().manual_seed(2)
        along = torch.randn(result.shape, generator=generator).to(dtype).to(DEVICE, result.dtype)
        result.backward(along)
        return [result.detach(), *(inputs[n].grad for n in ("q", "k", "v", "bias"))]

    exact, plain, ours = run("reference", torch.float64), run("reference"), run("triton")
    for want, eager, got in zip(exact, plain, ours, strict=True):
        assert (got.double() - want).norm() <= (eager.double() - want).norm()


@pytest.mark.parametrize(
    "dtype", [torch.float16, pytest.param(torch.bfloat16, marks=ON_GPU)], ids=str
)
@pytest.mark.parametrize(("S", "bias_rows"), [(2, 2), (TURNED, 1)])
def test_what_all_keys_share_gets_no_gradient(dtype, S, bias_rows):
    inputs = make(S=S, Nq=8, Nk=96, masked=False, gated=True, dtype=dtype, bias_rows=bias_rows)
    for name, shared_part in (("q", 1.0), ("k", 60.0), ("v", 4.0)):
        inputs[name] += shared_part

    def gradients(implementation, wider):
        given = {name: value.to(wider) for name, value in inputs.items() if name != "layout"}
        leaves = [given[name].requires_grad_() for name in ("q", "k", "bias")]
        with kernels.use(pair_attention=implementation):
            result = pair_attention(**given)
        generator = torch.Generator().manual_seed(2)
        along = torch.randn(result.shape, generator=generator).to(dtype).to(DEVICE, wider)
        return torch.autograd.grad(result, leaves, along)

    found, exact = gradients("triton", dtype), gradients("reference", torch.float64)
    rounding = torch.finfo(dtype).eps
    for got, want, most in zip(found, exact, (40, 1, 1), strict=True):
        assert (got.double() - want).norm() <= most * rounding * want.norm()


def test_golden_triangle_attention(shared):
    file = np.load(shared / "golden" / "pair" / "core_tri_attn.npz")
    inputs = {
        name: torch.from_numpy(file[f"in__{name}"]).to(DEVICE).requires_grad_()
        for name in ("q", "k", "v", "bias")
    }
    mask = (torch.from_numpy(file["in__mask"])[:, :, 0, 0] > 0).to(DEVICE)
    tiles = Tiles(64, 64, 4, 1)
    with (
        kernels.use(pair_attention="triton"),
        replaced(forward=tiles, dq=tiles, dkv=tiles, dbias=tiles),  # float32: no dkv_bias_first
    ):
        result = pair_attention(**inputs, mask=mask, layout="BSNHD")
        result.backward(torch.from_numpy(file["cot__y"]).to(DEVICE))
    assert_close(result, torch.from_numpy(file["out__y"]), 2e-6, "result")
    for name, tensor in inputs.items():
        assert_close(tensor.grad, torch.from_numpy(file[f"gin__{name}"]), 5e-6, name)


def test_views_of_one_projection_and_of_a_transposed_pair():
    joint = torch.randn(1, 6, 5, 4, 2, 8, device=DEVICE)  # [B, N, S, qkvg, H, D], read by columns
    bias = torch.randn(1, 5, 5, 2, device=DEVICE)  # what a linear layer gives
    results = []
    for implementation in ("reference", "triton"):
        leaf, bias_leaf = joint.clone().requires_grad_(), bias.clone().requires_grad_()
        q, k, v, gate = leaf.transpose(1, 2)[:, :, :5].unbind(3)
        with kernels.use(pair_attention=implementation):
            result = pair_attention(
                *(q, k, v, bias_leaf.permute(0, 3, 1, 2)[:, None]), gate=gate, layout="BSNHD"
            )
        result.square().sum().backward()
        results.append((result.detach(), leaf.grad, bias_leaf.grad))
    for want, got in zip(*results, strict=True):
        assert_close(got, want, 5e-6)


def test_all_that_has_strides_of_its_own_is_right():
    q, k = torch.randn(1, 3, 64, 2, 2, 8, device=DEVICE).unbind(3)
    v, bias = torch.randn(1, 3, 64, 2, 8), torch.randn(1, 1, 2, 64, 64 * 8)[..., ::8]
    gate, along = (each[..., :8] for each in torch.randn(2, 1, 3, 64, 2, 9, device=DEVICE))
    results = []
    for implementation in ("reference", "triton"):
        leaves = [each.to(DEVICE).detach().requires_grad_() for each in (q, k, v, bias)]
        leaves.append(gate.detach().requires_grad_())
        with kernels.use(pair_attention=implementation):
            result = pair_attention(*leaves[:4], gate=leaves[4], layout="BSNHD")
        results.append((result, *torch.autograd.grad(result, leaves, along)))
    for want, got in zip(*results, strict=True):
        assert_close(got, want, 2e-5)


@pytest.mark.parametrize("heads_first", [True, False])
def test_rows_too_far_apart_for_32_bits_are_copied(heads_first):
    from bevatron.kernels.pair.pair_attention.launch import LARGEST_STRIDE, rows_contiguous

    for step, copied in ((LARGEST_STRIDE, True), (LARGEST_STRIDE - 8, False)):
        steps = (8, step) if heads_first else (step, 8)
        rows = torch.empty_strided((1, 1, 2, 2, 8), (64, 64, *steps, 1), device="meta")
        assert (rows_contiguous(rows, heads_first) is not rows) is copied


def test_a_transposed_mask_hides_the_same_keys():
    inputs = make(S=3, Nq=4, Nk=3, D=8)
    mask = torch.tensor([[True, False, True], [True, True, False], [False, True, True]]).to(DEVICE)
    found = []
    for view in (mask.T[None], mask.T.contiguous()[None]):
        with kernels.use(pair_attention="triton"):
            found.append(pair_attention(**inputs | {"mask": view}))
    assert torch.equal(*found)


def test_bias_of_another_type_gets_its_gradient_in_that_type():
    inputs = make(dtype=torch.float16, masked=False, Nq=16, Nk=16)
    inputs["bias"] = inputs["bias"].float().requires_grad_()
    with kernels.use(pair_attention="triton"):
        result = pair_attention(**inputs)
    result.sum().backward()
    assert result.dtype == torch.float16
    assert inputs["bias"].grad.dtype == torch.float32
    assert inputs["bias"].grad.abs().max() > 0


def test_infinite_bias_hides_keys():
    inputs = make(masked=False)
    inputs["bias"][..., 3] = float("-inf")
    inputs["bias"].requires_grad_()
    with kernels.use(pair_attention="triton"):
        result = pair_attention(**inputs)
    result.square().sum().backward()
    with kernels.use("reference"):
        want = pair_attention(**inputs)
    assert_close(result, want, 2e-6)
    assert inputs["bias"].grad[..., 3].eq(0).all()


def test_a_bias_within_a_larger_tensor_is_read_alone():
    inputs = make(S=3, Nq=20, Nk=20)
    wider = torch.full((1, 1, 1, 24, 40), float("nan"), device=DEVICE)
    wider[..., :20, :20] = inputs["bias"]
    with kernels.use(pair_attention="triton"):
        within = pair_attention(**inputs | {"bias": wider[..., :20, :20]})
        alone = pair_attention(**inputs)
    assert torch.equal(within, alone)


def test_a_bias_may_have_heads_first_or_last():
    inputs = make(Nq=64, Nk=64, H=2, D=8)
    behind = inputs["bias"].movedim(2, -1).contiguous().movedim(-1, 2)
    with kernels.use(pair_attention="triton"):
        assert torch.equal(pair_attention(**inputs | {"bias": behind}), pair_attention(**inputs))


def test_unsupported_head_sizes_are_refused():
    with kernels.use(pair_attention="triton"), pytest.raises(KernelError, match="multiple of 8"):
        pair_attention(**make(D=12))
    with kernels.use(pair_attention="triton"), pytest.raises(KernelError, match="float64"):
        pair_attention(**make(dtype=torch.float64))


@pytest.mark.parametrize("layout", ["BSHND", "BSNHD"])
def test_opcheck(layout):
    inputs = make(S=1, Nq=4, Nk=8, D=8, gated=True, layout=layout)
    with kernels.use(pair_attention="triton"):
        pair_attention(**inputs)  # registers the operators
    leaves = [inputs[name].requires_grad_() for name in ("q", "k", "v", "bias")]
    gate = inputs["gate"].requires_grad_()
    torch.library.opcheck(
        torch.ops.bevatron.pair_attention.default,
        (*leaves, inputs["mask"], gate, 0.3, layout == "BSHND"),
    )


@ON_GPU
def test_a_cuda_graph_gives_the_same_bits():
    def step():
        for name in ("q", "k", "v", "bias", "gate"):
            inputs[name].grad = None
        result = pair_attention(**inputs)
        result.backward(along)
        return [result, *(inputs[name].grad for name in ("q", "k", "v", "bias", "gate"))]

    inputs = make(S=16, Nq=64, Nk=64, D=32, H=4, gated=True, layout="BSNHD", dtype=torch.bfloat16)
    for name in ("q", "k", "v", "bias", "gate"):
        inputs[name].requires_grad_()
    along = torch.randn_like(inputs["q"])
    expected = [tensor.detach().clone() for tensor in step()]
    graph, found = captured(step)
    graph.replay()
    torch.cuda.synchronize()
    for want, got in zip(expected, found, strict=True):
        assert torch.equal(want, got)


def check_last_row(q, k, bias):
    """Compare the last of many rows, the only one with a gradient, with itself in float64."""

    def derive(q, k, bias, implementation):
        leaves = [tensor.detach().requires_grad_() for tensor in (q, k, k, bias)]
        with kernels.use(pair_attention=implementation):
            result = pair_attention(*leaves, layout="BSNHD")
        along = torch.zeros_like(result)
        along[:, -1:] = 1.0
        dq, dk, dv, dbias = torch.autograd.grad(result, leaves, along)
        rows = {"result": result.detach(), "dq": dq, "dk": dk, "dv": dv}
        return {name: rows[name][:, -1:] for name in rows} | {"dbias": dbias}

    found = derive(q, k, bias, "triton")
    alone = (tensor.double() for tensor in (q[:, -1:], k[:, -1:], bias))
    for name, exact in derive(*alone, "reference").items():
        limits = LIMITS[q.dtype]
        limit = limits.forward if name == "result" else limits.gradients
        assert_close(found[name], exact, limit, name)


MANY = (1, 4100, 4096, 4, 32)
"""The last row begins beyond 2^31 elements."""


@ON_GPU
def test_more_than_2_to_the_31_elements():
    q = torch.randn(MANY, device=DEVICE, dtype=torch.bfloat16)
    bias = torch.randn(1, 1, 4, 4096, 64, device=DEVICE, dtype=torch.bfloat16)
    check_last_row(q, q[:, :, :64], bias)


@ON_GPU
def test_keys_beyond_2_to_the_31_elements():
    k = torch.randn(MANY, device=DEVICE, dtype=torch.bfloat16)
    bias = torch.randn(1, 1, 4, 64, 4096, device=DEVICE, dtype=torch.bfloat16)
    check_last_row(k[:, :, :64], k, bias)
