"""Larger batches at equal wall time: force errors on held-out structures by capacity and lr.

    python -m benchmarks.mace.batch_size --data bpa3_train.extxyz.gz --seconds 25

Every run trains for the same time on a GPU, counted from the end of its first epoch, in which
kernels are compiled and steps captured; the runs of one setting, one per seed, share the GPU.
``x rate`` multiplies the learning rate of the smallest batch. The error is the force RMSE of the
averaged weights over 100 held-out structures, the last one validated in time.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common.arguments import add_out, script_parser
from benchmarks.common.report import add_picture, write_result

from bevatron.recipes import recipe
from bevatron.recipes.mace.run import build
from bevatron.train.loop import Trainer, fit
from bevatron.train.report import plots


class TimedTrainer(Trainer):
    """Stops when time is up; keeps the error of each validation with its time."""

    seconds = 0.0

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.began: float | None = None
        self.curve: list[tuple[float, float]] = []

    def _end_epoch(self) -> None:
        super()._end_epoch()
        now = time.monotonic()
        if self.began is None:
            self.began = now
        if self.metrics:
            self.curve.append((now - self.began, 1e3 * self.metrics["forces_rmse"]))
            self.metrics = {}
        if now - self.began > self.seconds:
            self.stopped_by = "time"


def train(arguments: argparse.Namespace) -> None:
    capacity, rate, seed = arguments.capacities[0], arguments.rates[0], arguments.seeds[0]
    values: dict[str, Any] = {
        "output": str(arguments.out / f"run-{capacity}-{rate}-{seed}"),
        "preset": arguments.preset,
        "data": {"train": [str(arguments.data)]},
        "optim": {"lr": arguments.lr * rate},
        "schedule": {"kind": "constant"},
        "batch": {"capacity": capacity},
        "loader": {"workers": 4},
        "checkpoint": {"every_epochs": None, "best": False, "final": "last"},
        "train": {
            "epochs": 1_000_000,
            "evaluate_every": max(1, capacity // 100),
            "seed": seed,
            "dtype": "float32",
            "explode_factor": None,
        },
        "report": False,
    }
    TimedTrainer.seconds = arguments.seconds
    made: list[TimedTrainer] = []

    def trainer(*given: Any) -> TimedTrainer:
        made.append(TimedTrainer(*given))
        return made[0]

    fit(build(recipe("mace")[0].from_values(values)), trainer)
    done = {"steps": made[0].state.progress.step, "curve": made[0].curve}
    (arguments.out / f"{capacity}-{rate}-{seed}.json").write_text(json.dumps(done))


def measure(arguments: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Train every setting, its seeds concurrently, and return a row for each."""
    rows = []
    for capacity in arguments.capacities:
        grown = capacity / arguments.capacities[0]
        for rate in sorted({1.0, round(math.sqrt(grown), 3)}):
            command = [sys.executable, "-m", "benchmarks.mace.batch_size", "--one"]
            command += ["--data", str(arguments.data), "--preset", arguments.preset]
            command += ["--seconds", str(arguments.seconds), "--lr", str(arguments.lr)]
            command += ["--out", str(folder), "--capacities", str(capacity), "--rates", str(rate)]
            running = [
                subprocess.Popen([*command, "--seeds", str(seed)]) for seed in arguments.seeds
            ]
            if any(process.wait() for process in running):
                raise SystemExit(f"a run of {capacity} atoms failed")
            found = [
                json.loads((folder / f"{capacity}-{rate}-{seed}.json").read_text())
                for seed in arguments.seeds
            ]
            errors = [each["curve"][-1][1] for each in found]
            rows.append(
                {
                    "atoms of a batch": capacity,
                    "x rate": rate,
                    "steps": round(statistics.mean(each["steps"] for each in found)),
                    "meV/A": round(statistics.mean(errors), 1),
                    "spread": round(statistics.stdev(errors), 1) if len(errors) > 1 else "",
                    "each": " ".join(f"{error:.1f}" for error in errors),
                    "curves": [each["curve"] for each in found],
                }
            )
            print({name: value for name, value in rows[-1].items() if name != "curves"}, flush=True)
    return rows


def picture(rows: list[dict[str, Any]]) -> Any:
    """Draw the error of the first seed over time: atoms of a batch, factor of the rate."""
    curves = [
        plots.Curve(
            f"{row['atoms of a batch']}, x {row['x rate']:g}",
            [seconds for seconds, _ in row["curves"][0][1:]],
            [error for _, error in row["curves"][0][1:]],
        )
        for row in rows
    ]
    return plots.curves(
        [plots.Panel("Batches of few and of many atoms", "force RMSE (meV/Å)", curves)], "seconds"
    )


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--preset", default="small")
    parser.add_argument("--capacities", nargs="*", type=int, default=[135, 540, 2160])
    parser.add_argument("--rates", nargs="*", type=float, default=[1.0], help=argparse.SUPPRESS)
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--lr", type=float, default=0.01, help="of the smallest batch")
    parser.add_argument("--seconds", type=float, default=25.0)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    add_out(parser)
    arguments = parser.parse_args()
    if arguments.one:
        train(arguments)
        return
    with tempfile.TemporaryDirectory() as scratch:
        rows = measure(arguments, Path(scratch))
    curves = [row.pop("curves") for row in rows]
    notes = " ".join((__doc__ or "").split("\n\n")[-1].split())
    notes += f" Data {arguments.data.name}, preset {arguments.preset}, {arguments.seconds:g} s."
    path = write_result(
        "mace/batch_size",
        rows,
        notes,
        device="cuda",
        extra={"curves": curves},
        folder=arguments.out,
    )
    kept = [{**row, "curves": own} for row, own in zip(rows, curves, strict=True)]
    add_picture(picture(kept), path)


if __name__ == "__main__":
    main()
