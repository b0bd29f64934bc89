"""How busy a GPU is in real training on structures of mixed sizes, loader and all.

    python -m benchmarks.mace.training_idle [--models paper] [--data ../data/*.extxyz.gz]

`bevatron.train.loop.fit` trains on files of structures, or without any on rattled supercells of 4
to 500 atoms, packed by capacity. After a warm-up some steps are traced: idle is 1 - union of the
device's intervals over the wall time. Once with captured steps, once without; no peer. Of an epoch
only as many batches are walked as are needed, of structures drawn at random.
"""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
import torch
from ase.build import bulk
from benchmarks.common.arguments import add_out, script_parser
from benchmarks.common.report import write_result
from benchmarks.common.trace import SHORT_GAP, gaps, summary
from benchmarks.common.training import TracedSteps, repeated

from bevatron.data.dataset import Dataset, Subset
from bevatron.data.neighbours import add_neighbours
from bevatron.data.samples import unlabelled_structure
from bevatron.models.mace import MACE, LossConfig, MaceConfig, MaceTask, statistics
from bevatron.recipes.mace.data import DataConfig, batch_sizes, load_structures
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

REPEATS = ((1, 1, 1), (2, 1, 1), (2, 2, 2), (3, 3, 3), (4, 4, 4), (5, 5, 5))
SHARES = (0.25, 0.2, 0.2, 0.15, 0.12, 0.08)
WARM_UP, TRACED, AFTER = 60, 60, 40
CAPACITY = 3072
STEPS = ("captured", "launched")
CALM = 20
"""Steps after which training has settled."""


def rattled(cutoff: float, different: int = 240) -> list[Any]:
    """Make different rattled supercells of copper and nickel with neighbours and labels."""
    random = np.random.default_rng(0)
    samples = []
    for i in range(different):
        atoms = bulk("Cu", "fcc", a=3.585 + 0.004 * (i % 12), cubic=True)
        atoms = atoms * REPEATS[random.choice(len(REPEATS), p=SHARES)]
        atoms.numbers[random.random(len(atoms)) < 0.5] = 28
        atoms.positions += random.normal(0, 0.05, atoms.positions.shape)
        sample = unlabelled_structure(atoms.numbers, atoms.positions, atoms.cell.array, atoms.pbc)
        sample["energy"] = np.array(-1.5 * len(atoms) + random.normal())
        sample["forces"] = random.normal(0, 0.5, atoms.positions.shape)
        samples.append(add_neighbours(sample, cutoff))
    return samples


class TracedTask(TracedSteps, MaceTask):
    """A task that traces some steps after a warm-up."""

    first, traced = WARM_UP, TRACED


def crystals(preset: str) -> tuple[Dataset, MaceConfig]:
    """Return rattled supercells and a model for them."""
    plain = MaceConfig.preset(preset)
    data = repeated(rattled(plain.r_max), 6_000, "crystal")
    neighbours = data.lengths("edges").sum() / data.lengths("atomic_numbers").sum()
    return data, plain.with_data(
        atomic_numbers=(28, 29),
        atomic_energies=((-1.9, -1.2),),
        avg_num_neighbors=float(neighbours),
    )


def from_files(preset: str, files: Sequence[Path], folder: Path) -> tuple[Dataset, MaceConfig]:
    """Return the structures of some files and a model for them."""
    plain = MaceConfig.preset(preset)
    config = DataConfig(train=tuple(files), valid_size=0.0)
    data = load_structures(config, plain.r_max, folder).train
    found = statistics(data)
    return data, plain.with_data(
        atomic_numbers=found.atomic_numbers,
        atomic_energies=found.atomic_energies,
        avg_num_neighbors=found.avg_num_neighbors,
    )


def enough(data: Dataset) -> Dataset:
    """Draw the structures of as many steps as are needed, all if there are no more."""
    order = np.random.default_rng(0).permutation(len(data))
    used = np.cumsum(data.lengths("atomic_numbers")[order])
    last = np.searchsorted(used, (WARM_UP + TRACED + AFTER) * CAPACITY)
    return Subset(data, np.sort(order[: last + 1]))


