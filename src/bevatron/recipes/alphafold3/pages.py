"""The page of a predicted complex: the structure to turn, its scores and confidences."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bevatron.data.proteins.featurize import describe
from bevatron.models.alphafold3.predict import Predicted
from bevatron.models.common.folding.metrics import MAX_ERROR
from bevatron.output import counted
from bevatron.recipes.proteins.figures import NO_CONFIDENCES, map_figure, plddt_figure, untrained
from bevatron.train.report.page import Report
from bevatron.typing import Array, Arrays


def write_page(
    path: Path, entry: Arrays, best: Predicted, rows: Sequence[Mapping[str, Any]], mmcif: str
) -> None:
    """Write the report of a complex.

    Parameters
    ----------
    rows : scores of all structures, the best first
    mmcif : mmCIF of the best structure
    """
    words = describe(entry)
    labels = [chain["label"] for chain in words["chains"]]
    report = Report(
        str(words["name"]), f"{counted(len(rows), 'structure')}, predicted with AlphaFold3"
    )
    if untrained(best.plddt):
        report.notes([NO_CONFIDENCES])
    report.section("Structure")
    surest = {
        "ranking score": "ranking_score", "pLDDT": "plddt", "pTM": "ptm", "ipTM": "iptm",
    }  # fmt: skip
    scores = {text: best.scores[name] for text, name in surest.items()}
    report.highlights({text: score for text, score in scores.items() if score is not None})
    report.structure(mmcif, "The top-ranked structure.")
    report.section("Ranking")
    written = {
        "file": "file", "seed": "seed", "sample": "sample", "ranking_score": "ranking score",
        "plddt": "pLDDT", "ptm": "pTM", "iptm": "ipTM", "clash": "chains clash",
    }  # fmt: skip
    report.table(list(written.values()), [[row[name] for name in written] for row in rows])
    report.section("Confidence")
    edges = chain_edges(np.asarray(entry["asym_id"]))
    plddt = plddt_of_tokens(entry, best.plddt)
    report.figure(
        plddt_figure(plddt, edges, labels),
        "Expected lDDT of each token: above 90 very high, above 70 confident, below 50 very low.",
    )
    report.figure(
        map_figure(best.pae, edges, labels, "predicted aligned error (Å)", MAX_ERROR, "Greens_r"),
        "Expected position error of the column's token after alignment on the row's token; "
        "between chains it tells how certain their arrangement is.",
    )
    report.figure(
        map_figure(best.contacts, edges, labels, "probability", 1.0, "Blues"),
        "Probability, by the distogram, that two tokens are within 8 Å.",
    )
    if len(labels) > 1:
        report.section("Chains")
        pairs = best.scores["chain_pair_iptm"]
        table = [[label, *row] for label, row in zip(labels, pairs, strict=True)]
        report.table(("chain", *labels), table, "ipTM of two chains; pTM of one.")
    report.section("Versions").versions(("bevatron", "torch", "numpy"))
    report.write(path)


def plddt_of_tokens(entry: Arrays, plddt: Array) -> Array:
    """Return the mean pLDDT of the atoms of each token, [N]."""
    counts = np.asarray(entry["num_atoms"]).astype(np.int64)
    token = np.repeat(np.arange(len(counts)), counts)
    total: Array = np.bincount(token, weights=plddt.astype(np.float64), minlength=len(counts))
    return total.astype(np.float64) / counts


def chain_edges(asym_id: Array) -> list[int]:
    """Return where each chain's tokens begin, and the number of tokens.

    Examples
    --------
    >>> chain_edges(np.array([1, 1, 2]))
    [0, 2, 3]
    """
    return [0, *(np.flatnonzero(np.diff(asym_id)) + 1).tolist(), len(asym_id)]
