"""Does learning suffer from balanced batches? Force errors on mixed data by batching and by seed.

    python -m benchmarks.mace.batching --data ../data/*.extxyz.gz --out rows --seeds 0 1
    python -m benchmarks.mace.batching --data ../data/*.extxyz.gz --out costs --steps 100
    python -m benchmarks.mace.batching --collect rows --costs costs

Every file is a separate head with its own E0. All runs of a seed start from the same weights and
see the same structures equally often; they differ in which structures share a batch. Batches of a
fixed count hold as many structures as fill the capacity on average. ``meV/A`` is the force RMSE
over all validation structures after the last epoch; every run completes a cosine schedule. Rows
with equal epochs compare at equal samples, rows with equal ``s`` at equal wall time. Runs may share
a GPU:
``s`` is steps times the time of a step under ``--costs`` (``--steps``: captured steps over batches
spread over an epoch), measured on an otherwise idle GPU.
"""

import argparse
import json
import math
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.common.arguments import add_rows, read_all, script_parser
from benchmarks.common.report import add_picture, write_result

from bevatron.parallel.mesh import open_mesh
from bevatron.recipes import recipe
from bevatron.recipes.mace.run import MaceRun, build
from bevatron.train.capture.step import CapturedStep
from bevatron.train.epochs import plan_epoch
from bevatron.train.logger import read_journal
from bevatron.train.loop import begin_state, fit
from bevatron.train.report import plots
from bevatron.train.run import Run


def configuration(
    batching: str, seed: int, lr: float, folder: Path, arguments: argparse.Namespace
) -> MaceRun:
    heads = {path.name.split(".")[0]: {"train": [str(path)]} for path in arguments.data}
    values: dict[str, Any] = {
        "output": str(folder / f"{batching}-{lr:g}-{arguments.epochs}-{seed}"),
        "preset": arguments.preset,
        "model": {"num_channels": arguments.channels} if arguments.channels else {},
        "data": {"heads": heads, "prepared": str(arguments.prepared or folder / "prepared")},
        "loss": {"energy_weight": 1.0, "forces_weight": 100.0},
        "optim": {"lr": lr, "ema": 0.99, "clip": 10.0},
        "schedule": {"kind": "cosine"},
        "batch": {
            "algorithm": batching,
            "capacity": arguments.capacity,
            "size": arguments.size,
            "cost": {
                "atoms": 1.0,
                "edges": arguments.cost_edges if batching == "balanced" else 0.0,
            },
        },
        "loader": {"workers": arguments.workers},
        "checkpoint": {"every_epochs": None},
        "train": {
            "epochs": arguments.epochs,
            "evaluate_every": arguments.evaluate_every,
            "seed": seed,
            "dtype": "float32",
            "device": arguments.device,
            "explode_factor": None,
        },
        "report": False,
    }
    return recipe("mace")[0].from_values(values)


def curve(config: MaceRun) -> tuple[list[dict[str, float]], list[int]]:
    """Train; return seconds, force error and structures of every epoch, and of every step."""
    fit(build(config))
    points, graphs = [], []
    for record in read_journal(config.output / "metrics.jsonl"):
        if record["kind"] == "step":
            graphs.append(int(record["sizes"]["graphs"]))
        if record["kind"] != "epoch":
            continue
        points.append(
            {
                "epoch": record["epoch"] + 1,
                "seconds": record["time"]["seconds"],
                "meV/A": 1e3 * record["valid"].get("forces_rmse", math.nan),
                "graphs": record["sizes"].get("graphs", 0),
            }
        )
    return points, graphs


def measure(arguments: argparse.Namespace) -> None:
    """Train all runs of this process, saving every curve as soon as it is complete."""
    arguments.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.runs or Path(scratch)
        for seed in arguments.seeds:
            for lr in arguments.lr:
                for batching in arguments.batchings:
                    config = configuration(batching, seed, lr, folder, arguments)
                    points, graphs = curve(config)
                    row = {"batching": batching, "seed": seed, "lr": lr, "curve": points}
                    print({**row, "curve": points[-1]}, flush=True)
                    row["structures of a batch"] = [min(graphs), max(graphs)]
                    name = f"{batching}-{lr:g}-{arguments.epochs}-{seed}.json"
                    (arguments.out / name).write_text(json.dumps(row))


