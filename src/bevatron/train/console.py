"""Output during a run: a progress bar on a terminal, plain lines otherwise.

Every line also goes to log.txt with the time. Only rank 0 prints.
"""

import math
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console as RichConsole
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Column

from bevatron.data.store.progress import clock
from bevatron.errors import CheckpointError
from bevatron.files import explained, write_all
from bevatron.output import is_quiet, print_no_more

Batch = TypeVar("Batch")

LINE_SECONDS = 30.0
"""Without a terminal, time between lines about the steps."""

EPOCH_SECONDS = 1.0
"""Minimum time between lines about epochs; shorter epochs, except the last, are only logged."""


class Console:
    """Shows the progress of a run: over all its epochs, with the time that is left.

    A quiet run only writes the log. Raises CheckpointError if the log cannot be written.

    Parameters
    ----------
    log : file to which lines are added; None = no file
    shown : validation metrics to print after an epoch; none given: all. metrics.jsonl has all
    """

    def __init__(
        self, log: Path | None, *, active: bool = True, shown: Collection[str] = ()
    ) -> None:
        self._active = active
        self._shown = shown
        self._path = log if active else None
        self._file = None if self._path is None else self._path.open("ab", buffering=0)
        self._rich = RichConsole(highlight=False)
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._printed_at = time.monotonic()
        self._next_epoch = -math.inf
        self._held = ""
        self._pace: Pace | None = None
        self._shown_figures = ""

    def say(self, text: str) -> None:
        """Print a line and add it to the log."""
        if not self._active:
            return
        self._print_held()
        self._print(text)
        self._log(text)

    def _print(self, text: str) -> None:
        if is_quiet():
            return
        try:
            if self._rich.is_terminal:
                self._rich.print(text, markup=False)
                return
            sys.stdout.write(text + "\n")
            sys.stdout.flush()
        except OSError:  # its reader has left, its terminal or disk is gone; the log has its lines
            print_no_more()

    def begin_epoch(
        self, epoch: int, epochs: int, done: int, total: int, steps: tuple[int, int] | None = None
    ) -> None:
        """Begin an epoch of which ``done`` of ``total`` steps are done; the first begins the bar.

        The bar is that of the whole run; validation counts as time of the epoch before it. With
        ``steps``, those done and those of the whole run, steps are counted and not epochs.
        """
        if not self._active:
            return
        if steps is not None:
            self._pace = self._pace or Pace(steps[1], steps[0], "step")
            self._pace.begin_steps(*steps)
        else:
            self._pace = self._pace or Pace(epochs, epoch + done / max(total, 1))
            self._pace.begin_epoch(epoch, done, total)
        if not self._rich.is_terminal or is_quiet():
            return
        if self._progress is None:
            self._progress = Progress(
                TextColumn(self._pace.unit + " {task.fields[epoch]}"),
                BarColumn(bar_width=20),
                TextColumn("{task.percentage:.0f} %"),
                TextColumn("{task.fields[left]}"),
                # On a narrow terminal only the figures are cut.
                TextColumn("{task.fields[figures]}", table_column=Column(ratio=1, no_wrap=True)),
                expand=True,
                console=self._rich,
                transient=True,
            )
            name = self._pace.name(epoch)
            whole = self._pace.whole
            self._task = self._progress.add_task("", total=whole, epoch=name, left="", figures="")
            self._progress.start()
        self._show(self._pace.name(epoch))

    def step(self, record: Mapping[str, Any]) -> None:
        """Show a step."""
        if not self._active or self._pace is None:
            return
        self._pace.step()
        if self._progress is not None:
            self._show(self._pace.name(record["epoch"]), figures(record))
        elif time.monotonic() - self._printed_at > LINE_SECONDS:
            self.say(f"{self._pace.place(record['epoch'])}  {figures(record)}{self._left()}")
            self._printed_at = time.monotonic()

    def validating(self, batches: Iterable[Batch], number: int) -> Iterator[Batch]:
        """Yield the batches of a validation, and show how far it is if it takes long."""
        for place, batch in enumerate(batches):
            told = f"validation: {place} of {number} batches"
            if self._progress is not None and self._pace is not None:
                self._show(self._pace.name(self._pace.epoch), told)
            elif time.monotonic() - self._printed_at > LINE_SECONDS:
                self.say(told)
                self._printed_at = time.monotonic()
            yield batch

    def _show(self, epoch: str, shown: str = "") -> None:
        assert self._progress is not None
        assert self._task is not None
        assert self._pace is not None
        self._shown_figures = shown or self._shown_figures
        self._progress.update(
            self._task,
            completed=self._pace.done,
            epoch=epoch,
            left=self._left().strip(),
            figures=self._shown_figures,
        )

    def _left(self) -> str:
        seconds = None if self._pace is None else self._pace.seconds_left()
        return "" if seconds is None else f"  {clock(seconds)} left"

    def epoch(self, record: Mapping[str, Any]) -> None:
        """Log a line about an epoch; print it, unless the last one was printed just now."""
        if not self._active:
            return
        errors = "  ".join(
            f"{name} {value:.5g}"
            for name, value in record["valid"].items()
            if value is not None and (name in self._shown or not self._shown)
        )
        best = "  (best)" if record["best"] else ""
        errors = f"  | {errors}" if errors else ""
        name, unit = str(record["epoch"] + 1), "epoch"
        if self._pace is not None:
            name, unit = self._pace.name(record["epoch"]), self._pace.unit
        line = f"{unit} {name}  {figures(record)}{errors}{best}{self._left()}"
        self._log(line)
        now = time.monotonic()
        if now < self._next_epoch:
            self._held = line
            return
        self._print(line)
        self._held, self._printed_at, self._next_epoch = "", now, now + EPOCH_SECONDS

    def _print_held(self) -> None:
        """Print the last epoch if it was not, so that later lines come after it."""
        if self._held:
            self._print(self._held)
            self._held = ""

    def end(self) -> None:
        """Remove the bar; print the last epoch."""
        self._print_held()
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def close(self) -> None:
        """Remove the bar and close the log."""
        self.end()
        if self._file is not None:
            self._file.close()

    def _log(self, text: str) -> None:
        if self._path is not None and self._file is not None:
            line = f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {text}\n"
            with explained(self._path, CheckpointError):
                write_all(self._file, line.encode(errors="backslashreplace"))


