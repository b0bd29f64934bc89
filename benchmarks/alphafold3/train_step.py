"""Times whole training steps of AlphaFold3 on one GPU, the loader included, beside plain PyTorch.

    python -m benchmarks.alphafold3.train_step STORE [--lengths 128 256] [--arms ...] [--out rows]
    python -m benchmarks.alphafold3.train_step --collect rows

Arms: our kernels, captured as CUDA graphs or launched one by one; the same model in eager PyTorch;
and every block of that through torch.compile, static shapes. After a comma, what the backward pass
computes again, and which of our operators is left to PyTorch. At every length all arms take steps
on the same crops with the same noise; loss and norm of the gradient of the first step are compared
with those of eager PyTorch. The order of the arms changes from length to length. Steps of the
lengths ``--traced`` are also divided by kernel. Compilation and capture take a minute: with
``--after FILE`` a call gets ready beside others, and measures once this file exists.
"""

import argparse
import json
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.alphafold3.arms import (
    Crops,
    built,
    compiled_blocks,
    peak_gib,
    state_bytes,
    training_of,
)
from benchmarks.alphafold3.kernel_time import rows_of
from benchmarks.common.arguments import (
    add_after,
    add_crops,
    add_rows,
    read_all,
    script_parser,
    wait_for,
)
from benchmarks.common.arms import GIB, OUT_OF_MEMORY, Arm, Training, free, or_out_of_memory
from benchmarks.common.report import hardware, versions, write_result
from benchmarks.common.timing import memory_with_graphs
from benchmarks.common.trace import profiled

from bevatron.models.alphafold3.model import AlphaFold3
from bevatron.models.alphafold3.task import StepOptions
from bevatron.models.common.folding.checkpointing import Kind

LONGEST: tuple[Kind, ...] = ("all", "segments")
"""Policies of crops of which one fills a GPU."""
OURS, EAGER, COMPILED = "bevatron, captured", "eager", "torch.compile"
ARMS = {
    arm.name: arm
    for arm in (
        *(Arm(f"{OURS}, {policy}", policy=policy) for policy in ("none", "pair", "all")),
        *(Arm(f"bevatron, launched, {kind}", policy=kind, captured=False) for kind in LONGEST),
        Arm(f"{EAGER}, all", "reference", "all", captured=False),
        Arm(f"{COMPILED}, all", "reference", "all", captured=False, compiled=True),
    )
}
GROUPS = {
    "attention": ("pair_attention", "window_attention"),
    "norms and what follows them": ("layer_norm", "add_norm", "layer_norm_linear", "qkvg"),
    "transitions": ("transition", "conditioned_transition", "swiglu"),
    "triangle multiplication": ("triangle_multiply",),
    "outer product mean": ("outer_product_mean",),
    "residual updates": ("add_dropped",),
    "smooth lDDT": ("smooth_lddt",),
    "pair-weighted averaging": ("pair_weighted_averaging",),
    "sums over atoms": ("segment_sum",),
}
"""Fused operators; the paper fuses those of the first three groups, in this order."""
RUNGS = {
    title: sum(list(GROUPS.values())[count:], ())
    for count, title in (
        (1, "fused attention alone"),
        (2, "fused attention and norms"),
        (3, "fused attention, norms and transitions"),
    )
}
"""The paper's ladder: what is left to PyTorch on each rung."""
LADDER = {
    arm.name: arm
    for arm in (
        *(
            Arm(f"{OURS}, all, {title} of PyTorch", policy="all", plain=plain)
            for title, plain in GROUPS.items()
        ),
        *(
            Arm(f"{OURS}, all, {title}", policy="all", plain=plain)
            for title, plain in RUNGS.items()
        ),
    )
}
"""What fused operators bring: a step without one group of them, and with the first groups alone."""
IN_THE_STEP = ", samples made in the step"
IN_STEP = {
    arm.name: arm
    for arm in (
        Arm(f"{OURS}, all{IN_THE_STEP}", policy="all", workers=0),
        Arm(f"{EAGER}, all{IN_THE_STEP}", "reference", "all", False, workers=0),
    )
}
"""The same steps without the loader's workers."""
PROTENIX = {
    "Protenix": ("torch", "torch", "torch"),
    "Protenix, its own attention": ("torch", "triattention", "torch"),
    "Protenix, cuEquivariance": ("cuequivariance", "cuequivariance", "torch"),
    "Protenix, cuEquivariance, its own layer norm": (
        *("cuequivariance", "cuequivariance", "fast_layernorm"),
    ),
}
"""What multiplies and attends in its triangles, and its layer norm: `alphafold3.protenix`."""


