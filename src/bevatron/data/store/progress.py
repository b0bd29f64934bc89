"""Progress on standard error: a bar with rate and time left, or a line every ten seconds."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from bevatron.output import is_quiet

_SECONDS_BETWEEN_LINES = 10.0


@contextmanager
def progress(
    title: str, total: int, done: int = 0, unit: str = "samples", enabled: bool = True
) -> Iterator[Callable[[int], None]]:
    """Show progress on standard error: a bar on a terminal, plain lines otherwise.

    Parameters
    ----------
    total, done : number of items in all, and those already done
    enabled : false shows nothing; nor does a quiet command

    Yields
    ------
    Callable[[int], None]
        Call it with the number of items done since the last call.
    """
    if not enabled or total == 0 or is_quiet():
        yield lambda _count: None
    elif sys.stderr.isatty():
        yield from _bar(title, total, done, unit)
    else:
        yield from _lines(title, total, done, unit)


def _bar(title: str, total: int, done: int, unit: str) -> Iterator[Callable[[int], None]]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    begin = time.monotonic()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(title, total=total, completed=done, rate="")
        now = 0

        def advance(count: int) -> None:
            nonlocal now
            now += count
            rate = now / max(time.monotonic() - begin, 1e-9)
            bar.update(task, advance=count, rate=f"{_rate(rate)} {unit}/s")

        yield advance


def _lines(title: str, total: int, done: int, unit: str) -> Iterator[Callable[[int], None]]:
    begin = last = time.monotonic()
    now, printed = done, -1

    def line() -> str:
        seconds = max(time.monotonic() - begin, 1e-9)
        rate = (now - done) / seconds
        left = f", {clock((total - now) / rate)} left" if rate > 0 and now < total else ""
        return (
            f"{title}: {now:,} of {total:,} {unit} ({100 * now / total:.0f} %), "
            f"{_rate(rate)} {unit}/s, {clock(seconds)} so far{left}\n"
        )

    def advance(count: int) -> None:
        nonlocal now, printed, last
        now += count
        if time.monotonic() - last > _SECONDS_BETWEEN_LINES:
            printed, last = now, time.monotonic()
            sys.stderr.write(line())

    yield advance
    if printed != now:
        sys.stderr.write(line())


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def clock(seconds: float) -> str:
    """Write a time as hours, minutes and seconds.

    Examples
    --------
    >>> clock(59.6), clock(3725)
    ('0:01:00', '1:02:05')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"
