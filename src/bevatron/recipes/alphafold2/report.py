"""The report of a run on chains: measures of the validation, learning curves, timing."""

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

METRICS = [
    Metric(title, title, {"validation": name}, logarithmic=False)
    for name, title in (
        ("lddt_ca", "lDDT of CA atoms"),
        ("loss_fape", "frame-aligned point error"),
        ("distogram", "cross entropy of the distogram"),
        ("contact_precision", "precision of contacts"),
        ("plddt", "expected lDDT (pLDDT)"),
    )
]


def report_of_run(folder: Path, model: nn.Module, found: Sequence[str], result: FitResult) -> Path:
    """Write report.html and ``plots/`` of a finished run.

    Parameters
    ----------
    folder
        The run's folder, with config.yaml and metrics.jsonl.
    model
        Of the run.
    found
        Lines about its data.
    result
        Result of the training.
    """
    history = History.of_run(folder)
    report = Report("Structures of chains: AlphaFold2", str(folder), folder / "plots")
    report.notes(history.changes())
    report.section("Result").highlights({
        **{name.replace("_", " "): value for name, value in (result.metrics or {}).items()},
        **summary(result, model),
    })  # fmt: skip
    show_learning_curves(report, history, METRICS)
    report.section("Data").details("What was found in the stores", "\n".join(found))
    show_timing(report, history)
    report.section("Settings").config(history.config).versions(("bevatron", "torch", "numpy"))
    return report.write(folder / "report.html")
