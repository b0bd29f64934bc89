"""Compares the planned peak memory of training steps with that of torch's allocator on a GPU.

    python -m benchmarks.train.memory_plan DATA plan planned.json        # anywhere, without a GPU
    python -m benchmarks.train.memory_plan DATA measure measured.json    # on a GPU
    python -m benchmarks.train.memory_plan DATA compare planned.json measured.json

DATA holds stores named complexes, chains, molecules and structures, and components.cif.gz. Steps of
all systems allocate what they do in training, captured as CUDA graphs or launched, but no Triton
kernel is compiled: what a kernel writes is not looked at.
"""

import argparse
import dataclasses
import gc
import json
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.common.arguments import add_out
from benchmarks.common.report import hardware, versions, write_result
from benchmarks.common.timing import memory_with_graphs

from bevatron.data.padding import BatchShape, pad
from bevatron.data.padding.size_buckets import SizeBuckets, choose_shapes
from bevatron.errors import DivergenceError
from bevatron.kernels.shared.triton_compile import nothing_launched
from bevatron.parallel.mesh import Mesh
from bevatron.recipes import recipe
from bevatron.task import Numbered, StepNumbers
from bevatron.train.capture.step import CapturedStep
from bevatron.train.loop import begin_state
from bevatron.train.memory_plan import plan_memory
from bevatron.train.run import Run, example_batch
from bevatron.train.step import train_step

MIB = 2**20
Built = tuple[Run, Any, BatchShape | None]


def built(name: str, values: dict[str, Any], folder: Path) -> Run:
    cls, build = recipe(name)
    given = {"output": str(folder / f".run-{name}"), "report": False, **values}
    run: Run = build(cls.from_values(given))
    return run


def repeated(run: Run, count: int) -> Any:
    """Collate so many samples, each as often as it takes."""
    indices = np.arange(count) % len(run.train)
    return run.task.collate([run.train[int(i)] for i in indices], indices, [1.0] * count)


def mace(folder: Path) -> Built:
    """Build a batch of small molecules for the default model."""
    data = {"train": [str(folder / "structures")], "valid_size": 0.2}
    run = built("mace", {"data": data, "batch": {"capacity": 100}}, folder)
    return covered(run, repeated(run, 400))


def gpspp(folder: Path) -> Built:
    """Build a batch of molecules for the published model."""
    data = {"train": [str(folder / "molecules")], "split": "random", "valid_size": 6}
    values = {"data": data, "precision": "bfloat16", "molecules": 5}
    run = built("gpspp", values, folder)
    return covered(run, repeated(run, 900))


def covered(run: Run, batch: Any) -> Built:
    """Choose the shape for a batch."""
    sizes = np.array([batch.padding.size_of(batch.sizes)])
    return run, batch, choose_shapes(batch.padding, sizes).shapes[0]


def graph(folder: Path) -> Built:
    """Draw a graph of 100,000 nodes and a million edges."""
    random, path = np.random.default_rng(0), folder / "graph.npz"
    nodes, edges = 100_000, 1_000_000
    pairs = np.unique(random.integers(nodes, size=(edges, 2)), axis=0).T
    masks = {name: np.arange(nodes) % 3 == i for i, name in enumerate(("train", "val", "test"))}
    np.savez(
        path,
        edge_index=pairs,
        x=random.standard_normal((nodes, 128)).astype(np.float32),
        y=random.integers(10, size=nodes),
        **{f"{name}_mask": mask for name, mask in masks.items()},
    )
    run = built("graph", {"data": {"train": [str(path)]}}, folder)
    return run, example_batch(run), None


def alphafold2(kind: Any, sizes: dict[str, int]) -> Callable[[Path], Built]:
    """Pad a small chain to the crop of a published stage, with a policy of checkpointing."""

    def build(folder: Path) -> Built:
        values = {
            "data": {"train": [str(folder / "chains")]},
            "precision": "bfloat16",
            "model": {"checkpointing": {"kind": kind}},
        }
        return enlarged(built("alphafold2", values, folder), sizes)

    return build


def alphafold3(kind: Any, tokens: int) -> Callable[[Path], Built]:
    """Pad a small complex to a crop, with a policy of checkpointing."""

    def build(folder: Path) -> Built:
        data = {
            "train": [str(folder / "complexes")],
            "components": str(folder / "components.cif.gz"),
        }
        policy = {"checkpointing": {"kind": kind}}
        values = {
            "data": data,
            "precision": "bfloat16",
            "model": {**policy, "diffusion": policy},
            "stages": {"initial": {"crop": tokens}},
        }
        run = built("alphafold3", values, folder)
        return enlarged(run, {"tokens": tokens, "atoms": 6 * tokens, "rows": 1024})

    return build


def enlarged(run: Run, wanted: dict[str, int]) -> Built:
    batch = example_batch(run)
    rule = batch.padding
    sizes = [wanted.get(name, batch.sizes[name]) for name in rule.names]
    return run, batch, rule.rounded(sizes)


