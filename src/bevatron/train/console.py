"""Output during a run: a progress bar on a terminal, plain lines otherwise.

Every line also goes to log.txt with the time. Only rank 0 prints.
"""

import sys
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console as RichConsole
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

LINE_SECONDS = 30.0
"""Without a terminal, time between lines about the steps."""


class Console:
    """Shows the progress of a run.

    Parameters
    ----------
    log
        File to which lines are added; None = no file.
    active
        Whether this rank prints at all.
    shown
        Validation metrics to print after an epoch; none given: all. metrics.jsonl has all.
    """

    def __init__(
        self, log: Path | None, *, active: bool = True, shown: Collection[str] = ()
    ) -> None:
        self._active = active
        self._shown = shown
        self._file = log.open("a", encoding="utf-8") if active and log is not None else None
        self._rich = RichConsole(highlight=False)
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._printed_at = time.monotonic()

    def say(self, text: str) -> None:
        """Print a line and add it to the log."""
        if not self._active:
            return
        if self._rich.is_terminal:
            self._rich.print(text, markup=False)
        else:
            sys.stdout.write(text + "\n")
            sys.stdout.flush()
        self._log(text)

    def begin_epoch(self, epoch: int, epochs: int, done: int, total: int) -> None:
        """Start the progress bar of an epoch with ``done`` of ``total`` steps done."""
        if not (self._active and self._rich.is_terminal):
            return
        self._progress = Progress(
            TextColumn("epoch {task.fields[epoch]}"),
            BarColumn(),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[figures]}"),
            console=self._rich,
            transient=True,
        )
        self._task = self._progress.add_task(
            "", total=total, completed=done, epoch=f"{epoch + 1}/{epochs}", figures=""
        )
        self._progress.start()

    def step(self, record: Mapping[str, Any]) -> None:
        """Show a step."""
        if not self._active:
            return
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, advance=1, figures=figures(record))
        elif time.monotonic() - self._printed_at > LINE_SECONDS:
            self.say(f"step {record['step']}  {figures(record)}")
            self._printed_at = time.monotonic()

    def end_epoch(self) -> None:
        """Remove the bar."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def epoch(self, record: Mapping[str, Any]) -> None:
        """Print a line about an epoch."""
        if not self._active:
            return
        errors = "  ".join(
            f"{name} {value:.5g}"
            for name, value in record["valid"].items()
            if value is not None and (name in self._shown or not self._shown)
        )
        best = "  (best)" if record["best"] else ""
        errors = f"  | {errors}" if errors else ""
        self.say(f"epoch {record['epoch'] + 1}  {figures(record)}{errors}{best}")
        self._printed_at = time.monotonic()

    def close(self) -> None:
        """Close the log."""
        self.end_epoch()
        if self._file is not None:
            self._file.close()

    def _log(self, text: str) -> None:
        if self._file is not None:
            self._file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {text}\n")
            self._file.flush()


def figures(record: Mapping[str, Any]) -> str:
    """Format the figures of a step's or an epoch's record in one line.

    Examples
    --------
    >>> figures({"loss": 0.25, "lr": 0.01, "time": {"atoms_per_s": 1234.5, "wait_share": 0.02}})
    'loss 0.25  lr 0.01  1234 atoms/s  wait 2 %'
    """
    parts = [f"loss {record['loss']:.5g}", f"lr {record['lr']:.3g}"]
    rates = [(name, value) for name, value in record["time"].items() if name.endswith("_per_s")]
    # Of samples and of what they are measured in, which batches count first.
    parts += [f"{value:.4g} {name.removesuffix('_per_s')}/s" for name, value in rates[:2]]
    parts.append(f"wait {record['time'].get('wait_share', 0.0) * 100:.0f} %")
    return "  ".join(parts)
