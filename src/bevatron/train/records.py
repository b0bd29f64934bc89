"""What a run tells about its steps and epochs: metrics.jsonl, other writers and the console."""

import math
import time
from collections.abc import Mapping
from typing import Any

from bevatron.parallel.mesh import Mesh
from bevatron.train.checkpoint import Checkpoint
from bevatron.train.console import Console
from bevatron.train.journal import Journal
from bevatron.train.run import Run
from bevatron.train.run_folder import RunFolder, changes_since, matters
from bevatron.train.state import Progress
from bevatron.train.step import StepResult
from bevatron.train.writers import Writer, make_writers


class Records:
    """Turns figures into records and hands them on; on other ranks than 0 only adds them up.

    Parameters
    ----------
    run, folder, mesh, console
        Whose and where.
    checkpoint
        What the run goes on from; what metrics.jsonl holds beyond it is cut off.
    """

    def __init__(
        self,
        run: Run,
        folder: RunFolder,
        mesh: Mesh,
        console: Console,
        checkpoint: Checkpoint | None,
    ) -> None:
        self.console = console
        self._log_every = run.settings.train.log_every
        self._journal: Journal | None = None
        self._writers: list[Writer] = []
        self._began = time.monotonic()
        if mesh.is_main:
            kept = 0 if checkpoint is None else checkpoint.record.metrics_bytes
            step = 0 if checkpoint is None else checkpoint.progress.step
            self._journal = Journal(folder.metrics, kept)
            self._writers = make_writers(run.settings.train, folder.path, step, run.config)

    def close(self) -> None:
        """Close all files."""
        for writer in self._writers:
            writer.close()
        if self._journal is not None:
            self._journal.close()

    def sync(self) -> int:
        """Wait until metrics.jsonl is on disk; return its length."""
        return 0 if self._journal is None else self._journal.sync()

    def write(self, record: Mapping[str, Any]) -> None:
        """Write a record to all files."""
        if self._journal is not None:
            self._journal.write(record)
        for writer in self._writers:
            writer.write(record)

    def resumed(self, checkpoint: Checkpoint, run: Run, mesh: Mesh) -> None:
        """Tell from where the run goes on and which settings are others now."""
        progress = checkpoint.progress
        changes = changes_since(checkpoint.record, run, mesh)
        self.console.say(
            f"resumed from {checkpoint.path}: epoch {progress.epoch + 1}, step {progress.step}"
        )
        for key, before, now in changes:
            self.console.say(f"  changed: {key} was {before}, is {now}")
        told = {key: [before, now] for key, before, now in changes if matters(key)}
        if told:
            note = {"step": progress.step, "epoch": progress.epoch, "changes": told}
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
        recording: float = 0.0,
    ) -> None:
        """Take a step into the running sums of the epoch and tell of it.

        Rates leave out the seconds spent on ``recording`` CUDA graphs, which are told apart.
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
        figures |= {"time/recording": recording} if recording else {}
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
            "time": {
                "seconds": seconds,
                **_rates(result.sizes, seconds, recording),
                "wait_share": min(waited / seconds, 1.0),
            },
        }
        self.console.step(record)
        if progress.step % self._log_every == 0:
            self.write(record)

    def epoch(
        self,
        progress: Progress,
        lr: float,
        valid: Mapping[str, float],
        validation_seconds: float,
        *,
        best: bool,
    ) -> None:
        """Tell of an epoch: averages over its steps and the metrics of its validation."""
        sums = progress.sums
        steps = max(sums.get("steps", 0.0), 1.0)
        seconds = max(sums.get("time/seconds", 0.0), 1e-9)
        sizes = {k[6:]: int(v) for k, v in sums.items() if k.startswith("sizes/")}
        record = {
            "kind": "epoch",
            "epoch": progress.epoch,
            "step": progress.step,
            "loss": sums.get("loss", 0.0) / steps,
            "terms": {k[6:]: v / steps for k, v in sums.items() if k.startswith("terms/")},
            "lr": lr,
            "grad_norm": sums.get("grad_norm", 0.0) / steps,
            "sizes": sizes,
            "samples": progress.samples,
            "valid": dict(valid),
            "best": best,
            "time": {
                "seconds": seconds,
                **_rates(sizes, seconds, sums.get("time/recording", 0.0)),
                "wait_share": min(sums.get("time/waited", 0.0) / seconds, 1.0),
                "validation_seconds": validation_seconds,
            },
        }
        self.write(record)
        self.console.epoch(record)


def _rates(sizes: Mapping[str, int], seconds: float, recording: float) -> dict[str, float]:
    """Return what was done per second; with ``recording`` if time went into that."""
    at_work = seconds - recording if seconds > recording else seconds
    rates = {f"{name}_per_s": value / at_work for name, value in sizes.items()}
    return rates | ({"recording": recording} if recording else {})
