"""Checks and times operators on pairs and rows beside their peers; `run.py` is the command."""

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from benchmarks.common import report
from benchmarks.kernels.cases_pair import CASES, EXPONENTIALS, Case, Operator
from torch import Tensor

from bevatron import kernels

MIB = 2**20
DRAWS = 8
"""Of all inputs, where one leaves doubt about the error of a weight's or bias's gradient."""
Work = Callable[[], list[Tensor]]


def step(operator: Operator, inputs: dict[str, Tensor | None], along: Tensor) -> Work:
    """Return forward and backward, as a function that gives the result and all gradients."""
    leaves = [t for t in inputs.values() if t is not None and t.requires_grad]

    def run() -> list[Tensor]:
        result = operator(**inputs)
        return [result.detach(), *torch.autograd.grad(result, leaves, along)]

    return run


def direction(case: Case, inputs: dict[str, Tensor | None], seed: int = 1) -> Tensor:
    """Draw a gradient of the result."""
    with torch.no_grad():
        like = case.ours(**inputs)
    generator = torch.Generator(device=like.device).manual_seed(seed)
    return torch.empty_like(like).normal_(generator=generator)


def check(case: Case, dtype: torch.dtype) -> dict[str, float]:
    """Compare with float64, and two runs with each other; exit if anything is off.

    The gradient of a weight or bias is a sum over all rows of errors that rows share, those of a
    few channels most of all: one draw may show ours larger than plain PyTorch's though in the mean
    it is smaller, or the other way round. Where one draw leaves doubt about one of them, `DRAWS`
    draws decide, and theirs is the ratio that is returned.

    Returns
    -------
    dict
        Our error over that of plain PyTorch in this type, by tensor.
    """
    inputs = case.draw(dtype)
    along = direction(case, inputs)
    for first, second in zip(*(step(case.ours, inputs, along)() for _ in range(2)), strict=True):
        if not torch.equal(first, second):
            raise SystemExit(f"{case.op} {case.name}: a second run gave other bits")
    found, doubtful = errors(case, inputs, along), []
    for name, (error, theirs, size) in found.items():
        summed = name.endswith(("weight", "_bias"))
        # The error of a few numbers is left to chance.
        share = 1.05 if summed or size > 10_000 else 1.3
        if error <= (2e-5 if dtype == torch.float32 else theirs * share):
            continue
        if dtype == torch.float32 or not summed:
            raise _refused(case, name, error, theirs)
        doubtful.append(name)
    ratios = {name: error / max(theirs, 1e-30) for name, (error, theirs, _) in found.items()}
    del inputs, along
    return ratios | (_over_draws(case, dtype, doubtful) if doubtful else {})


def _over_draws(case: Case, dtype: torch.dtype, names: Sequence[str]) -> dict[str, float]:
    """Return our error over plain PyTorch's, both root mean squares over draws; exit above 1."""
    squares = {name: [0.0, 0.0] for name in names}
    for seed in range(0, 2 * DRAWS, 2):
        inputs = case.draw(dtype, seed)
        found = errors(case, inputs, direction(case, inputs, seed + 1))
        for name in names:
            for i in range(2):
                squares[name][i] += found[name][i] ** 2 / DRAWS
    ratios = {}
    for name, (ours, theirs) in squares.items():
        if not ours <= theirs:
            raise _refused(case, f"{name} over {DRAWS} draws", ours**0.5, theirs**0.5)
        ratios[name] = (ours / theirs) ** 0.5
    return ratios


def _refused(case: Case, name: str, error: float, theirs: float) -> SystemExit:
    return SystemExit(
        f"{case.op} {case.name}: the error of {name} is {error:.2e}, plain PyTorch's {theirs:.2e}"
    )


def errors(
    case: Case, inputs: dict[str, Tensor | None], along: Tensor
) -> dict[str, tuple[float, float, int]]:
    """Compare the result and all gradients with those in float64, for which memory may not do.

    16-bit types are then compared with float32, whose errors are a thousandth of theirs.

    Returns
    -------
    dict
        Our error, that of plain PyTorch in this type and the number of elements, by tensor; errors
        are norms over that of the exact tensor, in float32 largest elements.
    """
    if case.few_rows:
        inputs = {
            name: t if t is None or name == "bias" else _few(t, case.few_rows)
            for name, t in inputs.items()
        }
        along = along[:, : case.few_rows]
    try:
        return _errors(case, inputs, along, torch.float64)
    except torch.OutOfMemoryError:
        if along.dtype == torch.float32:
            raise
    torch.cuda.empty_cache()  # behind the handler, which holds what was made
    return _errors(case, inputs, along, torch.float32)


def _errors(
    case: Case, inputs: dict[str, Tensor | None], along: Tensor, exact: torch.dtype
) -> dict[str, tuple[float, float, int]]:
    exactly = {
        name: t.detach().to(exact).requires_grad_() if t is not None and t.requires_grad else t
        for name, t in inputs.items()
    }
    want = step(case.plain, exactly, along.to(exact))()
    ours, plain = (step(f, inputs, along)() for f in (case.ours, case.plain))
    names = ["result", *(name for name, t in inputs.items() if t is not None and t.requires_grad)]
    largest = along.dtype == torch.float32

    def size(tensor: Tensor) -> float:
        return float(tensor.abs().max() if largest else tensor.norm())

    return {
        name: (*(size(t.to(exact) - e) / max(size(e), 1e-30) for t in (got, eager)), e.numel())
        for name, got, eager, e in zip(names, ours, plain, want, strict=True)
    }


def _few(tensor: Tensor, rows: int) -> Tensor:
    few = tensor.detach()[:, :rows].contiguous()
    return few.requires_grad_(tensor.requires_grad)


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