class Pace:
    """Progress of a run, in epochs or steps, and the time left at the speed so far.

    Parameters
    ----------
    epochs : epochs of the whole run, or steps if it counts steps
    done : what was done before, epochs also in part
    unit : ``epoch`` or ``step``
    """

    def __init__(self, epochs: int, done: float, unit: str = "epoch") -> None:
        self.whole, self._begun, self.done, self.unit = epochs, done, done, unit
        self._began = time.monotonic()
        self.epoch, self._step, self._steps = 0, 0, 1

    def begin_steps(self, done: int, whole: int) -> None:
        """Continue after some of a number of steps, for a run that counts steps."""
        self.done, self.whole = done, whole

    def begin_epoch(self, epoch: int, done: int, total: int) -> None:
        """Begin an epoch of ``total`` steps."""
        self.epoch, self._step, self._steps = epoch, done, max(total, 1)
        self.done = epoch + done / self._steps

    def step(self) -> None:
        """Count a step."""
        self._step += 1
        if self.unit == "step":
            self.done += 1
        else:
            self.done = self.epoch + min(self._step / self._steps, 1.0)

    @property
    def steps(self) -> str:
        """Steps of the epoch, ``7/20``."""
        return f"{self._step}/{self._steps}"

    def name(self, epoch: int) -> str:
        """Name an epoch, counted from 0, among all: ``3/100``; or the last step."""
        return f"{epoch + 1 if self.unit == 'epoch' else round(self.done)}/{self.whole}"

    def place(self, epoch: int) -> str:
        """Say where the run is: ``epoch 3/100  step 7/20``, or ``step 247/5000``."""
        within = f"  step {self.steps}" if self.unit == "epoch" else ""
        return f"{self.unit} {self.name(epoch)}{within}"

    def seconds_left(self) -> float | None:
        """Estimate the rest of the run, patience aside; None at its begin and its end."""
        gained, left = self.done - self._begun, self.whole - self.done
        if gained <= 0 or left <= 0:
            return None
        return (time.monotonic() - self._began) * left / gained


def figures(record: Mapping[str, Any]) -> str:
    """Format the figures of a step's or an epoch's record in one line.

    Examples
    --------
    >>> figures({"loss": 0.25, "lr": 0.01, "time": {"atoms_per_s": 12345.6, "wait_share": 0.02}})
    'loss 0.25  lr 0.01  12,346 atoms/s  wait 2 %'
    """
    parts = [f"loss {record['loss']:.5g}", f"lr {record['lr']:.3g}"]
    rates = [(name, value) for name, value in record["time"].items() if name.endswith("_per_s")]
    # Of samples and of what they are measured in, which batches count first.
    parts += [f"{_rate(value)} {name.removesuffix('_per_s')}/s" for name, value in rates[:2]]
    parts.append(f"wait {record['time'].get('wait_share', 0.0) * 100:.0f} %")
    return "  ".join(parts)


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
