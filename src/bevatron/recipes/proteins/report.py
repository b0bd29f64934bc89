"""The report of a run on structures: measures of the validation, learning curves, timing."""

from collections.abc import Sequence
from pathlib import Path

from torch import nn

from bevatron.output import Cell
from bevatron.train.report.measures import measure_name
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
    measures: Sequence[str],
    model: nn.Module,
    found: Sequence[str],
    result: FitResult,
    more: Sequence[Metric] = (),
) -> Path:
    """Write report.html and ``plots/`` of a finished run.

    Parameters
    ----------
    title : name of the model
    measures : validation metrics at the head of the page, each with a panel of its own
    found : lines about its data
    more : panels of learning curves for other validation metrics
    """
    history = History.of_run(folder)
    report = Report(f"{title}: {folder.resolve().name}", str(folder), folder / "plots")
    report.notes(history.changes())
    # A run that was over when it was resumed has validated nothing since.
    validated = [epoch["valid"] for epoch in history.epochs if epoch.get("valid")]
    rest = dict(result.metrics or (validated[-1] if validated else {}))
    known = {measure_name(name): rest.pop(name, None) for name in measures}
    report.section("Result").highlights({
        **{text: value for text, value in known.items() if value is not None},
        **summary(history, result, model),
    })  # fmt: skip
    if rest:
        rows: list[list[Cell]] = [[measure_name(name), rest[name]] for name in sorted(rest)]
        report.table(["other measures of the validation", ""], rows)
    panels = [
        # lDDT and RMSD are written as they are.
        Metric(text if text[1].isupper() else text[0].upper() + text[1:], text,
               {"validation": name}, logarithmic=False)
        for name, text in ((name, measure_name(name)) for name in measures)
    ]  # fmt: skip
    show_learning_curves(report, history, [*panels, *more])
    report.section("Data").details("What was found in the stores", "\n".join(found))
    show_timing(report, history)
    report.section("Settings").config(history.config).versions(("bevatron", "torch", "numpy"))
    return report.write(folder / "report.html")
