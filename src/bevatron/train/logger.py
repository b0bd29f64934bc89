"""Logs the steps and epochs of a run to metrics.jsonl, the console and other services.

metrics.jsonl has one line per step and per epoch and is cut back to the checkpoint on resume. All
that depends on the clock is under the key ``time``; without it, the file of an interrupted and
resumed run equals that of an uninterrupted one.
"""

import json
import math
import os
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from bevatron.errors import CheckpointError, require
from bevatron.files import explained, write_all, write_text_atomically
from bevatron.parallel.mesh import Mesh
from bevatron.train.checkpoint import Checkpoint
from bevatron.train.console import Console
from bevatron.train.identity import changes_since, matters
from bevatron.train.run import Run
from bevatron.train.settings import TrainConfig
from bevatron.train.state import Progress
from bevatron.train.step import StepResult
from bevatron.typing import FloatArray

METRICS = "metrics.jsonl"
"""File of a run's folder."""

WANDB_ID = "wandb-id.txt"


class Logger:
    """Turns metrics into records and writes them; other ranks than 0 only add them up.

    Parameters
    ----------
    run, mesh, console : the run, its ranks and console
    checkpoint : checkpoint to resume from; later records of metrics.jsonl are cut off
    """

    def __init__(
        self, run: Run, mesh: Mesh, console: Console, checkpoint: Checkpoint | None
    ) -> None:
        self.console = console
        self._log_every = run.settings.train.log_every
        self._stages = [stage.name for stage in run.stages]
        self._named = run.named
        self._journal: Journal | None = None
        self._writers: list[Writer] = []
        self._began = time.monotonic()
        if mesh.is_main:
            kept = 0 if checkpoint is None else checkpoint.record.metrics_bytes
            step = 0 if checkpoint is None else checkpoint.progress.step
            self._journal = Journal(run.folder / METRICS, kept)
            self._writers = make_writers(run.settings.train, run.folder, step, run.config)

    def close(self) -> None:
        """Close all files."""
        for writer in self._writers:
            writer.close()
        if self._journal is not None:
            self._journal.close()

    def length(self) -> int:
        """Return the length of metrics.jsonl."""
        return 0 if self._journal is None else self._journal.length()

    def sync(self) -> None:
        """Wait until metrics.jsonl is on disk."""
        if self._journal is not None:
            self._journal.sync()

    def write(self, record: Mapping[str, Any]) -> None:
        """Write a record to all files."""
        if self._journal is not None:
            self._journal.write(record)
        for writer in self._writers:
            writer.write(record)

    def resumed(self, checkpoint: Checkpoint, run: Run, mesh: Mesh) -> None:
        """Log where the run resumes and which settings have changed."""
        progress = checkpoint.progress
        changes = changes_since(checkpoint.record.settings, run, mesh)
        epoch = "" if self._stages else f"epoch {progress.epoch + 1}, "
        self.console.say(f"resumed from {checkpoint.path}: {epoch}after step {progress.step}")
        for key, before, now in changes:
            self.console.say(f"  changed: {key} was {before}, is {now}")
        logged = {key: [before, now] for key, before, now in changes if matters(key)}
        if logged:
            note = {"step": progress.step, "epoch": progress.epoch, "changes": logged}
            progress.changes.append(note)
            self.write({"kind": "resume", **note})

    def begin_batches(self) -> None:
        """Start the clock of a step."""
        self._began = time.monotonic()

    def step(
        self,
        progress: Progress,
        result: StepResult,
        lr: float,
        waited: float,
        capture_seconds: float = 0.0,
        numbers: Mapping[str, Any] | None = None,
    ) -> None:
        """Add a step to the running sums of the epoch and log it.

        Rates leave out the seconds spent on capturing CUDA graphs, which are logged as ``capture``;
        ``numbers`` are what was random in the step.
        """
        now = time.monotonic()
        seconds = max(now - self._began, 1e-9)
        self._began = now
        # A step in float16 that was left out has no norm.
        norm = result.grad_norm if math.isfinite(result.grad_norm) else 0.0
        figures = {"loss": result.loss, "grad_norm": norm, "steps": 1.0}
        figures |= {f"terms/{name}": value for name, value in result.terms.items()}
        figures |= {f"sizes/{name}": float(value) for name, value in result.sizes.items()}
        figures |= {"time/seconds": seconds, "time/waited": waited}
        figures |= {"time/capture": capture_seconds} if capture_seconds else {}
        for name, value in figures.items():
            progress.sums[name] = progress.sums.get(name, 0.0) + value
        record = {
            "kind": "step",
            "step": progress.step,
            "epoch": progress.epoch,
            "loss": result.loss,
            "terms": result.terms,
            "lr": lr,
            "grad_norm": result.grad_norm,
            "sizes": result.sizes,
            **({"numbers": dict(numbers)} if numbers else {}),
            "time": {
                "seconds": seconds,
                **self._rates(result.sizes, seconds, capture_seconds),
                "wait_share": min(waited / seconds, 1.0),
            },
        }
        self.console.step(record)
        if progress.step % self._log_every == 0:
            self.write(record)

    def epoch_record(self, progress: Progress, lr: float) -> dict[str, Any]:
        """Return the record of an epoch before its validation: averages over its steps."""
        sums = progress.sums
        steps = max(sums.get("steps", 0.0), 1.0)
        seconds = max(sums.get("time/seconds", 0.0), 1e-9)
        sizes = {k[6:]: int(v) for k, v in sums.items() if k.startswith("sizes/")}
        return {
            "kind": "epoch",
            "epoch": progress.epoch,
            "step": progress.step,
            **({"stage": self._stages[progress.stage]} if self._stages else {}),
            "loss": sums.get("loss", 0.0) / steps,
            "terms": {k[6:]: v / steps for k, v in sums.items() if k.startswith("terms/")},
            "lr": lr,
            "grad_norm": sums.get("grad_norm", 0.0) / steps,
            "sizes": sizes,
            "samples": progress.samples,
            "time": {
                "seconds": seconds,
                **self._rates(sizes, seconds, sums.get("time/capture", 0.0)),
                "wait_share": min(sums.get("time/waited", 0.0) / seconds, 1.0),
            },
        }

    def epoch(
        self,
        record: Mapping[str, Any],
        valid: Mapping[str, float],
        validation_seconds: float,
        *,
        best: bool,
    ) -> None:
        """Log an epoch with the metrics of its validation."""
        spent = {**record["time"], "validation_seconds": validation_seconds}
        whole = {**record, "valid": dict(valid), "best": best, "time": spent}
        self.write(whole)
        self.console.epoch(whole)

    def _rates(self, sizes: Mapping[str, int], seconds: float, capture: float) -> dict[str, float]:
        """Return the throughput by name; with ``capture`` if time went into that."""
        at_work = seconds - capture if seconds > capture else seconds
        rates = {f"{name}_per_s": value / at_work for name, value in self._named(sizes).items()}
        return rates | ({"capture": capture} if capture else {})


