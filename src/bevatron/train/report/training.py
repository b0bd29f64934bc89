"""The part of all reports about training: learning curves, batch balance, timing."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import distributed

from bevatron.config import load_yaml
from bevatron.data.packing import Plan
from bevatron.output import Cell, counted, span
from bevatron.train.epochs import pack_samples
from bevatron.train.logger import column, epochs_of, read_journal
from bevatron.train.report import plots
from bevatron.train.report.measures import term_name
from bevatron.train.report.page import Report
from bevatron.train.report.plots import Curve, Panel
from bevatron.train.run import FitResult
from bevatron.train.settings import BatchConfig
from bevatron.typing import FloatArray, IntArray

Record = Mapping[str, Any]
"""A line of metrics.jsonl."""


@dataclass(frozen=True)
class History:
    """Configuration and metrics of a run.

    Attributes
    ----------
    config : the values of config.yaml
    records, epochs
        Lines of metrics.jsonl, and those of finished epochs; in a run of stages an epoch is what
        lies between two validations.
    """

    config: dict[str, Any]
    records: Sequence[Record]
    epochs: Sequence[Record]

    @classmethod
    def of_run(cls, folder: Path) -> Self:
        """Read the folder of a run."""
        records = list(read_journal(folder / "metrics.jsonl"))
        config = {"train": {}, **load_yaml(folder / "config.yaml")}
        return cls(config, records, epochs_of(records))

    @property
    def unit(self) -> str:
        """Unit of the horizontal axes: steps for a run in stages."""
        staged = any("stage" in record for record in self.epochs)
        return "step" if staged or (not self.epochs and "stages" in self.config) else "epoch"

    def place(self, record: Record) -> int:
        """Return the position of a line of metrics.jsonl on the horizontal axes."""
        return int(record.get("step", 0) if self.unit == "step" else record["epoch"] + 1)

    @property
    def device(self) -> str:
        """The device that the run asked for, on this machine."""
        asked = str(self.config["train"].get("device") or "auto")
        return ("cuda" if torch.cuda.is_available() else "cpu") if asked == "auto" else asked

    def changes(self) -> list[str]:
        """Describe every resume with other settings, and epochs that were repacked."""
        return list(_changes(self.records, self.unit))


@dataclass(frozen=True)
class Metric:
    """Validation metrics that share a panel.

    Attributes
    ----------
    title, ylabel : those of the panel, the latter with the unit
    keys : label of each curve -> name of the validation metric
    factor : from the unit of the metric to that of the panel
    logarithmic : whether the vertical axis is
    """

    title: str
    ylabel: str
    keys: Mapping[str, str]
    factor: float = 1.0
    logarithmic: bool = True


def summary(history: History, result: FitResult, model: torch.nn.Module) -> dict[str, Cell]:
    """Return the main figures of a run, shown after its errors."""
    best = [history.place(record) for record in history.epochs if record.get("best")]
    return {
        f"{history.unit}s": result.steps if history.unit == "step" else result.epochs,
        **({f"best {history.unit}": best[-1]} if best else {}),
        "parameters": sum(p.numel() for p in model.parameters()),
        "training time": duration(result.seconds),
    }


def show_learning_curves(
    report: Report, history: History, metrics: Sequence[Metric], caption: str = ""
) -> None:
    """Draw losses, validation metrics and the learning rate by epoch or step, in a section.

    A run without a finished epoch has no such section.

    Parameters
    ----------
    metrics : one panel each; those without values are left out
    """
    epochs = history.epochs
    if not epochs:
        return
    unit, x = history.unit, [history.place(record) for record in epochs]

    def curve(label: str, *keys: str, factor: float = 1.0) -> Curve:
        return Curve(label, x, factor * column(epochs, *keys))

    losses = [training_loss(history, "training"), curve("validation", "valid", "loss")]
    panels = [Panel("Loss", "loss", _known(losses))]
    for metric in metrics:
        found = _known(
            curve(label, "valid", key, factor=metric.factor) for label, key in metric.keys.items()
        )
        if found:
            # A legend names the curves only where there are several.
            alone = len(found) == 1 < len(metric.keys)
            title = f"{metric.title}: {found[0].label}" if alone else metric.title
            panels.append(Panel(title, metric.ylabel, found, metric.logarithmic))
    terms = sorted({name for record in epochs for name in record.get("terms", {})})
    if len(terms) > 1:
        curves = [curve(term_name(name), "terms", name) for name in terms]
        panels.append(Panel("Terms of the loss", "training loss", curves))
    panels.append(Panel("Learning rate", "learning rate", [curve("", "lr")]))
    if len(panels) < 6:
        panels.append(Panel("Gradient", "norm before clipping", [curve("", "grad_norm")]))
    events = list(_events(history))
    best = [history.place(record) for record in epochs if record.get("best")]
    marked = ", ".join(f"{name} ({unit} {place:g})" for place, name in events)
    sentences = [
        "Averages over each epoch."
        if unit == "epoch"
        else "Averages between validations; of the training loss, over logged steps.",
        f"Best validation in {unit} {best[-1]}." if best else "",
        caption,
        f"Marked: {marked}." if events else "",
    ]
    report.section("Learning curves").figure(
        plots.curves(panels, unit, events), " ".join(filter(None, sentences)), "learning_curves"
    )


def first_epoch(sizes: Mapping[str, IntArray], batch: BatchConfig, history: History) -> Plan:
    """Pack the batches of the first epoch again, for the current number of ranks.

    Parameters
    ----------
    sizes : name -> size of each sample, that by which samples are measured first
    """
    num_ranks = distributed.get_world_size() if distributed.is_initialized() else 1
    seed = int(history.config["train"].get("seed", 0))
    return pack_samples(sizes, None, batch, num_ranks, seed, epoch=0)


def show_balance(
    report: Report, plan: Plan, batch: BatchConfig, sizes: Iterable[str], samples: str
) -> None:
    """Show how evenly the batches of an epoch are filled, in a section.

    Parameters
    ----------
    plan, batch : batches of the first epoch and how they were made
    sizes : names of what is counted of a sample, that by which it is measured first
    samples : what samples are called
    """
    costs = batch.costs(sizes)
    unit = next(iter(costs)) if list(costs.values()) == [1.0] else None
    capacity = None if plan.capacity is None or unit is None else float(plan.capacity[0])
    counts = plan.batch_sizes
    report.section("Batch balance").table(
        ("batches", "ranks", "steps", f"{samples} per batch", "fill (%)",
         "slowest rank over mean (%)", "repeats"),
        [[
            batch.algorithm, plan.num_ranks, plan.num_steps, span(counts.min(), counts.max()),
            None if np.isnan(plan.fill) else 100 * plan.fill, 100 * (plan.imbalance - 1),
            plan.num_repeats,
        ]],
        "The first epoch",
    )  # fmt: skip
    unit = unit or "cost"
    if plan.num_ranks > 1:
        figure = plots.batch_balance({batch.algorithm: plan.costs}, capacity, unit)
        caption = "Work of each rank in each step. All ranks wait for the slowest."
    else:
        figure = plots.histogram(
            {"batches": plan.costs.ravel()}, f"{unit} of a batch", "Sizes of batches", "batches"
        )
        caption = "Sizes of the batches of the first epoch."
        caption += f" Capacity: {capacity:,.0f} {unit}." if capacity else ""
    report.figure(figure, caption, "batch_balance")


def show_timing(report: Report, history: History) -> None:
    """Show where the time of each epoch went, in a section; see `show_learning_curves`."""
    epochs = history.epochs
    if not epochs:
        return
    seconds = column(epochs, "time", "seconds")
    waited = seconds * column(epochs, "time", "wait_share")
    validation = np.nan_to_num(column(epochs, "time", "validation_seconds"))
    spent = {
        "training steps": seconds - waited,
        "waiting for data": waited,
        "validation": validation,
    }
    names = [name for name in epochs[-1]["time"] if name.endswith("_per_s")][:2]
    rates = {name.removesuffix("_per_s"): column(epochs, "time", name) for name in names}
    known = [(of_known(rate, np.median), unit) for unit, rate in rates.items()]
    medians = ", ".join(_rate(rate, unit) for rate, unit in known if np.isfinite(rate))
    counts = (
        counted(epochs[-1]["step"], "step")
        if history.unit == "step"
        else counted(len(epochs), "epoch")
    )
    report.section("Timing").table(
        ("", "seconds", "share (%)"),
        [
            [name, float(part.sum()), float(100 * part.sum() / (seconds + validation).sum())]
            for name, part in spent.items()
        ],
        f"{counts}; median {medians} while training" if medians else counts,
    )
    x = [history.place(record) for record in epochs]
    of = "an epoch" if history.unit == "epoch" else "the steps up to a validation"
    panels = [_linear(f"Time of {of}", "seconds", x, spent)]
    panels += [_linear("Throughput", f"{unit} per second", x, {"": rate})
               for unit, rate in list(rates.items())[-1:]]  # fmt: skip
    report.figure(plots.curves(panels, history.unit), f"Time of {of}, and throughput.", "timing")


def duration(seconds: float) -> str:
    """Format a duration.

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


