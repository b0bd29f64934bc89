"""Adds up the operators of a training step of AlphaFold3, each timed alone at its shapes there.

    python -m benchmarks.alphafold3.operators STORE --list calls.json          needs no GPU
    python -m benchmarks.alphafold3.operators --time calls.json [--out rows]
    python -m benchmarks.alphafold3.operators --collect rows

The calls are those of a planned step in which nothing is computed again. Each is timed as on the
operators' own pages: replays of a CUDA graph, L2 flushed, forward and backward, or forward alone
where the step takes no gradient; and once more as one of several in a graph, which has what is in
L2 and no graph's beginning. Sums of gradients, copies, embeddings and the optimiser are of no
operator and not counted. The sum stands beside the GPU time of the step, alphafold3/kernel_time.
"""

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.alphafold3.arms import Crops, built, training_of
from benchmarks.alphafold3.train_step import OURS
from benchmarks.common.arguments import (
    add_after,
    add_crops,
    add_rows,
    read_all,
    script_parser,
    wait_for,
)
from benchmarks.common.arms import Arm, free
from benchmarks.common.report import RESULTS, hardware, versions, write_result
from benchmarks.common.timing import captured, median_ms
from torch import Tensor
from torch.utils._pytree import tree_leaves

from bevatron.data.proteins.complex_batch import collate_complex
from bevatron.kernels import registry
from bevatron.models.alphafold3.task import StepOptions
from bevatron.train.memory_plan import plan_memory

ARM = f"{OURS}, none"
ADAM = "fused_adam_ema"
"""The optimiser, whose arguments are a whole model's."""
IN_A_ROW = 8
Calls = list[dict[str, Any]]


def described(value: Any) -> Any:
    """Describe an argument; of a tensor how it lies, its type and whether it has a gradient."""
    if not isinstance(value, Tensor):
        return [described(one) for one in value] if isinstance(value, tuple | list) else value
    kind = str(value.dtype).removeprefix("torch.")
    laid = {"shape": [*value.shape], "stride": [*value.stride()]}
    return {**laid, "dtype": kind, "grad": value.requires_grad}