class Journal:
    """Appends records to a JSONL file.

    Raises CheckpointError if the file cannot be written (also later, by a full disk) or is shorter
    than what the checkpoint has seen.

    Parameters
    ----------
    keep_bytes : what to keep of an existing file; the rest is cut off
    """

    def __init__(self, path: Path, keep_bytes: int = 0) -> None:
        self.path = path
        with explained(path, CheckpointError):
            size = path.stat().st_size if path.exists() else 0
            if size < keep_bytes:
                raise CheckpointError(
                    f"{path}: holds {size} bytes but {keep_bytes} when the checkpoint was written; "
                    f"put the file back or begin a new run in another folder"
                )
            self._file = path.open("ab", buffering=0)
            self._file.truncate(keep_bytes)

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one line; numbers that are not finite become null."""
        line = json.dumps(_finite(record), separators=(",", ":"), allow_nan=False)
        with explained(self.path, CheckpointError):
            write_all(self._file, line.encode() + b"\n")

    def length(self) -> int:
        """Return the file's length."""
        return os.fstat(self._file.fileno()).st_size

    def sync(self) -> None:
        """Wait until all lines are on disk."""
        with explained(self.path, CheckpointError):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_journal(path: Path) -> Iterator[dict[str, Any]]:
    """Read the records of a metrics.jsonl; a last line cut short by a kill is left out."""
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield json.loads(line)


