"""The folder of a run: what is written where and when, and whether there is something to resume."""

import json
import math
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from bevatron.config import dump_yaml
from bevatron.errors import BevatronError, CheckpointError, ConfigError, DamagedError
from bevatron.files import (
    ASIDE,
    atomic_folder,
    checksum,
    explained,
    recover_folder,
    remove_folder,
    remove_leftovers,
    write_json_atomically,
    write_text_atomically,
)
from bevatron.parallel.collectives import barrier, broadcast_json, sum_scalars
from bevatron.parallel.data_parallel import equalise
from bevatron.parallel.mesh import Mesh
from bevatron.train.checkpoint import (
    Checkpoint,
    RunRecord,
    list_checkpoints,
    prune_checkpoints,
    read_checkpoint,
    read_intact,
    write_checkpoint,
)
from bevatron.train.identity import check_identity, harmless_settings, identity_of
from bevatron.train.logger import METRICS, Logger
from bevatron.train.optim import averaged
from bevatron.train.restarts import note_launch
from bevatron.train.run import WEIGHTS, FitResult, Run, SaveModel
from bevatron.train.schedule import Decisions
from bevatron.train.snapshot import Snapshot, SnapshotMemory
from bevatron.train.state import TrainState

if sys.platform != "win32":
    import fcntl

BEST_NOTE = "best.json"

ENDED = {
    "epochs": "all epochs are done",
    "steps": "all stages are done",
    "patience": "it no longer improves",
    "target": "the last stage has reached its target",
    "target missed": "a stage has missed its target",
}
"""Why a run is finished, in words."""

LONG_WAIT = 1.0
"""Seconds of training that a checkpoint may cost without a warning."""


class RunFolder:
    """Paths of a run's files.

    Attributes
    ----------
    passed_over : why newer checkpoints than that of `open` were not taken, newest first; on rank 0
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.best = path / "best"
        self.metrics = path / METRICS
        self.log = path / "log.txt"
        self.config = path / "config.yaml"
        self.passed_over: list[str] = []

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Lock the folder against other trainings; the lock ends with the process.

        On a file system without locks for folders nothing is locked. Raises ConfigError if another
        process is training there, or the folder cannot be made.
        """
        with explained(self.path, ConfigError):
            self.path.mkdir(parents=True, exist_ok=True)
        if sys.platform == "win32":
            yield
            return
        place = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(place)
            raise ConfigError(
                f"{self.path}: another process is training there; stop it, wait for its end or "
                "choose another folder"
            ) from None
        except OSError:
            pass
        try:
            yield
        finally:
            os.close(place)

    def open(self, run: Run, mesh: Mesh) -> Checkpoint | None:
        """Prepare the folder and return the checkpoint to resume from, None for a new run.

        Raises ConfigError if the folder holds a run and ``run.resume`` is off, or cannot be
        written; CheckpointError if the checkpoint is missing, damaged or of another run; without
        ``run.checkpoint`` the newest intact one is taken, and it is an error if there are only
        damaged ones.
        """
        chosen = None
        if mesh.is_main:
            path = self._choose(run)
            note_launch(self.path, os.environ)
            chosen = None if path is None else str(path)
        chosen = broadcast_json(chosen, mesh)
        if chosen is None:
            return None
        checkpoint = read_checkpoint(Path(chosen))
        check_identity(checkpoint.path, checkpoint.record.identity, identity_of(run))
        return checkpoint

    def _choose(self, run: Run) -> Path | None:
        with explained(self.path, ConfigError):
            self.path.mkdir(parents=True, exist_ok=True)
            remove_leftovers(self.path)
            if self.checkpoints.is_dir():
                remove_leftovers(self.checkpoints)
                for aside in self.checkpoints.glob("step-*" + ASIDE):
                    recover_folder(aside.with_name(aside.name.removesuffix(ASIDE)))
            recover_folder(self.best)
        there = list_checkpoints(self.checkpoints)
        if run.checkpoint is not None:
            path = run.checkpoint
            if path.resolve().parent != self.checkpoints.resolve():
                raise CheckpointError(
                    f"{path}: not a checkpoint of {self.path}; to begin a new run from its weights "
                    f"fine-tune from that run"
                )
            return read_intact(path).path
        if not run.resume:
            if there or _has_lines(self.metrics) or self.best.exists():
                raise ConfigError(
                    f"{self.path}: holds a run already; resume it or choose another folder"
                )
            return None
        return self._newest_intact(there)

    def _newest_intact(self, there: Sequence[Path]) -> Path | None:
        for path in reversed(there):
            try:
                return read_intact(path).path
            except DamagedError as error:
                self.passed_over.append(str(error))
        if there:
            raise CheckpointError(
                f"{self.path}: none of its checkpoints is intact ({self.passed_over[0]}); begin a "
                "new run in another folder"
            )
        return None

    def settle(self, checkpoint: Checkpoint, decisions: Decisions, mesh: Mesh) -> None:
        """Remove what is newer than the checkpoint that the run resumes from.

        If the best weights are newer than it, the next validation counts as the best again.
        """
        best_is_gone = None
        if mesh.is_main:
            with explained(self.checkpoints, CheckpointError):
                for path in list_checkpoints(self.checkpoints):
                    if int(path.name[5:]) > checkpoint.progress.step:
                        remove_folder(path)
            best_is_gone = self.best_weights(decisions) is None
        if broadcast_json(best_is_gone, mesh):
            decisions.forget_best()

    def write_config(self, run: Run) -> None:
        """Write config.yaml."""
        text = dump_yaml(run.config or run.settings)
        write_text_atomically(self.config, text, ConfigError)

    def save_best(
        self, save_model: SaveModel, weights: Mapping[str, Tensor], note: Mapping[str, Any]
    ) -> None:
        """Replace the best model; a kill leaves the old one or the new one."""
        with atomic_folder(self.best, CheckpointError) as folder:
            save_model(folder, weights)
            files = {WEIGHTS: checksum((folder / WEIGHTS).read_bytes())}
            write_json_atomically(folder / BEST_NOTE, {**note, "files": files}, CheckpointError)

    def best_weights(self, decisions: Decisions) -> dict[str, Tensor] | None:
        """Read the best weights; None if those on disk are damaged or not the recorded ones."""
        try:
            note = json.loads((self.best / BEST_NOTE).read_text(encoding="utf-8"))
            data = (self.best / WEIGHTS).read_bytes()
            # Runs of 0.1.0 noted no checksum.
            same = note.get("files", {}).get(WEIGHTS) in {None, checksum(data)}
            if same and note["step"] == decisions.best_step and note["value"] == decisions.best:
                return load(data)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError):
            return None
        return None

    def final_weights(
        self, run: Run, last: dict[str, Tensor], decisions: Decisions
    ) -> tuple[dict[str, Tensor], str]:
        """Choose the weights of a finished run and describe them."""
        wants_best = run.settings.checkpoint.final == "best" and run.settings.checkpoint.best
        if not wants_best or decisions.best is None:
            return last, "the last"
        best = self.best_weights(decisions)
        if best is None:
            return last, "the last (the best ones in the folder are damaged or gone)"
        if run.stages:
            return best, f"the best, of step {decisions.best_step}"
        return best, f"the best, of epoch {decisions.best_epoch + 1}"


