"""Queries, keys, values and gate: the reference everywhere, kernels interpreted or compiled."""

import pytest
import torch
import torch.nn.functional as F
from pair_operators import DEVICE, HALF

from bevatron.kernels import pair_attention, qkvg, use
from bevatron.kernels.pair.qkvg.tiles import TILES
from bevatron.kernels.shared.parts import split
from bevatron.kernels.shared.standing_weights import standing_weights
from bevatron.kernels.shared.tiles import Tiles
from bevatron.testing import Tolerance, assert_close, check_op

pytest.importorskip("triton", reason="the kernels need the package triton")

TOLERANCES = {torch.float32: Tolerance(2e-6, 2e-5), HALF: Tolerance(2e-2, 4e-2)}
PARTS = {"q": 8, "k": 5, "v": 6, "gate": 8}


def make(rows, width, *names, dtype=torch.float32, parts=PARTS):
    generator = torch.Generator().manual_seed(7)
    shapes = {"x": (*rows, width)} | {f"{k}_weight": (n, width) for k, n in parts.items()}
    others = {"q_bias": 8, "gate_bias": 8, "norm_weight": width, "norm_bias": width}
    shapes |= {name: (others[name],) for name in names}
    drawn = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return {
        name: (value / width**0.5 if name[2:] == "weight" else value).to(DEVICE, dtype)
        for name, value in drawn.items()
    }


def joined(norm=True, norm_weight=None, norm_bias=None, **inputs):
    """All four results side by side."""
    return torch.cat(qkvg(**inputs, norm=(norm_weight, norm_bias) if norm else None), -1)


@pytest.mark.parametrize(
    "names", [(), ("gate_bias",), ("q_bias", "norm_weight", "norm_bias"), ("q_bias", "gate_bias")]
)
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_results_and_gradients_are_right(names, norm, dtype):
    if not norm:
        names = tuple(name for name in names if not name.startswith("norm"))
    check_op(
        *(joined, joined, make((3, 7), 12, *names, dtype=dtype) | {"norm": norm}),
        order=1,
        tolerance=TOLERANCES[dtype],
        ran=("qkvg", "triton"),
        strided=True,
    )


BIASED = {"q": 16, "k": 16, "v": 16, "gate": 16}


def updated(order=None, **inputs):
    """An update of the rows from everything that reads them."""
    x = inputs["x"] if order is None else inputs["x"].permute(order)
    norm = inputs["norm_weight"], inputs["norm_bias"]
    given = {k: v for k, v in inputs.items() if k not in {"x", "norm_weight", "norm_bias"}}
    q, k, v, gate, bias, x = qkvg(x, **given, norm=norm)
    return x + (q * k + v * gate) * bias.sum(-1, keepdim=True).tanh()


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize(
    ("rows", "order", "names", "heads"),
    [
        ((7, 9), None, (), 4),
        ((5, 5), (1, 0, 2), ("q_bias", "gate_bias"), 3),
        ((2, 3, 17), None, (), 16),
    ],
)
def test_rows_that_several_read_get_the_sum_of_all_gradients(rows, order, names, heads, dtype):
    inputs = make(rows, 16, "norm_weight", "norm_bias", dtype=dtype, parts=BIASED)
    generator = torch.Generator().manual_seed(3)
    shapes = {"bias_weight": (heads, 16)} | dict.fromkeys(names, (16,))
    for name, shape in shapes.items():
        inputs[name] = (torch.randn(shape, generator=generator) / 4).to(DEVICE, dtype)
    with TILES.replaced(input=Tiles(16, 0, 4, 1, depth=32)):
        check_op(
            *(updated, updated, inputs | {"order": order}),
            order=1,
            tolerance=TOLERANCES[dtype],
            ran=("qkvg", "triton"),
            strided=True,
        )


def beside_each_other(norm_weight, norm_bias, **inputs):
    """All that reads the rows, and the rows."""
    return torch.cat(qkvg(**inputs, norm=(norm_weight, norm_bias)), -1)


@pytest.mark.parametrize(
    ("rows", "width", "channels", "heads"),
    [
        ((3, 5), 24, 16, 4),
        ((5,), 16, 16, 4),
        ((0, 3), 16, 16, 4),
        ((3, 5), 16, 8, 4),
        ((3, 5), 16, 16, 17),
    ],
)
def test_rows_and_layers_that_one_kernel_does_not_take_are_right(rows, width, channels, heads):
    parts = dict.fromkeys(PARTS, channels)
    inputs = make(rows, width, "norm_weight", "norm_bias", dtype=HALF, parts=parts)
    inputs["bias_weight"] = inputs["q_weight"][:1].repeat(heads, 1)
    check_op(
        *[beside_each_other] * 2,
        inputs,
        order=1,
        tolerance=TOLERANCES[HALF],
        ran=("qkvg", "triton"),
    )


