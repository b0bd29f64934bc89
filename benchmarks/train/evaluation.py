"""Validation in line, beside training, and on a GPU of its own: what each adds to training.

    python -m benchmarks.train.evaluation [--preset default]

MACE trains on rattled crystals in captured steps and validates after every epoch: not at all, in
line, in a thread with a stream of its own (`train.evaluate_beside`), and, where there are two GPUs,
on a process of its own (`train.evaluation_ranks`). Seconds are those of all epochs but the first,
in which graphs are captured, to the end of the last validation, beside which nothing is trained;
epochs are those before the last. Overlap is the share of what validation in line adds that is
saved. Runs without validation and with a process of its own take turns; of repeated runs a row
holds medians. Losses of all runs must agree.
"""

import argparse
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from benchmarks.common.arguments import add_out, script_parser
from benchmarks.common.report import write_result
from benchmarks.mace.training_idle import crystals

from bevatron.data.dataset import Subset
from bevatron.models.mace import MACE, LossConfig, MaceTask
from bevatron.recipes.mace.data import batch_sizes
from bevatron.train.logger import read_journal
from bevatron.train.loop import Trainer, fit
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

ARMS: dict[str, dict[str, Any] | None] = {
    "no validation": None,
    "in line": {},
    "beside": {"evaluate_beside": True},
    "on a process of its own": {"evaluation_ranks": 1},
}
ALONE, IN_LINE, _, APART = ARMS

prepared = cache(crystals)


class Timed(Trainer):
    """Notes when each epoch has ended, its validation included if that is waited for."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.ended: list[float] = []

    def _end_epoch(self) -> None:
        super()._end_epoch()
        self.ended.append(time.perf_counter())


def trained(arguments: argparse.Namespace, name: str) -> dict[str, Any]:
    """Train in one way; return times and losses, nothing on the process that validates."""
    values = ARMS[name]
    torch.manual_seed(0)
    data, config = prepared(arguments.preset)
    train, valid = (Subset(data, np.arange(n) % len(data)) for n in arguments.structures)
    settings = Settings(
        optim=OptimConfig(lr=1e-4, ema=0.99),
        schedule=ScheduleConfig(kind="constant"),
        batch=BatchConfig(capacity=arguments.atoms),
        loader=LoaderConfig(workers=4),
        checkpoint=CheckpointConfig(every_epochs=None, best=False),
        train=TrainConfig(
            epochs=arguments.epochs, dtype="float32", device=arguments.device, **(values or {})
        ),
    )
    trainers: list[Timed] = []

    def timed(*given: Any) -> Timed:
        trainers.append(Timed(*given))
        return trainers[0]

    with tempfile.TemporaryDirectory() as folder:
        task = MaceTask(LossConfig())
        run = Run(MACE(config), task, train, batch_sizes(train), Path(folder) / "run", settings)
        run.monitor = "forces_rmse"
        if values is not None:
            run.valid, run.valid_sizes = valid, batch_sizes(valid)
        stopped = fit(run, timed).stopped_by
        if stopped is not None:
            raise SystemExit(f"stopped by {stopped}")
        if not trainers:
            return {}
        records = list(read_journal(Path(folder) / "run" / "metrics.jsonl"))
    ended = trainers[0].ended
    steps = [record for record in records if record["kind"] == "step" and record["epoch"]]
    validations = [record for record in records if record["kind"] == "epoch" and record["epoch"]]
    return {
        "seconds": ended[-1] - ended[0],
        "s an epoch": median(after - before for before, after in pairwise(ended[:-1])),
        "steps": len(steps),
        "ms a step": 1e3 * median(record["time"]["seconds"] for record in steps),
        "validation s": sum(record["time"]["validation_seconds"] for record in validations),
        "losses": [record["loss"] for record in steps],
    }


@contextmanager
def two_processes(wanted: bool) -> Iterator[None]:
    """Make this process rank 0 of two for the length of a ``with`` block, if wanted."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    if wanted:
        os.environ.update(zip(names, "002", strict=True))
    try:
        yield
    finally:
        for name in names:
            os.environ.pop(name, None)


