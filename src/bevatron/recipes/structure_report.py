"""The report of a run on structures: measures of the validation, learning curves, timing."""

from collections.abc import Sequence
from pathlib import Path

from torch import nn

from bevatron.train.report.page import Report
from bevatron.train.report.training import (
    History,
    Metric,
    show_learning_curves,
    show_timing,
    summary,
)
from bevatron.train.run import FitResult


def write_report(
    folder: Path,
    title: str,
    metrics: Sequence[Metric],
    model: nn.Module,
    found: Sequence[str],
    result: FitResult,
) -> Path:
    """Write report.html and ``plots/`` of a finished run.

    Parameters
    ----------
    metrics : what the curves show
    found : lines about its data
    """
    history = History.of_run(folder)
    report = Report(title, str(folder), folder / "plots")
    report.notes(history.changes())
    report.section("Result").highlights({
        **{name.replace("_", " "): value for name, value in (result.metrics or {}).items()},
        **summary(history, result, model),
    })  # fmt: skip
    show_learning_curves(report, history, metrics)
    report.section("Data").details("What was found in the stores", "\n".join(found))
    show_timing(report, history)
    report.section("Settings").config(history.config).versions(("bevatron", "torch", "numpy"))
    return report.write(folder / "report.html")