@pytest.mark.parametrize("used", [(0,), (4,), (5,), (0, 1, 2, 3), (0, 1, 2, 3, 4, 5)])
def test_results_used_alone_have_gradients_in_the_types_of_the_weights(used):
    """Gradients of the results are slices of a wider tensor."""
    inputs = make((3, 5), 16, "norm_weight", "norm_bias", parts=BIASED)
    inputs |= {"x": inputs["x"].to(HALF), "bias_weight": inputs["q_weight"][:4].clone()}
    inputs |= {name: inputs["norm_bias"].clone() for name in ("q_bias", "gate_bias")}
    found = []
    for choice in ("triton", "reference"):
        exact = choice == "reference"
        leaves = {k: v.to(torch.float64 if exact else v.dtype) for k, v in inputs.items()}
        given = {k: v.requires_grad_() for k, v in leaves.items() if k[:4] != "norm"}
        norm = tuple(leaves[name].requires_grad_() for name in ("norm_weight", "norm_bias"))
        wide = torch.linspace(-1.0, 1.0, 15 * 84, device=DEVICE).to(given["x"].dtype)
        *parts, bias, rows = wide.view(3, 5, 84).split([16, 16, 16, 16, 4, 16], -1)
        with use(choice):
            results = qkvg(**given, norm=norm)
        along = [(*parts, bias, rows)[i] for i in used]
        results = [results[i] for i in used]
        found.append(torch.autograd.grad(results, list(leaves.values()), along, allow_unused=True))
    for got, want, leaf in zip(*found, inputs.values(), strict=True):
        if want is not None:
            assert got.dtype == leaf.dtype
            assert_close(got, want, 2e-2)


@pytest.mark.parametrize("norm", [(None, None), None])
def test_results_by_heads_are_those_of_rows(norm):
    inputs = make((3, 7), 12)
    inputs |= {"k_weight": inputs["q_weight"] - 1.0, "v_weight": inputs["q_weight"] + 1.0}
    results = []
    for choice in ("reference", "triton"):
        for head_width in (4, None):
            leaves = {name: value.clone().requires_grad_() for name, value in inputs.items()}
            with use(choice):
                parts = qkvg(**leaves, norm=norm, head_width=head_width)
            if head_width:
                assert parts[0].shape == (3, 7, 2, 4)
                parts = [part.flatten(-2) for part in parts]
            total = sum((i + 1.0) * part.sin().sum() for i, part in enumerate(parts))
            results.append((*parts, *torch.autograd.grad(total, list(leaves.values()))))
    for other in results[1:]:
        for got, want in zip(other, results[0], strict=True):
            assert_close(got, want, 2e-5)


@pytest.mark.parametrize(
    ("head_width", "name"), [(4, r"k_weight has shape \(5, 8\)"), (0, "q_weight")]
)
def test_a_weight_that_heads_do_not_divide_is_named(head_width, name):
    with pytest.raises(ValueError, match=rf"{name}.* head_width {head_width}"):
        qkvg(**make((3,), 8), head_width=head_width)


@pytest.mark.parametrize("norm", [(None, None), None])
@pytest.mark.parametrize("name", ["q_weight", "k_weight"])
def test_weights_of_several_types_have_gradients_of_theirs(norm, name):
    inputs = make((3, 7), 12)
    inputs[name] = inputs[name].to(HALF)
    results = []
    for choice in ("triton", "reference"):
        wide = {name: value.double() for name, value in inputs.items()}
        leaves = {
            name: value.clone().requires_grad_()
            for name, value in (inputs if choice == "triton" else wide).items()
        }
        with use(choice):
            total = sum(part.sin().sum() for part in qkvg(**leaves, norm=norm))
        results.append(torch.autograd.grad(total, list(leaves.values())))
    for got, want, given in zip(*results, inputs.values(), strict=True):
        assert got.dtype == given.dtype
        assert_close(got, want, 2e-5 if got.dtype == torch.float32 else 4e-2)


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_the_operator_is_well_formed(dtype):
    from bevatron.kernels.pair.qkvg.triton import project

    inputs = make((3, 7), 12, "q_bias", "gate_bias", "norm_weight", "norm_bias")
    given = {name: value.requires_grad_() for name, value in inputs.items()}
    given["x"] = given["x"].detach().to(dtype).requires_grad_()
    for without in (set(), {"q_bias"}, {"gate_bias", "norm_bias"}, {"q_bias", "gate_bias"}):
        arguments = [None if name in without else given.get(name) for name in project.parameters]
        torch.library.opcheck(project.op, (*arguments[:-1], 1e-5))


