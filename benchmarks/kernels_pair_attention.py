"""Attention with a shared bias beside flex_attention, SDPA, compiled and eager PyTorch.

    python benchmarks/kernels_pair_attention.py --peers
    python benchmarks/kernels_pair_attention.py --cases triangle-768 --dtype bfloat16

Every case is first compared with the float64 reference at its very shape and type, and two runs
must give the same bits; otherwise nothing is timed. Times are medians of CUDA-graph replays of
forward and backward (the bias has a gradient) with the L2 cache flushed before each; "eager" is the
same called from Python. A peer that cannot be captured is timed eagerly and marked. The floor is
the larger of the operations of the matrix products over the rate of an 8192^3 bf16 product and one
exponential a pass over the rate of the special-function units.
"""

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import report
import torch
from torch import Tensor

from bevatron import kernels
from bevatron.kernels import pair_attention

EXPONENTIALS = 16 * 132 * 1.75e9
"""A second, on an H200."""
Attend = Callable[..., Tensor]


@dataclass(frozen=True)
class Case:
    """One shape; ``to_reach`` in milliseconds of forward and backward."""

    rows: int
    heads: int
    length: int
    head: int
    to_reach: float
    masked: bool = True


CASES = {
    "triangle-256": Case(256, 4, 256, 32, 0.30),
    "triangle-384": Case(384, 4, 384, 32, 0.60),
    "triangle-512": Case(512, 4, 512, 32, 1.35),
    "triangle-768": Case(768, 4, 768, 32, 4.4),
    "msa-row-128x256": Case(128, 8, 256, 32, 0.35),
    "diffusion-48x384": Case(48, 16, 384, 48, 0.75, masked=False),
    "diffusion-48x768": Case(48, 16, 768, 48, 2.3, masked=False),
    "single-384": Case(1, 16, 384, 24, 0.0),
    "sharded-by-8-256": Case(32, 4, 256, 32, 0.0),
    "heads-of-8": Case(256, 8, 256, 8, 0.0),
    "heads-of-16": Case(256, 4, 256, 16, 0.0),
    "heads-of-64": Case(256, 4, 256, 64, 0.0),
    "heads-of-128": Case(256, 4, 256, 128, 0.0),
    "triangle-64": Case(64, 4, 64, 32, 0.0),
    "triangle-1024": Case(1024, 4, 1024, 32, 0.0),
    "triangle-2048": Case(2048, 4, 2048, 32, 0.0),
}
USUAL = [name for name, case in CASES.items() if case.to_reach]


def draw(case: Case, dtype: torch.dtype) -> tuple[dict[str, Tensor], Tensor | None, Tensor]:
    """Draw inputs in the layout of projections, [B, S, N, H, D]."""
    shape = (1, case.rows, case.length, case.heads, case.head)
    inputs = {name: torch.randn(shape, device="cuda").to(dtype) for name in "qkv"}
    inputs["bias"] = torch.randn(1, 1, case.heads, case.length, case.length, device="cuda").to(
        dtype
    )
    mask = torch.rand(1, case.rows, case.length, device="cuda") > 0.05 if case.masked else None
    return inputs, mask, torch.randn(shape, device="cuda").to(dtype)


def ours(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None) -> Tensor:
    with kernels.use(pair_attention="triton"):
        return pair_attention(q, k, v, bias, mask, layout="BSNHD")


def eager(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None) -> Tensor:
    with kernels.use(pair_attention="reference"):
        return pair_attention(q, k, v, bias, mask, layout="BSNHD")


def compiled(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None) -> Tensor:
    from bevatron.kernels.pair_attention.reference import pair_attention as plain

    global _compiled  # noqa: PLW0603
    _compiled = _compiled or torch.compile(plain, dynamic=False)
    result: Tensor = _compiled(q, k, v, bias, mask, q.shape[-1] ** -0.5, None, "BSNHD")
    return result


_compiled: Any = None
_flex: Any = None


def sdpa(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None) -> Tensor:
    rows = [tensor[0].transpose(1, 2) for tensor in (q, k, v)]
    if mask is None:
        added = bias[0].expand(q.shape[1], -1, -1, -1)
    else:
        added = bias[0].masked_fill(~mask[0, :, None, None], float("-inf"))
    result = torch.nn.functional.scaled_dot_product_attention(*rows, attn_mask=added)
    return result.transpose(1, 2)[None]


