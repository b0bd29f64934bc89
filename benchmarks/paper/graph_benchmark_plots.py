"""Pictures of the times of graph attention, as in Figures 6 to 8 of Besta et al. (SC 2023)."""

import csv
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from bevatron.errors import DataError
from bevatron.train.report.plots import save
from bevatron.train.report.plots.lines import readable_log_ticks
from bevatron.train.report.plots.style import colours, new_axes

Row = dict[str, Any]

MOST_PANELS = 24


def plot_times(table: Path, out: Path) -> Path:
    """Draw a table of `graph_benchmark`: time by number of processes.

    A panel for each graph, width, number of layers and mode, a line for each model, bars for the
    95 % intervals. Of runs that were repeated the last counts. For weak scaling a panel holds all
    graphs of one density.

    Parameters
    ----------
    table : the CSV file
    out : picture to write

    Raises
    ------
    DataError
        If the file holds no times.
    """
    with table.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row.get("median_ms")]
    if not rows:
        raise DataError(f"{table}: holds no times to draw")
    weak = len({row["vertices"] for row in rows}) > 1 and _is_weak(rows)
    panels: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        size = f"density {_density(row):.1g}" if weak else f"{int(row['vertices']):,} vertices"
        entries = "" if weak else f"{int(row['nnz']) / 1e6:.3g}M entries"
        key = (row["dataset"], size, entries, int(row["features"]), int(row["layers"]), row["mode"])
        panels.setdefault(key, []).append(row)
    shown = list(panels.items())[:MOST_PANELS]
    columns = min(4, len(shown))
    lines = -(-len(shown) // columns)
    with new_axes(3.9 * columns + 0.4, 3.3 * lines, lines, columns) as (figure, axes):
        for (key, members), ax in zip(shown, axes.flat, strict=False):
            _panel(ax, key, members)
        for ax in axes.flat[len(shown) :]:
            ax.set_axis_off()
    return save(figure, out)


def _panel(ax: Axes, key: tuple[Any, ...], rows: Sequence[Row]) -> None:
    dataset, size, entries, features, layers, mode = key
    models = list(dict.fromkeys(row["model"] for row in rows))
    for model, colour in zip(models, colours(len(models)), strict=True):
        last = {int(row["ranks"]): row for row in rows if row["model"] == model}
        ranks = sorted(last)
        middle, low, high = (
            np.array([float(last[p][name]) for p in ranks])
            for name in ("median_ms", "low_ms", "high_ms")
        )
        bars = np.abs(np.stack([middle - low, high - middle]))
        ax.errorbar(ranks, middle, bars, fmt="o-", color=colour, capsize=3, label=model)
    ax.set_xscale("log", base=2)
    if len({row["ranks"] for row in rows}) > 1:
        ax.set_yscale("log")
        readable_log_ticks(ax)
    else:
        ax.margins(y=0.15)
        ax.set_ylim(bottom=0)
    ax.set_xticks(sorted({int(row["ranks"]) for row in rows}))
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    title = f"{dataset}, {size}\n{entries + ', ' if entries else ''}k={features}, {layers} layers"
    ax.set_title(title, fontsize=9.5)
    ax.set(xlabel="processes", ylabel=f"{mode} (ms)")
    ax.legend()


def _density(row: Row) -> float:
    """Return the density asked for; vertices are whole, perhaps rounded down, so to a decade."""
    exact = float(row["edges"]) / float(row["vertices"]) ** 2
    return float(10.0 ** round(math.log10(exact)))


def _is_weak(rows: Sequence[Row]) -> bool:
    """Whether the number of vertices follows the number of processes."""
    sizes: dict[tuple[str, str], set[str]] = {}
    for row in rows:
        sizes.setdefault((row["dataset"], row["ranks"]), set()).add(row["vertices"])
    several = len({ranks for _, ranks in sizes}) > 1
    return several and all(len(vertices) == 1 for vertices in sizes.values())
