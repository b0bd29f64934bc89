"""The house style of figures: fonts, lines, colours, and how a figure begins."""

import io
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.text import Text
from matplotlib.transforms import ScaledTranslation

from bevatron.files import write_bytes_atomically

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#5B5B5B")
"""Okabe and Ito's colours, without black and yellow."""

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
}

HEAT = LinearSegmentedColormap.from_list(
    "fill", ["#FFFFFF", "#D6E6F2", "#7FB2D9", "#0072B2", "#003B5C"]
)


LEGEND_COLUMNS = 3
"""Columns of a legend below a figure."""

Values = npt.ArrayLike


def png(figure: Figure, dpi: int = 130) -> bytes:
    """Render a figure in the house style."""
    stream = io.BytesIO()
    figure.set_dpi(dpi)
    # Names of ticks have been made with `as_text`; their numbers are written while drawing.
    for text in figure.findobj(Text):
        text.set_text(as_text(text.get_text()))
    # Ticks are created while drawing, with the settings of that moment. `Figure.savefig` would draw
    # a figure with a layout twice.
    with mpl.rc_context(STYLE), warnings.catch_warnings():
        # A letter that the font lacks, as of Chinese, is drawn as a box; the tables name the file.
        warnings.filterwarnings("ignore", r"Glyph \d+")
        FigureCanvasAgg(figure).print_png(stream)
    return stream.getvalue()


def as_text(name: str) -> str:
    """Escape what would be read as a formula, and bytes of a file's name that are not UTF-8."""
    return re.sub(r"(?<!\\)\$", r"\\$", name.encode(errors="backslashreplace").decode())


def save(figure: Figure, path: Path) -> Path:
    """Write a figure as PNG atomically; creates the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes_atomically(path, png(figure))
    return path


@contextmanager
def new_axes(
    width: float, height: float, rows: int = 1, columns: int = 1, **options: Any
) -> Iterator[tuple[Figure, npt.NDArray[Any]]]:
    """Create a figure in the house style; return it and its axes as a 2-d array."""
    with mpl.rc_context(STYLE):
        figure = Figure(
            figsize=(width, height), layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.08)
        )
        FigureCanvasAgg(figure)
        yield figure, figure.subplots(rows, columns, squeeze=False, **options)


def colours(number: int) -> list[str]:
    """Return the colours of a number of curves; they repeat after seven."""
    return [PALETTE[k % len(PALETTE)] for k in range(number)]


def legend_below(ax: Axes, columns: int = 2) -> None:
    """Put the legend below the axes' label, where it hides nothing."""
    figure = ax.get_figure(root=True)
    assert figure is not None
    inches = ScaledTranslation(0, -0.45, figure.dpi_scale_trans)
    ax.legend(
        ncols=columns,
        loc="upper left",
        bbox_to_anchor=(0, 0),
        bbox_transform=ax.transAxes + inches,
        borderaxespad=0.2,
    )


def short(value: float) -> str:
    """Write a number beside a bar: three significant digits, whole from a thousand on.

    Examples
    --------
    >>> short(1116.51), short(85.71), short(0.0002)
    ('1,117', '85.7', '0.0002')
    """
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e7 else f"{value:.3g}"


def write_centred(ax: Axes, text: str) -> None:
    """Write a text in the middle of empty axes."""
    ax.text(0.5, 0.5, text, transform=ax.transAxes, ha="center", va="center", color=FAINT)
