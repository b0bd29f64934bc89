"""Checkpoints: folders of safetensors and JSON that are complete or absent.

``checkpoints/step-00000123/`` holds ``model.safetensors``, ``optimizer.safetensors`` and
``ema.safetensors`` by name of parameter, ``rng-rankR.safetensors`` of every rank,
``rng-shared.safetensors`` of generators that all ranks have alike, and ``state.json``: progress,
identity of the run, number of threads, length of metrics.jsonl and a checksum of each file and of
itself. Nothing is pickled. A new checkpoint is complete on disk before an old one is removed.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from bevatron.errors import CheckpointError, DamagedError
from bevatron.files import atomic_folder, checksum, remove_folder, step
from bevatron.models.common.model_folder import misfit
from bevatron.parallel.collectives import gather_bytes
from bevatron.parallel.mesh import Mesh
from bevatron.train.identity import flatten
from bevatron.train.optim import load_optimizer_tensors, optimizer_tensors
from bevatron.train.settings import with_named_costs
from bevatron.train.state import (
    Progress,
    TrainState,
    random_state,
    restore_random_state,
    seed_everything,
)

FORMAT = 1
STATE = "state.json"
SHARED_RANDOM = "rng-shared.safetensors"
"""States of the run's own generators, which are the same on all ranks."""


