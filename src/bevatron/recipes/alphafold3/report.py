"""The report of a run on complexes: measures of the validation, learning curves, timing."""

from collections.abc import Sequence
from pathlib import Path

from torch import nn

from bevatron.recipes.structure_report import write_report
from bevatron.train.run import FitResult

MEASURES = {
    "lddt": "lDDT",
    "lddt_interface": "lDDT of interfaces",
    "lddt_protein": "lDDT of proteins",
    "contact_precision": "precision of contacts",
    "distogram": "cross entropy of the distogram",
    "plddt": "expected lDDT (pLDDT)",
}
"""Validation metric -> its name on the page."""


def report_of_run(folder: Path, model: nn.Module, found: Sequence[str], result: FitResult) -> Path:
    """Write report.html and ``plots/`` of a finished run; see `write_report`."""
    return write_report(folder, "AlphaFold3", MEASURES, model, found, result)
