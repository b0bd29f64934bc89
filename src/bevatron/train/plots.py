"""Figures in one house style: curves, parity, bars, histograms, ranges and batch balance.

Every function returns a matplotlib figure that belongs to no window and no global state; `Report`
embeds it and `save` writes it. Colours are those of Okabe and Ito, which colour-blind readers can
tell apart; every axis says its quantity and unit.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#5B5B5B")
"""Okabe and Ito's colours; black and yellow left out, which print badly as thin lines."""

INK, FAINT, GRID = "#222222", "#8A8F98", "#E4E7EB"

STYLE: dict[str, Any] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 10.5,
    "axes.titlesize": 11.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 8,
    "axes.labelsize": 10.5,
    "axes.labelcolor": INK,
    "axes.edgecolor": FAINT,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.labelsize": 9.5,
    "ytick.labelsize": 9.5,
    "text.color": INK,
    "lines.linewidth": 1.8,
    "legend.frameon": False,
    "legend.fontsize": 9.5,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
}

HEAT = LinearSegmentedColormap.from_list(
    "fill", ["#FFFFFF", "#D6E6F2", "#7FB2D9", "#0072B2", "#003B5C"]
)

Values = npt.ArrayLike


@dataclass(frozen=True)
class Curve:
    """One line of a panel: points without a value (NaN) are left out."""

    label: str
    x: Values
    y: Values
    dashed: bool = False


@dataclass(frozen=True)
class Counted:
    """A distribution of which the values and how often each occurs are known."""

    values: Values
    counts: Values


Distribution = Values | Counted
"""Values one by one, or counted."""


@dataclass(frozen=True)
class Panel:
    """One set of axes with several curves.

    Attributes
    ----------
    title
        What is shown.
    ylabel
        Quantity and unit.
    curves
        Drawn in the order of the palette.
    logarithmic
        Whether the vertical axis is; falls back to linear where a value is not positive.
    """

    title: str
    ylabel: str
    curves: Sequence[Curve] = field(default_factory=tuple)
    logarithmic: bool = True


def save(figure: Figure, path: Path) -> Path:
    """Write a figure as PNG, making the folder if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    return path


@contextmanager
def _axes(
    width: float, height: float, rows: int = 1, columns: int = 1, **options: Any
) -> Iterator[tuple[Figure, npt.NDArray[Any]]]:
    """Begin a figure in the house style; gives it and its axes, always as a 2-d array."""
    with mpl.rc_context(STYLE):
        figure = Figure(
            figsize=(width, height), layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.08)
        )
        FigureCanvasAgg(figure)
        yield figure, figure.subplots(rows, columns, squeeze=False, **options)
        # Drawn here, since fonts and paddings are looked up while drawing.
        figure.canvas.draw()


def curves(
    panels: Sequence[Panel], xlabel: str = "epoch", events: Sequence[tuple[float, str]] = ()
) -> Figure:
    """Draw learning curves or any other lines, up to three panels in a row.

    Parameters
    ----------
    panels
        What to draw; at least one.
    xlabel
        Quantity of the common horizontal axis.
    events
        Places to mark with a thin vertical line and a few words, such as a change of the loss.

    Examples
    --------
    >>> figure = curves([Panel("Loss", "loss", [Curve("training", [1, 2, 3], [1.0, 0.3, 0.1])])])
    >>> len(figure.axes)
    1
    """
    columns = min(len(panels), 3)
    rows = -(-len(panels) // columns)
    with _axes(4.3 * columns + 0.6 * (columns == 1), 3.3 * rows, rows, columns) as (figure, axes):
        for panel, ax in zip(panels, axes.flat, strict=False):
            _draw_panel(ax, panel, xlabel)
            for index, (place, words) in enumerate(events):
                _mark(ax, place, words if ax is axes.flat[0] else "", index)
        for ax in axes.flat[len(panels) :]:
            ax.set_axis_off()
    return figure


def _draw_panel(ax: Axes, panel: Panel, xlabel: str) -> None:
    smallest, longest = np.inf, 0
    for curve, colour in zip(panel.curves, _colours(len(panel.curves)), strict=True):
        x, y = np.asarray(curve.x, dtype=float), np.asarray(curve.y, dtype=float)
        shown = np.isfinite(x) & np.isfinite(y)
        x, y = x[shown], y[shown]
        # A line of one point is invisible, and with a few the points themselves matter.
        marker = "o" if len(x) <= 15 else ""
        style = "--" if curve.dashed else "-"
        ax.plot(x, y, style, color=colour, label=curve.label, marker=marker, markersize=4)
        smallest = min(smallest, y.min(initial=np.inf))
        longest = max(longest, len(x))
    if panel.logarithmic and 0 < smallest < np.inf:
        ax.set_yscale("log")
        _readable_log_ticks(ax)
    ax.set(title=panel.title, xlabel=xlabel, ylabel=panel.ylabel)
    if longest and len(panel.curves) > 1:
        ax.legend()
    elif not longest:
        _say(ax, "no values")


def _readable_log_ticks(ax: Axes) -> None:
    """Write ticks as plain numbers, and label more of them where few decades are shown."""
    low, high = ax.get_ylim()
    if low < 1e-4 or high > 1e5:
        return
    plain = FuncFormatter(lambda value, _: f"{value:g}")
    ax.yaxis.set_major_formatter(plain)
    ax.yaxis.set_minor_formatter(plain if high / low < 100 else NullFormatter())
    steps = (1.5, 2, 3, 4, 5, 7) if high / low < 6 else (2, 5)
    ax.yaxis.set_minor_locator(LogLocator(subs=steps))


def _mark(ax: Axes, place: float, words: str, index: int) -> None:
    ax.axvline(place, color=FAINT, linewidth=1, linestyle=":")
    if words:
        ax.annotate(
            words,
            (place, 0.98 - 0.09 * (index % 4)),
            xycoords=("data", "axes fraction"),
            xytext=(3, 0),
            textcoords="offset points",
            fontsize=8.5,
            color="#555555",
            va="top",
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1, "alpha": 0.8},
        )


def parity(
    reference: Values,
    predicted: Values,
    quantity: str,
    unit: str,
    labels: Sequence[str] | None = None,
) -> Figure:
    """Plot predictions against reference values, with the distribution of the errors beside.

    Few points are drawn one by one, in a colour per label; many as a density.

    Parameters
    ----------
    reference, predicted
        The same number of values; pairs with a NaN (no label) are left out.
    quantity, unit
        For the axes: ``"force component"``, ``"eV/Å"``.
    labels
        For each value what it belongs to (a group, an element).

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
    with _axes(8.6, 3.9, 1, 2, width_ratios=(1.1, 1)) as (figure, axes):
        left, right = axes[0]
        _parity_points(figure, left, x, y, names)
        left.set(
            xlabel=f"reference {quantity} ({unit})",
            ylabel=f"predicted {quantity} ({unit})",
            title=f"{quantity[:1].upper()}{quantity[1:]}",
        )
        _error_histogram(right, y - x, unit)
    return figure


