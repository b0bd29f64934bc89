"""Operators on rows of channels beside PyTorch's own: LayerNorm, transitions, gated units.

    python benchmarks/rows.py --op layer_norm transition

Every case is first compared with the float64 reference at its very shape and type: its mean error
may not be larger than that of eager PyTorch, and two runs must give the same bits. Times are
medians of CUDA-graph replays of forward and backward, with the L2 cache flushed before each;
"eager" beside them includes Python. Peak memory holds inputs, result and gradients.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bevatron import kernels

Operator = Callable[..., Tensor]
MIB = 2**20


@dataclass(frozen=True)
class Case:
    """One operator at one size.

    Attributes
    ----------
    op, name
        Operator and size.
    ours, eager
        Take the tensors by name.
    shapes
        Of the inputs, by name; weights are scaled so that results are of order one.
    to_reach
        Milliseconds of forward and backward.
    bytes, operations
        What forward and backward must at least move and compute.
    """

    op: str
    name: str
    ours: Operator
    eager: Operator
    shapes: Mapping[str, tuple[int, ...]]
    to_reach: float
    bytes: float
    operations: float = 0.0


def eager_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, weight.shape, weight, bias)


def eager_transition(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    up_weight: Tensor,
    down_weight: Tensor,
    gate_weight: Tensor,
) -> Tensor:
    n = F.layer_norm(x, norm_weight.shape, norm_weight, norm_bias)
    return F.linear(F.silu(F.linear(n, gate_weight)) * F.linear(n, up_weight), down_weight)


def eager_norm_linear(x: Tensor, norm_weight: Tensor, norm_bias: Tensor, weight: Tensor) -> Tensor:
    return F.linear(F.layer_norm(x, norm_weight.shape, norm_weight, norm_bias), weight)


def eager_conditioned(
    x: Tensor,
    s: Tensor,
    norm_weight: Tensor,
    scale_weight: Tensor,
    scale_bias: Tensor,
    shift_weight: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    down_weight: Tensor,
    out_weight: Tensor,
    out_bias: Tensor,
) -> Tensor:
    c = F.layer_norm(s, norm_weight.shape, norm_weight)
    n = torch.sigmoid(F.linear(c, scale_weight, scale_bias)) * F.layer_norm(x, x.shape[-1:])
    n = n + F.linear(c, shift_weight)
    hidden = F.silu(F.linear(n, gate_weight)) * F.linear(n, up_weight)
    return torch.sigmoid(F.linear(s, out_weight, out_bias)) * F.linear(hidden, down_weight)


def norm_cases() -> list[Case]:
    found = []
    for rows, width, to_reach in ((147456, 128, 0.09), (589824, 128, 0.35), (32768, 256, 0.04)):
        shapes = {"x": (rows, width), "weight": (width,), "bias": (width,)}
        name, moved = f"{rows} x {width}", 5 * rows * width * 2
        functions = (kernels.layer_norm, eager_norm)
        found.append(Case("layer_norm", name, *functions, shapes, to_reach, moved))
    return found


def transition_cases() -> list[Case]:
    found = []
    sizes = (
        (384**2, 128, 4, 0.65),
        (768**2, 128, 4, 2.5),
        (128 * 256, 256, 4, 0.0),
        (384, 384, 4, 0.0),
    )
    for rows, width, factor, to_reach in sizes:
        hidden = factor * width
        shapes = {
            "x": (rows, width),
            "norm_weight": (width,),
            "norm_bias": (width,),
            "up_weight": (hidden, width),
            "down_weight": (width, hidden),
            "gate_weight": (hidden, width),
        }
        moved, operations = 5 * rows * width * 2, 3 * 2 * 3 * rows * width * hidden
        name, functions = f"{rows} x {width}, x{factor}", (kernels.transition, eager_transition)
        found.append(Case("transition", name, *functions, shapes, to_reach, moved, operations))
    return found


def norm_linear_cases() -> list[Case]:
    rows, width, out = 384**2, 128, 512
    shapes = {
        "x": (rows, width),
        "norm_weight": (width,),
        "norm_bias": (width,),
        "weight": (out, width),
    }
    moved, operations = rows * (3 * width + 2 * out) * 2, 3 * 2 * rows * width * out
    functions = (kernels.layer_norm_linear, eager_norm_linear)
    name = f"{rows} x {width} to {out}"
    return [Case("layer_norm_linear", name, *functions, shapes, 0.0, moved, operations)]


def conditioned_cases() -> list[Case]:
    rows, C, D, H = 48 * 384, 768, 384, 1536
    shapes = {
        "x": (rows, C),
        "s": (rows, D),
        "norm_weight": (D,),
        "scale_weight": (C, D),
        "scale_bias": (C,),
        "shift_weight": (C, D),
        "gate_weight": (H, C),
        "up_weight": (H, C),
        "down_weight": (C, H),
        "out_weight": (C, D),
        "out_bias": (C,),
    }
    moved, operations = rows * (5 * C + 3 * D) * 2, 3 * 2 * rows * (3 * C * D + 3 * C * H)
    functions = (kernels.conditioned_transition, eager_conditioned)
    name = f"{rows} x {C}, condition {D}"
    return [Case("conditioned_transition", name, *functions, shapes, 0.0, moved, operations)]


CASES = {
    "layer_norm": norm_cases,
    "layer_norm_linear": norm_linear_cases,
    "transition": transition_cases,
    "conditioned_transition": conditioned_cases,
}


def draw(case: Case, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    generator = torch.Generator(device="cuda").manual_seed(0)
    found = {}
    for name, shape in case.shapes.items():
        tensor = torch.randn(shape, device="cuda", generator=generator)
        if name.endswith("weight") and len(shape) > 1:
            tensor /= shape[1] ** 0.5
        found[name] = tensor.to(dtype).requires_grad_()
    return found


def step(operator: Operator, tensors: Mapping[str, Tensor], dy: Tensor) -> list[Tensor]:
    """Run forward and backward; return the result and all gradients."""
    y = operator(**tensors)
    return [y, *torch.autograd.grad(y, list(tensors.values()), dy)]


def check(case: Case) -> dict[str, float]:
    """Compare with float64; return the ratio of our mean error to eager's, by name."""
    tensors = draw(case)
    dy = torch.randn_like(case.eager(**tensors))
    wide = {name: value.detach().double().requires_grad_() for name, value in tensors.items()}
    exact = step(case.eager, wide, dy.double())
    del wide
    eager, ours = step(case.eager, tensors, dy), step(case.ours, tensors, dy)
    again = step(case.ours, tensors, dy)
    ratios = {}
    for name, e, o, a, x in zip(("y", *tensors), eager, ours, again, exact, strict=True):
        if not torch.equal(o, a):
            raise SystemExit(f"{case.op} {case.name}: {name} of a second run has other bits")
        theirs, error = ((v.double() - x).abs().mean().item() for v in (e, o))
        ratios[name] = error / theirs
        # The mean over a vector of weights is one over few numbers.
        if not error <= (1.05 if x.numel() > 10_000 else 1.3) * theirs:
            raise SystemExit(
                f"{case.op} {case.name}: mean error of {name} is {error:.2e}, eager's {theirs:.2e}"
            )
    return ratios


