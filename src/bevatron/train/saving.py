"""When the state of a run is written, and the weights that are kept from it."""

import math
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from bevatron.errors import BevatronError
from bevatron.files import explained
from bevatron.parallel.collectives import barrier, sum_scalars
from bevatron.parallel.data_parallel import equalise
from bevatron.parallel.mesh import Mesh
from bevatron.train.checkpoint import RunRecord, prune_checkpoints, save_checkpoint
from bevatron.train.optim import averaged
from bevatron.train.records import Records
from bevatron.train.run import FitResult, Run
from bevatron.train.run_folder import RunFolder, harmless_settings, identity_of
from bevatron.train.state import TrainState


class Saver:
    """Writes checkpoints, the best weights and the final ones; all ranks call its methods."""

    def __init__(
        self, run: Run, state: TrainState, folder: RunFolder, records: Records, mesh: Mesh
    ) -> None:
        self.run, self.state, self.folder = run, state, folder
        self.records, self.mesh = records, mesh
        self._seconds_before = state.progress.seconds
        self._began = self._saved_at = time.monotonic()
        progress = state.progress
        self._saved = (progress.step, progress.epoch, progress.finished)
        self._improved: tuple[dict[str, Tensor], dict[str, Any]] | None = None
        self._improved_waits = False

    def time_due(self) -> bool:
        """Whether rank 0's clock asks for a checkpoint."""
        config = self.run.settings.checkpoint
        waited = time.monotonic() - self._saved_at
        minutes_over = config.every_minutes is not None and waited >= config.every_minutes * 60
        improved_over = self._improved_waits and waited >= config.best_seconds
        return self.mesh.is_main and (minutes_over or improved_over)

    def improved(self, metrics: Mapping[str, float]) -> bool:
        """Keep the present (averaged) weights as the best ones; tell all ranks whether to save.

        They are in memory until the next checkpoint.
        """
        progress = self.state.progress
        if self.mesh.is_main and self.run.settings.checkpoint.best:
            note = {
                "epoch": progress.epoch,
                "step": progress.step,
                "value": progress.decisions.best,
                "metrics": {k: v for k, v in metrics.items() if math.isfinite(v)},
            }
            self._improved = self.weights(), note
        self._improved_waits = True
        due = sum_scalars({"due": float(self.time_due())}, self.mesh)["due"]
        return bool(due)

    def checkpoint(self) -> None:
        """Write a checkpoint unless this state is on disk already, and prune older ones.

        The best weights come first: a checkpoint that remembers better ones than are on disk would
        have nothing to go back to.
        """
        self._improved_waits = False
        if self._improved is not None:
            self.folder.save_best(self.run.save_model, *self._improved)
            self._improved = None
        progress, config = self.state.progress, self.run.settings.checkpoint
        now = (progress.step, progress.epoch, progress.finished)
        if now == self._saved:
            return
        progress.seconds = self._seconds_before + time.monotonic() - self._began
        record = RunRecord(
            identity=identity_of(self.run),
            settings=harmless_settings(self.run, self.mesh),
            threads=torch.get_num_threads(),
            metrics_bytes=self.records.sync(),
            num_ranks=self.mesh.world,
        )
        save_checkpoint(self.folder.checkpoints, self.state, record, self.mesh)
        if self.mesh.is_main:
            prune_checkpoints(self.folder.checkpoints, config.keep)
        self._saved, self._saved_at = now, time.monotonic()

    def weights(self) -> dict[str, Tensor]:
        """Return a copy of the present weights, averaged if the run averages them."""
        with averaged(self.state.model, self.state.ema):
            return {k: v.detach().clone() for k, v in self.state.model.state_dict().items()}

    def finish(self, result: FitResult) -> FitResult:
        """Write the weights of a finished run, put them into the model, call what ends it.

        No rank leaves before all is written: over NCCL `equalise` makes no host wait.
        """
        decisions = self.state.progress.decisions
        self.records.console.say(f"the run is over ({result.finished}), writing its weights")
        if self.mesh.is_main:
            weights, which = self.folder.final_weights(self.run, self.weights(), decisions)
            self.state.model.load_state_dict(weights)
            with explained(self.run.folder, BevatronError):
                self.run.save_model(self.run.folder, weights)
            self.records.console.say(f"weights: {which}; all is in {self.run.folder}")
        equalise(self.state.model, self.mesh)
        if self.run.before_end is not None:
            self.run.before_end(self.mesh)
        if self.mesh.is_main and self.run.on_end is not None:
            self.run.on_end(result, self.run.folder)
        barrier(self.mesh)
        return result

    def result(self, stopped_by: str | None, metrics: Mapping[str, float]) -> FitResult:
        """Sum up where the run is."""
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
