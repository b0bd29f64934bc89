"""Does learning suffer from balanced batches? Force errors on mixed data by batching and by seed.

    python benchmarks/mace_batching.py --data ../data/*.extxyz.gz --out rows/gpu0 --seeds 0 1
    python benchmarks/mace_batching.py --collect rows

Every file is a head of its own with its own E0. All runs of a seed begin with the same weights and
see the same structures as often; what differs is which structures share a batch. Batches of a fixed
count hold as many structures as fill the capacity on average. ``meV/A`` is the force RMSE over all
validation structures after the last epoch, ``at equal time`` the one after the last epoch that
ended before the fastest run of that seed was over.
"""

import argparse
import json
import math
import statistics
import tempfile
from pathlib import Path
from typing import Any

from report import write_result

from bevatron.recipes import recipe
from bevatron.recipes.mace import MaceRun, build
from bevatron.train.journal import read_journal
from bevatron.train.loop import fit


def configuration(
    batching: str, seed: int, lr: float, folder: Path, arguments: argparse.Namespace
) -> MaceRun:
    """Make the configuration of one run."""
    heads = {path.name.split(".")[0]: {"train": [str(path)]} for path in arguments.data}
    values: dict[str, Any] = {
        "output": str(folder / f"{batching}-{lr:g}-{seed}"),
        "preset": arguments.preset,
        "model": {"num_channels": arguments.channels} if arguments.channels else {},
        "data": {"heads": heads, "prepared": str(folder / "prepared")},
        "loss": {"energy_weight": 1.0, "forces_weight": 100.0},
        "optim": {"lr": lr, "ema": 0.99, "clip": 10.0},
        "schedule": {"kind": "cosine"},
        "batch": {
            "algorithm": batching,
            "capacity": arguments.capacity,
            "size": arguments.size,
            "cost_edges": 0.02 if batching == "balanced" else 0.0,
        },
        "loader": {"workers": arguments.workers},
        "checkpoint": {"every_epochs": None},
        "train": {
            "epochs": arguments.epochs,
            "seed": seed,
            "dtype": "float32",
            "device": arguments.device,
            "explode_factor": None,
        },
        "report": False,
    }
    return recipe("mace")[0].from_values(values)


def curve(config: MaceRun) -> list[dict[str, float]]:
    """Train; return seconds of training so far and the force error after every epoch."""
    fit(build(config))
    points, seconds = [], 0.0
    for record in read_journal(config.output / "metrics.jsonl"):
        if record["kind"] != "epoch":
            continue
        seconds += record["time"]["seconds"]
        points.append(
            {
                "epoch": record["epoch"] + 1,
                "seconds": seconds,
                "meV/A": 1e3 * record["valid"]["forces_rmse"],
                "graphs": record["sizes"].get("graphs", 0),
            }
        )
    return points


def measure(arguments: argparse.Namespace) -> None:
    """Train all runs of this process, and keep every curve as soon as it is there."""
    arguments.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(arguments.scratch or scratch)
        for seed in arguments.seeds:
            for lr in arguments.lr:
                for batching in arguments.batchings:
                    config = configuration(batching, seed, lr, folder, arguments)
                    points = curve(config)
                    row = {"batching": batching, "seed": seed, "lr": lr, "curve": points}
                    print({**row, "curve": points[-1]}, flush=True)
                    name = f"{batching}-{lr:g}-{seed}.json"
                    (arguments.out / name).write_text(json.dumps(row))


def at_time(points: list[dict[str, float]], seconds: float) -> float:
    """Return the force error of the last epoch that ended before ``seconds``; NaN if none did."""
    ended = [p["meV/A"] for p in points if p["seconds"] <= seconds * 1.001]
    return ended[-1] if ended else math.nan


def collect(folder: Path, device: str) -> None:
    """Join all curves and write means and spreads over seeds."""
    runs = [json.loads(path.read_text()) for path in sorted(folder.rglob("*.json"))]
    fastest = {
        run["seed"]: min(r["curve"][-1]["seconds"] for r in runs if r["seed"] == run["seed"])
        for run in runs
    }
    rows = []
    for batching, lr in sorted({(run["batching"], run["lr"]) for run in runs}):
        own = [run for run in runs if (run["batching"], run["lr"]) == (batching, lr)]
        errors = [run["curve"][-1]["meV/A"] for run in own]
        timed = [at_time(run["curve"], fastest[run["seed"]]) for run in own]
        rows.append(
            {
                "batching": batching,
                "lr": lr,
                "seeds": len(own),
                "epochs": own[0]["curve"][-1]["epoch"],
                "meV/A": round(statistics.mean(errors), 2),
                "each": " ".join(f"{error:.2f}" for error in errors),
                "at equal time": round(statistics.mean(timed), 2),
                "training s": round(statistics.mean(r["curve"][-1]["seconds"] for r in own), 1),
            }
        )
    notes = (__doc__ or "").split("\n\n")[-1]
    write_result("mace_batching", rows, notes, device=device, extra={"curves": runs})


def main() -> None:
    """Train, or put together what was trained."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--data", nargs="*", type=Path, default=[])
    parser.add_argument("--batchings", nargs="*", default=["fixed_count", "algorithm1", "balanced"])
    parser.add_argument("--seeds", nargs="*", type=int, default=[0])
    parser.add_argument("--lr", nargs="*", type=float, default=[0.005])
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--capacity", type=int, default=1024)
    parser.add_argument("--size", type=int, default=29, help="structures of a fixed-count batch")
    parser.add_argument("--preset", default="paper")
    parser.add_argument("--channels", type=int, help="instead of those of the preset")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--scratch", type=Path, help="kept: data are prepared once for all")
    parser.add_argument("--out", type=Path, default=Path("batching-rows"))
    parser.add_argument("--collect", type=Path)
    arguments = parser.parse_args()
    if arguments.collect:
        collect(arguments.collect, arguments.device)
    else:
        measure(arguments)


if __name__ == "__main__":
    main()
