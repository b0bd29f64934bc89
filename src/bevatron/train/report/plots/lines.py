"""Curves over epochs, steps or time, in one or several panels."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import (
    FixedLocator,
    FuncFormatter,
    LogLocator,
    MaxNLocator,
    NullFormatter,
    NullLocator,
)

from bevatron.train.report.plots.style import (
    FAINT,
    LEGEND_COLUMNS,
    PALETTE,
    Values,
    colours,
    legend_below,
    new_axes,
    write_centred,
)

MARKERS, STYLES = "osD", ("-", ":", "-.")
"""Of points and of lines, one for each repeat of the palette."""


@dataclass(frozen=True)
class Curve:
    """One line of a panel: points without a value (NaN) are left out."""

    label: str
    x: Values
    y: Values
    dashed: bool = False


@dataclass(frozen=True)
class Panel:
    """One set of axes with several curves.

    Attributes
    ----------
    title : title of the panel
    ylabel : quantity and unit
    curves : curves, in the order of the palette
    logarithmic : whether the vertical axis is logarithmic; linear if a value is not positive
    from_zero : whether a linear vertical axis begins at zero, for quantities whose size matters
    """

    title: str
    ylabel: str
    curves: Sequence[Curve] = field(default_factory=tuple)
    logarithmic: bool = True
    from_zero: bool = False


def curves(
    panels: Sequence[Panel],
    xlabel: str = "epoch",
    events: Sequence[tuple[float, str]] = (),
    *,
    logarithmic_x: bool = False,
) -> Figure:
    """Draw learning curves or any other lines, up to three panels in a row; four in two rows.

    Legends are below the axes, where they hide no curve: one for all panels if these agree,
    otherwise one for each.

    Parameters
    ----------
    panels : what to draw; at least one
    xlabel : quantity of the common horizontal axis
    events : positions to mark with a labelled vertical line, such as a change of the loss
    logarithmic_x
        Whether the horizontal axis is logarithmic, for sizes that double from point to point.

    Examples
    --------
    >>> figure = curves([Panel("Loss", "loss", [Curve("training", [1, 2, 3], [1.0, 0.3, 0.1])])])
    >>> len(figure.axes)
    1
    """
    columns = 2 if len(panels) == 4 else min(len(panels), 3)
    rows = -(-len(panels) // columns)
    most = max(len(panel.curves) for panel in panels)
    common = _agree(panels)
    names = 0 if most == 1 else -(-most // LEGEND_COLUMNS) if common else rows * -(-most // 2)
    height = 3.3 * rows + 0.22 * names
    with new_axes(4.3 * columns + 0.6 * (columns == 1), height, rows, columns) as (figure, axes):
        for panel, ax in zip(panels, axes.flat, strict=False):
            _draw_panel(ax, panel, xlabel)
            if logarithmic_x:
                _doubling(ax)
            for place, _ in events:
                ax.axvline(place, color=FAINT, linewidth=1, linestyle=":")
        _label_events(axes.flat[0], events)
        for ax in axes.flat[len(panels) :]:
            ax.set_axis_off()
        if common and most > 1:
            _common_legend(figure, axes.flat[: len(panels)])
        else:
            for panel, ax in zip(panels, axes.flat, strict=False):
                if len(panel.curves) > 1:
                    legend_below(ax)
    return figure


def _agree(panels: Sequence[Panel]) -> bool:
    """Whether every name has the same colour in all panels."""
    names = [[curve.label for curve in panel.curves] for panel in panels]
    longest = max(names, key=len)
    return all(own == longest[: len(own)] for own in names)


def _common_legend(figure: Figure, axes: Iterable[Axes]) -> None:
    """Put one legend for all panels below them."""
    found: dict[str, Artist] = {}
    for ax in axes:
        handles, labels = ax.get_legend_handles_labels()
        found |= dict(zip(labels, handles, strict=True))
    place = "outside lower center"
    figure.legend(found.values(), found.keys(), loc=place, ncols=min(len(found), LEGEND_COLUMNS))


def _draw_panel(ax: Axes, panel: Panel, xlabel: str) -> None:
    smallest, longest, whole = np.inf, 0, True
    for number, (curve, colour) in enumerate(
        zip(panel.curves, colours(len(panel.curves)), strict=True)
    ):
        x, y = np.asarray(curve.x, dtype=float), np.asarray(curve.y, dtype=float)
        shown = np.isfinite(x) & np.isfinite(y)
        x, y = x[shown], y[shown]
        # A line of one point is invisible, and with a few the points themselves matter.
        few, again = len(x) <= 15, number // len(PALETTE) % 3
        marker = MARKERS[again] if few else ""
        style = "--" if curve.dashed else "-" if few else STYLES[again]
        ax.plot(x, y, style, color=colour, label=curve.label, marker=marker, markersize=4)
        smallest = min(smallest, y.min(initial=np.inf))
        longest = max(longest, len(x))
        whole = whole and bool((x == np.round(x)).all())
    if whole:
        ax.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
    if panel.logarithmic and 0 < smallest < np.inf:
        ax.set_yscale("log")
        readable_log_ticks(ax)
    elif panel.from_zero:
        ax.set_ylim(0, 1.04 * ax.get_ylim()[1])  # the margin of a narrow range is too small
    ax.set(title=panel.title, xlabel=xlabel, ylabel=panel.ylabel)
    if not longest:
        write_centred(ax, "no values")


def _doubling(ax: Axes) -> None:
    """Make the horizontal axis logarithmic, with powers of two as ticks."""
    ax.set_xscale("log", base=2)
    low, high = np.log2(ax.get_xlim())
    every = 1 if high - low < 6 else 2
    ax.xaxis.set_major_locator(FixedLocator([2.0**k for k in range(0, 60, every)]))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))


def readable_log_ticks(ax: Axes) -> None:
    """Write ticks as plain numbers, with more labels if there are few decades."""
    low, high = ax.get_ylim()
    if low < 1e-4 or high > 1e5:
        return
    plain = FuncFormatter(lambda value, _: f"{value:g}")
    ax.yaxis.set_major_formatter(plain)
    ax.yaxis.set_minor_formatter(plain if high / low < 100 else NullFormatter())
    steps = (1.5, 2, 3, 4, 5, 7) if high / low < 6 else (2, 5)
    ax.yaxis.set_minor_locator(LogLocator(subs=steps))


CHARACTER, LINE = 0.026, 0.085
"""Width and height of a label's characters, as shares of a panel."""


