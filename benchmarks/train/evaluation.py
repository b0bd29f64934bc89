"""Validation in line and beside training on one GPU: what each adds to the time of training.

    python -m benchmarks.train.evaluation [--preset default]

MACE trains on rattled crystals in captured steps and validates after every epoch: not at all, in
line, and in a thread with a stream of its own (`train.evaluate_beside`). Times are those of all
epochs but the first, in which graphs are captured, to the end of the last validation. Overlap is
the share of what validation in line adds that is saved beside training. Losses of the three runs
must agree.
"""

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from benchmarks.common.arguments import add_out
from benchmarks.common.report import write_result
from benchmarks.common.training import Repeated
from benchmarks.mace.training_idle import crystals

from bevatron.models.mace import MACE, LossConfig, MaceTask
from bevatron.recipes.mace.data import batch_sizes
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

ARMS = {"no validation": None, "in line": False, "beside": True}


class Timed(MaceTask):
    """Notes when each epoch begins."""

    def __init__(self) -> None:
        super().__init__(LossConfig())
        self.began: list[float] = []

    def begin_epoch(self, epoch: int) -> None:
        """Note the time."""
        self.began.append(time.perf_counter())
        super().begin_epoch(epoch)


def trained(arguments: argparse.Namespace, beside: bool | None) -> dict[str, Any]:
    """Train; return times and losses."""
    torch.manual_seed(0)
    data, config = crystals(arguments.preset)
    train, valid = (Repeated(data._samples, n, "crystal") for n in arguments.structures)  # noqa: SLF001
    settings = Settings(
        optim=OptimConfig(lr=1e-4, ema=0.99),
        schedule=ScheduleConfig(kind="constant"),
        batch=BatchConfig(capacity=arguments.atoms),
        loader=LoaderConfig(workers=4),
        checkpoint=CheckpointConfig(every_epochs=None, best=False),
        train=TrainConfig(
            epochs=arguments.epochs,
            dtype="float32",
            device=arguments.device,
            evaluate_beside=bool(beside),
        ),
    )
    task = Timed()
    with tempfile.TemporaryDirectory() as folder:
        run = Run(MACE(config), task, train, batch_sizes(train), Path(folder) / "run", settings)
        run.monitor = "forces_rmse"
        if beside is not None:
            run.valid, run.valid_sizes = valid, batch_sizes(valid)
        stopped = fit(run).stopped_by
        ended = time.perf_counter()
        if stopped is not None:
            raise SystemExit(f"stopped by {stopped}")
        records = list(read_journal(Path(folder) / "run" / "metrics.jsonl"))
    steps = [record for record in records if record["kind"] == "step" and record["epoch"]]
    validations = [record for record in records if record["kind"] == "epoch" and record["epoch"]]
    return {
        "seconds": ended - task.began[1],
        "steps": len(steps),
        "ms a step": 1e3 * median(record["time"]["seconds"] for record in steps),
        "validation s": sum(record["time"]["validation_seconds"] for record in validations),
        "losses": [record["loss"] for record in steps],
    }


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Train in all three ways; write the rows."""
    found = {}
    for name, beside in ARMS.items():
        found[name] = trained(arguments, beside)
        print(name, {k: v for k, v in found[name].items() if k != "losses"}, flush=True)
    alone, in_line, beside = (found[name] for name in ARMS)
    losses = torch.tensor([one["losses"] for one in found.values()], dtype=torch.float64)
    apart = float(((losses - losses[0]).abs() / losses[0].abs()).max())
    if apart > arguments.tolerance:
        raise SystemExit(f"losses of the three runs differ by {apart:.1e}")
    rows = []
    for name, one in found.items():
        added = one["seconds"] - alone["seconds"]
        rows.append(
            {
                "validation": name,
                "steps": one["steps"],
                "seconds": round(one["seconds"], 2),
                "added %": round(100 * added / alone["seconds"], 1) if one is not alone else "",
                "ms a step": round(one["ms a step"], 2),
                "seconds of validations": round(one["validation s"], 2) or "",
            }
        )
    whole = in_line["seconds"] - alone["seconds"]
    rows[-1]["overlap %"] = round(100 * (in_line["seconds"] - beside["seconds"]) / whole, 1)
    train, valid = arguments.structures
    notes = (
        f"MACE, preset {arguments.preset}, float32, {train:,} crystals of 4 to 500 atoms in "
        f"batches of {arguments.atoms:,}, {valid:,} more validated after each of "
        f"{arguments.epochs} epochs; the first does not count, and nothing is "
        f"trained beside the last validation. Losses agree within {apart:.0e}."
    )
    write_result("train/evaluation", rows, notes, device=arguments.device, folder=arguments.out)
    return rows


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--preset", default="default")
    parser.add_argument("--structures", nargs=2, type=int, default=[2000, 400])
    parser.add_argument("--atoms", type=int, default=1024)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--tolerance", type=float, default=1e-2)
    parser.add_argument("--device", default="cuda")
    add_out(parser)
    for row in measure(parser.parse_args()):
        print(row, flush=True)


if __name__ == "__main__":
    main()