def drawn(described: Any, device: str, rows: int = 1) -> Any:
    """Draw an argument; masks are true, and integers, the starts of segments, divide the rows."""
    if isinstance(described, list):
        return [drawn(one, device, rows) for one in described]
    if not isinstance(described, dict):
        return described
    dtype, shape, stride = (
        getattr(torch, described["dtype"]),
        described["shape"],
        described["stride"],
    )
    size = 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
    x = torch.linspace(0, rows, size, device=device)  # masks are true, the first one too
    x = x.normal_(std=0.1) if dtype.is_floating_point else x + (dtype == torch.bool)
    return x.to(dtype).as_strided(shape, stride).requires_grad_(described["grad"])


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count the calls of operators by their arguments, but for those that another one makes."""
    calls, inside, dispatch = Counter[str](), 0, registry.dispatch

    def watched(operator: str, tensor: Tensor) -> Callable[..., Any]:
        run = dispatch(operator, tensor)

        def call(*arguments: Any) -> Any:
            nonlocal inside
            in_backward = torch._C._current_autograd_node() is not None  # noqa: SLF001  no other way
            if not inside and not in_backward and operator != ADAM:
                given = described(arguments)
                grad = torch.is_grad_enabled() and any(
                    isinstance(x, Tensor) and x.requires_grad for x in tree_leaves(arguments)
                )
                calls[json.dumps({"operator": operator, "grad": grad, "arguments": given})] += 1
            inside += 1
            try:
                return run(*arguments)
            finally:
                inside -= 1

        return call

    registry.dispatch = watched
    try:
        yield calls
    finally:
        registry.dispatch = dispatch


def calls_of(given: argparse.Namespace) -> Calls:
    """Plan a step as on a GPU and return the calls of its operators."""
    crops = Crops(given.store, given.tokens, rows=given.rows, different=1)
    model = built(given.preset, torch.device("cpu"))
    run = training_of(Arm(ARM, workers=0), model, crops, StepOptions(copies=given.copies)).run
    run.task.activations = torch.bfloat16
    batch = collate_complex([crops[0]], np.zeros(1, np.int64), [1.0])
    with counted() as calls:
        plan_memory(run, batch, shape=crops.shape)
    return [{"N": given.tokens, **json.loads(call), "calls": n} for call, n in calls.items()]


def ready(call: Mapping[str, Any], device: str) -> Callable[[], Any]:
    """Draw the arguments of a call; return what runs it, backward too if the step does."""
    first = next(one for one in call["arguments"] if isinstance(one, dict))
    arguments = drawn(call["arguments"], device, first["shape"][0])
    wanted = [x for x in tree_leaves(arguments) if isinstance(x, Tensor) and x.requires_grad]
    operator = registry.dispatch(call["operator"], arguments[call["arguments"].index(first)])
    cotangents: list[Tensor] = []

    def run() -> Any:
        with torch.set_grad_enabled(call["grad"]):
            results = [x for x in tree_leaves(operator(*arguments)) if isinstance(x, Tensor)]
        if not call["grad"]:
            return results
        results = [x for x in results if x.requires_grad]
        if not cotangents:
            cotangents.extend(torch.randn_like(x) for x in results)
        return torch.autograd.grad(results, wanted, cotangents, allow_unused=True)

    return run


def timed(call: Mapping[str, Any], device: str) -> dict[str, float]:
    """Time a call in ms: alone, and as one of several."""
    run = ready(call, device)
    if device == "cpu":
        began = time.perf_counter()
        run()
        return dict.fromkeys(("ms", "ms, in a row"), 1e3 * (time.perf_counter() - began))
    alone = median_ms(captured(run), 7, flush=True)
    several = captured(lambda: [run() for _ in range(IN_A_ROW)], rehearsals=0)
    found = {"ms": alone, "ms, in a row": median_ms(several, 3) / IN_A_ROW}
    del several
    free()
    return found


def measure(given: argparse.Namespace) -> None:
    """Time all calls and keep the rows."""
    calls: Calls = json.loads(given.time.read_text())
    for call in calls:
        ready(call, given.device)()
    free()
    print("operators: ready", flush=True)
    wait_for(given.after)
    kept = {"hardware": hardware(given.device), "versions": versions()}
    given.out.mkdir(parents=True, exist_ok=True)
    found = [call | timed(call, given.device) for call in calls]
    (given.out / "operators.json").write_text(json.dumps({**kept, "calls": found}))
    whole = sum(call["ms"] * call["calls"] for call in found)
    print(f"operators: measured, {whole:.4g} ms", flush=True)


def collect(folder: Path, results: Path, note: str) -> None:
    """Add the calls up by operator and write the result beside the step's GPU time."""
    (found,) = read_all(folder, "operators.json")
    step = json.loads((RESULTS / "alphafold3/kernel_time.json").read_text())
    rows: dict[str, dict[str, Any]] = {}
    for call in found["calls"]:
        passes = "forward and backward" if call["grad"] else "forward"
        for operator in (call["operator"], "all"):
            key = f"{operator}, {passes}" if operator != "all" else "all"
            of = {"N": call["N"], "operator": operator, "passes": passes}
            row = rows.setdefault(key, of | dict.fromkeys(("calls", "ms", "ms, in a row"), 0))
            row["calls"] += call["calls"]
            for name in ("ms", "ms, in a row"):
                row[name] += call["calls"] * call[name]
    whole = rows.pop("all") | {"passes": ""}
    (busy,) = (
        row["ms"]
        for row in step["rows"]
        if (row["N"], row["arm"], row["kernels"]) == (whole["N"], ARM, "all")
    )
    for name in ("ms", "ms, in a row"):
        whole[f"GPU time of a step / {name}"] = busy / whole[name]
    table = [whole, *sorted(rows.values(), key=lambda row: -row["ms"])]
    device = "cpu" if found["hardware"].startswith("cpu") else "cuda"
    write_result(
        "alphafold3/operators", table, f"{NOTES} {note}".strip(),
        device=device, folder=results, measured_on=found, extra={"calls": found["calls"]},
    )  # fmt: skip


NOTES = (
    f"Calls of our operators in a step ({ARM}), planned, times the time of each alone at the "
    "shapes of the step, in bfloat16 where the step is. ms: replays of a CUDA graph of one call, "
    f"L2 flushed, as on the operators' pages; in a row: of {IN_A_ROW} calls in a graph, not "
    "flushed. GPU time of a step: alphafold3/kernel_time; it also has what no operator does: sums "
    "of gradients, copies, embeddings, losses, the optimiser."
)


def main() -> None:
    """List the calls of a step, time them, or write the result."""
    parser = script_parser(__doc__)
    add_crops(parser)
    parser.add_argument("--list", type=Path, metavar="FILE", help="write the calls of a step")
    parser.add_argument("--time", type=Path, metavar="FILE", help="time the calls in it")
    add_after(parser)
    parser.add_argument("--tokens", type=int, default=384)
    add_rows(parser, "alphafold3-operators-rows")
    given = parser.parse_args()
    if given.collect:
        collect(given.collect, given.results, given.note)
    elif given.list:
        given.list.write_text(json.dumps(calls_of(given)))
    else:
        measure(given)


if __name__ == "__main__":
    main()