def _label_events(ax: Axes, events: Sequence[tuple[float, str]]) -> None:
    """Write above the curves what the vertical lines mark, each label where it hides no other."""
    merged: dict[float, list[str]] = {}
    for place, label in events:
        merged.setdefault(place, []).append(label)
    left, right = ax.get_xlim()
    if ax.get_xscale() == "log":
        return
    rows: list[float] = []  # where the labels of each row end, from the top
    placed: list[tuple[float, str, str, int]] = []
    for place in sorted(merged):
        label = ", ".join(dict.fromkeys(merged[place]))
        at, width = (place - left) / (right - left), CHARACTER * len(label)
        side = "left" if at + width <= 1 else "right"
        begin = at if side == "left" else at - width
        row = next((i for i, end in enumerate(rows) if end < begin), len(rows))
        if row == MOST_ROWS or width > 1:
            continue  # the caption of the figure names it
        rows[row:] = [begin + width + CHARACTER, *rows[row + 1 :]]
        placed.append((place, label, side, row))
    _raise_top(ax, LINE * len(rows))
    for place, label, side, row in placed:
        ax.annotate(
            label,
            (place, 1 - LINE * row),
            xycoords=("data", "axes fraction"),
            xytext=(3 if side == "left" else -3, 0),
            textcoords="offset points",
            fontsize=8.5,
            color="#555555",
            ha=side,
            va="top",
        )


MOST_ROWS = 4
"""Rows of labels above the curves."""


def _raise_top(ax: Axes, share: float) -> None:
    """Leave a share of the panel free at its top."""
    low, high = ax.get_ylim()
    if ax.get_yscale() == "log":
        ax.set_ylim(low, low * (high / low) ** (1 / (1 - share)))
    else:
        ax.set_ylim(low, low + (high - low) / (1 - share))