@contextmanager
def validating_process(wanted: bool) -> Iterator[None]:
    """Start the process that validates, and end it."""
    if not wanted:
        yield
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free.getsockname()[1]))
    rank = os.environ | {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}
    command = [sys.executable, "-m", "benchmarks.train.evaluation", *sys.argv[1:]]
    with subprocess.Popen(command, env=rank) as process:
        try:
            yield
        except BaseException:
            process.terminate()
            raise


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Train in all ways; write the rows."""
    apart = arguments.device == "cpu" or torch.cuda.device_count() > 1
    names = [name for name in ARMS if apart or name != APART]
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    with validating_process(apart):
        for name in [*names, *(arguments.repeats - 1) * [n for n in (ALONE, APART) if n in names]]:
            with two_processes(name == APART):
                runs[name].append(trained(arguments, name))
            shown = {k: v for k, v in runs[name][-1].items() if k != "losses"}
            print(name, shown, flush=True)
            if all(runs.values()):
                rows = write(arguments, runs)
    return rows


def write(
    arguments: argparse.Namespace, runs: Mapping[str, list[dict[str, Any]]]
) -> list[dict[str, Any]]:
    """Write a row of each way to validate, if the losses of all runs agree."""
    losses = torch.tensor(
        [run["losses"] for of_one in runs.values() for run in of_one], dtype=torch.float64
    )
    differ = float(((losses - losses[0]).abs() / losses[0].abs()).max())
    if differ > arguments.tolerance:
        raise SystemExit(f"losses of the runs differ by {differ:.1e}")
    rows = table(runs)
    train, valid = arguments.structures
    notes = (
        f"MACE, preset {arguments.preset}, float32, {train:,} crystals of 4 to 500 atoms in "
        f"batches of {arguments.atoms:,}, {valid:,} more validated after each of "
        f"{arguments.epochs} epochs; the first does not count, and nothing is trained beside the "
        f"last validation. Losses agree within {differ:.0e}."
    )
    write_result("train/evaluation", rows, notes, device=arguments.device, folder=arguments.out)
    return rows


def table(runs: Mapping[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Make a row of each way to validate from the figures of its runs."""
    found = {
        name: {key: median(one[key] for one in of_one) for key in of_one[0] if key != "losses"}
        for name, of_one in runs.items()
    }
    alone, whole = found[ALONE], found[IN_LINE]["seconds"] - found[ALONE]["seconds"]

    def added(one: dict[str, float], key: str) -> float | str:
        return round(100 * (one[key] / alone[key] - 1), 2) if one is not alone else ""

    return [
        {
            "validation": name,
            "runs": len(runs[name]),
            "steps": one["steps"],
            "ms a step": round(one["ms a step"], 3),
            "s an epoch": round(one["s an epoch"], 3),
            "added to an epoch %": added(one, "s an epoch"),
            "seconds": round(one["seconds"], 2),
            "added with the last validation %": added(one, "seconds"),
            "seconds of validations": round(one["validation s"], 2) or "",
            "overlap %": ""
            if name in (ALONE, IN_LINE)
            else round(100 * (found[IN_LINE]["seconds"] - one["seconds"]) / whole, 1),
        }
        for name, one in found.items()
    ]


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--preset", default="default")
    parser.add_argument("--structures", nargs=2, type=int, default=[2000, 400])
    parser.add_argument("--atoms", type=int, default=1024)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tolerance", type=float, default=1e-2)
    parser.add_argument("--device", default="cuda")
    add_out(parser)
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        for _ in range(arguments.repeats):
            trained(arguments, APART)
        return
    for row in measure(arguments):
        print(row, flush=True)


if __name__ == "__main__":
    main()
