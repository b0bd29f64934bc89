"""Stacked horizontal bars, several panels in one figure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bevatron.train.report.plots.style import (
    FAINT,
    INK,
    colours,
    legend_below,
    new_axes,
    short,
    write_centred,
)

LONG = 24
"""Characters of a row's name that leave no room for two names of parts side by side."""


@dataclass(frozen=True)
class Stacks:
    """One set of axes with one bar per row.

    Attributes
    ----------
    title : title of the panel
    xlabel : quantity and unit
    rows : names, from top to bottom
    parts : name of a part -> its length in each row
    """

    title: str
    xlabel: str
    rows: Sequence[str]
    parts: Mapping[str, Sequence[float]]


def stacks(panels: Sequence[Stacks], columns: int = 2) -> Figure:
    """Draw stacked bars.

    Bars of one part are labelled with their value; those of several have a legend.

    Parameters
    ----------
    panels : what to draw, row by row
    columns : panels per row

    Examples
    --------
    >>> panel = Stacks("GPU time", "share", ["rank 0"], {"busy": [0.9], "idle": [0.1]})
    >>> len(stacks([panel], columns=1).axes)
    1
    """
    columns = min(columns, len(panels))
    grid = [panels[i : i + columns] for i in range(0, len(panels), columns)]
    heights = [max(3, *(len(panel.rows) for panel in row)) * 0.32 + 1.3 for row in grid]
    size = 6.2 * columns, min(sum(heights), 40.0)
    with new_axes(*size, len(grid), columns, height_ratios=heights) as (figure, axes):
        for panel, ax in zip(panels, axes.flat, strict=False):
            _draw(ax, panel)
        for ax in axes.flat[len(panels) :]:
            ax.set_axis_off()
    return figure


def _draw(ax: Axes, panel: Stacks) -> None:
    ax.set(title=panel.title, xlabel=panel.xlabel)
    if not panel.rows:
        write_centred(ax, "no values")
        return
    places = np.arange(len(panel.rows))
    reached = np.zeros(len(panel.rows))
    for (name, lengths), colour in zip(panel.parts.items(), colours(len(panel.parts)), strict=True):
        values = np.asarray(lengths, dtype=float)
        shown = FAINT if name == "idle" else colour
        ax.barh(places, values, 0.72, left=reached, color=shown, label=name)
        reached = reached + values
    largest = float(reached.max(initial=0.0)) or 1.0
    alone = len(panel.parts) == 1
    if alone:
        for place, value in zip(places.tolist(), reached.tolist(), strict=True):
            ax.text(value, place, f" {short(value)}", va="center", fontsize=8.5, color=INK)
    else:
        legend_below(ax, 1 if max(map(len, panel.rows)) > LONG else 2)
    ax.set_yticks(places, panel.rows)
    ax.set(xlim=(0, largest * (1.14 if alone else 1.0)), ylim=(len(places) - 0.4, -0.6))
    ax.grid(visible=False, axis="y")