def train(data: Dataset, config: MaceConfig, workers: int, *, captured: bool) -> dict[str, Any]:
    """Train on enough of the data; return what the trace and the journal say."""
    torch.manual_seed(0)
    data = enough(data)
    sizes = batch_sizes(data)
    task = TracedTask(LossConfig())
    settings = Settings(
        optim=OptimConfig(lr=1e-4),
        schedule=ScheduleConfig(kind="constant"),
        batch=BatchConfig(capacity=CAPACITY),
        loader=LoaderConfig(workers=workers),
        checkpoint=CheckpointConfig(every_epochs=None),
        train=TrainConfig(epochs=1, dtype="float32", device="cuda", cuda_graphs=captured),
    )
    with tempfile.TemporaryDirectory() as folder:
        fit(Run(MACE(config), task, data, sizes, Path(folder) / "run", settings))
        records = list(read_journal(Path(folder) / "run" / "metrics.jsonl"))
        log = (Path(folder) / "run" / "log.txt").read_text()
    print(*(line for line in log.splitlines() if "captured" in line), sep="\n")
    times = [record["time"] for record in records if record["kind"] == "step"]
    calm = times[CALM:WARM_UP] + times[WARM_UP + TRACED + 5 :]
    seconds = median(time["seconds"] for time in calm)
    waited = mean(time["seconds"] * time["wait_share"] for time in calm)
    traced = summary(task.profiler, TRACED)
    row: dict[str, Any] = {"steps": STEPS[0 if captured else 1]}
    row |= {"ms/step": 1e3 * seconds, "waited for data %": 100 * waited / seconds, **traced}
    row |= gaps(task.profiler, TRACED)
    row["traced ms/step"] = round(traced["busy ms"] / (1 - traced["idle %"] / 100), 3)
    return row | {"idle untraced %": round(100 * (1 - traced["busy ms"] / (1e3 * seconds)), 1)}


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--models", nargs="*", default=["paper"])
    parser.add_argument("--steps", nargs="*", choices=STEPS, default=STEPS)
    parser.add_argument("--workers", type=int, default=6)
    parser.add_argument("--data", nargs="*", type=Path, default=[], help="files of structures")
    parser.add_argument("--prepared", type=Path, help="kept: data are prepared once for all")
    add_out(parser)
    measure(parser.parse_args())


def measure(arguments: argparse.Namespace) -> None:
    """Train every model with both kinds of steps; the result is written after each."""
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for preset in arguments.models:
            folder = arguments.prepared or Path(scratch) / preset
            made = (
                from_files(preset, arguments.data, folder) if arguments.data else crystals(preset)
            )
            for steps in arguments.steps:
                row = train(*made, arguments.workers, captured=steps == STEPS[0])
                rows.append({"model": preset, **row})
                notes = notes_on(made[0], arguments)
                write_result("mace/training_idle", rows, notes, device="cuda", folder=arguments.out)


def notes_on(data: Dataset, arguments: argparse.Namespace) -> str:
    words = "Rattled fcc supercells of 4 to 500 atoms"
    if arguments.data:
        atoms = batch_sizes(data)["atoms"]
        words = f"Of {len(atoms):,} real structures of {atoms.min()} to {atoms.max()} atoms"
    return (
        f"{words} as many as fill {WARM_UP + TRACED + AFTER} batches of {CAPACITY} atoms, float32, "
        f"{arguments.workers} loader workers; {TRACED} traced steps; ms/step: median "
        "of steps that are not traced, by which `idle untraced %` is 1 - busy / step. Longer gaps: "
        f"above {SHORT_GAP / 1e3:g} us. Tracing adds the difference of both times to a step; where "
        "that is more than all gaps, these are in part its own."
    )


if __name__ == "__main__":
    main()