def epochs_of(records: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the record of every epoch, in order; the last one if an epoch was logged twice."""
    return list({r["epoch"]: r for r in records if r.get("kind") == "epoch"}.values())


def column(records: Iterable[Mapping[str, Any]], *keys: str) -> FloatArray:
    """Return one figure of every record, [n]; NaN where it is missing.

    Examples
    --------
    >>> column([{"valid": {"mae": 0.5}}, {"valid": {}}, {"valid": {"mae": None}}], "valid", "mae")
    array([0.5, nan, nan])
    """
    found = []
    for record in records:
        value: Any = record
        for key in keys:
            value = value.get(key) if isinstance(value, Mapping) else None
        found.append(np.nan if value is None else float(value))
    return np.array(found, dtype=np.float64)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Writer(Protocol):
    """Takes the records of metrics.jsonl."""

    def write(self, record: Mapping[str, Any]) -> None:
        """Write one record."""

    def close(self) -> None:
        """Write what is still buffered."""


class TensorBoardWriter:
    """Writes scalars to ``folder/tensorboard``; on resume what came after ``step`` is dropped."""

    def __init__(self, folder: Path, step: int) -> None:
        require("tensorboard", "tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        purge = step or None
        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=purge)

    def write(self, record: Mapping[str, Any]) -> None:
        """Add every number of the record."""
        for name, value in scalars(record):
            self._writer.add_scalar(name, value, record["step"])

    def close(self) -> None:
        """Write what is still buffered."""
        self._writer.close()


class WandbWriter:
    """Logs to a Weights & Biases run that is named after the folder and resumed with it."""

    def __init__(self, folder: Path, step: int, project: str, config: Mapping[str, Any]) -> None:
        wandb: Any = require("wandb", "wandb")
        self._run = wandb.init(
            project=project,
            name=folder.resolve().name,
            id=wandb_id(folder, step),
            dir=str(folder),
            config=dict(config),
            resume="allow",
        )

    def write(self, record: Mapping[str, Any]) -> None:
        """Log every number of the record."""
        self._run.log(dict(scalars(record)), step=record["step"])

    def close(self) -> None:
        """Finish the run there."""
        self._run.finish()


def wandb_id(folder: Path, step: int) -> str:
    """Return the id of the folder's run at Weights & Biases; make a random one for a new run.

    It is in the file `WANDB_ID`. Runs of earlier versions have the folder's name as id and none.
    """
    path = folder / WANDB_ID
    with explained(path, CheckpointError):
        if path.is_file():
            return path.read_text().strip()
        chosen = folder.resolve().name if step else secrets.token_hex(8)
        write_text_atomically(path, chosen + "\n", CheckpointError)
    return chosen


def make_writers(
    config: TrainConfig, folder: Path, step: int, values: Mapping[str, Any]
) -> list[Writer]:
    """Build the writers that the configuration asks for.

    Raises MissingPackageError if the package of one is not installed.
    """
    writers: list[Writer] = []
    if config.tensorboard:
        writers.append(TensorBoardWriter(folder, step))
    if config.wandb:
        writers.append(WandbWriter(folder, step, config.wandb_project, values))
    return writers


def scalars(record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """List a record's numbers as ``kind/key`` -> value.

    Examples
    --------
    >>> list(scalars({"kind": "step", "step": 3, "loss": 0.5, "terms": {"energy": 0.1}}))
    [('step/loss', 0.5), ('step/terms/energy', 0.1)]
    """
    yield from _flat({k: v for k, v in record.items() if k != "step"}, f"{record['kind']}/")


def _flat(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, float]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{prefix}{key}", float(value)
