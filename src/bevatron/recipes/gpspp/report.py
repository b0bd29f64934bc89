"""The report of a run on molecules: learning curves, errors, parity, errors by size, the data."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from bevatron.data.dataset import Dataset, Subset
from bevatron.models.gpspp import GPSPlusPlus, GPSPlusPlusTask, Mode, Target
from bevatron.output import Cell
from bevatron.recipes.gpspp import SYSTEM
from bevatron.recipes.gpspp.data import MoleculeData, molecule_sizes
from bevatron.recipes.gpspp.finetune import trained_model
from bevatron.recipes.gpspp.targets import labels_of
from bevatron.train.evaluate import predict
from bevatron.train.report import plots
from bevatron.train.report.measures import measure_name
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
from bevatron.typing import FloatArray, IntArray

MOST_TRAINING_MOLECULES = 2000
"""Number of training molecules that are evaluated, for comparison with held-out ones."""

MOST_TARGETS_DRAWN = 6


@dataclass(frozen=True)
class Evaluated:
    """Metrics of a data set; labels and predictions of the first mode.

    Attributes
    ----------
    metrics : by name, see `bevatron.models.gpspp.PropertyMetrics`
    labels, predictions : [n, T], NaN where there is no label
    num_atoms : [n]
    """

    metrics: Mapping[str, float]
    labels: FloatArray
    predictions: FloatArray
    num_atoms: IntArray


def evaluate_molecules(
    model: GPSPlusPlus,
    dataset: Dataset,
    modes: Sequence[Mode] = ("2d",),
    device: torch.device | str = "cpu",
    capacity: int = 4096,
) -> Evaluated:
    """Compute errors and predictions of a model on prepared molecules with labels.

    Parameters
    ----------
    modes : inputs: 2d, 3d
    capacity : maximum number of atoms per batch; a larger molecule is a batch of its own
    """
    task = GPSPlusPlusTask(model.config, modes=modes)
    metrics = task.metrics()
    dtype = next(model.parameters()).dtype
    labels, predictions = [], []
    sizes = molecule_sizes(dataset)
    limits = {"atoms": capacity, "pairs": 32 * capacity}
    batches = predict(
        task, model, dataset, sizes, batch=BatchConfig(capacity=limits), device=device, dtype=dtype
    )
    for batch, outputs in batches:
        metrics.update(batch, outputs)
        known = batch.target_weight > 0
        labels.append(torch.where(known, batch.targets, torch.nan).cpu())
        predictions.append(outputs["prediction"].cpu())
    return Evaluated(
        metrics.compute(),
        torch.cat(labels).double().numpy(),
        torch.cat(predictions).double().numpy(),
        sizes["atoms"],
    )


def report_of_run(
    folder: Path, data: MoleculeData, modes: Sequence[Mode], batch: BatchConfig, result: FitResult
) -> Path:
    """Evaluate the model of a finished run and write report.html and ``plots/``.

    Parameters
    ----------
    modes : the modes of validation
    """
    history = History.of_run(folder)
    model = trained_model(folder).to(history.device)
    aside = (("test", data.test), ("validation", data.valid))
    parts = {
        name: part
        for name, part in aside
        if part is not None and np.isfinite(labels_of(part)).any()
    }
    some = _some(data.train)
    number = len(some)
    name = "training" if number == len(data.train) else f"training ({number} of {len(data.train)})"
    parts[name] = some
    found = {
        role: evaluate_molecules(model, part, modes, history.device) for role, part in parts.items()
    }
    first = next(iter(found))
    report = Report(f"GPS++: {folder.resolve().name}", str(folder), folder / "plots")
    report.highlights(
        {**_headline(first, found[first], model.config.targets), **summary(history, result, model)}
    )
    warnings = [line for line in data.report if line.startswith("warning")]
    stopped = [] if result.stopped_by is None else [f"stopped by {result.stopped_by}"]
    report.notes([*stopped, *warnings, *history.changes()])
    _errors(report, found, modes, model.config.targets)
    masked = "In training, inputs are masked and noisy and the loss has all terms."
    show_learning_curves(report, history, _metrics(model.config.targets, modes), masked)
    _parity(report, first, found[first], model.config.targets)
    _data(report, data, dict(reversed(found.items())), model.config.targets)
    sizes = molecule_sizes(data.train)
    show_balance(report, first_epoch(sizes, batch, history), batch, sizes, SYSTEM.samples)
    show_timing(report, history)
    report.section("Settings").config(history.config)
    report.versions(("bevatron", "torch", "numpy", "rdkit"))
    return report.write(folder / "report.html")


def _some(train: Dataset) -> Dataset:
    """Choose training molecules to be evaluated."""
    if len(train) <= MOST_TRAINING_MOLECULES:
        return train
    order = np.random.default_rng(0).permutation(len(train))
    return Subset(train, np.sort(order[:MOST_TRAINING_MOLECULES]))


MAIN = {"regression": "mae", "binary": "auroc", "multiclass": "accuracy"}
"""Main metric of a target by kind."""


def _headline(name: str, found: Evaluated, targets: Sequence[Target]) -> dict[str, Cell]:
    cards: dict[str, Cell] = {}
    for target in targets[:MOST_TARGETS_DRAWN]:
        metric = MAIN[target.kind]
        unit = f" ({target.unit})" if target.unit and metric == "mae" else ""
        label = f"{target.name} {measure_name(metric)}, {name}{unit}"
        cards[label] = found.metrics.get(f"{target.name}_{metric}")
    return cards


def _errors(
    report: Report, found: Mapping[str, Evaluated], modes: Sequence[Mode], targets: Sequence[Target]
) -> None:
    names = list(dict.fromkeys(name for each in found.values() for name in each.metrics))
    rows: list[list[Cell]] = [
        [_written(name, targets), *(each.metrics.get(name) for each in found.values())]
        for name in names
    ]
    told = "" if len(modes) == 1 else f"Seen in {modes[0].upper()} unless the row says otherwise."
    report.section("Errors").table(["", *found], rows, told)


def _written(name: str, targets: Sequence[Target]) -> str:
    """Write a metric's name as a report does.

    Examples
    --------
    >>> targets = [Target("u0", unit="eV"), Target("u0_atom", unit="eV")]
    >>> [_written(name, targets) for name in ("u0_mae", "3d/u0_atom_mae", "loss")]
    ['u0 MAE (eV)', 'u0_atom MAE (eV), 3D', 'loss']
    """
    mode, _, metric = name.rpartition("/")
    for target in sorted(targets, key=lambda each: -len(each.name)):  # u0_atom is not of u0
        kind = metric.removeprefix(f"{target.name}_")
        if kind != metric:
            unit = f" ({target.unit})" if target.unit and kind in {"mae", "rmse"} else ""
            metric = f"{target.name} {measure_name(kind)}{unit}"
            break
    return f"{metric}, {mode.upper()}" if mode else metric


def _metrics(targets: Sequence[Target], modes: Sequence[Mode]) -> list[Metric]:
    """Return the panel of each target: its main metric, a curve for each mode."""
    prefixes = ["", *(f"{mode}/" for mode in modes[1:])]
    found = []
    for target in targets[:MOST_TARGETS_DRAWN]:
        metric = MAIN[target.kind]
        unit = f" ({target.unit})" if target.unit and metric == "mae" else ""
        keys: dict[str, str] = {
            mode.upper(): f"{prefix}{target.name}_{metric}"
            for mode, prefix in zip(modes, prefixes, strict=True)
        }
        ylabel = f"validation {measure_name(metric)}{unit}"
        found.append(Metric(target.name, ylabel, keys, logarithmic=metric == "mae"))
    return found


def _parity(report: Report, name: str, found: Evaluated, targets: Sequence[Target]) -> None:
    report.section("Predictions")
    drawn = [(t, target) for t, target in enumerate(targets) if target.kind == "regression"]
    for t, target in drawn[:MOST_TARGETS_DRAWN]:
        known = np.isfinite(found.labels[:, t])
        label, said = found.labels[known, t], found.predictions[known, t]
        unit = target.unit or "label's unit"
        picture = plots.parity(label, said, target.name, unit)
        report.figure(picture, f"{target.name}, {name} set.", f"parity_{t}")
        _by_size(report, target, unit, found.num_atoms[known], np.abs(said - label), t)
    for t, target in enumerate(targets):
        if target.kind == "binary":
            known = np.isfinite(found.labels[:, t])
            scores = {
                str(side): found.predictions[known & (found.labels[:, t] == side), t]
                for side in (0, 1)
            }
            label = f"probability of {target.name}"
            picture = plots.histogram(scores, label, target.name, "molecules")
            report.figure(picture, f"{target.name}, {name} set, by label.", f"scores_{t}")


def _by_size(
    report: Report, target: Target, unit: str, sizes: IntArray, errors: FloatArray, t: int
) -> None:
    """Draw the error by number of atoms; rare sizes are pooled."""
    if len(sizes) < 2 or sizes.min() == sizes.max():
        return
    edges = np.unique(np.quantile(sizes, np.linspace(0, 1, 9)).round().astype(int))
    labels, means = [], []
    for low, high in pairwise(edges):
        upper = high + (high == edges[-1])
        own = (sizes >= low) & (sizes < upper)
        if own.any():
            last = upper - 1
            labels.append(f"{low}" if last == low else f"{low}-{last}")
            means.append(float(errors[own].mean()))
    picture = plots.bars(labels, {"MAE": means}, f"MAE ({unit})", f"{target.name} by heavy atoms")
    report.figure(picture, "Mean absolute error by number of heavy atoms.", f"errors_by_size_{t}")


def _data(
    report: Report, data: MoleculeData, found: Mapping[str, Evaluated], targets: Sequence[Target]
) -> None:
    parts = {"training": data.train, "validation": data.valid, "test": data.test}
    rows: list[list[Cell]] = []
    sizes = {}
    for name, part in parts.items():
        if part is None:
            continue
        counted = molecule_sizes(part)
        sizes[name] = counted["atoms"]
        rows.append(
            [
                name,
                len(part),
                float(counted["atoms"].mean()),
                int(counted["atoms"].max()),
                float(counted["edges"].mean() / 2),
                int((part.lengths("positions") > 0).sum()),
            ]
        )
    headers = ["set", "molecules", "atoms each", "most atoms", "bonds each", "with 3D structure"]
    report.section("Data").table(headers, rows)
    report.figure(plots.histogram(sizes, "heavy atoms", "Sizes", "molecules"), "", "sizes")
    for t, target in enumerate(targets[:MOST_TARGETS_DRAWN]):
        series = {part: each.labels[:, t] for part, each in found.items()}
        if any(np.isfinite(labels).any() for labels in series.values()):
            unit = f" ({target.unit})" if target.unit else ""
            title = f"Labels of {target.name}"
            picture = plots.histogram(series, f"{target.name}{unit}", title, "molecules")
            report.figure(picture, "", f"labels_{t}")
    report.details("What was found in the files", "\n".join(data.report))