def test_second_derivatives_beside_a_bias_are_refused():
    inputs = make((3, 5), 16, dtype=HALF, parts=BIASED)
    x = inputs["x"].requires_grad_()
    with use(qkvg="triton"):
        *_, rows = qkvg(**inputs, norm=(None, None), bias_weight=inputs["q_weight"][:4])
    (dx,) = torch.autograd.grad(rows.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


@pytest.mark.parametrize("norm", [(None, None), None])
def test_a_bias_that_stands_still_keeps_its_place_beside_weights_of_other_lengths(norm):
    inputs = make((3, 5), 12, "gate_bias")
    with standing_weights(), torch.no_grad():
        for length in (8, 4):
            inputs["q_weight"] = inputs["q_weight"][:length]
            found = []
            for choice in ("triton", "reference"):
                with use(qkvg=choice):
                    found.append(torch.cat(qkvg(**inputs, norm=norm), -1))
            assert_close(*found, 2e-5)


def test_no_rows():
    with use(qkvg="triton"):
        assert joined(**make((0, 3), 8)).shape == (0, 3, sum(PARTS.values()))


@pytest.mark.parametrize("rows", [0, 5])
def test_biases_of_other_lengths_and_types_have_gradients_of_theirs(rows):
    inputs = make((rows, 3), 8, "q_bias", "gate_bias")
    inputs["q_weight"] = inputs["q_weight"][:4]
    inputs["q_bias"] = inputs["q_bias"][:4].to(HALF)
    biases = [inputs[name].requires_grad_() for name in ("q_bias", "gate_bias")]
    results = []
    for choice in ("reference", "triton"):
        with use(qkvg=choice):
            total = sum(part.sin().sum() for part in qkvg(**inputs, norm=(None, None)))
        results.append(torch.autograd.grad(total, biases))
    for want, got, tolerance in zip(*results, (4e-2, 2e-5), strict=True):
        assert got.dtype == want.dtype
        assert_close(got, want, tolerance)


def test_it_is_four_linear_layers():
    inputs = make((4,), 8, "gate_bias")
    n = F.layer_norm(inputs["x"], (8,))
    for choice in ("reference", "triton"):
        with use(qkvg=choice):
            q, k, v, gate = qkvg(**inputs, norm=(None, None))
        for got, name in ((q, "q"), (k, "k"), (v, "v")):
            assert_close(got, F.linear(n, inputs[f"{name}_weight"]), 1e-5)
        assert_close(gate, F.linear(n, inputs["gate_weight"], inputs["gate_bias"]), 1e-5)


def test_attention_takes_the_views():
    inputs = make((1, 3, 6), 8)
    w = torch.randn(4, 16, 8, device=DEVICE)
    x = inputs["x"].requires_grad_()
    found = []
    for choice in ("reference", "triton"):
        with use(qkvg=choice, pair_attention=choice):
            rows = [part.unflatten(-1, (2, 8)) for part in qkvg(x, *w)]
            y = pair_attention(*rows[:3], gate=rows[3], layout="BSNHD")
        found.append((y, *torch.autograd.grad(y.square().sum(), x)))
    for want, got in zip(*found, strict=True):
        assert_close(got, want, 2e-5)


def test_gradients_of_attention_are_joined_without_a_copy(monkeypatch):
    """Attention's backward pass writes them where the matmul before it reads them."""
    generator = torch.Generator().manual_seed(5)
    N, H, D = 8, 2, 8
    drawn = [torch.randn(N, N, 12, generator=generator)]
    drawn += [torch.randn(H * D, 12, generator=generator) / 4 for _ in PARTS]
    inputs = [value.to(DEVICE) for value in drawn]
    mask = torch.rand(1, N, N, generator=generator) > 0.2
    results = []
    for choice, dtype in (("triton", torch.float32), ("reference", torch.float64)):
        leaves = [value.to(dtype).requires_grad_() for value in inputs]
        with use(choice):
            q, k, v, gate = (part.view(1, N, N, H, D) for part in qkvg(*leaves, norm=(None, None)))
            y = pair_attention(q, k, v, mask=mask.to(DEVICE), gate=gate, layout="BSNHD")
            weight = torch.linspace(-1.0, 1.0, y.numel(), device=DEVICE, dtype=dtype)
            with monkeypatch.context() as patched:
                patched.setattr(torch, "cat", None)
                found = torch.autograd.grad((weight.view(y.shape) * y).sum(), leaves)
        results.append((y, *found))
    for got, want in zip(*results, strict=True):
        assert_close(got, want, 2e-5)


@pytest.mark.parametrize(("farthest", "gap"), [(1000, 100), (200, 8)])
def test_joined_gradients_too_far_apart_for_cublas_are_copied(farthest, gap, monkeypatch):
    monkeypatch.setattr("bevatron.kernels.shared.rows.FARTHEST", farthest)
    along = torch.arange(300.0).as_strided((3, 8), (100, 1))
    x = torch.zeros(3, 8, requires_grad=True)
    found = []
    x.register_hook(found.append)
    torch.autograd.backward(split(x, [4, 4]), along.split(4, -1))
    assert found[0].equal(along)
    assert found[0].stride(0) == gap


def test_separate_gradients_are_joined():
    inputs = make((3, 7), 12)
    results = []
    for choice, dtype in (("triton", torch.float32), ("reference", torch.float64)):
        leaves = {name: value.to(dtype).requires_grad_() for name, value in inputs.items()}
        with use(choice):
            q, k, v, gate = qkvg(**leaves)
            total = q.square().sum() + (q * gate).sum() + v.sin().sum() + k.cos().sum()
            results.append(torch.autograd.grad(total, list(leaves.values())))
    for got, want in zip(*results, strict=True):
        assert_close(got, want, 2e-5)