def measured(
    arm: Arm, model: AlphaFold3, crops: Crops, options: StepOptions, given: argparse.Namespace
) -> dict[str, Any]:
    """Time an arm at one length, after first steps that compile and capture."""
    on_gpu = next(model.parameters()).is_cuda
    row: dict[str, Any] = {"N": crops.tokens, "atoms": crops.shape["atoms"], "arm": arm.name}
    trained: list[Training] = []

    def measure() -> bool:
        began = time.perf_counter()
        workers = given.workers if arm.workers is None else arm.workers
        training = training_of(
            replace(arm, workers=workers), model, crops, options, cycles=given.cycles
        )
        trained.append(training)
        first = training.steps([0])
        row["loss"], row["gradient norm"] = first.results[0].loss, first.results[0].grad_norm
        if arm.captured or arm.compiled:
            training.steps([0, 1])  # a shape is launched the first time and captured the second
        row["ready s"] = time.perf_counter() - began
        if on_gpu:
            row["peak GiB"] = peak_gib(model)
            if arm.captured:
                held = memory_with_graphs(torch.cuda.memory_allocated())
                row["held by graphs GiB"] = (held - state_bytes(model)) / GIB
        print(f"{arm.name}, N = {crops.tokens}: ready", flush=True)
        wait_for(given.after)
        # A captured step is read when the next is launched: the first of a loader tells nothing.
        lead = int(arm.captured)
        steps = training.steps(range(lead + given.steps), given.seconds) if given.steps else first
        seconds, waited = steps.seconds[lead:], steps.waited[lead:]
        if not lead:
            seconds[0], waited[0] = seconds[0] - waited[0], 0.0  # its workers began meanwhile
        row["steps"], row["s/step"] = len(seconds), float(np.mean(seconds))
        row["median s"], row["deviation s"] = float(np.median(seconds)), float(np.std(seconds))
        row["each s"] = [round(one, 4) for one in seconds]
        row["waited %"] = 100 * sum(waited) / sum(seconds)
        traced = on_gpu and crops.tokens in given.traced
        trace = profiled(lambda: training.steps([0]), 1) if traced else None
        print(f"{arm.name}, N = {crops.tokens}: measured", flush=True)
        if trace is not None:
            row["kernels"] = rows_of(trace)
        return True

    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    with compiled_blocks(model) if arm.compiled else nullcontext():
        if or_out_of_memory(measure) is None:
            row["s/step"] = OUT_OF_MEMORY
    for training in trained:
        training.release()
    free()
    return row