def flex(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None) -> Tensor:
    from torch.nn.attention.flex_attention import flex_attention

    def score(x: Tensor, row: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        x = x + bias[0, 0, head, i, j]
        return x if mask is None else torch.where(mask[0, row, j], x, -float("inf"))

    global _flex  # noqa: PLW0603
    _flex = _flex or torch.compile(flex_attention, dynamic=False)
    rows = [tensor[0].transpose(1, 2) for tensor in (q, k, v)]
    result: Tensor = _flex(*rows, score_mod=score).transpose(1, 2)[None]
    return result


PEERS: dict[str, Attend] = {"flex": flex, "sdpa": sdpa, "compile": compiled, "eager": eager}


def step(
    attend: Attend, inputs: dict[str, Tensor], mask: Tensor | None, along: Tensor
) -> Callable[[], list[Tensor]]:
    """Return forward and backward, as a function that gives result and gradients."""
    leaves = {name: value.detach().requires_grad_() for name, value in inputs.items()}

    def run() -> list[Tensor]:
        result = attend(**leaves, mask=mask)
        return [result.detach(), *torch.autograd.grad(result, list(leaves.values()), along)]

    return run


def check(case: Case, dtype: torch.dtype) -> dict[str, float]:
    """Compare with float64 on as many rows as fit, and two runs of all rows with each other."""
    inputs, mask, along = draw(case, dtype)
    first, second = (step(ours, inputs, mask, along)() for _ in range(2))
    if not all(torch.equal(a, b) for a, b in zip(first, second, strict=True)):
        raise SystemExit("pair_attention: a second run gave other bits")
    rows = max(1, min(case.rows, 2**27 // (case.heads * case.length**2)))
    few = {n: t if n == "bias" else t[:, :rows] for n, t in inputs.items()}
    mask, along = mask if mask is None else mask[:, :rows], along[:, :rows]
    exact = {name: value.double() for name, value in few.items()}
    want = step(eager, exact, mask, along.double())()
    errors = {}
    for name, a, b, e in zip(
        ("result", *"qkv", "bias"),
        step(ours, few, mask, along)(),
        step(eager, few, mask, along)(),
        want,
        strict=True,
    ):
        error, plain = ((x.double() - e).norm().item() / e.norm().item() for x in (a, b))
        limit = 2e-5 if dtype == torch.float32 else plain
        if error > limit:
            raise SystemExit(f"pair_attention: {name} is off by {error:.2e}, plain {plain:.2e}")
        errors[name] = error
    return errors


def median_ms(function: Callable[[], Any], repeats: int = 15) -> float:
    """Median time of a call, the L2 cache flushed before each."""
    flush = torch.empty(2**27, dtype=torch.uint8, device="cuda")
    times = []
    for _ in range(repeats + 2):
        flush.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[2:])


def captured(function: Callable[[], Any]) -> Callable[[], Any]:
    """Capture a call as a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay


def timed(attend: Attend, case: Case, dtype: torch.dtype) -> dict[str, Any]:
    """Time one implementation and take its peak memory."""
    function = step(attend, *draw(case, dtype))
    function()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    torch.cuda.synchronize()
    found: dict[str, Any] = {"MiB": round((torch.cuda.max_memory_allocated() - before) / 2**20)}
    found["eager ms"] = median_ms(function)
    try:
        found["ms"] = median_ms(captured(function))
    except RuntimeError as error:
        torch.cuda.synchronize()
        found |= {"ms": found["eager ms"], "note": f"not captured: {str(error)[:60]}"}
    return found


def main() -> None:
    """Check, time and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=sorted(CASES), default=USUAL)
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--peers", action="store_true", help="time the peers too")
    parser.add_argument("--out", type=Path, default=report.RESULTS, help="folder for the results")
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)
    torch.manual_seed(0)
    matrix = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    rate = 2 * 8192**3 / median_ms(lambda: matrix @ matrix) * 1e3
    rows = []
    for name in options.cases:
        case = CASES[name]
        check(case, dtype)
        logits = case.rows * case.heads * case.length**2
        floor = 1e3 * max(14 * logits * case.head / rate, 2 * logits / EXPONENTIALS)
        for who, attend in {"bevatron": ours, **(PEERS if options.peers else {})}.items():
            row = {"case": name, "who": who, "floor ms": floor, "to reach": case.to_reach or ""}
            try:
                row |= timed(attend, case, dtype)
            except torch.OutOfMemoryError:
                row |= {"note": "out of memory"}
            rows.append(row)
            print(row, flush=True)
            torch.cuda.empty_cache()
    notes = (
        f"{options.dtype}, forward and backward with the gradient of the bias; checked against the "
        "float64 reference at these shapes, two runs with equal bits. ms: CUDA-graph replays, L2 "
        f"flushed. Rate of an 8192^3 bf16 product in this run: {rate / 1e12:.0f} TFLOP/s."
    )
    report.write_result("pair_attention", rows, notes, device="cuda", folder=options.out)


if __name__ == "__main__":
    main()
