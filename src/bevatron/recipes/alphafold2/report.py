"""The report of a run on chains: measures of the validation, learning curves, timing."""

from collections.abc import Sequence
from pathlib import Path

from torch import nn

from bevatron.recipes.structure_report import write_report
from bevatron.train.run import FitResult

MEASURES = {
    "lddt_ca": "lDDT of CA atoms",
    "tm_score": "TM-score",
    "rmsd": "RMSD of CA atoms (Å)",
    "loss_fape": "frame-aligned point error",
    "distogram": "cross entropy of the distogram",
    "contact_precision": "precision of contacts",
    "plddt": "expected lDDT (pLDDT)",
}
"""Validation metric -> its name on the page."""


def report_of_run(folder: Path, model: nn.Module, found: Sequence[str], result: FitResult) -> Path:
    """Write report.html and ``plots/`` of a finished run; see `write_report`."""
    return write_report(folder, "AlphaFold2", MEASURES, model, found, result)