def _has_lines(path: Path) -> bool:
    """Whether a run has written anything; one that was refused when it started has not."""
    return path.exists() and path.stat().st_size > 0


class Saver:
    """Writes checkpoints, the best weights and the final ones; all ranks call its methods.

    A checkpoint is copied to the host between two steps and written by a thread meanwhile. It
    counts, and an older one goes, once it is on disk. Its errors end the run at the next step.
    """

    def __init__(
        self, run: Run, state: TrainState, folder: RunFolder, logger: Logger, mesh: Mesh
    ) -> None:
        self.run, self.state, self.folder = run, state, folder
        self.logger, self.mesh = logger, mesh
        self._seconds_before = state.progress.seconds
        self._began = self._saved_at = time.monotonic()
        progress = state.progress
        self._saved = (progress.step, progress.epoch, progress.finished)
        self._improved: tuple[dict[str, Tensor], dict[str, Any]] | None = None
        self._improved_waits = False
        self._memory = SnapshotMemory()
        self._writing: threading.Thread | None = None
        self._failure: Exception | None = None
        self._told_to_wait = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, trace: object) -> None:
        """Wait for the checkpoint under way, also after an error; not after a second Ctrl-C."""
        if error is None:
            self.wait()
        elif self._writing is not None and not isinstance(error, KeyboardInterrupt):
            self._writing.join()

    def time_due(self) -> bool:
        """Whether rank 0's clock asks for a checkpoint; raise what the last one has failed with."""
        if self._failure is not None:
            self.wait()
        config = self.run.settings.checkpoint
        waited = time.monotonic() - self._saved_at
        minutes_over = config.every_minutes is not None and waited >= config.every_minutes * 60
        improved_over = self._improved_waits and waited >= config.best_seconds
        return self.mesh.is_main and (minutes_over or improved_over)

    def improved(
        self,
        record: Mapping[str, Any],
        metrics: Mapping[str, float],
        weights: Mapping[str, Tensor] | None,
    ) -> bool:
        """Keep the weights of an epoch as the best; return on all ranks whether to save.

        They are in memory until the next checkpoint.

        Parameters
        ----------
        record, metrics : those of the epoch and its validation
        weights : none = the current (averaged) ones
        """
        if self.mesh.is_main and self.run.settings.checkpoint.best:
            note = {
                "epoch": record["epoch"],
                "step": record["step"],
                "value": self.state.progress.decisions.best,
                "metrics": {k: v for k, v in metrics.items() if math.isfinite(v)},
            }
            kept = {name: value.clone() for name, value in weights.items()} if weights else None
            self._improved = kept or self.weights(), note
        self._improved_waits = True
        due = sum_scalars({"due": float(self.time_due())}, self.mesh)["due"]
        return bool(due)

    def checkpoint(self) -> None:
        """Begin to write a checkpoint, unless this state is on disk already."""
        self._improved_waits = False
        progress = self.state.progress
        now = (progress.step, progress.epoch, progress.finished)
        if now == self._saved and self._improved is None:
            return
        began = time.monotonic()
        self.wait()  # the memory of the snapshot is in use until then
        self._tell_of_waiting(time.monotonic() - began)
        progress.seconds = self._seconds_before + time.monotonic() - self._began
        weights, note = self._improved or (None, None)
        snapshot = self._memory.take(self.state, self.mesh, weights)
        self._improved = None
        self._saved, self._saved_at = now, time.monotonic()
        if snapshot is None:
            return
        record = RunRecord(
            identity=identity_of(self.run),
            settings=harmless_settings(self.run, self.mesh),
            threads=torch.get_num_threads(),
            metrics_bytes=self.logger.length(),
            num_ranks=self.mesh.world,
        )
        self._writing = threading.Thread(
            target=self._write, args=(snapshot, record, note), name="checkpoint", daemon=True
        )
        self._writing.start()

    def _write(self, snapshot: Snapshot, record: RunRecord, note: Mapping[str, Any] | None) -> None:
        """Write a checkpoint and prune older ones, in the thread.

        The best weights come first: a checkpoint must not refer to better ones than are on disk,
        nor to more lines of metrics.jsonl.
        """
        try:
            if snapshot.best is not None and note is not None:
                self.folder.save_best(self.run.save_model, snapshot.best, note)
            self.logger.sync()
            write_checkpoint(self.folder.checkpoints, snapshot, record)
            prune_checkpoints(self.folder.checkpoints, self.run.settings.checkpoint.keep)
        except Exception as error:  # noqa: BLE001  raised again by the run's own thread
            self._failure = error

    def wait(self) -> None:
        """Wait until the checkpoint under way is on disk.

        Raises CheckpointError if it cannot be written.
        """
        if self._writing is not None:
            self._writing.join()
            self._writing = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def _tell_of_waiting(self, seconds: float) -> None:
        """Say once that checkpoints are due faster than they can be written."""
        if seconds > LONG_WAIT and not self._told_to_wait:
            self._told_to_wait = True
            self.logger.console.say(
                f"warning: training waited {seconds:.1f} s for the checkpoint before this one to "
                "be on disk; let more time pass between two (checkpoint.every_steps, every_epochs, "
                "every_minutes)"
            )

    def weights(self, *, averages: bool = True) -> dict[str, Tensor]:
        """Return a copy of the current weights, averaged if the run averages them."""
        with averaged(self.state.model, self.state.ema if averages else None):
            return {k: v.detach().clone() for k, v in self.state.model.state_dict().items()}

    def finish(self, result: FitResult) -> FitResult:
        """Write the weights of a finished run, put them into the model, call its end hooks.

        No rank leaves before all is written: over NCCL `equalise` makes no host wait.
        """
        decisions = self.state.progress.decisions
        self.wait()
        self.logger.console.say(f"training ended: {ENDED[str(result.finished)]}")
        if self.mesh.is_main:
            last = self.weights()
            weights, which = self.folder.final_weights(self.run, last, decisions)
            self.state.model.load_state_dict(weights)
            with explained(self.run.folder, BevatronError):
                self.run.save_model(self.run.folder, weights)
            self.logger.console.say(f"weights: {which}; everything is in {self.run.folder}")
            self._save_further_averages(last)
        equalise(self.state.model, self.mesh)
        if self.run.before_end is not None:
            self.run.before_end(self.mesh)
        if self.mesh.is_main and self.run.on_end is not None:
            line = self.run.on_end(result, self.run.folder)
            if line:
                self.logger.console.say(line)
        barrier(self.mesh)
        return result

    def _save_further_averages(self, last: dict[str, Tensor]) -> None:
        """Write the averages that were not validated, each a model with the last buffers."""
        ema = self.state.ema
        for decay, averages in ({} if ema is None else ema.further()).items():
            path = self.folder.path / f"ema-{decay}"
            with atomic_folder(path, CheckpointError) as folder:
                self.run.save_model(folder, {**last, **averages})
            self.logger.console.say(f"last weights averaged with decay {decay}: {path}")

    def result(self, stopped_by: str | None, metrics: Mapping[str, float]) -> FitResult:
        """Summarise the progress of the run."""
        progress = self.state.progress
        return FitResult(
            folder=self.run.folder,
            finished=progress.finished,
            stopped_by=stopped_by,
            epochs=progress.epoch,
            steps=progress.step,
            metrics=dict(metrics),
            best=progress.decisions.best,
            best_epoch=progress.decisions.best_epoch,
            seconds=self._seconds_before + time.monotonic() - self._began,
        )
