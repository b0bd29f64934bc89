"""Copies of the metrics for TensorBoard and Weights & Biases, both optional."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from bevatron.errors import require
from bevatron.train.settings import TrainConfig


class Writer(Protocol):
    """Takes the records of metrics.jsonl."""

    def write(self, record: Mapping[str, Any]) -> None:
        """Take one record."""

    def close(self) -> None:
        """Write what is still waiting."""


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
        """Write what is still waiting."""
        self._writer.close()


class WandbWriter:
    """Logs to a Weights & Biases run that is named after the folder and resumed with it."""

    def __init__(self, folder: Path, project: str, config: Mapping[str, Any]) -> None:
        wandb: Any = require("wandb", "wandb")
        name = folder.resolve().name
        self._run = wandb.init(
            project=project,
            name=name,
            id=name,
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


def make_writers(
    config: TrainConfig, folder: Path, step: int, values: Mapping[str, Any]
) -> list[Writer]:
    """Make the writers that the configuration asks for.

    Raises
    ------
    MissingPackageError
        If the package of one is not installed.
    """
    writers: list[Writer] = []
    if config.tensorboard:
        writers.append(TensorBoardWriter(folder, step))
    if config.wandb:
        writers.append(WandbWriter(folder, config.wandb_project, values))
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
