"""Attention with one query per column: the reference, and kernels interpreted or compiled."""

from functools import partial

import pytest
import torch
from pair_operators import DEVICE, HALF, check_kernels

from bevatron.kernels import global_attention, use
from bevatron.testing import Tolerance, assert_close
from half_precision import check_no_worse

pytest.importorskip("triton", reason="the kernels need the package triton")

TOLERANCES = {torch.float32: Tolerance(4e-6, 2e-5), HALF: Tolerance(2e-2, 6e-2)}


def make(rows, length, width, heads, head, batch=(), dtype=torch.float32):
    generator = torch.Generator().manual_seed(7)
    hidden = heads * head
    shapes = {
        "m": (*batch, rows, length, width),
        "norm_weight": (width,),
        "norm_bias": (width,),
        "q_weight": (hidden, width),
        "k_weight": (head, width),
        "v_weight": (head, width),
        "gate_weight": (hidden, width),
        "gate_bias": (hidden,),
        "out_weight": (width, hidden),
        "out_bias": (width,),
    }
    drawn = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    for name, shape in shapes.items():
        if name != "m" and len(shape) == 2:
            drawn[name] /= shape[1] ** 0.5
    mask = torch.rand(shapes["m"][:-1], generator=generator) > 0.3
    mask[..., 0, 1:] = True
    mask[..., 0] = False  # the first column has no row at all
    inputs = {name: value.to(DEVICE, dtype) for name, value in drawn.items()}
    return inputs | {"mask": mask.to(DEVICE)}


def check(inputs, **options):
    check_kernels(global_attention, inputs, TOLERANCES[inputs["m"].dtype], **options)


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_result_and_gradients_are_right(dtype):
    check(make(17, 3, 12, 4, 8, dtype=dtype))


@pytest.mark.parametrize(
    ("rows", "length", "batch", "width", "heads"),
    [(1, 2, (), 16, 2), (5, 3, (2,), 32, 4), (130, 2, (), 16, 4)],
)
def test_sixteen_bits_of_few_channels_are_right(rows, length, batch, width, heads):
    check(make(rows, length, width, heads, 8, batch, HALF), strided=True)


@pytest.mark.parametrize("parts", [1, 3])
def test_any_number_of_parts_of_a_column_is_right(parts, monkeypatch):
    from bevatron.kernels.pair.global_attention import triton_fused

    monkeypatch.setattr(triton_fused, "num_sms", lambda _: parts)
    monkeypatch.setattr(triton_fused, "PER_SM", 2)
    check(make(140, 2, 16, 2, 8, dtype=HALF))


@pytest.mark.parametrize(("rows", "length", "batch"), [(1, 2, ()), (5, 3, (2,)), (37, 2, ())])
def test_any_size_is_right(rows, length, batch):
    check(make(rows, length, 8, 2, 8, batch=batch), strided=True)


@pytest.mark.parametrize(("rows", "length"), [(4, 0), (0, 3)])
@pytest.mark.parametrize(("width", "dtype"), [(8, torch.float32), (16, HALF)])
def test_there_may_be_no_column_and_no_row(rows, length, width, dtype):
    inputs = make(4, 3, width, 2, 8, dtype=dtype)
    check(inputs | {name: inputs[name][:rows, :length] for name in ("m", "mask")})


def test_against_the_published_algorithm():
    t = {n: v.double() if n != "mask" else v for n, v in make(6, 4, 8, 3, 8).items()}
    with use("reference"):
        actual = global_attention(**t)
    n = torch.nn.functional.layer_norm(t["m"], (8,), t["norm_weight"], t["norm_bias"])
    for j in range(1, 4):
        rows = n[:, j][t["mask"][:, j]]
        q = (t["q_weight"] @ rows.mean(0)).view(3, 8) / 8**0.5
        weights = (q @ (rows @ t["k_weight"].T).T).softmax(-1)
        o = (weights @ (rows @ t["v_weight"].T)).flatten()
        gate = torch.sigmoid(n[:, j] @ t["gate_weight"].T + t["gate_bias"])
        assert_close(actual[:, j], (gate * o) @ t["out_weight"].T + t["out_bias"], 1e-9)


@pytest.mark.parametrize("choice", ["reference", "triton"])
@pytest.mark.parametrize(("width", "dtype"), [(8, torch.float32), (16, HALF)])
def test_a_column_without_rows_gives_the_bias_and_finite_gradients(choice, width, dtype):
    inputs = make(5, 3, width, width // 8, 8, dtype=dtype)
    inputs = {k: v.requires_grad_() if k != "mask" else v for k, v in inputs.items()}
    with use(global_attention=choice):
        y = global_attention(**inputs)
    (dm,) = torch.autograd.grad(y.square().sum(), inputs["m"])
    assert_close(y[:, 0], inputs["out_bias"].expand(5, -1), 1e-6)
    assert dm[:, 0].eq(0).all()
    assert dm.isfinite().all()


def test_sixteen_bits_are_no_worse_than_the_reference():
    inputs = make(33, 12, 32, 4, 8, dtype=HALF)
    mask = inputs.pop("mask")
    check_no_worse("global_attention", partial(global_attention, mask=mask), inputs)


def test_custom_operators_pass_opcheck():
    from bevatron.kernels.pair.global_attention.triton import sigmoid_gate

    gate = torch.randn(2, 3, 4, 8, device=DEVICE, requires_grad=True)
    value = torch.randn(2, 4, 8, device=DEVICE, requires_grad=True)
    torch.library.opcheck(sigmoid_gate.op, (gate, value))


def test_the_operator_of_few_channels_passes_opcheck():
    from bevatron.kernels.pair.global_attention.triton_fused import attend

    inputs = make(5, 3, 16, 2, 8, dtype=HALF)
    mask = inputs.pop("mask").to(HALF)
    m, *weights = (value[None] if name == "m" else value for name, value in inputs.items())
    arguments = [tensor.detach().requires_grad_() for tensor in (m, *weights)]
    torch.library.opcheck(attend.op, (arguments[0], mask[None], *arguments[1:], 1e-5, 1e-10))


def test_rows_are_not_saved():
    inputs = make(64, 3, 16, 2, 8, dtype=HALF)
    mask = inputs.pop("mask").to(HALF)
    inputs = {name: value.requires_grad_() for name, value in inputs.items()}
    kept = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t)
    with hooks, use(global_attention="triton"):
        global_attention(**inputs, mask=mask)
    given = {value.data_ptr() for value in (*inputs.values(), mask)}
    columns = 3 * (16 + 1 + 2 * (16 + 1 + 8))
    assert sum(t.numel() for t in kept if t.data_ptr() not in given) == 2 * 64 * 3 + columns
