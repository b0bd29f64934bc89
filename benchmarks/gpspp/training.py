"""GPS++ in real training on one and on many GPUs: molecules a second, the loader included.

    torchrun --nproc-per-node 8 -m benchmarks.gpspp.training molecules.npz --out rows
    python -m benchmarks.gpspp.training molecules.npz --loader --out rows     (the loader alone)
    python -m benchmarks.gpspp.training --collect rows

`bevatron.train.loop.fit` walks two epochs of the real molecules, seen under many indices, as
often for each GPU (weak scaling): loader workers, padding, copies, captured steps with all dropouts
and losses, gradients summed over the ranks, clipping of every gradient, Adam; matmuls in bfloat16.
The second epoch counts.
At its start some steps may be traced. "busy ms" is the union of the device's intervals in a traced
step, and idle is 1 - busy over the time of the steps after them, which are not traced; "idle,
traced" is over the wall time of the trace itself, where the profiler spreads a graph's kernels.
The loader alone makes the batches of one epoch, pinned, and nothing uses them.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.common.arguments import add_rows, read_rows, script_parser
from benchmarks.common.report import RESULTS, write_result
from benchmarks.common.trace import summary
from benchmarks.common.training import TracedSteps, repeated
from benchmarks.gpspp.molecules import load

from bevatron.models.gpspp import GPSPlusPlusTask, build
from bevatron.parallel.mesh import Mesh, open_mesh
from bevatron.recipes.gpspp.data import molecule_sizes
from bevatron.train.epochs import plan_epoch
from bevatron.train.evaluate import make_loader
from bevatron.train.logger import read_journal
from bevatron.train.loop import fit
from bevatron.train.run import Run
from bevatron.train.settings import (
    BatchConfig,
    CheckpointConfig,
    LoaderConfig,
    OptimConfig,
    ScheduleConfig,
    Settings,
    TrainConfig,
)

LIMITS = {"atoms": 1.0, "edges": 2.15, "pairs": 17.5}
"""Room of a batch by atoms: a little more than molecules of PCQM4Mv2 need on average."""


class TracedTask(TracedSteps, GPSPlusPlusTask):
    """A task that traces some steps."""


def settings_of(arguments: argparse.Namespace) -> Settings:
    """Return the published settings, and what was asked for."""
    on_gpu = arguments.device != "cpu"
    return Settings(
        optim=OptimConfig(
            algorithm="adam", lr=1e-4, weight_decay=0.0, clip=5.0, clip_norm="tensor", ema=None
        ),
        schedule=ScheduleConfig(kind="constant"),
        batch=BatchConfig(
            capacity={key: round(value * arguments.atoms) for key, value in LIMITS.items()}
        ),
        loader=LoaderConfig(workers=arguments.workers),
        checkpoint=CheckpointConfig(every_epochs=None),
        train=TrainConfig(
            epochs=2,
            dtype="float32",
            device=arguments.device,
            autocast="bfloat16" if on_gpu else None,
            explode_factor=None,
        ),
    )


def loader_alone(mesh: Mesh, arguments: argparse.Namespace) -> dict[str, Any]:
    """Make the batches of one epoch without training on them; the first ones do not count."""
    data = repeated(load(arguments.molecules), arguments.number, "molecule")
    settings = settings_of(arguments)
    plan = plan_epoch(molecule_sizes(data), settings.batch, mesh, seed=0, epoch=0)
    collate = GPSPlusPlusTask(build("gpspp-4", num_layers=1).config).collate
    begin, molecules, steps = 0.0, 0, 0
    first = 2 * arguments.workers
    with make_loader(data, plan.batches, collate, settings.loader, mesh) as loader:
        for place, loaded in enumerate(loader):
            if place == first:
                begin = time.perf_counter()
            elif place > first:
                molecules, steps = molecules + loaded.batch.num_graphs, steps + 1
        seconds = time.perf_counter() - begin
    return {
        "model": f"loader alone, {arguments.workers} workers",
        "GPUs": "",
        "molecules": molecules,
        "steps": steps,
        "ms/step": round(1e3 * seconds / steps, 2),
        "molecules/s": round(molecules / seconds),
    }


def measured(name: str, mesh: Mesh, arguments: argparse.Namespace) -> dict[str, Any]:
    """Train two epochs; return the rates of the second."""
    torch.manual_seed(0)
    data = repeated(load(arguments.molecules), arguments.number * mesh.world, "molecule")
    model = build(name)
    on_gpu = arguments.device != "cpu"
    settings = settings_of(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) if mesh.world == 1 else Path(arguments.out) / f"run-{mesh.world}"
        folder = folder / name
        task = TracedTask(model.config)
        if on_gpu and arguments.traced:  # about where the second epoch begins
            task.first, task.traced = arguments.number * 14 // arguments.atoms, arguments.traced
        fit(Run(model, task, data, molecule_sizes(data), folder, settings))
        steps = [r for r in read_journal(folder / "metrics.jsonl") if r["kind"] == "step"]
    traced = task.first + task.traced + 5 if arguments.traced else 0
    steady = steps[max(len(steps) // 2, traced) :]
    seconds = np.array([record["time"]["seconds"] for record in steady])
    waited = sum(r["time"]["seconds"] * r["time"]["wait_share"] for r in steady)
    molecules = sum(record["sizes"]["graphs"] for record in steady)
    row = {
        "model": name,
        "GPUs": mesh.world,
        "molecules": molecules,
        "steps": len(steady),
        "ms/step": round(1e3 * float(seconds.mean()), 2),
        "median": round(1e3 * float(np.median(seconds)), 2),
        "molecules/s": round(molecules / float(seconds.sum())),
        "waited %": round(100 * waited / float(seconds.sum()), 1),
    }
    if task.profiler is not None:
        found = summary(task.profiler, task.traced)
        row["idle %"] = round(100 * (1 - found["busy ms"] / (1e3 * float(seconds.mean()))), 1)
        row |= {key: round(found[key], 2) for key in ("busy ms", "kernels")}
        row["idle, traced %"] = found["idle %"]
    return row


def collect(folder: Path, results: Path = RESULTS) -> None:
    """Join the rows of all numbers of GPUs and write the result."""
    rows = read_rows(folder)
    rows.sort(key=lambda row: (row["model"], row["GPUs"] or 0))
    single = {row["model"]: row for row in rows if row["GPUs"] == 1}
    for row in rows:
        if row["model"] in single:
            one = single[row["model"]]
            ideal = one["molecules/s"] * int(row["GPUs"])
            row["efficiency %"] = round(100 * row["molecules/s"] / ideal, 1)
            row["efficiency by medians %"] = round(100 * one["median"] / row["median"], 1)
    notes = (__doc__ or "").split("\n\n")[-1]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    name = "gpspp/scaling" if any((row["GPUs"] or 0) > 1 for row in rows) else "gpspp/training"
    write_result(name, rows, notes, device=device, folder=results)


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("molecules", nargs="?", type=Path)
    parser.add_argument("--models", nargs="*", default=["gpspp-16", "gpspp-16-mpnn"])
    parser.add_argument("--number", type=int, default=300_000, help="molecules for each GPU")
    parser.add_argument("--atoms", type=int, default=30_000, help="of a batch")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--traced", type=int, default=50, help="steps; 0 = none")
    parser.add_argument("--device", default="cuda")
    add_rows(parser, "gpspp-rows")
    parser.add_argument("--loader", action="store_true", help="only the loader, without a model")
    arguments = parser.parse_args()
    if arguments.collect:
        collect(arguments.collect, arguments.results)
        return
    with open_mesh(arguments.device) as mesh:
        rows: list[dict[str, Any]] = []
        if arguments.loader:
            rows.append(loader_alone(mesh, arguments))
            print(rows[-1], flush=True)
            arguments.out.mkdir(parents=True, exist_ok=True)
            (arguments.out / "rows-loader.json").write_text(json.dumps(rows))
            return
        for name in arguments.models:
            rows.append(measured(name, mesh, arguments))
            if mesh.is_main:
                print(rows[-1], flush=True)
                arguments.out.mkdir(parents=True, exist_ok=True)
                (arguments.out / f"rows-{mesh.world}.json").write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
