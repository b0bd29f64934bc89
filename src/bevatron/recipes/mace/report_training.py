"""What a report of MACE says of training: learning curves, events, batch balance, timing."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from bevatron.data.packing import Plan
from bevatron.train.logger import column
from bevatron.train.report import plots
from bevatron.train.report.page import Report
from bevatron.train.report.plots import Curve, Panel
from bevatron.train.settings import BatchConfig
from bevatron.typing import FloatArray

Record = Mapping[str, Any]
"""A line of metrics.jsonl."""


def events_in_words(records: Sequence[Record]) -> Iterator[str]:
    """Say when a run was resumed or its batches changed."""
    for record in records:
        epoch, step = record.get("epoch", 0) + 1, record.get("step", 0)
        if record["kind"] == "resume":
            changes = "; ".join(
                f"{key} was {before}, is {now}" for key, (before, now) in record["changes"].items()
            )
            yield f"resumed in epoch {epoch}, after step {step}, with other settings: {changes}"
        elif record["kind"] == "repacked":
            yield (
                f"the samples left of epoch {epoch} after step {step} were packed anew, "
                "each still seen exactly once"
            )


def show_learning_curves(
    report: Report, epochs: Sequence[Record], records: Sequence[Record], config: Mapping[str, Any]
) -> None:
    """Draw losses, errors and the learning rate by epoch."""
    x = [record["epoch"] + 1 for record in epochs]

    def values(*keys: str, factor: float = 1.0) -> FloatArray:
        return factor * column(epochs, *keys)

    loss = [Curve("training", x, values("loss")), Curve("validation", x, values("valid", "loss"))]
    panels = [Panel("Loss", "loss", _shown(loss))]
    for quantity, title, unit in (
        ("energy_per_atom", "Energy, validation", "error (meV/atom)"),
        ("forces", "Forces, validation", "error (meV/Å)"),
        ("stress", "Stress, validation", "error (meV/Å³)"),
    ):
        both = [
            Curve(kind.upper(), x, values("valid", f"{quantity}_{kind}", factor=1e3))
            for kind in ("rmse", "mae")
        ]
        if _shown(both):
            panels.append(Panel(title, unit, _shown(both)))
    terms = sorted({name for record in epochs for name in record.get("terms", {})})
    if len(terms) > 1:
        curves = [Curve(name, x, values("terms", name)) for name in terms]
        panels.append(Panel("Terms of the loss", "training loss", curves))
    panels.append(Panel("Learning rate", "learning rate", [Curve("", x, values("lr"))]))
    if len(panels) < 6:
        norm = Curve("", x, values("grad_norm"))
        panels.append(Panel("Gradient", "norm before clipping", [norm]))
    events = list(_events(records, config))
    best = [record["epoch"] + 1 for record in epochs if record.get("best")]
    words = "Marked: " + ", ".join(f"{name} (epoch {place:g})" for place, name in events) + "."
    report.figure(
        plots.curves(panels, events=events),
        f"Averages over each epoch. {f'Best validation in epoch {best[-1]}. ' if best else ''}"
        f"{words if events else ''}",
        "learning_curves",
    )


def _shown(curves: Sequence[Curve]) -> list[Curve]:
    return [curve for curve in curves if np.isfinite(np.asarray(curve.y, dtype=float)).any()]


def _events(records: Sequence[Record], config: Mapping[str, Any]) -> Iterator[tuple[float, str]]:
    stage = ((config.get("loss") or {}).get("stage_two") or {}).get("start_epoch")
    if stage is None:
        stage = (config.get("schedule") or {}).get("stage_two_start")
    if stage is not None and any(record.get("epoch", -1) >= stage for record in records):
        yield stage + 1, "stage two"
    for record in records:
        if record["kind"] in {"resume", "repacked"}:
            words = "resumed" if record["kind"] == "resume" else "packed anew"
            yield record["epoch"] + 1, words


def show_balance(report: Report, plan: Plan, batch: BatchConfig | None) -> None:
    """Show how evenly the batches of an epoch are filled."""
    algorithm = batch.algorithm if batch is not None else "batches"
    capacity = None if plan.capacity is None else float(plan.capacity[0])
    sizes = plan.batch_sizes
    report.table(
        ("batches", "ranks", "steps", "structures per batch", "fill (%)",
         "slowest rank over mean (%)", "repeats"),
        [[
            algorithm, plan.num_ranks, plan.num_steps, f"{sizes.min()} - {sizes.max()}",
            None if np.isnan(plan.fill) else 100 * plan.fill, 100 * (plan.imbalance - 1),
            plan.num_repeats,
        ]],
        "The first epoch",
    )  # fmt: skip
    atoms = batch is None or batch.costs(["atoms"]) == {"atoms": 1.0}
    unit = "atoms" if atoms else "cost"
    if plan.num_ranks > 1:
        figure = plots.batch_balance({algorithm: plan.costs}, capacity if atoms else None, unit)
        caption = "What each rank has to do in each step; all ranks wait for the slowest."
    else:
        figure = plots.histogram(
            {"batches": plan.costs.ravel()}, f"{unit} of a batch", "Sizes of batches", "batches"
        )
        caption = "How much is in the batches of the first epoch."
        caption += f" Capacity: {capacity:,.0f} {unit}." if capacity and atoms else ""
    report.figure(figure, caption, "batch_balance")


def show_timing(report: Report, epochs: Sequence[Record]) -> None:
    """Show where the time of each epoch went."""
    seconds = column(epochs, "time", "seconds")
    waited = seconds * column(epochs, "time", "wait_share")
    validation = column(epochs, "time", "validation_seconds")
    atoms, graphs = column(epochs, "time", "atoms_per_s"), column(epochs, "time", "graphs_per_s")
    report.table(
        ("", "seconds", "share (%)"),
        [
            [name, float(part.sum()), float(100 * part.sum() / (seconds + validation).sum())]
            for name, part in (
                ("training steps", seconds - waited),
                ("waiting for data", waited),
                ("validation", validation),
            )
        ],
        f"{len(epochs)} epochs; median {np.nanmedian(graphs):,.0f} structures/s, "
        f"{np.nanmedian(atoms):,.0f} atoms/s while training",
    )
    x = [record["epoch"] + 1 for record in epochs]
    parts = [
        Curve("training steps", x, seconds - waited),
        Curve("waiting for data", x, waited),
        Curve("validation", x, validation),
    ]
    report.figure(
        plots.curves(
            [
                Panel("Time of an epoch", "seconds", parts, logarithmic=False, from_zero=True),
                Panel(
                    "Speed",
                    "atoms per second",
                    [Curve("", x, atoms)],
                    logarithmic=False,
                    from_zero=True,
                ),
            ]
        ),
        "Where the time of each epoch went, and how fast training was.",
        "timing",
    )
