"""When the state of a run is written, and the weights that are kept from it."""

import math
import time
from collections.abc import Mapping

import torch
from torch import Tensor

from bevatron.errors import BevatronError
from bevatron.files import explained
from bevatron.parallel.data_parallel import equalise
from bevatron.parallel.mesh import Mesh
from bevatron.train.checkpoint import RunRecord, prune_checkpoints, save_checkpoint
from bevatron.train.folder import RunFolder, harmless_settings, identity_of
from bevatron.train.optim import averaged
from bevatron.train.records import Records
from bevatron.train.run import FitResult, Run
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

    def minutes_due(self) -> bool:
        """Whether rank 0's clock asks for a checkpoint."""
        minutes = self.run.settings.checkpoint.every_minutes
        waited = time.monotonic() - self._saved_at
        return self.mesh.is_main and minutes is not None and waited >= minutes * 60

    def checkpoint(self) -> None:
        """Write a checkpoint unless this state is on disk already, and prune older ones."""
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

    def best(self, metrics: Mapping[str, float]) -> None:
        """Keep the present (averaged) weights as the best ones."""
        progress = self.state.progress
        if not (self.mesh.is_main and self.run.settings.checkpoint.best):
            return
        note = {
            "epoch": progress.epoch,
            "step": progress.step,
            "value": progress.decisions.best,
            "metrics": {k: v for k, v in metrics.items() if math.isfinite(v)},
        }
        self.folder.save_best(self.run.save_model, self.weights(), note)

    def weights(self) -> dict[str, Tensor]:
        """Return a copy of the present weights, averaged if the run averages them."""
        with averaged(self.state.model, self.state.ema):
            return {k: v.detach().clone() for k, v in self.state.model.state_dict().items()}

    def finish(self, result: FitResult) -> FitResult:
        """Write the weights of a finished run, put them into the model and call ``on_end``."""
        decisions = self.state.progress.decisions
        self.records.console.say(f"the run is over ({result.finished}), writing its weights")
        if self.mesh.is_main:
            weights, which = self.folder.final_weights(self.run, self.weights(), decisions)
            self.state.model.load_state_dict(weights)
            with explained(self.run.folder, BevatronError):
                self.run.save_model(self.run.folder, weights)
            self.records.console.say(f"weights: {which}; all is in {self.run.folder}")
            if self.run.on_end is not None:
                self.run.on_end(result, self.run.folder)
        equalise(self.state.model, self.mesh)
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
