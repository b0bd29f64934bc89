"""The page of a predicted complex: the structure to turn, its scores and what they are made of."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from bevatron.data.proteins.complexes import describe
from bevatron.recipes.alphafold3.predictor import Predicted
from bevatron.train.report.page import Report
from bevatron.train.report.plots.style import FAINT, INK, colours, new_axes
from bevatron.typing import Array, Arrays

MAX_ERROR = 32.0
"""Å; where the colours of aligned errors end."""


def write_page(
    path: Path, entry: Arrays, best: Predicted, rows: Sequence[Mapping[str, Any]], mmcif: str
) -> None:
    """Write the report of a complex.

    Parameters
    ----------
    path
        The HTML file.
    entry
        The complex.
    best
        Its best structure.
    rows
        Scores of all structures, the best first.
    mmcif
        Of the best.
    """
    words = describe(entry)
    labels = [chain["label"] for chain in words["chains"]]
    report = Report(str(words["name"]), f"{len(rows)} structures, predicted with AlphaFold3")
    report.section("Structure")
    report.highlights({
        "ranking score": best.scores["ranking_score"],
        "pLDDT": best.scores["plddt"],
        "pTM": best.scores["ptm"],
        "ipTM": best.scores["iptm"],
    })  # fmt: skip
    report.structure(mmcif, "The best ranked structure.")
    report.section("Ranking")
    names = ("file", "seed", "sample", "ranking_score", "ptm", "iptm", "plddt", "clash")
    report.table(names, [[row[name] for name in names] for row in rows])
    report.section("Confidence")
    edges = chain_edges(np.asarray(entry["asym_id"]))
    plddt = plddt_of_tokens(entry, best.plddt)
    report.figure(
        plddt_figure(plddt, edges, labels),
        "Expected lDDT of each token: above 90 very high, above 70 confident, below 50 very low.",
    )
    report.figure(
        map_figure(best.pae, edges, labels, "predicted aligned error (Å)", MAX_ERROR, "Greens_r"),
        "Expected error of the column's token where the row's token lies in place; between chains, "
        "how sure their arrangement is.",
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
    report.versions(("bevatron", "torch", "numpy"))
    report.write(path)


def plddt_of_tokens(entry: Arrays, plddt: Array) -> Array:
    """Return the mean pLDDT of the atoms of each token, [N]."""
    counts = np.asarray(entry["num_atoms"]).astype(np.int64)
    token = np.repeat(np.arange(len(counts)), counts)
    total: Array = np.bincount(token, weights=plddt.astype(np.float64), minlength=len(counts))
    mean: Array = total.astype(np.float64) / counts
    return mean


def chain_edges(asym_id: Array) -> list[int]:
    """Return where each chain's tokens begin, and the number of tokens.

    Examples
    --------
    >>> chain_edges(np.array([1, 1, 2]))
    [0, 2, 3]
    """
    return [0, *(np.flatnonzero(np.diff(asym_id)) + 1).tolist(), len(asym_id)]


def plddt_figure(plddt: Array, edges: Sequence[int], labels: Sequence[str]) -> Figure:
    """Draw pLDDT along the chains."""
    with new_axes(7.6, 3.0) as (figure, axes):
        ax = axes[0, 0]
        for (start, stop), colour in zip(pairwise(edges), colours(len(labels)), strict=True):
            marker = "o" if stop - start == 1 else ""
            ax.plot(range(start, stop), plddt[start:stop], color=colour, marker=marker)
            ax.axvline(start, color=FAINT, linewidth=0.6)
        ax.set(xlabel="token", ylabel="pLDDT", ylim=(0, 100), xlim=(0, max(edges[-1] - 1, 1)))
        _name_chains(ax, edges, labels)
    return figure


def map_figure(
    values: Array,
    edges: Sequence[int],
    labels: Sequence[str],
    name: str,
    top: float,
    colour_map: str,
) -> Figure:
    """Draw a value of each two tokens, with lines between chains."""
    with new_axes(5.8, 4.8) as (figure, axes):
        ax = axes[0, 0]
        shown = ax.imshow(values, cmap=colour_map, vmin=0, vmax=top, interpolation="nearest")
        for edge in edges[1:-1]:
            ax.axhline(edge - 0.5, color=INK, linewidth=0.6)
            ax.axvline(edge - 0.5, color=INK, linewidth=0.6)
        ax.set(xlabel="token", ylabel="token")
        ax.grid(visible=False)
        _name_chains(ax, edges, labels)
        figure.colorbar(shown, ax=ax, label=name)
    return figure


def _name_chains(ax: Any, edges: Sequence[int], labels: Sequence[str]) -> None:
    """Write the names of the chains above, where there is room for them."""
    if len(labels) > 20:
        return
    upper = ax.secondary_xaxis("top")
    upper.set_xticks([(a + b - 1) / 2 for a, b in pairwise(edges)], labels)
    upper.tick_params(length=0)
