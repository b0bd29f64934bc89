"""The report of a run on complexes: measures of the validation, learning curves, timing."""

from collections.abc import Sequence
from pathlib import Path

from torch import nn

from bevatron.models.alphafold3.metrics import PAIRS
from bevatron.models.common.folding.metrics.lddt import KINDS
from bevatron.recipes.proteins.report import write_report
from bevatron.train.report.measures import measure_name
from bevatron.train.report.training import Metric
from bevatron.train.run import FitResult

MEASURES = ("lddt", "lddt_interface", "contact_precision", "distogram", "plddt")
"""Validation metrics at the head of the page, each with a panel of its own."""

BY_KIND = [
    Metric(title, "lDDT", {measure_name(key): f"lddt_{key}" for key in keys}, logarithmic=False)
    for title, keys in (("lDDT by kind", KINDS), ("lDDT by interface", PAIRS))
]
"""Curves of all kinds of molecules and of interfaces that the validation has."""


def report_of_run(folder: Path, model: nn.Module, found: Sequence[str], result: FitResult) -> Path:
    """Write report.html and ``plots/`` of a finished run; see `write_report`."""
    return write_report(folder, "AlphaFold3", MEASURES, model, found, result, BY_KIND)
