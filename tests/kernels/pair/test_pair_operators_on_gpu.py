"""What only a GPU shows of operators on alignments: graphs, equal bits, offsets behind 2^31.

And float16 compiled: elsewhere 16 bits are bfloat16 on a GPU.
"""

import pytest
import torch

from bevatron.kernels import (
    global_attention,
    outer_product_mean,
    qkvg,
    triangle_multiply,
    use,
)
from bevatron.testing import assert_close
from replayed import captured

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

OPERATORS = {
    "outer_product_mean": outer_product_mean,
    "global_attention": global_attention,
    "qkvg": qkvg,
}


def draw(name, rows=24, length=40, width=64):
    """Inputs in bfloat16, as tensors in the operator's order; the mask is not among them."""
    C = width
    shapes = {
        "outer_product_mean": {
            "m": (rows, length, C),
            "norm_weight": (C,),
            "norm_bias": (C,),
            "a_weight": (32, C),
            "b_weight": (32, C),
            "out_weight": (128, 1024),
        },
        "global_attention": {
            "m": (rows, length, C),
            "norm_weight": (C,),
            "norm_bias": (C,),
            "q_weight": (64, C),
            "k_weight": (8, C),
            "v_weight": (8, C),
            "gate_weight": (64, C),
            "gate_bias": (64,),
            "out_weight": (C, 64),
            "out_bias": (C,),
        },
        "qkvg": {"x": (rows * length, C), **{f"{k}_weight": (C, C) for k in ("q", "k", "v")}}
        | {"gate_weight": (C, C)},
    }[name]
    generator = torch.Generator("cuda").manual_seed(3)
    drawn = {
        k: torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=generator)
        for k, shape in shapes.items()
    }
    return {k: v / v.shape[-1] ** 0.5 if k.endswith("weight") else v for k, v in drawn.items()}


def kept(name, inputs):
    """A mask where the operator takes one."""
    if name == "qkvg":
        return {}
    generator = torch.Generator("cuda").manual_seed(4)
    shape = inputs["m"].shape[:-1]
    return {"mask": torch.rand(shape, device="cuda", generator=generator) > 0.2}


@pytest.mark.parametrize(
    ("name", "width"),
    [
        ("outer_product_mean", 64),
        ("global_attention", 64),
        ("global_attention", 48),
        ("qkvg", 64),
    ],
)
def test_runs_and_replays_of_a_graph_give_the_same_bits(name, width):
    inputs = {k: v.requires_grad_() for k, v in draw(name, width=width).items()}
    mask = kept(name, inputs)
    run = getattr(OPERATORS[name], "__wrapped__", OPERATORS[name])

    def step():
        with use(**{name: "triton"}):
            result = run(**inputs, **mask)
        parts = result if isinstance(result, tuple) else (result,)
        loss = sum((part.float() * (i + 1)).square().sum() for i, part in enumerate(parts))
        return [*(part.detach() for part in parts), *torch.autograd.grad(loss, inputs.values())]

    expected = [tensor.clone() for tensor in step()]
    again = step()
    graph, found = captured(step)
    graph.replay()
    torch.cuda.synchronize()
    for first, second, replayed in zip(expected, again, found, strict=True):
        assert torch.equal(first, second)
        assert torch.equal(first, replayed)


@pytest.mark.parametrize("name", [*OPERATORS, "triangle_multiply"])
def test_half_precision_is_right(name):
    if name == "triangle_multiply":
        run, mask = triangle_multiply, torch.rand(37, 37, device="cuda") > 0.2
        square = dict.fromkeys(("a", "a_gate", "b", "b_gate", "out", "out_gate"), (64, 64))
        shapes = {"z": (37, 37, 64)} | {f"{k}_weight": v for k, v in square.items()}
        shapes |= {f"norm_{k}_{v}": (64,) for k in ("in", "out") for v in ("weight", "bias")}
        inputs = {k: torch.randn(v, device="cuda") / v[-1] ** 0.5 for k, v in shapes.items()}
        inputs["z"] = inputs["z"] * 8
        given = {"mask": mask}
    else:
        run, inputs = OPERATORS[name], draw(name)
        given = kept(name, inputs)
    found = {}
    for choice, dtype in (("triton", torch.float16), ("reference", torch.float64)):
        leaves = {k: v.half().to(dtype).requires_grad_() for k, v in inputs.items()}
        with use(**{name: choice}):
            result = run(**leaves, **given)
            parts = result if isinstance(result, tuple) else (result,)
            torch.manual_seed(5)
            along = [torch.randn(part.shape).to("cuda", torch.float64) for part in parts]
            loss = sum((part.double() * g).sum() for part, g in zip(parts, along, strict=True))
            found[choice] = [*parts, *torch.autograd.grad(loss, leaves.values())]
    assert found["triton"][0].dtype == torch.float16
    for got, want in zip(found["triton"], found["reference"], strict=True):
        assert got.isfinite().all()
        assert_close(got, want, 2e-2)


def end_of(run, x, seen):
    """The seen end of the result, and the gradient by x of a loss of nothing else."""
    x = x.detach().requires_grad_()
    y = run(x)
    y = torch.cat([seen(part) for part in y], -1) if isinstance(y, tuple) else seen(y)
    generator = torch.Generator("cuda").manual_seed(6)
    along = torch.randn(y.shape, device="cuda", generator=generator)
    return y.detach(), *torch.autograd.grad((y.float() * along).sum(), x)


def test_a_large_pair_of_outer_products():
    length, corner = 4112, 16
    inputs = draw("outer_product_mean", rows=2, length=length, width=16)
    mask = torch.ones(2, length, device="cuda", dtype=torch.bool)
    m = inputs.pop("m")
    assert length**2 * len(inputs["out_weight"]) > 2**31

    def run(x):
        return outer_product_mean(x, mask[:, -x.shape[1] :], **inputs)

    def seen(y):
        return y[-corner:, -corner:]

    with use(outer_product_mean="triton"):
        y, dm = end_of(run, m, seen)
        want_y, want_dm = end_of(run, m[:, -corner:], seen)
    assert_close(y, want_y, 1e-2)
    assert_close(dm[:, -corner:], want_dm, 2e-2)


def test_a_large_alignment_of_global_attention():
    length, corner = 2**15 + 64, 16
    inputs = draw("global_attention", rows=1024, length=length)
    mask = torch.ones(1024, length, device="cuda", dtype=torch.bool)
    m = inputs.pop("m")
    assert m.numel() > 2**31

    def run(x):
        return global_attention(x, mask[:, -x.shape[1] :], **inputs)

    def seen(y):
        return y[:, -corner:]

    with use(global_attention="triton"):
        y, dm = end_of(run, m, seen)
        want_y, want_dm = end_of(run, m[:, -corner:], seen)
    assert_close(y, want_y, 1e-2)
    assert_close(dm[:, -corner:], want_dm, 2e-2)


def test_large_projections():
    inputs = draw("qkvg", rows=2**22 + 64, length=1, width=128)
    x = inputs.pop("x")

    def run(rows):
        return qkvg(rows, **inputs)

    def seen(y):
        return y[-16:]

    with use(qkvg="triton"):
        y, dx = end_of(run, x, seen)
        want_y, want_dx = end_of(run, x[-16:], seen)
    assert_close(y, want_y, 1e-2)
    assert_close(dx[-16:], want_dx, 2e-2)
