"""GPU time of a training step of AlphaFold3 by class of kernel, ours beside eager PyTorch.

    python -m benchmarks.alphafold3.kernel_time STORE [--length 384]

One step of each arm is traced after others. Kernels are told apart by their names.
"""

import argparse
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from benchmarks.alphafold3.arms import Crops, built, training_of
from benchmarks.alphafold3.train_step import ARMS
from benchmarks.common.arguments import add_out
from benchmarks.common.report import write_result
from benchmarks.common.trace import KernelRow, by_kernel, profiled, summary

from bevatron.models.alphafold3.task import StepOptions

CLASSES = {
    "matrix products of libraries": r"nvjet|gemm|cutlass|cublas|splitKreduce|gemv",
    "copies, casts, concatenation": r"copy|Memcpy|Memset|CatArray|FillFunctor|transpose",
    "optimiser": r"adam|multi_tensor|lerp",
    "softmax and norms": r"softmax|layer_norm|LayerNorm|GammaBeta",
    "sums": r"reduce_kernel|scan|sort|Sort|cub::",
    "gather and scatter": r"index|gather|scatter|unfold",
    "elementwise": r"elementwise",
}
"""Name of a class -> names of its kernels; the first that fits."""
OURS = "fused kernels"
NAMED_BY_US = re.compile(r"\w+_kernel|_adam|kernel")


def class_of(kernel: str) -> str:
    """Return the class of a kernel by its name: Triton's have the bare name of a function."""
    if kernel != "_adam" and NAMED_BY_US.fullmatch(kernel):
        return OURS
    found = (name for name, names in CLASSES.items() if re.search(names, kernel))
    return next(found, "other")


def by_class(kernels: list[KernelRow]) -> dict[str, tuple[float, float]]:
    """Add up ms and launches of every class, the longest first."""
    spent: Counter[str] = Counter()
    count: Counter[str] = Counter()
    for row in kernels:
        name = class_of(str(row["kernel"]))
        spent[name] += float(row["ms"])  # type: ignore[assignment]
        count[name] += float(row["launches"])  # type: ignore[assignment]
    return {name: (ms, count[name]) for name, ms in spent.most_common()}


def traced(name: str, given: argparse.Namespace, model: Any, crops: Crops) -> list[dict[str, Any]]:
    """Trace a step of an arm."""
    options = StepOptions(copies=given.copies)
    training = training_of(replace(ARMS[name], workers=given.workers), model, crops, options)
    training.steps(range(2))
    if next(model.parameters()).is_cuda:
        profiler = profiled(lambda: training.steps([2]), 1)
        whole, kernels = summary(profiler, 1), by_kernel(profiler, 1)
    else:
        whole, kernels = {"busy ms": 0.0, "kernels": 0.0}, []
    training.release()
    rows = [
        {"arm": name, "kernels": kind, "ms": ms, "launches": count}
        for kind, (ms, count) in by_class(kernels).items()
    ]
    total = {"ms": whole["busy ms"], "launches": whole["kernels"]}
    return [{"arm": name, "kernels": "all", **total}, *rows]


def main() -> None:
    """Trace both arms and write the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("store", type=Path, help="of complexes; the largest is cropped")
    parser.add_argument("--length", type=int, default=384)
    parser.add_argument("--arms", nargs="*", default=["bevatron, captured, all", "eager, all"])
    parser.add_argument("--rows", type=int, default=1024, help="of the alignment")
    parser.add_argument("--copies", type=int, default=48)
    parser.add_argument("--workers", type=int)
    parser.add_argument("--preset", default="alphafold3")
    parser.add_argument("--device", default="cuda")
    add_out(parser)
    given = parser.parse_args()
    model = built(given.preset, torch.device(given.device))
    crops = Crops(given.store, given.length, rows=given.rows)
    rows = [row for name in given.arms for row in traced(name, given, model, crops)]
    notes = (
        f"N = {given.length}, {given.rows} rows, {given.copies} copies, one pass, rollout and "
        "confidences, bfloat16; ms of `all`: union of the device's intervals in one traced step."
    )
    write_result("alphafold3/kernel_time", rows, notes, device=given.device, folder=given.out)


if __name__ == "__main__":
    main()
