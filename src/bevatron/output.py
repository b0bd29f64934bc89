"""Output of the commands: results on standard output, notes on standard error.

``--quiet`` and ``--json`` are decided once, for the whole process, in `quietly` and by the command
line; functions print through `say`, `note` and `Result` and know nothing of them.
"""

import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

_quiet: ContextVar[bool] = ContextVar("quiet", default=False)

UNFOLDED = 20
"""Maximum length of a number, word or name in the first column that is never folded."""

MOST_WORDS = 8
"""A cell with more words is a sentence."""


@dataclass(frozen=True)
class Result:
    """The result of a command.

    Attributes
    ----------
    values : plain values, for ``--json``
    show : prints them for people
    """

    values: Any
    show: Callable[[], None]

    def as_json(self) -> str:
        """Write the values as one JSON document; numbers that are not finite become null.

        Examples
        --------
        >>> Result({"mae": 0.5, "r2": float("nan")}, lambda: None).as_json()
        '{"mae": 0.5, "r2": null}'
        """
        return json.dumps(_plain(self.values), ensure_ascii=False, allow_nan=False)


Cell = str | int | float | None
"""Value of a table."""

Outcome = Result | int | None
"""Return value of a command's function: a result, an exit code or nothing."""


def print_no_more() -> None:
    """Send what is printed from now on to nowhere: its reader (``| head``) or place is gone."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def say(*lines: str) -> None:
    """Print lines, unless the command is quiet."""
    if not _quiet.get():
        for line in lines:
            print(line)  # noqa: T201


def note(line: str) -> None:
    """Print a line about the work itself to standard error, unless the command is quiet."""
    if not _quiet.get():
        print(line, file=sys.stderr)  # noqa: T201


def is_quiet() -> bool:
    """Whether only results and errors are printed."""
    return _quiet.get()


@contextmanager
def quietly(quiet: bool = True) -> Iterator[None]:
    """Print only results and errors within a ``with`` block."""
    token = _quiet.set(quiet)
    try:
        yield
    finally:
        _quiet.reset(token)


def number(value: Cell) -> str:
    """Write a value for a table: four significant digits, thousands separators, None as a dash.

    Examples
    --------
    >>> number(0.123456), number(1234567), number(12345.6), number(None), number(float("nan"))
    ('0.1235', '1,234,567', '12,346', '-', '-')
    """
    if value is None or value != value:  # noqa: PLR0124  NaN
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        size = abs(value)
        if 1000 <= size < 1e7:
            return f"{value:,.0f}"
        return f"{value:.4g}" if size < 1e-4 or size >= 1e7 else f"{value:#.4g}".rstrip(".")
    return str(value)


def print_table(
    headers: Sequence[str], rows: Sequence[Sequence[str]], title: str = "", width: int | None = None
) -> None:
    """Print a table whose first column identifies its rows and is never cut.

    Columns of text are left-aligned, others right. Cells and headers that do not fit are folded,
    numbers are not; a table that is still too wide is left for the terminal to wrap.

    Parameters
    ----------
    headers : headers of the columns; a line break puts a unit below the name
    rows : cells as text
    width : columns of a line; None = those of the terminal, 120 without one
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table

    if _quiet.get():
        return
    table = Table(
        title=title or None,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    shown = width or (Console().width if sys.stdout.isatty() else 120)
    frame = 2 * len(headers) + 1
    widths = _widths([headers, *rows], shown - frame)
    for column, (header, cells) in enumerate(zip(headers, widths, strict=True)):
        texts = [row[column] for row in rows]
        figures = any(character.isdigit() for text in texts for character in text[:2])
        sentences = any(len(text.split()) > MOST_WORDS for text in texts)
        right = column > 0 and figures and not sentences
        justify: Literal["left", "right"] = "right" if right else "left"
        table.add_column(header, justify=justify, overflow="fold", width=cells)
    for row in rows:
        table.add_row(*row)
    wide = max(shown, sum(widths) + frame)
    # Cells are text: rich would take a list in brackets for markup and drop it.
    console = Console(width=wide, highlight=False, markup=False, emoji=False)
    with console.capture() as text:  # rich itself would end the process where ``| head`` has left
        console.print(table, crop=False)
    print(text.get(), end="")  # noqa: T201


def print_rows(rows: Sequence[Mapping[str, Any]], title: str = "") -> None:
    """Print rows of equal keys with `print_table`; nothing if there are none."""
    if rows:
        print_table(list(rows[0]), [[str(value) for value in row.values()] for row in rows], title)


def counted(count: int, noun: str) -> str:
    """Write how many there are.

    Examples
    --------
    >>> counted(1, "chain"), counted(1200, "chain")
    ('1 chain', '1,200 chains')
    """
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def span(low: object, high: object) -> str:
    """Write a range of numbers, or the number if it is one.

    Examples
    --------
    >>> span(3, 15), span(15, 15)
    ('3 - 15', '15')
    """
    return f"{low}" if low == high else f"{low} - {high}"


def _widths(lines: Sequence[Sequence[str]], room: int) -> list[int]:
    """Return the widths of columns: as wide as their texts, cut where need be, the first last."""
    widths, least = [], []
    for column, texts in enumerate(zip(*lines, strict=True)):
        parts = [part for text in texts for part in text.split("\n")]
        words = [word for part in parts for word in part.split()]
        widths.append(max(map(len, parts), default=0))
        longest = max(map(len, words), default=0) if column else widths[0]
        least.append(min(longest, UNFOLDED))
    for column in (*range(1, len(widths)), 0):
        excess = max(sum(widths) - room, 0)
        widths[column] -= min(excess, widths[column] - least[column])
    return widths


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value