def _parity_points(
    figure: Figure, ax: Axes, x: npt.NDArray[Any], y: npt.NDArray[Any], names: Any
) -> None:
    if len(x) == 0:
        _say(ax, "no values")
        return
    low, high = min(x.min(), y.min()), max(x.max(), y.max())
    margin = 0.04 * (high - low) or 0.5
    span = (low - margin, high + margin)
    ax.plot(span, span, color=FAINT, linewidth=1, zorder=1)
    if len(x) > 3000:
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
    ax.set_aspect("equal")


def _error_histogram(ax: Axes, errors: npt.NDArray[Any], unit: str) -> None:
    ax.set(xlabel=f"predicted - reference ({unit})", ylabel="share of values", title="Errors")
    if len(errors) == 0:
        _say(ax, "no values")
        return
    # The widest thousandth would squeeze the rest into one bar; it is counted in the end bars.
    bound = float(np.quantile(np.abs(errors), 0.995)) or 1e-12
    bins = np.linspace(-bound, bound, 41 if len(errors) >= 200 else 21).tolist()
    share = np.full(len(errors), 1 / len(errors))
    ax.hist(np.clip(errors, -bound, bound), bins=bins, weights=share, color=PALETTE[0], alpha=0.85)
    ax.axvline(0, color=INK, linewidth=0.8)
    mae, rmse = np.mean(np.abs(errors)), np.sqrt(np.mean(errors**2))
    rows = {"MAE": mae, "RMSE": rmse, "max": np.abs(errors).max()}
    words = "\n".join(f"{name:<5}{value:>9.3g}" for name, value in rows.items())
    ax.annotate(
        f"{words}\n{'n':<5}{len(errors):>9,}",
        (0.99, 0.98),
        xycoords="axes fraction",
        ha="right",
        va="top",
        fontsize=8.5,
        family="DejaVu Sans Mono",
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1, "alpha": 0.8},
    )


