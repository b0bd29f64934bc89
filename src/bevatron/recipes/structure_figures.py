"""Figures of predicted structures: pLDDT along the chains, maps over pairs of tokens."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from bevatron.train.report.plots.style import FAINT, INK, colours, new_axes
from bevatron.typing import Array

NO_CONFIDENCES = (
    "The confidence heads were not trained and predict the same for every atom: pLDDT, aligned "
    "errors, pTM and the ranking are meaningless here."
)


def untrained(plddt: Array) -> bool:
    """Whether pLDDT is that of an untrained head, the same for all atoms."""
    return len(plddt) > 1 and float(np.ptp(plddt)) < 1e-3


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