@dataclass(frozen=True)
class RunRecord:
    """What a checkpoint stores about the run besides its state.

    Attributes
    ----------
    identity
        Flat settings that may not differ on resume: ``{"model.channels": 16}``.
    settings
        All other flat settings, whose changes are only reported.
    threads
        CPU threads of torch.
    metrics_bytes
        Length of metrics.jsonl.
    num_ranks
        Processes of the run.
    """

    identity: dict[str, Any]
    settings: dict[str, Any]
    threads: int
    metrics_bytes: int
    num_ranks: int


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk, its ``state.json`` read."""

    path: Path
    progress: Progress
    record: RunRecord
    ema_updates: int | None
    checksums: dict[str, str]


def save_checkpoint(folder: Path, state: TrainState, record: RunRecord, mesh: Mesh) -> Path:
    """Write a checkpoint below ``folder``; all ranks call it.

    Returns
    -------
    Path
        ``folder/step-00000123``.

    Raises
    ------
    CheckpointError
        If the disk is full or the folder cannot be written; older checkpoints stay intact.
    """
    random_states = gather_bytes(random_state(mesh.device), mesh)
    path = folder / f"step-{state.progress.step:08d}"
    if not mesh.is_main:
        return path
    files = {f"rng-rank{rank}.safetensors": data for rank, data in enumerate(random_states)}
    files["model.safetensors"] = _pack(dict(state.model.state_dict()))
    files["optimizer.safetensors"] = _pack(optimizer_tensors(state.model, state.optimizer))
    if state.ema is not None:
        files["ema.safetensors"] = _pack(state.ema.averages)
    if state.generators:
        files[SHARED_RANDOM] = _pack({n: g.get_state() for n, g in state.generators.items()})
    values = {
        "format": FORMAT,
        "progress": state.progress.to_json(),
        "ema_updates": None if state.ema is None else state.ema.updates,
        "identity": record.identity,
        "settings": record.settings,
        "threads": record.threads,
        "metrics_bytes": record.metrics_bytes,
        "num_ranks": record.num_ranks,
        "torch": str(torch.__version__),
        "files": {name: checksum(data) for name, data in sorted(files.items())},
    }
    files[STATE] = json.dumps({**values, "checksum": _checksum_of(values)}, indent=1).encode()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be made ({error.strerror})") from None
    older = list_checkpoints(folder)
    try:
        with atomic_folder(path, CheckpointError) as unfinished:
            for name, data in files.items():
                step("write", unfinished / name)
                (unfinished / name).write_bytes(data)
    except CheckpointError as error:
        intact = f" ({older[-1].name} is intact)" if older else ""
        raise CheckpointError(f"{error}{intact}") from error.__cause__
    return path


def prune_checkpoints(folder: Path, keep: int) -> None:
    """Remove all but the newest checkpoints."""
    try:
        for path in list_checkpoints(folder)[:-keep]:
            remove_folder(path)
    except OSError as error:
        raise CheckpointError(
            f"{folder}: old checkpoints cannot be removed ({error.strerror})"
        ) from None


def list_checkpoints(folder: Path) -> list[Path]:
    """List complete checkpoints, oldest first."""
    names = (path for path in folder.glob("step-*") if path.name[5:].isdigit())
    return sorted((path for path in names if path.is_dir()), key=lambda path: int(path.name[5:]))


def read_checkpoint(path: Path) -> Checkpoint:
    """Read the state of a checkpoint, not yet its tensors.

    Raises
    ------
    DamagedError
        If it is missing, incomplete or damaged.
    CheckpointError
        If it is of a newer format or may not be read.
    """
    try:
        values = json.loads((path / STATE).read_text())
        # Checkpoints of 0.1.0 have none.
        stored = values.pop("checksum", None)
        if stored is not None and stored != _checksum_of(values):
            raise DamagedError(f"{path / STATE}: damaged (its checksum does not match)")
        if values["format"] != FORMAT:
            raise CheckpointError(
                f"{path}: a checkpoint of format {values['format']}, this version of bevatron "
                f"reads format {FORMAT}"
            )
        values["settings"] = _with_named_costs(values["settings"])
        record = RunRecord(
            **{
                name: values[name]
                for name in ("identity", "settings", "threads", "metrics_bytes", "num_ranks")
            }
        )
        progress = Progress.from_json(values["progress"])
        return Checkpoint(path, progress, record, values["ema_updates"], values["files"])
    except PermissionError as error:
        raise CheckpointError(f"{path / STATE}: cannot be read ({error.strerror})") from None
    except OSError as error:
        raise DamagedError(
            f"{path}: not a checkpoint, {STATE} cannot be read ({error.strerror})"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedError(f"{path / STATE}: damaged ({error!r})") from None


def read_intact(path: Path) -> Checkpoint:
    """Read the state of a checkpoint after comparing all its files with their checksums.

    Raises
    ------
    DamagedError
        Naming the first file that is missing or damaged.
    CheckpointError
        As `read_checkpoint`.
    """
    checkpoint = read_checkpoint(path)
    for name in checkpoint.checksums:
        _read_bytes(checkpoint, name)
    return checkpoint


def load_checkpoint(checkpoint: Checkpoint, state: TrainState, seed: int, mesh: Mesh) -> None:
    """Restore model, optimiser, averages, progress and random numbers.

    A rank that the checkpoint does not know gets a new seed.

    Raises
    ------
    CheckpointError
        If a file is missing or damaged or the model is another one.
    """
    try:
        state.model.load_state_dict(_read(checkpoint, "model.safetensors"))
    except RuntimeError as error:
        raise CheckpointError(
            f"{checkpoint.path}: the weights belong to another model ({misfit(error)})"
        ) from None
    load_optimizer_tensors(state.model, state.optimizer, _read(checkpoint, "optimizer.safetensors"))
    if state.ema is not None:
        state.ema.load(_read(checkpoint, "ema.safetensors"), checkpoint.ema_updates or 0)
    state.progress = checkpoint.progress
    if SHARED_RANDOM in checkpoint.checksums:  # older ones are without
        for name, saved in _read(checkpoint, SHARED_RANDOM).items():
            if name in state.generators:
                state.generators[name].set_state(saved)
    if mesh.rank < checkpoint.record.num_ranks:
        data = _read_bytes(checkpoint, f"rng-rank{mesh.rank}.safetensors")
        restore_random_state(data, mesh.device)
    else:
        seed_everything(seed, mesh.rank, checkpoint.progress.step)


def _with_named_costs(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Convert old keys of flat settings."""
    own = {key.removeprefix("batch."): v for key, v in settings.items() if key.startswith("batch.")}
    if not any(key.startswith("cost_") for key in own):
        return dict(settings)
    rest = {key: value for key, value in settings.items() if not key.startswith("batch.")}
    return {**rest, **flatten({"batch": with_named_costs(own)})}


def _read(checkpoint: Checkpoint, name: str) -> dict[str, Tensor]:
    try:
        return load(_read_bytes(checkpoint, name))
    except SafetensorError as error:
        raise DamagedError(f"{checkpoint.path / name}: damaged ({error})") from None


def _read_bytes(checkpoint: Checkpoint, name: str) -> bytes:
    path = checkpoint.path / name
    if name not in checkpoint.checksums:
        raise CheckpointError(f"{checkpoint.path}: written without {name}, which this run needs")
    try:
        data = path.read_bytes()
    except PermissionError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
    except OSError as error:
        raise DamagedError(f"{path}: cannot be read ({error.strerror})") from None
    if checksum(data) != checkpoint.checksums[name]:
        raise DamagedError(f"{path}: damaged (its checksum does not match)")
    return data


def _pack(tensors: Mapping[str, Tensor]) -> bytes:
    return save(
        {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
    )


def _checksum_of(values: Mapping[str, Any]) -> str:
    """Hash plain values, the same before they are written as JSON and after they are read."""
    plain = json.loads(json.dumps(values))
    return checksum(json.dumps(plain, sort_keys=True).encode())
