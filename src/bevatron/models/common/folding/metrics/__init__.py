"""Accuracy of predicted structures, and their predicted confidences."""

from bevatron.models.common.folding.metrics.confidence import (
    MAX_ERROR,
    expected_error,
    expected_lddt,
    has_clash,
    iptm,
    ptm,
    ranking_score,
)
from bevatron.models.common.folding.metrics.contacts import (
    DISTOGRAM_EDGES,
    contact_precision,
    contact_probability,
)
from bevatron.models.common.folding.metrics.dockq import DockQ, dockq
from bevatron.models.common.folding.metrics.lddt import ca_lddt, lddt, lddt_by_kind
from bevatron.models.common.folding.metrics.ligands import pocket_rmsd
from bevatron.models.common.folding.metrics.superposed import rmsd, tm_score

__all__ = [
    "DISTOGRAM_EDGES",
    "MAX_ERROR",
    "DockQ",
    "ca_lddt",
    "contact_precision",
    "contact_probability",
    "dockq",
    "expected_error",
    "expected_lddt",
    "has_clash",
    "iptm",
    "lddt",
    "lddt_by_kind",
    "pocket_rmsd",
    "ptm",
    "ranking_score",
    "rmsd",
    "tm_score",
]