def measure(run: Callable[[], Any]) -> tuple[float, float]:
    """Return milliseconds of a graph's replay and of an eager call."""
    from triton.testing import do_bench

    for _ in range(3):
        run()
    eager = do_bench(run, warmup=20, rep=60, return_mode="median")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    replayed = [do_bench(graph.replay, warmup=20, rep=60, return_mode="median") for _ in range(2)]
    return statistics.median(replayed), eager


def peak(case: Case, operator: Operator) -> float:
    """Return the peak of one forward and backward in MiB."""
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    tensors = draw(case)
    width = tensors["weight"].shape[0] if case.op == "layer_norm_linear" else case.shapes["x"][1]
    dy = torch.randn((case.shapes["x"][0], width), device="cuda").to(tensors["x"].dtype)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step(operator, tensors, dy)
    return (torch.cuda.max_memory_allocated() - before) / MIB


def ceilings() -> tuple[float, float]:
    """Measure bytes per second of a copy and operations per second of a bf16 product."""
    from triton.testing import do_bench

    a = torch.empty(2**30, dtype=torch.uint8, device="cuda").random_()
    b = torch.empty_like(a)
    copied = 2 * a.numel() / do_bench(lambda: b.copy_(a), return_mode="median") * 1e3
    m = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    return copied, 2 * 8192**3 / do_bench(lambda: m @ m, return_mode="median") * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--op", nargs="+", choices=sorted(CASES), default=sorted(CASES))
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    copy_rate, matrix_rate = ceilings()
    print(f"copy {copy_rate / 1e12:.2f} TB/s, bf16 product {matrix_rate / 1e12:.0f} TFLOP/s")
    print("| operator | size | who | graph ms | eager ms | peak MiB | to reach | floor |")
    print("|---|---|---|---|---|---|---|---|")
    rows = []
    for op in arguments.op:
        for case in CASES[op]():
            errors = check(case)
            floor = 1e3 * max(case.bytes / copy_rate, case.operations / matrix_rate)
            operators = {
                "bevatron": case.ours,
                "eager": case.eager,
                "compile": torch.compile(case.eager, dynamic=False),
            }
            for who, operator in operators.items():
                tensors = draw(case)
                dy = torch.randn_like(case.eager(**tensors))
                replayed, eager = measure(lambda o=operator, t=tensors, g=dy: step(o, t, g))
                del tensors, dy
                memory = peak(case, operator)
                row = {"op": op, "case": case.name, "who": who, "ms": replayed, "mib": memory}
                rows.append(row | {"eager_ms": eager, "floor_ms": floor, "errors": errors})
                print(
                    f"| {op} | {case.name} | {who} | {replayed:.3f} | {eager:.3f} | {memory:.0f} | "
                    f"{case.to_reach or ''} | {floor:.3f} |",
                    flush=True,
                )
    if arguments.out:
        arguments.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
