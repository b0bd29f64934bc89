"""Figures of predicted structures: pLDDT along the chains, maps over pairs of tokens."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from bevatron.train.report.plots.style import FAINT, INK, colours, new_axes
from bevatron.typing import Array

NO_CONFIDENCES = (
    "The confidence heads were not trained and predict the same for every atom: pLDDT, aligned "
    "errors, pTM and the ranking are meaningless here."
)


def untrained(plddt: Array) -> bool:
    """Whether pLDDT is that of an untrained head, the same for all atoms."""
    return len(plddt) > 1 and float(np.ptp(plddt)) < 1e-3


def plddt_figure(
    plddt: Array, edges: Sequence[int], labels: Sequence[str], of: str = "token"
) -> Figure:
    """Draw pLDDT along the chains.

    Parameters
    ----------
    of : what has a value: token, residue; counted from 1
    """
    with new_axes(7.6, 3.0) as (figure, axes):
        ax = axes[0, 0]
        for (start, stop), colour in zip(pairwise(edges), colours(len(labels)), strict=True):
            marker = "o" if stop - start == 1 else ""
            ax.plot(range(start + 1, stop + 1), plddt[start:stop], color=colour, marker=marker)
            ax.axvline(start + 0.5, color=FAINT, linewidth=0.6)
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        ax.set(xlabel=of, ylabel="pLDDT", ylim=(0, 100), xlim=(0.5, edges[-1] + 0.5))
        _name_chains(ax, edges, labels)
    return figure


def map_figure(
    values: Array,
    edges: Sequence[int],
    labels: Sequence[str],
    name: str,
    top: float,
    colour_map: str,
    of: str = "token",
) -> Figure:
    """Draw a value of each two tokens or residues, with lines between chains."""
    with new_axes(5.8, 4.8) as (figure, axes):
        ax = axes[0, 0]
        last = edges[-1] + 0.5
        shown = ax.imshow(
            values, colour_map, vmin=0, vmax=top, interpolation="nearest",
            extent=(0.5, last, last, 0.5),
        )  # fmt: skip
        for edge in edges[1:-1]:
            ax.axhline(edge + 0.5, color=INK, linewidth=0.6)
            ax.axvline(edge + 0.5, color=INK, linewidth=0.6)
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_locator(MaxNLocator(integer=True))
        ax.set(xlabel=of, ylabel=of)
        ax.grid(visible=False)
        _name_chains(ax, edges, labels)
        figure.colorbar(shown, ax=ax, label=name)
    return figure


def _name_chains(ax: Any, edges: Sequence[int], labels: Sequence[str]) -> None:
    """Write the names of the chains above, where there is room for them."""
    if len(labels) > 20:
        return
    upper = ax.secondary_xaxis("top")
    upper.set_xticks([(a + b + 1) / 2 for a, b in pairwise(edges)], labels)
    upper.tick_params(length=0)
