"""Operators on rows at many sizes, beside plain and compiled PyTorch, with memory.

    python -m benchmarks.kernels.run --op transition layer_norm

Rows are those of a pair of N tokens, whole or as one of 2, 4 or 8 devices holds them (axial
sharding), and of several widths; of types other than bfloat16 those of N = 384 and one width. Every
case is checked as by `kernels.py`, the largest on its first rows. All is compiled, checked and
recorded before the first time is taken.
"""

import argparse
import gc
import time
from collections.abc import Callable, Iterator
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import torch
from benchmarks.common import report
from benchmarks.kernels import peers_pair as peers
from benchmarks.kernels import run_pair as pair_timing
from benchmarks.kernels.cases_pair import Case, Shape
from torch import Tensor

from bevatron import kernels

PAIRS = {
    **{f"N {N}": N * N for N in (64, 128, 256, 384)},
    **{f"N 384, 1 of {parts}": 384 * 384 // parts for parts in (2, 4, 8)},
    **{f"N {N}": N * N for N in (1024, 2048)},
}
"""Rows of a pair of 128 channels."""
WIDE_ROWS = 32768
CHECKED_ROWS = 2**16
"""The check's float64 tensors must fit beside all else."""


def plain_swiglu(gate: Tensor, value: Tensor) -> Tensor:
    return torch.nn.functional.silu(gate) * value


def norm(rows: int, width: int) -> tuple[dict[str, Shape], float, float]:
    shapes: dict[str, Shape] = {"x": (rows, width), "weight": (width,), "bias": (width,)}
    return shapes, 10 * rows * width, 0.0


def gated(rows: int, width: int) -> tuple[dict[str, Shape], float, float]:
    shapes: dict[str, Shape] = {"gate": (rows, width), "value": (rows, width)}
    return shapes, 16 * rows * width, 0.0


def norm_linear(rows: int, width: int) -> tuple[dict[str, Shape], float, float]:
    shapes: dict[str, Shape] = {"x": (rows, width), "norm_weight": (width,)}
    shapes |= {"norm_bias": (width,), "weight": (4 * width, width)}
    return shapes, 2 * rows * 11 * width, 24 * rows * width * width


def transition(rows: int, width: int) -> tuple[dict[str, Shape], float, float]:
    hidden = 4 * width
    shapes: dict[str, Shape] = {"x": (rows, width), "norm_weight": (width,), "norm_bias": (width,)}
    shapes |= {"up_weight": (hidden, width), "down_weight": (width, hidden)}
    shapes |= {"gate_weight": (hidden, width)}
    return shapes, 10 * rows * width, 18 * rows * width * hidden


def conditioned(rows: int, width: int) -> tuple[dict[str, Shape], float, float]:
    D, H = width // 2, 2 * width
    shapes: dict[str, Shape] = {"x": (rows, width), "s": (rows, D), "norm_weight": (D,)}
    shapes |= {"scale_weight": (width, D), "scale_bias": (width,), "shift_weight": (width, D)}
    shapes |= {"gate_weight": (H, width), "up_weight": (H, width), "down_weight": (width, H)}
    shapes |= {"out_weight": (width, D), "out_bias": (width,)}
    work = 6 * rows * (3 * width * D + 3 * width * H)
    return shapes, 2 * rows * (5 * width + 3 * D), work


Shaper = Callable[[int, int], tuple[dict[str, Shape], float, float]]
OPERATORS: dict[str, tuple[Shaper, Any, Any, int, tuple[int, ...]]] = {
    "layer_norm": (norm, kernels.layer_norm, peers.layer_norm, 128, (8, 64, 384, 1024, 2048)),
    "swiglu": (gated, kernels.swiglu, plain_swiglu, 512, (1024, 2048)),
    "layer_norm_linear": (
        *(norm_linear, kernels.layer_norm_linear, peers.layer_norm_linear),
        *(128, (64, 256, 384)),
    ),
    "transition": (transition, kernels.transition, peers.transition, 128, (64, 256, 384)),
}
"""Shapes and work, our operator, plain PyTorch, channels of a pair's rows, other widths."""


def cases(op: str) -> Iterator[Case]:
    """Yield the sizes of an operator."""
    if op == "conditioned_transition":
        sizes = [(f"48 x {N}", 48 * N, 768) for N in (64, 256, 384, 768)]
        sizes += [(f"48 x 384, 1 of {parts}", 48 * 384 // parts, 768) for parts in (2, 4, 8)]
        shaper, functions = (
            conditioned,
            (kernels.conditioned_transition, peers.conditioned_transition),
        )
    else:
        shaper, ours, plain, width, widths = OPERATORS[op]
        functions = (ours, plain)
        sizes = [(f"{name}, {width} wide", rows, width) for name, rows in PAIRS.items()]
        sizes += [(f"{WIDE_ROWS} rows, {width} wide", WIDE_ROWS, width) for width in widths]
    for name, rows, width in sizes:
        shapes, moved, operations = shaper(rows, width)
        yield Case(op, name, shapes, *functions, moved, operations)


def few(case: Case) -> Case:
    """Cut a case to as many rows as the check takes."""
    rows = max(shape[0] for shape in case.shapes.values())
    most = min(rows, CHECKED_ROWS)
    shapes = {
        name: (most, *shape[1:]) if shape[0] == rows else shape
        for name, shape in case.shapes.items()
    }
    return Case(case.op, case.name, shapes, case.ours, case.plain)


def prepare(case: Case, dtype: torch.dtype) -> Iterator[tuple[dict[str, Any], Callable[[], Any]]]:
    """Check a case; yield a row of the table and what is to be timed, for each implementation."""
    with kernels.use("triton"):
        worst = max(pair_timing.check(few(case), dtype).values())
    inputs = case.draw(dtype)
    along = pair_timing.direction(case, inputs)
    # Of one function torch compiles eight shapes only, and then runs it plain without an error.
    torch.compiler.reset()
    compiled = torch.compile(case.plain, dynamic=False)
    for who, operator in (("bevatron", case.ours), ("eager", case.plain), ("compile", compiled)):
        row: dict[str, Any] = {"op": case.op, "case": case.name, "type": named(dtype), "who": who}
        with kernels.use("triton"):
            function = pair_timing.step(operator, inputs, along)
            function()
            function()
            row |= {"MiB": peak(function), "kept MiB": kept(operator, inputs)}
            recorded = pair_timing.captured(function)
        if who == "bevatron":
            row["worst error"] = worst
        replay = partial(replayed, recorded, function)
        # Held by nobody here: what is recorded of large cases takes much of the memory.
        del recorded, function
        yield row, replay
        del replay


def named(dtype: torch.dtype) -> str:
    """Return the name of a type."""
    return str(dtype).removeprefix("torch.")


def wanted(case: Case, dtype: torch.dtype) -> bool:
    """Say whether a case is measured in a type."""
    return dtype == torch.bfloat16 or case.name.startswith(("N 384,", "48 x 384"))


def replayed(replay: Callable[[], Any], _function: Callable[[], Any]) -> None:
    """Replay what was captured of a function, whose inputs must live as long."""
    replay()


def peak(function: Callable[[], Any]) -> int:
    """Return the MiB that a call takes beyond the inputs."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    torch.cuda.synchronize()
    return round((torch.cuda.max_memory_allocated() - before) / pair_timing.MIB)


def kept(operator: Callable[..., Tensor], inputs: dict[str, Any]) -> float:
    """Return the MiB that lie between the passes, beyond the inputs and the result."""
    before = torch.cuda.memory_allocated()
    result = operator(**inputs)
    held = torch.cuda.memory_allocated() - before - result.nbytes
    return round(held / pair_timing.MIB, 1)


def main() -> None:
    """Prepare all, then time all, then write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    known = [*OPERATORS, "conditioned_transition"]
    parser.add_argument("--op", nargs="+", choices=known, default=known)
    types = ["bfloat16", "float16", "float32"]
    parser.add_argument("--dtype", nargs="+", choices=types, default=types[:1])
    parser.add_argument("--out", type=Path, default=report.RESULTS, help="folder for the results")
    parser.add_argument(
        "--after",
        type=Path,
        help="take times when this file is there; X.ready says that all is prepared",
    )
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    prepared, large = [], []
    for dtype in (getattr(torch, name) for name in options.dtype):
        for case in (case for op in options.op for case in cases(op) if wanted(case, dtype)):
            if max(shape[0] for shape in case.shapes.values()) > 2**19:
                large.append((case, dtype))
                continue
            prepared += [(case, *both) for both in prepare(case, dtype)]
    if options.after is not None:
        options.after.with_suffix(".ready").touch()
        while not options.after.exists():
            time.sleep(0.05)
    copy_rate, matrix_rate = pair_timing.ceilings()

    def take(case: Case, row: dict[str, Any], replay: Callable[[], Any]) -> None:
        size = getattr(torch, row["type"]).itemsize / 2
        floors = (case.moved * size / copy_rate, case.operations / matrix_rate)
        row |= {"ms": pair_timing.median_ms(replay), "floor ms": 1e3 * max(floors)}
        rows.append(row)
        print(row, flush=True)

    for case, row, replay in prepared:
        take(case, row, replay)
    prepared.clear()
    for case, dtype in large:
        try:
            for row, replay in prepare(case, dtype):
                take(case, row, replay)
                del replay
        except torch.cuda.OutOfMemoryError:
            print(f"{case.op} {case.name}: no memory for what is not in the table", flush=True)
        torch.cuda.empty_cache()
    notes = (
        "Forward and backward with all gradients, checked against float64; CUDA-graph "
        "replays, L2 flushed; MiB: peak beyond the inputs; kept: between the passes, without "
        "the result. In this run a copy moved "
        f"{copy_rate / 1e12:.2f} TB/s and an 8192^3 bf16 product ran at "
        f"{matrix_rate / 1e12:.0f} TFLOP/s (the floor of products, "
        "also of float32)."
    )
    name = "-".join(["rows", *options.op])
    report.write_result(f"kernels/{name}", beside(rows), notes, device="cuda", folder=options.out)


def beside(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Put the implementations of a case into one row."""
    found: dict[tuple[str, ...], dict[str, Any]] = {}
    for row in rows:
        key = {name: row[name] for name in ("op", "case", "type")}
        one = found.setdefault(tuple(key.values()), key)
        one |= {f"{row['who']} {what}": row[what] for what in ("ms", "MiB", "kept MiB")}
        one |= {k: row[k] for k in ("floor ms", "worst error") if k in row}
    for one in found.values():
        peers_ms = [one[f"{who} ms"] for who in ("eager", "compile") if f"{who} ms" in one]
        one["faster"] = "bevatron" if one["bevatron ms"] <= min(peers_ms, default=inf) else "peer"
    return list(found.values())


if __name__ == "__main__":
    main()