def _rate(value: float, unit: str) -> str:
    return f"{value:,.0f} {unit}/s" if value >= 10 else f"{value:.2g} {unit}/s"


def _linear(title: str, ylabel: str, x: Any, values: Mapping[str, FloatArray]) -> Panel:
    lines = [Curve(name, x, value) for name, value in values.items()]
    return Panel(title, ylabel, lines, logarithmic=False, from_zero=True)


def training_loss(history: History, label: str) -> Curve:
    """Return the loss of the epochs, or of the logged steps in at most 200 equal intervals."""
    if history.unit == "epoch":
        places = [history.place(record) for record in history.epochs]
        return Curve(label, places, column(history.epochs, "loss"))
    steps = [record for record in history.records if record["kind"] == "step"]
    length = -(-len(steps) // 200) or 1
    parts = [steps[first : first + length] for first in range(0, len(steps), length)]
    losses = [of_known(column(part, "loss"), np.mean) for part in parts]
    return Curve(label, [part[-1]["step"] for part in parts], losses)


def of_known(values: FloatArray, reduce: Callable[[FloatArray], Any]) -> float:
    """Reduce the values that are known to a number; NaN if none is."""
    known = values[np.isfinite(values)]
    return float(reduce(known)) if len(known) else np.nan


def _known(curves: Iterable[Curve]) -> list[Curve]:
    return [curve for curve in curves if np.isfinite(np.asarray(curve.y, dtype=float)).any()]


def _changes(records: Sequence[Record], unit: str) -> Iterator[str]:
    for record in records:
        epoch, step = record.get("epoch", 0) + 1, record.get("step", 0)
        if record["kind"] == "resume":
            changes = "; ".join(
                f"{key} was {before}, is {now}" for key, (before, now) in record["changes"].items()
            )
            place = (
                f"in epoch {epoch}, after step {step}" if unit == "epoch" else f"after step {step}"
            )
            yield f"resumed {place}, with other settings: {changes}"
        elif record["kind"] == "repacked":
            yield (
                f"the samples left of epoch {epoch} after step {step} were repacked, "
                "each is still seen exactly once"
            )


def _events(history: History) -> Iterator[tuple[float, str]]:
    """Yield (place, label) of the events marked in the curves: of the first step after each."""
    beyond = 1 if history.unit == "step" else 0
    stages = [(record["step"], record["stage"]) for record in history.epochs if "stage" in record]
    for (step, before), (_, after) in itertools.pairwise(stages):
        if after != before:
            yield step + beyond, after
    stage = ((history.config.get("loss") or {}).get("stage_two") or {}).get("start_epoch")
    if stage is None:
        stage = (history.config.get("schedule") or {}).get("stage_two_start")
    if stage is not None and any(r.get("epoch", -1) >= stage for r in history.records):
        yield stage + 1, "stage two"
    labels = {"resume": "resumed", "repacked": "repacked"}
    for record in history.records:
        if record["kind"] in labels:
            yield history.place(record) + beyond, labels[record["kind"]]