def measure_steps(arguments: argparse.Namespace) -> None:
    """Time steps over batches of each kind, one after the other as in training."""
    arguments.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.runs or Path(scratch)
        configs = {
            batching: configuration(batching, 0, arguments.lr[0], folder, arguments)
            for batching in arguments.batchings
        }
        run = build(next(iter(configs.values())))
        for batching, config in configs.items():
            settings = replace(config.settings, optim=replace(config.optim, lr=1e-9))
            row = {"batching": batching, **step_seconds(replace(run, settings=settings), arguments)}
            print(row, flush=True)
            (arguments.out / f"{batching}.json").write_text(json.dumps(row))


def step_seconds(run: Run, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the mean seconds of a step, the steps of an epoch and the waste of padding."""
    seed, lr = run.settings.train.seed, run.settings.optim.lr
    with open_mesh(run.settings.train.device) as mesh:
        step = CapturedStep(run, begin_state(run, mesh, None), mesh)
        epoch = plan_epoch(run.sizes, run.settings.batch, mesh, seed=seed, epoch=0)
        shapes = step.plan(epoch.of_all_ranks())
        every = max(1, epoch.num_batches // arguments.steps)
        batches = [
            run.task.collate([run.train[int(i)] for i in indices], indices, list(weights))
            for indices, weights in list(epoch.batches)[::every]
        ]
        for _ in range(2):  # the first time captures the shapes
            waiting = step(batches[:1], lr=lr)
            waiting.result()
            began = time.perf_counter()
            for batch in batches:
                following = step([batch], lr=lr)
                waiting.result()
                waiting = following
            waiting.result()
        seconds = (time.perf_counter() - began) / len(batches)
        step.release()
    return {"seconds": seconds, "timed": len(batches), "steps": epoch.num_batches, "shapes": shapes}


def collect(arguments: argparse.Namespace) -> None:
    """Join all curves; write means and spreads over seeds, and the picture."""
    runs = read_all(arguments.collect)
    seconds = {}
    for cost in read_all(arguments.costs) if arguments.costs else []:
        seconds[cost["batching"]] = cost["seconds"] * cost["steps"]
    grouped: dict[tuple[str, float, int], list[Any]] = {}
    for run in runs:
        key = run["batching"], run["lr"], run["curve"][-1]["epoch"]
        grouped.setdefault(key, []).append(run)
    rows = []
    for (batching, lr, epochs), own in sorted(grouped.items()):
        errors = [run["curve"][-1]["meV/A"] for run in own]
        fewest = min(run["structures of a batch"][0] for run in own)
        most = max(run["structures of a batch"][1] for run in own)
        row: dict[str, Any] = {
            "batching": batching,
            "structures of a batch": f"{fewest}-{most}",
            "lr": lr,
            "epochs": epochs,
            "seeds": len(own),
            "meV/A": round(statistics.mean(errors), 2),
            "spread": round(statistics.stdev(errors), 2) if len(own) > 1 else "",
            "each": " ".join(f"{error:.1f}" for error in errors),
            "beside fixed count %": against_fixed_count(
                own, grouped.get(("fixed_count", lr, epochs), [])
            ),
        }
        if batching in seconds:
            row |= {"s/epoch": round(seconds[batching], 2)}
            row |= {"s": round(seconds[batching] * epochs, 1)}
        rows.append(row)
    notes = f"{' '.join((__doc__ or '').split(chr(10) * 2)[-1].split())} {arguments.notes}".strip()
    device = arguments.device if arguments.device == "cpu" else "cuda"
    extra = {"curves": runs}
    path = write_result(
        "mace/batching", rows, notes, device=device, extra=extra, folder=arguments.results
    )
    add_picture(picture(grouped), path)


def against_fixed_count(own: Sequence[Any], fixed: Sequence[Any]) -> str:
    """Compare seed by seed with fixed counts: mean and standard error of the relative difference.

    Runs of a seed share weights, data and split, so this scatters less than the errors.
    """
    errors = {run["seed"]: run["curve"][-1]["meV/A"] for run in fixed}
    pairs = [(run["curve"][-1]["meV/A"], errors.get(run["seed"])) for run in own]
    ratios = [100 * (one / other - 1) for one, other in pairs if other is not None]
    if len(ratios) < 2 or own == fixed:
        return ""
    error = statistics.stdev(ratios) / math.sqrt(len(ratios))
    return f"{statistics.mean(ratios):+.1f} +- {error:.1f}"


def picture(grouped: Mapping[tuple[str, float, int], list[Any]]) -> Any:
    """Plot the mean error over seeds by epoch, a panel per learning rate.

    If only the end was validated: the error of each seed.
    """
    points = (run["curve"] for runs in grouped.values() for run in runs)
    if not any(math.isfinite(point["meV/A"]) for curve in points for point in curve[:-1]):
        return _ends(grouped)
    most = max(epochs for _, _, epochs in grouped)
    panels = []
    for lr in sorted({lr for _, lr, _ in grouped}):
        curves = []
        for (batching, own_lr, epochs), runs in sorted(grouped.items()):
            if own_lr == lr:
                label = batching if epochs == most else f"{batching}, {epochs} epochs"
                found = [[point["meV/A"] for point in run["curve"]] for run in runs]
                x = np.arange(1, epochs + 1)
                curves.append(plots.Curve(label, x, np.mean(found, axis=0), epochs != most))
        panels.append(plots.Panel(f"Learning rate {lr:g}", "force RMSE (meV/Å)", curves))
    return plots.curves(panels)


def _ends(grouped: Mapping[tuple[str, float, int], list[Any]]) -> Any:
    several = len({lr for _, lr, _ in grouped}) > 1
    labels = [f"{kind}, rate {lr:g}" if several else kind for kind, lr, _ in sorted(grouped)]
    seeds = sorted({run["seed"] for runs in grouped.values() for run in runs})
    errors = [{r["seed"]: r["curve"][-1]["meV/A"] for r in grouped[key]} for key in sorted(grouped)]
    series = {f"seed {seed}": [of.get(seed, math.nan) for of in errors] for seed in seeds}
    title = "After as many samples in batches of each kind"
    return plots.bars(labels, series, "force RMSE (meV/Å)", title)


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--data", nargs="*", type=Path, default=[])
    parser.add_argument("--batchings", nargs="*", default=["fixed_count", "algorithm1", "balanced"])
    parser.add_argument("--seeds", nargs="*", type=int, default=[0])
    parser.add_argument("--lr", nargs="*", type=float, default=[0.005])
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--capacity", type=int, default=1024)
    parser.add_argument("--size", type=int, default=29, help="structures of a fixed-count batch")
    parser.add_argument("--cost-edges", type=float, default=0.0, help="of balanced batches")
    parser.add_argument("--preset", default="paper")
    parser.add_argument("--channels", type=int, help="instead of those of the preset")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--prepared", type=Path, help="kept: data are prepared once for all")
    parser.add_argument("--runs", type=Path, help="kept: folder of the runs")
    parser.add_argument("--evaluate-every", type=int, default=1, help="epochs")
    parser.add_argument(
        "--steps", type=int, help="measure the time of this number of steps instead"
    )
    add_rows(parser, "batching-rows")
    parser.add_argument("--costs", type=Path, help="times of steps")
    parser.add_argument("--notes", default="", help="text below the table: the protocol")
    arguments = parser.parse_args()
    if arguments.collect:
        collect(arguments)
    elif arguments.steps:
        measure_steps(arguments)
    else:
        measure(arguments)


if __name__ == "__main__":
    main()