def bars(
    labels: Sequence[str],
    series: Mapping[str, Values],
    xlabel: str,
    title: str = "",
    reference: tuple[float, str] | None = None,
) -> Figure:
    """Draw horizontal bars, one row a label; several series stand side by side.

    Parameters
    ----------
    labels
        The rows, from top to bottom.
    series
        Name -> value for each label; NaN draws no bar.
    xlabel
        Quantity and unit.
    reference
        A value to mark with a vertical line, and its name.
    """
    height = 0.8 / max(len(series), 1)
    rows = np.arange(len(labels))
    inches = 1.3 + max(len(labels), 2) * (0.16 + 0.16 * len(series))
    with _axes(8.0, min(inches, 30.0)) as (figure, axes):
        ax = axes[0, 0]
        largest = 0.0
        for k, (name, colour) in enumerate(zip(series, _colours(len(series)), strict=True)):
            values = np.asarray(series[name], dtype=float)
            offset = rows - 0.4 + (k + 0.5) * height
            shown = np.nan_to_num(values)
            ax.barh(offset, shown, height * 0.92, color=colour, label=name)
            largest = max(largest, shown.max(initial=0.0))
            for place, value in zip(offset, values, strict=True):
                words = " -" if np.isnan(value) else f" {value:.3g}"
                ax.text(0 if np.isnan(value) else value, place, words, va="center", fontsize=8.5)
        if reference is not None:
            ax.axvline(reference[0], color=INK, linewidth=1, linestyle="--", label=reference[1])
            largest = max(largest, reference[0])
        ax.set_yticks(rows, labels)
        ax.set(xlabel=xlabel, xlim=(0, 1.12 * largest or 1), ylim=(len(labels) - 0.4, -0.6))
        ax.set_title(title)
        ax.grid(visible=False, axis="y")
        if len(series) > 1 or reference is not None:
            ax.legend(loc="lower right")
    return figure


def histogram(
    series: Mapping[str, Distribution], xlabel: str, title: str = "", ylabel: str = "structures"
) -> Figure:
    """Draw how values are distributed, several series over each other as outlines.

    The horizontal axis is logarithmic where the values span more than two decades.
    """
    counted = {name: _counted(values) for name, values in series.items()}
    everything = np.concatenate([np.empty(0), *(values for values, _ in counted.values())])
    with _axes(7.2, 3.4) as (figure, axes):
        ax = axes[0, 0]
        ax.set(xlabel=xlabel, ylabel=ylabel, title=title)
        if len(everything) == 0:
            _say(ax, "no values")
            return figure
        bins = _bins(everything).tolist()
        if _many_decades(everything):
            ax.set_xscale("log")
        for name, colour in zip(counted, _colours(len(counted)), strict=True):
            values, weights = counted[name]
            options = {"bins": bins, "weights": weights, "color": colour}
            ax.hist(values, histtype="stepfilled", alpha=0.22, **options)
            ax.hist(values, histtype="step", linewidth=1.6, label=name, **options)
        if len(counted) > 1:
            ax.legend(fontsize=8.5)
    return figure


