"""Predictions against reference values, and errors as bars."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from bevatron.train.report.plots.style import (
    FAINT,
    HEAT,
    INK,
    PALETTE,
    Values,
    as_text,
    colours,
    new_axes,
    short,
    write_centred,
)

MOST_POINTS = 3000
"""More values than this are drawn as a density."""


def parity(
    reference: Values,
    predicted: Values,
    quantity: str,
    unit: str,
    labels: Sequence[str] | None = None,
) -> Figure:
    """Plot predictions against reference values, with the distribution of the errors on the right.

    Few points are drawn one by one, in a colour per label; many as a density.

    Parameters
    ----------
    reference, predicted : the same number of values; pairs with a NaN (no label) are left out
    quantity, unit : for the axes: ``"force component"``, ``"eV/Å"``
    labels : label of each value (a group, an element)

    Examples
    --------
    >>> figure = parity([0.0, 1.0], [0.1, 0.9], "energy", "eV")
    >>> len(figure.axes)
    2
    """
    x = np.asarray(reference, dtype=float).ravel()
    y = np.asarray(predicted, dtype=float).ravel()
    shown = np.isfinite(x) & np.isfinite(y)
    names = None if labels is None else np.asarray(labels)[shown]
    x, y = x[shown], y[shown]
    with new_axes(8.6, 3.9, 1, 2, width_ratios=(1.1, 1)) as (figure, axes):
        left, right = axes[0]
        _parity_points(figure, left, x, y, names)
        left.set(
            xlabel=f"reference {quantity} ({unit})",
            ylabel=f"predicted {quantity} ({unit})",
            title=quantity[0].upper() + quantity[1:] if " " in quantity else quantity,
        )
        _error_histogram(right, y - x, unit)
    return figure


def _parity_points(
    figure: Figure, ax: Axes, x: npt.NDArray[Any], y: npt.NDArray[Any], names: Any
) -> None:
    if len(x) == 0:
        write_centred(ax, "no values")
        return
    low, high = min(x.min(), y.min()), max(x.max(), y.max())
    margin = 0.04 * (high - low) or 0.5
    span = (low - margin, high + margin)
    ax.plot(span, span, color=FAINT, linewidth=1, zorder=1)
    if len(x) > MOST_POINTS:
        cells = ax.hexbin(x, y, gridsize=70, extent=(*span, *span), bins="log", mincnt=1, cmap=HEAT)
        cells.set_clim(vmin=0.3)
        figure.colorbar(cells, ax=ax, label="values per cell", shrink=0.85)
    elif names is None or len(set(names)) > len(PALETTE):
        ax.scatter(x, y, s=12, color=PALETTE[0], alpha=0.55, linewidths=0, zorder=2)
    else:
        for name, colour in zip(sorted(set(names)), PALETTE, strict=False):
            own = names == name
            ax.scatter(x[own], y[own], s=14, color=colour, alpha=0.65, linewidths=0, label=name)
        ax.legend(markerscale=1.5, handletextpad=0.2)
    ax.set(xlim=span, ylim=span)
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    ax.set_aspect("equal")


def _error_histogram(ax: Axes, errors: npt.NDArray[Any], unit: str) -> None:
    ax.set(xlabel=f"predicted - reference ({unit})", ylabel="share of values", title="Errors")
    if len(errors) == 0:
        write_centred(ax, "no values")
        return
    # Outliers (0.1 %) count in the end bars; the range would shrink the rest to one bar.
    bound = float(np.quantile(np.abs(errors), 0.995)) or 1e-12
    bins = np.linspace(-bound, bound, 41 if len(errors) >= 200 else 21).tolist()
    share = np.full(len(errors), 1 / len(errors))
    ax.hist(np.clip(errors, -bound, bound), bins=bins, weights=share, color=PALETTE[0], alpha=0.85)
    ax.xaxis.set_major_locator(MaxNLocator(5))
    ax.margins(y=0.4)  # room for the text above the bars
    ax.axvline(0, color=INK, linewidth=0.8)
    mae, rmse = np.mean(np.abs(errors)), np.sqrt(np.mean(errors**2))
    rows = {"MAE": mae, "RMSE": rmse, "max": np.abs(errors).max()}
    text = "\n".join(f"{name:<5}{short(value):>9}" for name, value in rows.items())
    ax.annotate(
        f"{text}\n{'n':<5}{len(errors):>9,}",
        (0.99, 0.98),
        xycoords="axes fraction",
        ha="right",
        va="top",
        fontsize=8.5,
        family="DejaVu Sans Mono",
    )


def bars(
    labels: Sequence[str],
    series: Mapping[str, Values],
    xlabel: str,
    title: str = "",
    reference: tuple[float, str] | None = None,
) -> Figure:
    """Draw horizontal bars, one row per label, with all series of a label next to each other.

    Parameters
    ----------
    labels : the rows, from top to bottom
    series : name -> value for each label; NaN draws no bar
    xlabel : quantity and unit
    reference : a value to mark with a vertical line, and its name
    """
    height = 0.8 / max(len(series), 1)
    rows = np.arange(len(labels))
    inches = 1.3 + max(len(labels), 2) * (0.16 + 0.16 * len(series))
    with new_axes(8.0, min(inches, 30.0)) as (figure, axes):
        ax = axes[0, 0]
        largest = 0.0
        for k, (name, colour) in enumerate(zip(series, colours(len(series)), strict=True)):
            values = np.asarray(series[name], dtype=float)
            offset = rows - 0.4 + (k + 0.5) * height
            shown = np.nan_to_num(values)
            ax.barh(offset, shown, height * 0.92, color=colour, label=name)
            largest = max(largest, shown.max(initial=0.0))
            for place, value in zip(offset, values, strict=True):
                text = " -" if np.isnan(value) else f" {short(value)}"
                ax.text(0 if np.isnan(value) else value, place, text, va="center", fontsize=8.5)
        if reference is not None:
            ax.axvline(reference[0], color=INK, linewidth=1, linestyle="--", label=reference[1])
            largest = max(largest, reference[0])
        if all((np.mod(values, 1) == 0).all() for values in series.values()):
            ax.xaxis.set_major_locator(MaxNLocator(8, integer=True, min_n_ticks=1))
        ax.set_yticks(rows, [as_text(label) for label in labels])
        ax.set(xlabel=xlabel, xlim=(0, 1.12 * largest or 1), ylim=(len(labels) - 0.4, -0.6))
        ax.set_title(title)
        ax.grid(visible=False, axis="y")
        if len(series) > 1 or reference is not None:
            # Next to the bars: inside the axes it would hide the values at their ends.
            ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure
