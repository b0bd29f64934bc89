"""Checkpoints: folders of safetensors and JSON that are complete or absent.

``checkpoints/step-00000123/`` holds ``model.safetensors``, ``optimizer.safetensors`` and
``ema.safetensors`` by name of parameter, ``rng-rankR.safetensors`` of every rank,
``rng-shared.safetensors`` of generators that all ranks have alike, and ``state.json``: progress,
identity of the run, number of threads, length of metrics.jsonl and a checksum of each file and of
itself. Nothing is pickled. A new checkpoint is complete on disk before an old one is removed.
"""

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from bevatron.config import RENAMED
from bevatron.errors import CheckpointError, DamagedError
from bevatron.files import atomic_folder, checksum, explained, remove_folder, step, write_all
from bevatron.models.common.model_folder import misfit
from bevatron.parallel.mesh import Mesh
from bevatron.train.identity import flatten
from bevatron.train.optim import load_optimizer_tensors
from bevatron.train.settings import with_named_costs
from bevatron.train.snapshot import PENDING, SHARED_RANDOM, Snapshot
from bevatron.train.state import Progress, TrainState, restore_random_state, seed_everything

FORMAT = 1
STATE = "state.json"

PIECE_BYTES = 2**24
"""Largest piece that is written at once."""


@dataclass(frozen=True)
class RunRecord:
    """Description of the run that a checkpoint stores with the state.

    Attributes
    ----------
    identity : flat settings that may not differ on resume: ``{"model.channels": 16}``
    settings : all other flat settings, whose changes are only reported
    threads : CPU threads of torch
    metrics_bytes : length of metrics.jsonl
    num_ranks : processes of the run
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


def write_checkpoint(folder: Path, snapshot: Snapshot, record: RunRecord) -> Path:
    """Write a checkpoint below ``folder``; it gets its name once it is complete on disk.

    Raises CheckpointError if the disk is full or the folder cannot be written; older checkpoints
    stay intact.

    Returns
    -------
    Path
        ``folder/step-00000123``.
    """
    path = folder / f"step-{snapshot.step:08d}"
    with explained(folder, CheckpointError):
        folder.mkdir(parents=True, exist_ok=True)
    older = list_checkpoints(folder)
    try:
        with atomic_folder(path, CheckpointError) as unfinished:
            checksums = {
                name: _write(unfinished / name, parts) for name, parts in snapshot.files.items()
            }
            values = {
                "format": FORMAT,
                **snapshot.values,
                "identity": record.identity,
                "settings": record.settings,
                "threads": record.threads,
                "metrics_bytes": record.metrics_bytes,
                "num_ranks": record.num_ranks,
                "torch": str(torch.__version__),
                "files": dict(sorted(checksums.items())),
            }
            text = json.dumps({**values, "checksum": _checksum_of(values)}, indent=1)
            _write(unfinished / STATE, (memoryview(text.encode()),))
    except CheckpointError as error:
        intact = f" ({older[-1].name} is intact)" if older else ""
        raise CheckpointError(f"{error}{intact}") from error.__cause__
    return path


def _write(path: Path, parts: Sequence[memoryview]) -> str:
    """Write a file piece by piece, so that no other thread waits long; return its checksum.

    A thread adds it up beside the writing: it would be a seventh of the time on a fast disk.
    """
    digest = xxhash.xxh3_64()
    with ThreadPoolExecutor(1) as beside, path.open("xb", buffering=0) as file:
        for part in parts:
            for begin in range(0, len(part), PIECE_BYTES):
                piece = part[begin : begin + PIECE_BYTES]
                step("write", path)
                added = beside.submit(digest.update, piece)
                write_all(file, piece)
                added.result()
    return digest.hexdigest()


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

    Raises DamagedError if it is missing, incomplete or damaged; CheckpointError if it is of a newer
    format or may not be read.
    """
    try:
        values = json.loads((path / STATE).read_text(encoding="utf-8"))
        # Checkpoints of 0.1.0 have none.
        stored = values.pop("checksum", None)
        if stored is not None and stored != _checksum_of(values):
            raise DamagedError(f"{path / STATE}: damaged (its checksum does not match)")
        if values["format"] != FORMAT:
            raise CheckpointError(
                f"{path}: a checkpoint of format {values['format']}, this version of bevatron "
                f"reads format {FORMAT}"
            )
        values["settings"] = _with_todays_keys(values["settings"])
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

    Raises DamagedError naming the first file that is missing or damaged; CheckpointError as
    `read_checkpoint`.
    """
    checkpoint = read_checkpoint(path)
    for name in checkpoint.checksums:
        _read_bytes(checkpoint, name)
    return checkpoint


def load_checkpoint(checkpoint: Checkpoint, state: TrainState, seed: int, mesh: Mesh) -> None:
    """Restore model, optimiser, averages, progress and random numbers.

    A rank that the checkpoint does not know gets a new seed. Raises CheckpointError if a file is
    missing or damaged or the model is another one.
    """
    try:
        state.model.load_state_dict(read_tensors(checkpoint, "model.safetensors"))
    except RuntimeError as error:
        raise CheckpointError(
            f"{checkpoint.path}: the weights belong to another model ({misfit(error)})"
        ) from None
    load_optimizer_tensors(
        state.model, state.optimizer, read_tensors(checkpoint, "optimizer.safetensors")
    )
    if state.ema is not None:
        state.ema.load(read_tensors(checkpoint, "ema.safetensors"), checkpoint.ema_updates or 0)
    state.progress = checkpoint.progress
    if state.progress.pending is not None:
        state.pending = read_tensors(checkpoint, PENDING)
    if SHARED_RANDOM in checkpoint.checksums:  # older ones are without
        for name, saved in read_tensors(checkpoint, SHARED_RANDOM).items():
            if name in state.generators:
                state.generators[name].set_state(saved)
    if mesh.rank < checkpoint.record.num_ranks:
        data = _read_bytes(checkpoint, f"rng-rank{mesh.rank}.safetensors")
        restore_random_state(data, mesh.device)
    else:
        seed_everything(seed, mesh.rank, checkpoint.progress.step)


def _with_todays_keys(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Convert old keys of flat settings."""
    settings = {
        f"{group}{dot}{RENAMED.get(key, key)}": value
        for (group, dot, key), value in ((path.rpartition("."), v) for path, v in settings.items())
    }
    own = {key.removeprefix("batch."): v for key, v in settings.items() if key.startswith("batch.")}
    if not any(key.startswith("cost_") for key in own):
        return settings
    rest = {key: value for key, value in settings.items() if not key.startswith("batch.")}
    return {**rest, **flatten({"batch": with_named_costs(own)})}


def read_tensors(checkpoint: Checkpoint, name: str) -> dict[str, Tensor]:
    """Read the tensors of one of its files; DamagedError if it is missing or damaged."""
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


def _checksum_of(values: Mapping[str, Any]) -> str:
    """Hash plain values, the same before they are written as JSON and after they are read."""
    plain = json.loads(json.dumps(values))
    return checksum(json.dumps(plain, sort_keys=True).encode())