def _counted(series: Distribution) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Return finite values, ascending, and how often each occurs."""
    source, counts = (series.values, series.counts) if isinstance(series, Counted) else (series, 1)
    values = np.asarray(source, dtype=float).ravel()
    often = np.broadcast_to(np.asarray(counts, dtype=float), values.shape)
    order = np.argsort(values, kind="stable")
    order = order[np.isfinite(values[order]) & (often[order] > 0)]
    return values[order], often[order]


def _quantiles(
    values: npt.NDArray[Any], counts: npt.NDArray[Any], shares: Sequence[float]
) -> npt.NDArray[Any]:
    """Return the smallest values that at least such shares of all do not exceed."""
    below = np.cumsum(counts) / counts.sum()
    places = np.searchsorted(below, np.asarray(shares) - 1e-12)
    return values[np.minimum(places, len(values) - 1)]


def _many_decades(values: npt.NDArray[Any]) -> bool:
    return bool(values.min() > 0 and values.max() > 100 * values.min())


def _bins(values: npt.NDArray[Any], most: int = 50) -> npt.NDArray[Any]:
    """Place the edges of bars; whole numbers of a narrow range get a bar each."""
    low, high = float(values.min()), float(values.max())
    if _many_decades(values):
        return np.geomspace(low, high * 1.0001, most)
    whole = bool((values == np.round(values)).all())
    if whole:
        step = max(1, int(np.ceil((high - low + 1) / most)))
        return np.arange(low - 0.5, high + step, step)
    return np.linspace(low, high if high > low else low + 1, most)


def ranges(
    series: Mapping[str, Distribution], xlabel: str, title: str = "", counted: str = "values"
) -> Figure:
    """Draw one box per series: median, middle half, and the range from 1 to 99 %.

    This is how neighbours per atom differ from file to file (Firoz et al. 2025, Figure 5).
    """
    names = list(series)
    with _axes(8.0, min(1.4 + 0.42 * max(len(names), 2), 30.0)) as (figure, axes):
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
            words = f"  mean {mean:.3g}, {number:,} {counted}"
            ax.text(high, row, words, va="center", fontsize=8.5, color="#555555")
        ax.set_yticks(range(len(names)), names)
        ax.set(xlabel=xlabel, title=title, ylim=(len(names) - 0.4, -0.6))
        ax.set_xlim(0, ax.get_xlim()[1] * 1.3)
        ax.grid(visible=False, axis="y")
    return figure


def batch_balance(
    costs: Mapping[str, Values], capacity: float | None = None, unit: str = "atoms"
) -> Figure:
    """Draw how batches fill the ranks step by step (Firoz et al. 2025, Figure 12).

    Each plan gets a map of its ranks and steps, dark where a rank has much to do, all on one scale;
    and below the distribution of work that all others wait for: largest over mean of each step.

    Parameters
    ----------
    costs
        Name of the plan -> cost of each batch, [steps, ranks].
    capacity
        What a batch may hold; the scale ends there.
    unit
        What the cost counts.
    """
    plans = {name: np.atleast_2d(np.asarray(value, dtype=float)) for name, value in costs.items()}
    top = max([capacity or 0.0, *(plan.max(initial=0.0) for plan in plans.values())]) or 1.0
    heights = [1.0] * len(plans) + [1.15]
    with _axes(8.6, 1.5 * len(plans) + 2.4, len(plans) + 1, 1, height_ratios=heights) as (
        fig,
        axes,
    ):
        image = None
        for ax, (name, plan) in zip(axes.flat, plans.items(), strict=False):
            steps, ranks = plan.shape
            image = ax.imshow(
                plan.T,
                aspect="auto",
                cmap=HEAT,
                vmin=0,
                vmax=top,
                interpolation="nearest" if steps <= 1000 else "antialiased",
                extent=(0.5, steps + 0.5, ranks - 0.5, -0.5),
            )
            ax.grid(visible=False)
            ax.set_title(f"{name}: {_balance_words(plan, capacity)}", fontsize=10)
            ax.set_ylabel("rank")
            ax.set_yticks(np.unique(np.linspace(0, ranks - 1, min(ranks, 4)).round()))
            ax.set_xlabel("step", labelpad=1)
        if image is not None:
            fig.colorbar(image, ax=list(axes.flat[:-1]), label=f"{unit} of a batch", aspect=30)
        _waiting(axes.flat[-1], plans)
    return fig


def _balance_words(plan: npt.NDArray[Any], capacity: float | None) -> str:
    mean = plan.mean(axis=1)
    ratio = float(plan.max(axis=1).sum() / mean.sum()) if mean.sum() > 0 else 1.0
    words = f"{len(plan):,} steps, slowest rank {100 * (ratio - 1):.1f} % over the mean"
    return f"{words}, fill {100 * plan.mean() / capacity:.1f} %" if capacity else words


def _waiting(ax: Axes, plans: Mapping[str, npt.NDArray[Any]]) -> None:
    for (name, plan), colour in zip(plans.items(), _colours(len(plans)), strict=True):
        mean = plan.mean(axis=1)
        ratio = np.sort(plan.max(axis=1)[mean > 0] / mean[mean > 0])
        share = np.linspace(0, 100, len(ratio)) if len(ratio) > 1 else np.array([50.0] * len(ratio))
        ax.plot(share, ratio, color=colour, label=name, marker="o" if len(ratio) == 1 else "")
    ax.set(
        title="What the slowest rank costs",
        xlabel="share of steps (%), sorted",
        ylabel="largest / mean",
    )
    ax.set_ylim(bottom=1 - 0.02 * (ax.get_ylim()[1] - 1))
    ax.legend()


def shares(
    rows: Sequence[str], parts: Mapping[str, Values], xlabel: str, title: str = ""
) -> Figure:
    """Draw stacked horizontal bars: what each row's total is made of, such as an epoch's time."""
    places = np.arange(len(rows))
    with _axes(8.0, min(1.5 + 0.3 * max(len(rows), 2), 12.0)) as (figure, axes):
        ax = axes[0, 0]
        left = np.zeros(len(rows))
        for (name, values), colour in zip(parts.items(), _colours(len(parts)), strict=True):
            width = np.nan_to_num(np.asarray(values, dtype=float))
            ax.barh(places, width, 0.7, left=left, color=colour, label=name)
            left = left + width
        if len(rows) <= 30:
            ax.set_yticks(places, rows)
        ax.set(xlabel=xlabel, title=title, ylim=(len(rows) - 0.4, -0.6))
        ax.grid(visible=False, axis="y")
        ax.legend(ncols=len(parts), loc="lower left", bbox_to_anchor=(0, 1.0), borderaxespad=0)
        ax.set_title(title, pad=26)
    return figure


def _colours(number: int) -> list[str]:
    return [PALETTE[k % len(PALETTE)] for k in range(number)]


def _say(ax: Axes, words: str) -> None:
    ax.text(0.5, 0.5, words, transform=ax.transAxes, ha="center", va="center", color=FAINT)
