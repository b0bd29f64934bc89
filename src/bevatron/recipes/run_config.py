"""The common part of all runs: settings, presets, model folder and report."""

import dataclasses
import importlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

from torch import Tensor

from bevatron.config import from_dict, leaves, merged, to_dict
from bevatron.errors import ConfigError
from bevatron.kernels import KernelConfig
from bevatron.models.common import model_folder
from bevatron.train.run import FitResult
from bevatron.train.settings import (
    BatchConfig,
    CheckpointConfig,
    LoaderConfig,
    OptimConfig,
    ScheduleConfig,
    Settings,
    TrainConfig,
)

LARGE_MODEL = 50_000_000
"""Parameters above which a model takes minutes to plan and trains on GPUs only."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Configuration of a training run; each system adds its own keys and changes defaults.

    Attributes
    ----------
    output : the run's folder
    preset : hyper-parameters by name, see `preset_values`
    data, model : the system's own
    optim, schedule, batch, loader, checkpoint, train : see `bevatron.train.settings`
    kernels : which implementation of an operator runs, see `bevatron.kernels`
    report : write report.html and the figures at the end
    """

    recipe: ClassVar[str]

    output: Path = Path("runs")
    preset: str | None = None
    data: Any = None
    model: Any = None
    optim: OptimConfig = field(default_factory=OptimConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    loader: LoaderConfig = field(default_factory=LoaderConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    kernels: KernelConfig = field(default_factory=KernelConfig)
    report: bool = True

    def __post_init__(self) -> None:
        """Refuse NaN and infinity, which fit within most ranges or make every comparison false."""
        for path, value in leaves(to_dict(self)):
            if isinstance(value, float) and not math.isfinite(value):
                raise ConfigError(f"{path}: expected a finite number, got {value}")

    @classmethod
    def preset_values(cls, name: str | None) -> dict[str, Any]:
        """Return what a preset changes of the defaults, as plain values.

        Raises ConfigError if there is no such preset.
        """
        if name is not None:
            raise ConfigError(f"preset: {cls.recipe} has none, got '{name}'")
        return {}

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> Self:
        """Build a configuration from plain values, over those of the preset, over the defaults.

        Raises ConfigError for an unknown key, preset or value.
        """
        name = values.get("preset")
        if name is None:
            name = cls.__dataclass_fields__["preset"].default
        preset = cls.preset_values(None if name is None else str(name))
        return from_dict(cls, merged(merged(cls._own_defaults(), preset), values))

    @classmethod
    def _own_defaults(cls) -> dict[str, Any]:
        """Return the groups of keys for which this system has its own defaults."""
        groups: dict[str, Any] = {}
        for each in dataclasses.fields(cls):
            if each.default_factory is not dataclasses.MISSING:
                group = each.default_factory()
                kind: Any = type(group)
                if dataclasses.is_dataclass(group) and group != kind():
                    groups[each.name] = to_dict(group)
        return groups

    @property
    def settings(self) -> Settings:
        """The trainer's settings."""
        return Settings(
            optim=self.optim,
            schedule=self.schedule,
            batch=self.batch,
            loader=self.loader,
            checkpoint=self.checkpoint,
            train=self.train,
        )


class SaveModel:
    """Writes the weights of a run as a model folder.

    Parameters
    ----------
    kind : kind of the model, see `bevatron.recipes.system.System.kind`
    config : the model's configuration
    """

    def __init__(self, kind: str, config: Any) -> None:
        self.kind, self.config = kind, config

    def __call__(self, folder: Path, state: Mapping[str, Tensor]) -> None:
        """Write a state dict."""
        model_folder.save_model(folder, self.kind, to_dict(self.config), state)


class WriteReport:
    """Writes a system's report at the end of a run; plotting is imported only then.

    A report that fails does not fail the run, whose model and metrics are on disk by then.

    Parameters
    ----------
    module : module whose ``report_of_run(folder, *values, result)`` is called
    *values : what the report is made from
    """

    def __init__(self, module: str, *values: Any) -> None:
        self.module, self.values = module, values

    def __call__(self, result: FitResult, folder: Path) -> str | None:
        """Write the report; return a warning where that failed."""
        try:
            importlib.import_module(self.module).report_of_run(folder, *self.values, result)
        except Exception as error:  # noqa: BLE001  whatever it is, the run is over and saved
            path = folder / "report.html"
            cause = " ".join(f"{type(error).__name__}: {error}".split())
            older = ", the report there is older" if path.exists() else ""
            return f"warning: {path} could not be written ({cause}); the model is saved{older}"
        return None