def compared(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sort the rows and add, at each length, what sets arms beside each other.

    How far loss and gradient are from those of eager PyTorch, how many times faster it is than
    that with samples made likewise, time over that of our fastest arm, memory over that of ours
    with the same policy.
    """
    order = [*ARMS, *IN_STEP, *PROTENIX, *LADDER]
    rows = sorted(rows, key=lambda row: (row["N"], order.index(row["arm"])))
    for row in rows:
        here = [other for other in rows if other["N"] == row["N"]]
        of = {other["arm"]: other for other in here}
        eager, same = of.get(f"{EAGER}, all", {}), of.get(f"{OURS}, all", {})
        for name, key in (("loss off by", "loss"), ("gradient off by", "gradient norm")):
            if key in row and key in eager and row is not eager and row["arm"] not in PROTENIX:
                row[name] = abs(row[key] - eager[key]) / abs(eager[key])
        likewise = of.get(f"{EAGER}, all{IN_THE_STEP if IN_THE_STEP in row['arm'] else ''}", {})
        if "steps" in row and "steps" in likewise:
            row["x faster than eager"] = likewise["s/step"] / row["s/step"]
        timed = [r["s/step"] for r in here if r["arm"].startswith(OURS) and "steps" in r]
        if timed and "steps" in row:
            row["x our best"] = row["s/step"] / min(timed)
        if "peak GiB" in row and "peak GiB" in same:
            row["x our memory, all"] = row["peak GiB"] / same["peak GiB"]
    return rows


def main() -> None:
    """Measure every length and keep the rows of each, or join the rows of all calls."""
    parser = script_parser(__doc__)
    add_crops(parser)
    parser.add_argument("--lengths", nargs="*", type=int, default=[128, 256, 384, 512, 640, 768])
    parser.add_argument("--arms", nargs="*", choices=[*ARMS, *LADDER, *IN_STEP], default=[*ARMS])
    parser.add_argument("--steps", type=int, default=100, help="at most; 0: the first")
    parser.add_argument("--seconds", type=float, default=60.0, help="after which none begins")
    parser.add_argument("--traced", nargs="*", type=int, default=[384], help="lengths")
    add_after(parser)
    parser.add_argument("--cycles", type=int, default=1)
    parser.add_argument("--workers", type=int, help="those given start before any step is timed")
    add_rows(parser, "alphafold3-rows")
    given = parser.parse_args()
    collect(given.collect, given.results, given.note) if given.collect else measure_all(given)


def measure_all(given: argparse.Namespace) -> None:
    """Measure the arms at all lengths."""
    model = built(given.preset, torch.device(given.device))
    options = StepOptions(copies=given.copies)
    measured_on = {"hardware": hardware(given.device), "versions": versions()}
    given.out.mkdir(parents=True, exist_ok=True)
    for place, length in enumerate(given.lengths):
        crops = Crops(given.store, length, rows=given.rows)
        arms = [(ARMS | LADDER | IN_STEP)[name] for name in given.arms]
        for arm in arms if place % 2 == 0 else arms[::-1]:
            row = measured(arm, model, crops, options, given)
            print(row, flush=True)
            found = {"measured on": measured_on, "notes": notes(given), "row": row}
            name = "-".join([str(length), *arm.name.replace(",", "").split()])
            (given.out / f"step-{name}.json").write_text(json.dumps(found))


def collect(folder: Path, results: Path, note: str = "") -> None:
    """Join the rows and write the result, and that of the kernels of traced steps."""
    found = read_all(folder, "step-*.json")
    first = found[0]
    rows = [one["row"] for one in found]
    kernels = {(row["N"], row["arm"]): row.pop("kernels", []) for row in rows}
    each = {f"{row['arm']}, N = {row['N']}": row.pop("each s", []) for row in rows}
    device = "cpu" if first["measured on"]["hardware"].startswith("cpu") else "cuda"

    def write(name: str, rows: list[dict[str, Any]], notes: str, **extra: Any) -> None:
        measured_on = first["measured on"]
        write_result(
            name, rows, notes, device=device, folder=results, measured_on=measured_on, extra=extra
        )

    write("alphafold3/train_step", compared(rows), f"{first['notes']} {note}".strip(), seconds=each)
    traced = [{"N": N, "arm": arm, **one} for (N, arm), of in kernels.items() for one in of]
    if traced:
        traced.sort(key=lambda row: (row["N"], [*ARMS, *IN_STEP, *LADDER].index(row["arm"])))
        write("alphafold3/kernel_time", traced, KERNEL_NOTES)


KERNEL_NOTES = (
    "One traced step of each arm after others; ms of `all`: union of the intervals in which the "
    "device works, which tracing makes longer. The steps are those of alphafold3/train_step."
)


def notes(given: argparse.Namespace) -> str:
    """Say what was trained, and how it was timed."""
    return (
        f"One complex in crops of N tokens and {given.rows} rows of its alignment, batch 1, preset "
        f"{given.preset}, {given.copies} noisy copies, rollout of 20 steps and confidence head in "
        f"every step, passes through the trunk: {given.cycles}, activations in bfloat16, clipping, "
        "Adam and averaged weights. s/step: mean of `steps` whole steps after those that get "
        "ready, samples made by the loader's workers meanwhile; ready s: until steps can be timed,"
        " with compilation and capture, beside other processes that get ready. all, "
        "pair, none: what the backward pass computes again. peak GiB: most that was allocated, "
        "less weights, gradients, moments and averaged weights; held by graphs: what captured "
        "steps reserve. Captured and compiled steps pad to the shape given, others do not. Crops "
        "of one length have one shape; in training another shape is captured anew."
    )


if __name__ == "__main__":
    main()
