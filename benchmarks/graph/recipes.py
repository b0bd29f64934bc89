"""What `graph_learning.py` trains: graphs, hyper-parameters and what the literature reports."""

from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Recipe:
    """How one line of the table is trained.

    Attributes
    ----------
    preset, graph : configuration and file
    lr, weight_decay : of Adam; the decay is L2 (AdamW's in ``heterophilous``)
    published : what the literature says, percent and spread
    heterophilous : fixed number of steps, a mask per split, ROC-AUC
    layers : instead of the preset's
    most_epochs : where patience does not end it before
    changes : of the preset
    patience : epochs without improvement after which training ends
    """

    preset: str
    graph: str
    lr: float
    weight_decay: float
    published: str
    heterophilous: bool = False
    layers: int | None = None
    most_epochs: int = 1000
    changes: dict[str, Any] = field(default_factory=dict)
    patience: int = 100


_GAT = {
    "gat-cora": Recipe("gat-cora", "cora", 0.005, 5e-4, "83.0 ± 0.7", most_epochs=100_000),
    "gat-citeseer": Recipe(
        "gat-citeseer", "citeseer", 0.005, 5e-4, "72.5 ± 0.7", most_epochs=100_000
    ),
    "gat-pubmed": Recipe("gat-pubmed", "pubmed", 0.01, 1e-3, "79.0 ± 0.3", most_epochs=100_000),
}
_VARIANTS = {
    "shared": {"head_masks": False, "head_glorot": False},
    "masks": {"head_masks": True, "head_glorot": False},
    "heads": {"head_masks": True, "head_glorot": True},
}
"""Whether heads draw input masks of their own, and begin as layers by themselves."""

_AGNN = {
    "agnn-cora": Recipe("agnn-cora", "cora", 0.01, 5e-4, "83.1 ± 0.1"),
    "agnn-citeseer": Recipe("agnn-citeseer", "citeseer", 0.01, 5e-4, "71.7 ± 0.1"),
    "agnn-pubmed": Recipe("agnn-pubmed", "pubmed", 0.01, 5e-4, "79.9 ± 0.1"),
}

RUNS = {
    **_GAT,
    **{
        f"{name}-{variant}": replace(recipe, changes=changes)
        for name, recipe in _GAT.items()
        for variant, changes in _VARIANTS.items()
    },
    **_AGNN,
    **{f"{name}-long": replace(r, patience=1000) for name, r in _AGNN.items()},
    "gat-tolokers": Recipe(
        "gat-heterophilous", "tolokers", 3e-5, 0.0, "83.70 ± 0.47", heterophilous=True, layers=3
    ),
    "gat-minesweeper": Recipe(
        "gat-heterophilous", "minesweeper", 3e-5, 0.0, "92.01 ± 0.68", heterophilous=True, layers=5
    ),
}
