"""Data, tasks and schedules for measurements of real training."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from torch.profiler import ProfilerActivity, profile

from bevatron.data.dataset import InMemory, Subset
from bevatron.train.logger import METRICS, epochs_of, read_journal


def whole_schedule(epochs: int, evaluate_every: int, warmup: float = 0.05) -> dict[str, Any]:
    """Return the values of a run whose rate ends at zero, of which nothing but its end is kept.

    Parameters
    ----------
    warmup : share of the run in which the rate rises
    """
    return {
        "train": {
            "epochs": epochs,
            "evaluate_every": evaluate_every,
            "patience": None,
            "log_every": 10**9,
            "explode_factor": None,
        },
        "schedule": {"kind": "linear", "warmup_epochs": warmup * epochs},
        "checkpoint": {"every_epochs": None, "best": False, "final": "last"},
        "report": False,
    }


def epochs_walked(folder: Path) -> list[dict[str, Any]]:
    """Return a run's epochs with ``elapsed``, the seconds up to their ends, validation included."""
    records = epochs_of(read_journal(folder / METRICS))
    spent = (r["time"]["seconds"] + r["time"]["validation_seconds"] for r in records)
    return [{**r, "elapsed": at} for r, at in zip(records, accumulate(spent), strict=True)]


def repeated(samples: Sequence[Mapping[str, Any]], length: int, name: str) -> Subset:
    """Make a dataset of some samples, each seen under several indices.

    Parameters
    ----------
    samples : the different samples
    length : of the dataset
    name : what a sample is called in messages
    """
    different = InMemory(samples, f"{name} {{}}".format)
    return Subset(different, np.arange(length) % len(different))


class TracedSteps:
    """Traces some steps of a task; precedes the task's class among the bases.

    Attributes
    ----------
    first, traced : the first traced step, counted from 1, and number of traced steps; none if 0
    profiler : the trace
    """

    first, traced, calls = 0, 0, 0
    profiler: profile | None = None

    def normalisers(self, batch: Any) -> Any:
        """Count the labels, and the steps."""
        self.calls += 1
        if self.calls == self.first:
            self.profiler = profile(activities=[ProfilerActivity.CUDA])
            self.profiler.start()
        if self.profiler is not None and self.calls == self.first + self.traced:
            self.profiler.stop()
        return super().normalisers(batch)  # type: ignore[misc]