CASES: dict[str, Callable[[Path], Built]] = {
    "MACE, default": mace,
    "GPS++": gpspp,
    "graph attention": graph,
    **{
        f"AlphaFold2, {sizes['tokens']} residues, {kind}": alphafold2(kind, sizes)
        for sizes, kinds in (
            ({"tokens": 256, "rows": 124, "extra_rows": 1024}, ("all", "pair", "none")),
            ({"tokens": 384, "rows": 508, "extra_rows": 5120}, ("all",)),
        )
        for kind in kinds
    },
    **{
        f"AlphaFold3, 384 tokens, {kind}": alphafold3(kind, 384) for kind in ("all", "none", "pair")
    },
}
LAUNCHED = ("AlphaFold3", ("none", "pair"))
"""Cases that are not captured, which takes long: of a system, those that end in these."""


def is_captured(name: str) -> bool:
    """Whether the step of a case is captured as a CUDA graph."""
    system, ends = LAUNCHED
    return system not in name or not name.endswith(ends)


def plan(folder: Path, out: Path, only: str) -> None:
    """Plan all cases, and write what was planned."""
    found = json.loads(out.read_text()) if out.exists() else {}
    for name, build in CASES.items():
        if only not in name or name in found:
            continue
        run, batch, shape = build(folder)
        began = time.process_time()
        planned = plan_memory(run, batch, shape=shape, captured=is_captured(name))
        seconds = time.process_time() - began
        parts = dataclasses.asdict(planned)
        found[name] = {**parts, "captured": is_captured(name), "seconds": seconds}
        print(name, {k: round(v / MIB, 1) for k, v in parts.items()}, f"{seconds:.1f} s",
              flush=True)  # fmt: skip
        out.write_text(json.dumps(found, indent=1))
        del run, batch


def measured(run: Run, batch: Any, shape: BatchShape | None, captured: bool) -> int:
    """Return the peak of two steps, or of the second if they are launched."""
    mesh = Mesh(device=torch.device("cuda"))
    torch.cuda.reset_peak_memory_stats()
    state = begin_state(run, mesh, None)
    if isinstance(run.task, Numbered):
        run.task.begin_step(StepNumbers(0, run.settings.train.seed))
    step = CapturedStep(run, state, mesh) if captured else None
    if step is not None and shape is not None:
        step.buckets = SizeBuckets((shape,))
    with nothing_launched():
        for _ in range(2):  # the second of a drawn shape is captured
            gc.collect()
            torch.cuda.synchronize()
            if step is None:
                torch.cuda.reset_peak_memory_stats()
            with suppress(DivergenceError):
                if step is not None:
                    step([batch], lr=1e-6)
                else:
                    train_step(run, state, state.model, [padded(batch, shape)], lr=1e-6, mesh=mesh)
            torch.cuda.synchronize()
    held = memory_with_graphs(torch.cuda.memory_allocated())
    return max(torch.cuda.max_memory_allocated(), held)


def padded(batch: Any, shape: BatchShape | None) -> Any:
    return batch if shape is None else pad(batch, shape)


def measure(folder: Path, out: Path, only: str) -> None:
    """Measure all cases on a GPU, and write the peaks with what they were measured on."""
    machine = {"hardware": hardware("cuda"), "versions": versions()}
    found = json.loads(out.read_text()) if out.exists() else {"measured_on": machine, "peaks": {}}
    for name, build in CASES.items():
        if only not in name or name in found["peaks"]:
            continue
        run, batch, shape = build(folder)
        found["peaks"][name] = measured(run, batch, shape, is_captured(name))
        print(f"{name}: {found['peaks'][name] / MIB:.1f} MiB", flush=True)
        out.write_text(json.dumps(found, indent=1))
        del run, batch
        gc.collect()
        torch.cuda.empty_cache()


def compare(planned: Path, measurements: Path, out: Path) -> None:
    """Write what was planned beside what was measured."""
    plans, found = json.loads(planned.read_text()), json.loads(measurements.read_text())
    rows = [
        {
            "step": name,
            "captured": plans[name]["captured"],
            "weights MiB": round(plans[name]["weights"] / MIB),
            "optimiser MiB": round(plans[name]["optimizer"] / MIB),
            "planned MiB": round(plans[name]["peak"] / MIB),
            "measured MiB": round(peak / MIB),
            "planned/measured": round(plans[name]["peak"] / peak, 3),
            "s to plan": round(plans[name]["seconds"], 1),
        }
        for name, peak in found["peaks"].items()
    ]
    notes = (
        "Planned on a CPU, whose seconds these are; measured on a GPU: "
        "torch.cuda.max_memory_allocated of a step whose Triton kernels are not launched, or, if "
        "that is more, what is allocated with all that pools of CUDA graphs hold. Steps that are "
        "not captured as CUDA graphs are launched one by one; captured ones need a second copy of "
        "the batch, gaps in their pools and, of one batch among several, a second gradient."
    )
    write_result("train/memory_plan", rows, notes, folder=out, measured_on=found["measured_on"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("what", choices=("plan", "measure", "compare"))
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--only", default="")
    add_out(parser)
    options = parser.parse_args()
    if options.what == "plan":
        plan(options.data, options.files[0], options.only)
    elif options.what == "measure":
        measure(options.data, options.files[0], options.only)
    else:
        compare(*options.files, options.out)


if __name__ == "__main__":
    main()
