"""The report of a run on chains: measures of the validation, learning curves, timing."""

from collections.abc import Sequence
from pathlib import Path

from torch import nn

from bevatron.recipes.proteins.report import write_report
from bevatron.train.run import FitResult

MEASURES = ("lddt_ca", "tm_score", "rmsd", "loss_fape", "distogram", "contact_precision", "plddt")
"""Validation metrics at the head of the page, each with a panel of its own."""


def report_of_run(folder: Path, model: nn.Module, found: Sequence[str], result: FitResult) -> Path:
    """Write report.html and ``plots/`` of a finished run; see `write_report`."""
    return write_report(folder, "AlphaFold2", MEASURES, model, found, result)
