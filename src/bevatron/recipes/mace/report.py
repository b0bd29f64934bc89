"""The report of a run of MACE: learning curves, errors, parity, batch balance, timing.

`report_of_run` evaluates the finished model and calls `write_report`, which composes report.html
and the pictures in ``plots/`` from metrics.jsonl and from labels and predictions side by side.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed

from bevatron.config import load_yaml
from bevatron.data.dataset import Dataset, Subset
from bevatron.data.packing import Plan
from bevatron.models.mace import load_model
from bevatron.recipes.mace.data import StructureData, batch_sizes, isolated_atoms
from bevatron.recipes.mace.evaluate import Evaluation, evaluate_dataset
from bevatron.recipes.mace.potential import Potential
from bevatron.recipes.mace.report_errors import headline, show_data, show_errors, show_parity
from bevatron.recipes.mace.report_training import (
    events_in_words,
    show_balance,
    show_learning_curves,
    show_timing,
)
from bevatron.train.epochs import pack_samples
from bevatron.train.logger import epochs_of, read_journal
from bevatron.train.report.page import Cell, Report
from bevatron.train.run import FitResult
from bevatron.train.settings import BatchConfig

MOST_TRAINING_STRUCTURES = 200
"""How many training structures are evaluated, for comparison with those not trained on."""


def report_of_run(
    folder: Path,
    data: StructureData,
    batch: BatchConfig,
    result: FitResult,
    num_ranks: int | None = None,
) -> Path:
    """Evaluate the model of a finished run and write its report.

    Parameters
    ----------
    folder
        The run's folder, with model, config.yaml and metrics.jsonl.
    data
        The data sets of the run.
    batch
        How batches were made.
    result
        What the trainer says of the run.
    num_ranks
        Processes that shared the run; None = those of torch's process group.

    Returns
    -------
    Path
        report.html
    """
    config = read_config(folder)
    model = load_model(folder)
    dtype = str(config["train"].get("dtype", "float64"))
    # Structures name their heads themselves; the potential's own does not matter here.
    potential = Potential(model, _device(config), dtype, model.config.heads[0])
    chosen: dict[str, Dataset] = {}
    if data.test is not None:
        chosen["test"] = data.test
    if data.valid is not None:
        chosen["validation"] = data.valid
    # Isolated atoms only give E0.
    trained = np.setdiff1d(np.arange(len(data.train)), isolated_atoms(data.train))
    number = min(MOST_TRAINING_STRUCTURES, len(trained))
    some = np.sort(np.random.default_rng(0).permutation(trained)[:number])
    name = "training" if number == len(trained) else f"training ({number} of {len(trained)})"
    chosen[name] = Subset(data.train, some)
    capacity = max(batch.capacities(["atoms"]).get("atoms", 0), 512)
    evaluations = {
        name: evaluate_dataset(potential, dataset, capacity) for name, dataset in chosen.items()
    }
    seed = int(config["train"].get("seed", 0))
    if num_ranks is None:
        num_ranks = distributed.get_world_size() if distributed.is_initialized() else 1
    plan = pack_samples(batch_sizes(Subset(data.train, trained)), None, batch, num_ranks, seed, 0)
    notes = [] if result.stopped_by is None else [f"stopped by {result.stopped_by}"]
    return write_report(
        folder,
        evaluations,
        plan=plan,
        batch=batch,
        energies=isolated_energies(model),
        summary={
            "epochs": result.epochs,
            "best epoch": result.best_epoch + 1 if result.best is not None else None,
            "parameters": sum(p.numel() for p in potential.model.parameters()),
            "training time": duration(result.seconds),
        },
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
    summary: Mapping[str, Cell] | None = None,
    notes: Sequence[str] = (),
    found: Sequence[str] = (),
) -> Path:
    """Compose report.html and ``plots/*.png`` in the folder of a run.

    Parameters
    ----------
    folder
        With metrics.jsonl and config.yaml.
    evaluations
        Name of a data set -> errors and predictions; the first one is shown in detail.
    plan, batch
        An epoch's batches and how they were made.
    energies
        Head -> atomic number -> E0 in eV, subtracted where energies are drawn.
    summary
        More numbers for the top of the page.
    notes
        Remarks that a reader must not miss; resumes are added from metrics.jsonl.
    found
        What the readers found in the files.

    Returns
    -------
    Path
        report.html
    """
    records = list(read_journal(folder / "metrics.jsonl"))
    epochs = epochs_of(records)
    config = read_config(folder)
    report = Report(f"MACE: {folder.resolve().name}", str(folder), figures=folder / "plots")
    first = next(iter(evaluations.items()), None)
    report.highlights({**(headline(*first) if first else {}), **(summary or {})})
    report.notes([*notes, *events_in_words(records)])
    report.section("Data")
    show_data(report, evaluations, found)
    if epochs:
        report.section("Learning curves")
        show_learning_curves(report, epochs, records, config)
    if first:
        report.section("Errors")
        show_errors(report, evaluations, *first)
        report.section("Parity")
        show_parity(report, *first, energies or {})
    if plan is not None:
        report.section("Batch balance")
        show_balance(report, plan, batch)
    if epochs:
        report.section("Timing")
        show_timing(report, epochs)
    report.section("Settings").config(config).versions()
    return report.write(folder / "report.html")


def read_config(folder: Path) -> dict[str, Any]:
    """Read the configuration that a run wrote."""
    values = load_yaml(folder / "config.yaml")
    return {"train": {}, **values}


def isolated_energies(model: torch.nn.Module) -> dict[str, dict[int, float]]:
    """Return E0 of each head and element of a model."""
    config: Any = model.config
    return {
        head: dict(zip(config.atomic_numbers, row, strict=True))
        for head, row in zip(config.heads, config.atomic_energies, strict=True)
    }


def duration(seconds: float) -> str:
    """Write a time for a reader.

    Examples
    --------
    >>> duration(42.4), duration(200), duration(7300)
    ('42 s', '3 min 20 s', '2 h 1 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def _device(config: Mapping[str, Any]) -> str:
    asked = config["train"].get("device") or "auto"
    if asked != "auto":
        return str(asked)
    return "cuda" if torch.cuda.is_available() else "cpu"
