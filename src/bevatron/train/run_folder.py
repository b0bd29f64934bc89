"""The folder of a run: what may be written where, and whether there is something to go on from."""

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from bevatron.config import dump_yaml, to_dict
from bevatron.errors import CheckpointError, ConfigError
from bevatron.files import (
    ASIDE,
    atomic_folder,
    explained,
    recover_folder,
    remove_folder,
    remove_leftovers,
    write_json_atomically,
    write_text_atomically,
)
from bevatron.parallel.collectives import broadcast_json
from bevatron.parallel.mesh import Mesh
from bevatron.train.checkpoint import (
    Checkpoint,
    RunRecord,
    check_identity,
    differences,
    flatten,
    list_checkpoints,
    read_checkpoint,
)
from bevatron.train.run import WEIGHTS, Run, SaveModel
from bevatron.train.schedule import Decisions
from bevatron.train.settings import HARMLESS, Settings

if sys.platform != "win32":
    import fcntl

BEST_NOTE = "best.json"
IDLE_KEYS = ("loader.", "checkpoint.", "train.log_every", "train.tensorboard", "train.wandb")
"""Settings whose change cannot alter a number."""


class RunFolder:
    """Paths of a run's files.

    Parameters
    ----------
    path
        The folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.best = path / "best"
        self.metrics = path / "metrics.jsonl"
        self.log = path / "log.txt"
        self.config = path / "config.yaml"

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Keep others from training into the folder meanwhile; however the process ends, that ends.

        Where the file system knows no locks of folders nothing is kept from anybody.

        Raises
        ------
        ConfigError
            If somebody is training there, or the folder cannot be made.
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
        """Make the folder ready and return the checkpoint to go on from, None to begin.

        Raises
        ------
        ConfigError
            If the folder holds a run and ``run.resume`` is off, or cannot be written.
        CheckpointError
            If the checkpoint is missing, damaged or of another run.
        """
        chosen = None
        if mesh.is_main:
            path = self._choose(run)
            chosen = None if path is None else str(path)
        chosen = broadcast_json(chosen, mesh)
        if chosen is None:
            return None
        checkpoint = read_checkpoint(Path(chosen))
        check_identity(checkpoint, identity_of(run))
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
            return path
        if not run.resume:
            if there or _has_lines(self.metrics) or self.best.exists():
                raise ConfigError(
                    f"{self.path}: holds a run already; resume it or choose another folder"
                )
            return None
        return there[-1] if there else None

    def settle(self, checkpoint: Checkpoint, decisions: Decisions, mesh: Mesh) -> None:
        """Remove what is newer than the checkpoint that the run goes on from.

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
            write_json_atomically(folder / BEST_NOTE, note, CheckpointError)

    def best_weights(self, decisions: Decisions) -> dict[str, Tensor] | None:
        """Read the best weights; None if those on disk are not the ones that are remembered."""
        try:
            note = json.loads((self.best / BEST_NOTE).read_text())
            if note["step"] == decisions.best_step and note["value"] == decisions.best:
                return load_file(self.best / WEIGHTS)
        except (OSError, ValueError, KeyError, SafetensorError):
            return None
        return None

    def final_weights(
        self, run: Run, last: dict[str, Tensor], decisions: Decisions
    ) -> tuple[dict[str, Tensor], str]:
        """Choose the weights of a finished run and say which they are."""
        wants_best = run.settings.checkpoint.final == "best" and run.settings.checkpoint.best
        if not wants_best or decisions.best is None:
            return last, "the last"
        best = self.best_weights(decisions)
        if best is None:
            return last, "the last (the best ones are not in the folder any more)"
        return best, f"the best, of epoch {decisions.best_epoch + 1}"


def _has_lines(path: Path) -> bool:
    """Whether a run has written anything; one that was refused at its start has not."""
    return path.exists() and path.stat().st_size > 0


def identity_of(run: Run) -> dict[str, Any]:
    """Return the flat settings that may not differ on resume."""
    return flatten({**run.identity, **_own(run.settings, harmless=False)})


def harmless_settings(run: Run, mesh: Mesh) -> dict[str, Any]:
    """Return the flat settings that may differ on resume and are then reported."""
    own = flatten(_own(run.settings, harmless=True))
    identity = identity_of(run)
    rest = {k: v for k, v in flatten(run.config).items() if k not in identity and k not in own}
    return {"ranks": mesh.world, **own, **rest}


def _own(settings: Settings, *, harmless: bool) -> dict[str, Any]:
    flat = flatten(to_dict(settings))
    return {
        key: value
        for key, value in flat.items()
        if (key in HARMLESS or key.split(".")[0] in HARMLESS) == harmless
    }


def changes_since(record: RunRecord, run: Run, mesh: Mesh) -> list[tuple[str, str, str]]:
    """List (key, before, now) of settings that another start of the run has changed."""
    return differences(record.settings, harmless_settings(run, mesh))


def matters(key: str) -> bool:
    """Whether a changed setting can alter the numbers of the run."""
    return not key.startswith(IDLE_KEYS)
