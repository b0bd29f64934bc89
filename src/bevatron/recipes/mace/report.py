"""The report of a run of MACE: learning curves, errors, parity, batch balance, timing.

`report_of_run` evaluates the finished model and calls `write_report`, which composes report.html
and the pictures in ``plots/`` from metrics.jsonl and from labels and predictions.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bevatron.data.dataset import Dataset, Subset
from bevatron.data.packing import Plan
from bevatron.models.mace import load_model
from bevatron.output import Cell
from bevatron.recipes.mace import SYSTEM
from bevatron.recipes.mace.data import StructureData, batch_sizes
from bevatron.recipes.mace.evaluate import Evaluation, evaluate_dataset
from bevatron.recipes.mace.potential import Potential
from bevatron.recipes.mace.report_errors import headline, show_data, show_errors, show_parity
from bevatron.train.report.page import Report
from bevatron.train.report.training import (
    History,
    Metric,
    first_epoch,
    show_balance,
    show_learning_curves,
    show_timing,
    summary,
)
from bevatron.train.run import FitResult
from bevatron.train.settings import BatchConfig

MOST_TRAINING_STRUCTURES = 200
"""Number of training structures that are evaluated, for comparison with held-out ones."""

METRICS = [
    Metric(
        f"{title}, validation",
        f"error ({unit})",
        {kind.upper(): f"{name}_{kind}" for kind in ("rmse", "mae")},
        factor=1e3,
    )
    for name, title, unit in (
        ("energy_per_atom", "Energy", "meV/atom"),
        ("forces", "Forces", "meV/Å"),
        ("stress", "Stress", "meV/Å³"),
    )
]


def report_of_run(folder: Path, data: StructureData, batch: BatchConfig, result: FitResult) -> Path:
    """Evaluate the model of a finished run and write its report."""
    history = History.of_run(folder)
    model = load_model(folder)
    dtype = str(history.config["train"].get("dtype", "float64"))
    potential = Potential(model, history.device, dtype)
    chosen: dict[str, Dataset] = {}
    if data.test is not None:
        chosen["test"] = data.test
    if data.valid is not None:
        chosen["validation"] = data.valid
    total = len(data.train)
    number = min(MOST_TRAINING_STRUCTURES, total)
    some = np.sort(np.random.default_rng(0).permutation(total)[:number])
    name = "training" if number == total else f"training ({number} of {total})"
    chosen[name] = Subset(data.train, some)
    capacity = max(batch.capacities(["atoms"]).get("atoms", 0), 512)
    evaluations = {
        name: evaluate_dataset(potential, dataset, capacity) for name, dataset in chosen.items()
    }
    plan = first_epoch(batch_sizes(data.train), batch, history)
    notes = [] if result.stopped_by is None else [f"stopped by {result.stopped_by}"]
    return write_report(
        folder,
        evaluations,
        plan=plan,
        batch=batch,
        energies=isolated_energies(model),
        figures=summary(history, result, model),
        notes=notes,
        found=data.report,
    )


def write_report(
    folder: Path,
    evaluations: Mapping[str, Evaluation],
    *,
    plan: Plan | None = None,
    batch: BatchConfig | None = None,
    energies: Mapping[str, Mapping[int, float]] | None = None,
    figures: Mapping[str, Cell] | None = None,
    notes: Sequence[str] = (),
    found: Sequence[str] = (),
) -> Path:
    """Compose report.html and ``plots/*.png`` in the folder of a run.

    Parameters
    ----------
    folder : with metrics.jsonl and config.yaml
    evaluations : name of a data set -> errors and predictions; the first one is shown in detail
    plan, batch : an epoch's batches and how they were made
    energies : head -> atomic number -> E0 in eV, subtracted where energies are drawn
    figures : more numbers for the top of the page
    notes : warnings at the top; resumes are added from metrics.jsonl
    found : what the readers found in the files
    """
    history = History.of_run(folder)
    report = Report(f"MACE: {folder.resolve().name}", str(folder), figures=folder / "plots")
    first = next(iter(evaluations.items()), None)
    report.highlights({**(headline(*first) if first else {}), **(figures or {})})
    report.notes([*notes, *history.changes()])
    report.section("Data")
    show_data(report, evaluations, found)
    show_learning_curves(report, history, METRICS)
    if first:
        report.section("Errors")
        show_errors(report, evaluations, *first)
        report.section("Parity")
        show_parity(report, *first, energies or {})
    if plan is not None:
        show_balance(report, plan, batch or BatchConfig(), ["atoms"], SYSTEM.samples)
    show_timing(report, history)
    report.section("Settings").config(history.config).versions()
    return report.write(folder / "report.html")


def isolated_energies(model: torch.nn.Module) -> dict[str, dict[int, float]]:
    """Return E0 of each head and element of a model."""
    config: Any = model.config
    return {
        head: dict(zip(config.atomic_numbers, row, strict=True))
        for head, row in zip(config.heads, config.atomic_energies, strict=True)
    }
