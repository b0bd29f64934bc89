"""Training for a given time instead of a number of epochs, for comparisons at equal cost.

The learning rate rises over the first part of the time and falls on a straight line to zero at its
end, so that every model is compared at the end of a whole schedule. Nothing is saved on the way.
"""

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from bevatron.train.course import Epochs
from bevatron.train.evaluate import Interrupted
from bevatron.train.logger import epochs_of, read_journal
from bevatron.train.loop import Trainer, fit
from bevatron.train.run import FitResult, Run

STEPS_BEFORE = 4
"""Steps in which kernels are compiled and captured; the schedule begins after them."""

LEAST = 1e-3
"""Share of the learning rate that the first steps have."""


@dataclass(frozen=True)
class Budget:
    """How long to train.

    Attributes
    ----------
    seconds
        From the beginning, compilation included; None = no limit.
    epochs
        Likewise; the run is over at whichever comes first.
    warmup
        Share of it in which the learning rate rises.
    """

    seconds: float | None = None
    epochs: int | None = None
    warmup: float = 0.05

    def learning_rate(self, lr: float, done: float) -> float:
        """Return the rate when a share of the run is done.

        Examples
        --------
        >>> budget = Budget(seconds=60, warmup=0.2)
        >>> [round(budget.learning_rate(1.0, done), 3) for done in (0, 0.1, 0.2, 0.6, 1)]
        [0.001, 0.5, 1.0, 0.5, 0.0]
        """
        done = min(max(done, 0.0), 1.0)
        rising = max(done / self.warmup, LEAST) if self.warmup else 1.0
        return lr * min(rising, (1.0 - done) / (1.0 - self.warmup))


@dataclass(frozen=True)
class Timed:
    """What came of a run.

    Attributes
    ----------
    curve
        One record per epoch as in metrics.jsonl, with ``elapsed``, the seconds since the beginning
        at its end, validation included.
    result
        Of the last validation; the run's model has its last (averaged) weights.
    """

    curve: list[dict[str, Any]]
    result: FitResult


def fit_within(run: Run, budget: Budget) -> Timed:
    """Train a run until its budget is used up; its own schedule and epochs do not count.

    It is validated as ``train.evaluate_every`` says, and at the end.

    Parameters
    ----------
    run
        With a new folder.
    budget
        Time or epochs.

    Raises
    ------
    ValueError
        For a budget of neither.
    """
    if budget.seconds is None and budget.epochs is None:
        raise ValueError("a budget needs seconds or epochs")
    ends: dict[int, float] = {}

    def trainer(*parts: Any) -> Trainer:
        return _TimedTrainer(budget, ends, *parts)

    result = fit(run, trainer)
    records = epochs_of(read_journal(run.folder / "metrics.jsonl"))
    curve = [{**record, "elapsed": ends[record["epoch"]]} for record in records]
    return Timed(curve, result)


class _Nothing:
    """Stands in for what saves."""

    def time_due(self) -> bool:
        return False

    def checkpoint(self) -> None:
        pass


class _TimedTrainer(Trainer):
    def __init__(self, budget: Budget, ends: dict[int, float], *parts: Any) -> None:
        super().__init__(*parts)
        self.budget, self.ends = budget, ends
        self._writer, self.saver = self.saver, _Nothing()  # type: ignore[assignment]
        self._began = self._from = time.monotonic()
        self._ready = self._over = False
        self.course = _BudgetedCourse(self)

    def walk(self) -> FitResult:
        progress = self.state.progress
        for line in self.run.notes:
            self.logger.console.say(line)
        while self.stopped_by is None and not self._is_over():
            self.run.task.begin_epoch(progress.epoch)
            self._train_epoch()
            self._end_epoch()
        self.state.model.load_state_dict(self._writer.weights())
        signal = None if self.stopped_by == "time" else self.stopped_by
        if signal is not None:
            progress.finished = None
        return self._writer.result(signal, self.metrics)

    def _train_epoch(self) -> None:
        stops = self.stops
        self.stops = _Clock(stops, self)  # type: ignore[assignment]
        try:
            super()._train_epoch()
        finally:
            self.stops = stops

    def _end_epoch(self) -> None:
        """Validate every so many epochs and after the last."""
        progress, train = self.state.progress, self.run.settings.train
        number, began = progress.epoch + 1, time.monotonic()
        if self.spent() or self.stopped_by is not None:
            progress.finished, self._over = "time", True
        elif number == self.budget.epochs:
            progress.finished, self._over = "epochs", True
        valid: dict[str, float] = {}
        if self._over or number % train.evaluate_every == 0:
            with suppress(Interrupted):
                valid = self._validate()
        now = time.monotonic()
        record = self.logger.epoch_record(progress, self.learning_rate(1.0, progress.step))
        self.logger.epoch(record, valid, now - began, best=False)
        self.ends[progress.epoch] = now - self._began
        progress.epoch = number
        progress.step_in_epoch, progress.segments, progress.sums = 0, [], {}

    def _is_over(self) -> bool:
        return self._over

    def spent(self) -> bool:
        """Whether the time is over."""
        seconds = self.budget.seconds
        return seconds is not None and time.monotonic() - self._began >= seconds

    def learning_rate(self, fraction: float, step: int) -> float:
        budget, now = self.budget, time.monotonic()
        if not self._ready:
            self._from, self._ready = now, step >= STEPS_BEFORE
        shares = [0.0]
        if budget.epochs is not None:
            shares.append((self.state.progress.epoch + fraction) / budget.epochs)
        if budget.seconds is not None:
            left = budget.seconds - (self._from - self._began)
            shares.append((now - self._from) / max(left, 1e-9))
        return budget.learning_rate(self.run.settings.optim.lr, max(shares))


class _BudgetedCourse(Epochs):
    """Epochs whose learning rate goes by the budget."""

    def __init__(self, trainer: _TimedTrainer) -> None:
        super().__init__(trainer.run, trainer.planner)
        object.__setattr__(self, "_trainer", trainer)

    def learning_rate(self, progress: Any, step: int, fraction: float) -> float:
        del progress
        rate: float = self._trainer.learning_rate(fraction, step)  # type: ignore[attr-defined]
        return rate


class _Clock:
    """Requests to stop, the end of the time among them."""

    def __init__(self, stops: Any, trainer: _TimedTrainer) -> None:
        self._stops, self._trainer = stops, trainer

    def notes(self) -> dict[str, float]:
        return {**self._stops.notes(), "time": float(self._trainer.spent())}

    def agreed(self, totals: Mapping[str, float]) -> str | None:
        said: str | None = self._stops.agreed(totals)
        return said or ("time" if totals["time"] else None)
