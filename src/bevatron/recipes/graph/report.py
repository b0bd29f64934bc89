"""The report of a run on graphs: learning curves, metrics by split, confusion of classes."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import nn

from bevatron.data.dataset import Dataset
from bevatron.models.graph_attention import NodeTask
from bevatron.parallel.collectives import sum_over_ranks
from bevatron.parallel.mesh import Mesh
from bevatron.recipes.graph import SYSTEM
from bevatron.recipes.graph.data import GraphData, graph_sizes
from bevatron.train.evaluate import predict
from bevatron.train.precision import dtype_of
from bevatron.train.report.measures import measure_name
from bevatron.train.report.page import Report
from bevatron.train.report.plots.style import HEAT, new_axes
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
from bevatron.train.settings import Settings
from bevatron.typing import IntArray

MOST_CLASSES_DRAWN = 40

ROLE_NAMES = {"train": "training", "valid": "validation", "test": "test"}
"""Role of vertices -> its name in a report."""


METRICS = [
    Metric(title, f"validation {label}", {"validation": name}, logarithmic=False)
    for name, title, label in (
        ("accuracy", "Accuracy", "accuracy"),
        ("roc_auc", "ROC-AUC", "ROC-AUC"),
    )
]


@dataclass(frozen=True)
class Measured:
    """Metrics of a model on one split.

    Attributes
    ----------
    confused : [classes, classes]
        Confusion matrix: rows are true classes; empty for yes-or-no questions.
    """

    metrics: dict[str, float]
    confused: IntArray


def measure(
    model: nn.Module, data: GraphData, settings: Settings, mesh: Mesh | None = None
) -> dict[str, Measured]:
    """Evaluate a model on train, valid and test.

    Parameters
    ----------
    model : with its final weights, on the device of the run
    mesh : the processes that share the graph, which all call this; None = one process
    """
    sets = {"train": data.train, "valid": data.valid, "test": data.test}
    return {
        role: _measure(model, data, dataset, settings, mesh or Mesh())
        for role, dataset in sets.items()
        if dataset is not None
    }


def report_of_run(
    folder: Path,
    model: nn.Module,
    measured: Mapping[str, Measured] | None,
    data: GraphData,
    settings: Settings,
    result: FitResult,
) -> Path:
    """Write report.html and ``plots/`` of a finished run.

    Parameters
    ----------
    measured : its metrics, see `measure`; None = it is evaluated here
    """
    history = History.of_run(folder)
    config = history.config
    if measured is None:
        measured = measure(model, data, settings)
    metrics = {role: found.metrics for role, found in measured.items()}
    chosen = next((role for role in ("test", "valid", "train") if metrics.get(role)), "train")
    layer, _, variant = config["model"]["layer"].upper().replace("V2", "v2").partition("_")
    layers = f"{config['model']['num_layers']} layers of {layer}"
    layers += f" ({variant.lower()})" if variant else ""
    report = Report(f"Node classification: {layers}", str(folder), folder / "plots")
    report.notes(history.changes())
    report.section("Result").highlights(
        {
            **{
                f"{measure_name(name)}, {ROLE_NAMES[chosen]}": value
                for name, value in metrics.get(chosen, {}).items()
            },
            **summary(history, result, model),
        }
    )
    names = list(dict.fromkeys(name for each in metrics.values() for name in each))
    rows = [
        [ROLE_NAMES[role], *(each.get(name) for name in names)] for role, each in metrics.items()
    ]
    report.table(["set", *map(measure_name, names)], rows)
    show_learning_curves(report, history, METRICS)
    if data.questions == "classes" and chosen in measured:
        _classes(report, measured[chosen].confused, chosen)
    report.section("Data").details("What was found in the files", "\n".join(data.report))
    if len(data.train) > 1:
        sizes = graph_sizes(data.train)
        plan = first_epoch(sizes, settings.batch, history)
        show_balance(report, plan, settings.batch, sizes, SYSTEM.samples)
    show_timing(report, history)
    report.section("Settings").config(config).versions(("bevatron", "torch", "numpy"))
    return report.write(folder / "report.html")


def _measure(
    model: nn.Module, data: GraphData, dataset: Dataset, settings: Settings, mesh: Mesh
) -> Measured:
    task = NodeTask(data.questions, data.outputs)
    metrics = task.metrics()
    size = data.outputs if data.questions == "classes" else 0
    confused = np.zeros((size, size), dtype=np.int64)
    device = next(model.parameters()).device
    dtype = dtype_of(settings.train.dtype)
    batches = predict(
        task, model, dataset, graph_sizes(dataset), batch=settings.batch, device=device, dtype=dtype
    )
    for batch, outputs in batches:
        metrics.update(batch, outputs)
        if size:
            known = batch.mask & (batch.labels >= 0)
            pair = batch.labels[known] * size + outputs["logits"].argmax(1)[known]
            counts = torch.bincount(pair, minlength=size**2).cpu().numpy()
            confused += counts.reshape(size, size)
    if mesh.world > 1:
        metrics.load_sums(sum_over_ranks(metrics.sums(), mesh))
        confused = sum_over_ranks(torch.from_numpy(confused), mesh).numpy()
    return Measured(metrics.compute(), confused)


def _classes(report: Report, confused: IntArray, role: str) -> None:
    """Show precision and recall of each class."""
    total, said, right = (
        counts.tolist()
        for counts in (confused.sum(axis=1), confused.sum(axis=0), np.diag(confused))
    )
    rows: list[list[Any]] = [
        [str(c), total[c], _share(right[c], total[c]), _share(right[c], said[c])]
        for c in range(len(confused))
    ]
    report.section("Classes").table(
        ["class", "vertices", "recall", "precision"], rows, f"On the {ROLE_NAMES[role]} vertices."
    )
    if len(confused) <= MOST_CLASSES_DRAWN:
        caption = "Fraction of the vertices of each class (row) predicted as each class (column)."
        report.figure(confusion(confused), caption, "confusion")


def _share(part: int, whole: int) -> float | None:
    return float(part / whole) if whole else None


def confusion(counts: IntArray) -> Figure:
    """Draw the confusion matrix."""
    size = len(counts)
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    side = min(3.0 + 0.35 * size, 11.0)
    with new_axes(side + 0.8, side) as (figure, axes):
        ax = axes[0, 0]
        image = ax.imshow(shares, cmap=HEAT, vmin=0, vmax=1)
        ax.grid(visible=False)
        ax.set(xlabel="predicted class", ylabel="true class", title="Confusion matrix")
        ax.set_xticks(range(size))
        ax.set_yticks(range(size))
        if size <= 15:
            for true, row in enumerate(shares):
                for said, share in enumerate(row):
                    colour = "white" if share > 0.6 else "#222222"
                    ax.text(said, true, f"{share:.2f}", ha="center", va="center", color=colour,
                            fontsize=8)  # fmt: skip
        figure.colorbar(image, ax=ax, shrink=0.8, label="share")
    return figure