def longest_kernel(function: Callable[[], Any]) -> str:
    """Name the kernel that takes most of the time: a peer that falls back silently shows."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as trace:
        function()
        torch.cuda.synchronize()
    events = [e for e in trace.key_averages() if e.device_type == torch.autograd.DeviceType.CUDA]
    if not events:
        return ""
    return str(max(events, key=lambda e: e.self_device_time_total).key)[:48]


def timed(case: Case, operator: Operator, dtype: torch.dtype) -> dict[str, Any]:
    """Time one implementation and take its peak memory."""
    inputs = case.draw(dtype)
    function = step(operator, inputs, direction(case, inputs))
    function()
    function()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    torch.cuda.synchronize()
    found: dict[str, Any] = {"MiB": round((torch.cuda.max_memory_allocated() - before) / MIB)}
    found["eager ms"] = median_ms(function)
    if operator is not case.ours and operator is not case.plain:
        found["longest kernel"] = longest_kernel(function)
    try:
        found["ms"] = median_ms(captured(function))
    except RuntimeError as error:
        torch.cuda.synchronize()
        found |= {"ms": found["eager ms"], "note": f"not captured: {str(error)[:60]}"}
    return found


def ceilings() -> tuple[float, float]:
    """Measure bytes per second of a copy and operations per second of a bf16 product."""
    source = torch.randn(2**28, device="cuda")
    target = torch.empty_like(source)
    copied = 2 * source.nbytes / median_ms(lambda: target.copy_(source)) * 1e3
    matrix = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    return copied, 2 * 8192**3 / median_ms(lambda: matrix @ matrix) * 1e3


def _beside(case: Case, names: Sequence[str] | None) -> dict[str, Operator]:
    """List our operator and its peers: none, all (no names), or those named."""
    found: dict[str, Operator] = {"bevatron": case.ours}
    if names is None:
        return found
    peers: dict[str, Operator] = {"eager": case.plain}
    if "compile" in names or not names:
        torch.compiler.reset()  # after eight shapes a compiled function would run as written
        peers["compile"] = torch.compile(case.plain, dynamic=False)
    peers |= case.peers
    return found | {name: peer for name, peer in peers.items() if name in names or not names}


def run(
    ops: Sequence[str],
    dtype: torch.dtype,
    peers: Sequence[str] | None,
    wanted: Sequence[str],
    out: Path,
) -> None:
    """Check and time the cases of operators, all usual ones or those named; write the results.

    Cases that are named, or ``other`` for all unusual ones, go into a file of shapes. What was
    measured is written even where a case is refused, which ends the command with an error, or
    somebody interrupts it.
    """
    rates, rows, refused = ceilings(), [], []
    try:
        for op in ops:
            for case in CASES[op]():
                usual = op not in {"pair_attention", "triangle_multiply"} or bool(case.to_reach)
                named = case.name in wanted or (not usual and "other" in wanted)
                if not (named if wanted else usual):
                    continue
                try:
                    rows += measured(case, dtype, peers, rates)
                except SystemExit as refusal:
                    refused.append(str(refusal))
                    rows.append({"op": op, "case": case.name, "note": f"refused: {refusal}"})
                torch.cuda.empty_cache()
    finally:
        named_ops = ops if set(ops) != set(CASES) else ["pair"]
        name = "-".join([*named_ops, *(["shapes"] if wanted else [])])
        report.write_result(
            f"kernels/{name}", rows, _notes(dtype, rates), device="cuda", folder=out
        )
    if refused:
        raise SystemExit("\n".join(refused))


def measured(
    case: Case, dtype: torch.dtype, peers: Sequence[str] | None, rates: tuple[float, float]
) -> list[dict[str, Any]]:
    """Check a case, then time our operator and peers; exit if the check fails."""
    try:
        with kernels.use("triton"):
            ratios = check(case, dtype)
    except torch.OutOfMemoryError:  # what is not checked is not timed
        return [{"op": case.op, "case": case.name, "note": "no memory to check it"}]
    floors = (case.moved * dtype.itemsize / 2 / rates[0], case.operations / rates[1])
    floor, rows = 1e3 * max(*floors, case.exponentials / EXPONENTIALS), []
    for who, operator in _beside(case, peers).items():
        row = {"op": case.op, "case": case.name, "who": who, "ms": 0.0, "eager ms": 0.0}
        row |= {"MiB": 0, "to reach": case.to_reach or "", "floor ms": floor}
        try:
            with kernels.use("triton"):
                row |= timed(case, operator, dtype)
        except torch.OutOfMemoryError:
            row |= {"note": "out of memory"}
        except ModuleNotFoundError as error:
            row |= {"note": f"{error.name} is not installed"}
        if who == "bevatron":
            row["worst error"] = max(ratios.values())
        rows.append(row)
        print(row, flush=True)
        torch.cuda.empty_cache()
    return rows


def _notes(dtype: torch.dtype, rates: tuple[float, float]) -> str:
    return (
        f"{str(dtype).removeprefix('torch.')}, forward and backward with all gradients; checked "
        "against float64 at these shapes (float32 where memory does not do), two runs with equal "
        "bits. ms: CUDA-graph replays, L2 flushed; MiB: peak beyond the inputs; worst error: ours "
        "over that of plain PyTorch in this type (of a weight or bias where one draw gives more "
        f"than 1.05: over {DRAWS} draws). In this run a copy moved "
        f"{rates[0] / 1e12:.2f} TB/s and an 8192^3 bf16 product ran at {rates[1] / 1e12:.0f} "
        "TFLOP/s."
    )
