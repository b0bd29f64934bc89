"""Histograms, and ranges of several data sets."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from bevatron.train.report.plots.style import (
    FAINT,
    INK,
    LEGEND_COLUMNS,
    PALETTE,
    Values,
    as_text,
    colours,
    legend_below,
    new_axes,
    write_centred,
)


@dataclass(frozen=True)
class Counted:
    """A distribution as values and their counts."""

    values: Values
    counts: Values


Distribution = Values | Counted
"""Single values, or values with counts."""

FEWEST_BINS, MOST_BINS = 12, 50
"""Of a histogram; in between twice the square root of the number of values."""


def histogram(
    series: Mapping[str, Distribution], xlabel: str, title: str = "", ylabel: str = "structures"
) -> Figure:
    """Draw histograms; several series are overlaid as outlines.

    The horizontal axis is logarithmic where the values span more than two decades.
    """
    counted = {name: _counted(values) for name, values in series.items()}
    everything = np.concatenate([np.empty(0), *(values for values, _ in counted.values())])
    names = -(-len(series) // LEGEND_COLUMNS) if len(series) > 1 else 0
    with new_axes(7.2, 3.4 + 0.22 * names) as (figure, axes):
        ax = axes[0, 0]
        ax.set(xlabel=xlabel, ylabel=ylabel, title=title)
        if len(everything) == 0:
            write_centred(ax, "no values")
            return figure
        number = sum(weights.sum() for _, weights in counted.values())
        bins = _bins(everything, int(np.clip(2 * number**0.5, FEWEST_BINS, MOST_BINS))).tolist()
        if (everything == np.round(everything)).all():
            ax.xaxis.set_major_locator(MaxNLocator(8, integer=True, min_n_ticks=1))
        if _many_decades(everything):
            ax.set_xscale("log")
        ax.yaxis.set_major_locator(MaxNLocator(6, integer=True))
        for name, colour in zip(counted, colours(len(counted)), strict=True):
            values, weights = counted[name]
            options = {"bins": bins, "weights": weights, "color": colour}
            ax.hist(values, histtype="stepfilled", alpha=0.22, **options)
            ax.hist(values, histtype="step", linewidth=1.6, label=name, **options)
        if len(counted) > 1:
            legend_below(ax, LEGEND_COLUMNS)
    return figure


def _counted(series: Distribution) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Return finite values, ascending, and their counts."""
    source, counts = (series.values, series.counts) if isinstance(series, Counted) else (series, 1)
    values = np.asarray(source, dtype=float).ravel()
    often = np.broadcast_to(np.asarray(counts, dtype=float), values.shape)
    order = np.argsort(values, kind="stable")
    order = order[np.isfinite(values[order]) & (often[order] > 0)]
    return values[order], often[order]


def _quantiles(
    values: npt.NDArray[Any], counts: npt.NDArray[Any], shares: Sequence[float]
) -> npt.NDArray[Any]:
    """Return the weighted quantiles for the given fractions."""
    below = np.cumsum(counts) / counts.sum()
    places = np.searchsorted(below, np.asarray(shares) - 1e-12)
    return values[np.minimum(places, len(values) - 1)]


def _shortened(name: str, most: int = 36) -> str:
    name = as_text(name)
    if len(name) <= most:
        return name
    return f"{name[: most // 2 - 1]}…{name[-most // 2 :]}"


def _many_decades(values: npt.NDArray[Any]) -> bool:
    return bool(values.min() > 0 and values.max() > 100 * values.min())


def _bins(values: npt.NDArray[Any], most: int) -> npt.NDArray[Any]:
    """Choose bin edges; integers of a narrow range get a bar each."""
    low, high = float(values.min()), float(values.max())
    if _many_decades(values):
        return np.geomspace(low, high * 1.0001, most)
    whole = bool((values == np.round(values)).all())
    if whole:
        step = max(1, int(np.ceil((high - low + 1) / (2 * most))))
        return np.arange(low - 0.5, high + step, step)
    return np.linspace(low, high if high > low else low + 1, most)


def ranges(
    series: Mapping[str, Distribution], xlabel: str, title: str = "", counted: str = "values"
) -> Figure:
    """Draw one box per series: median, middle half, and the range from 1 to 99 %.

    For neighbours per atom by file, as in Firoz et al. 2025, Figure 5.
    """
    names = list(series)
    with new_axes(8.0, min(1.4 + 0.42 * max(len(names), 2), 30.0)) as (figure, axes):
        ax = axes[0, 0]
        for row, name in enumerate(names):
            values, counts = _counted(series[name])
            if len(values) == 0:
                ax.text(0, row, " no values", va="center", fontsize=8.5, color=FAINT)
                continue
            shares = (0.01, 0.25, 0.5, 0.75, 0.99)
            low, first, middle, third, high = _quantiles(values, counts, shares)
            ax.plot([low, high], [row, row], color=PALETTE[0], linewidth=1.4, zorder=2)
            ax.barh(row, third - first, 0.55, left=first, color=PALETTE[5], zorder=3)
            ax.plot([middle] * 2, [row - 0.275, row + 0.275], color=INK, linewidth=2, zorder=4)
            mean, number = np.average(values, weights=counts), int(counts.sum())
            text = f"  mean {mean:.3g}, {number:,} {counted}"
            ax.text(high, row, text, va="center", fontsize=8.5, color="#555555")
        ax.set_yticks(range(len(names)), [_shortened(name) for name in names])
        ax.set(xlabel=xlabel, title=title, ylim=(len(names) - 0.4, -0.6))
        ax.set_xlim(0, ax.get_xlim()[1] * 1.3)
        ax.grid(visible=False, axis="y")
    return figure
