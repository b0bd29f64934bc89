"""The common part of runs on drawn proteins: configuration, precision, stages."""

import dataclasses
import os
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

import torch

from bevatron.config import from_dict, merged, to_dict
from bevatron.errors import ConfigError
from bevatron.models.common.folding.checkpointing import automatic
from bevatron.parallel import axial
from bevatron.parallel.mesh import parse_device, ranks_from_environment
from bevatron.recipes.proteins.shared_samples import fitted, gpu_memory
from bevatron.recipes.run_config import LARGE_MODEL, RunConfig, SaveModel, WriteReport
from bevatron.recipes.system import System
from bevatron.task import Task
from bevatron.train.run import Run, SamplesApart, SamplesInGroups, Sharing, Stage
from bevatron.train.settings import CheckpointConfig, ScheduleConfig, TrainConfig
from bevatron.typing import IntArray


@dataclass(frozen=True)
class ParallelConfig:
    """Division of a run's work among processes.

    Attributes
    ----------
    axial
        Consecutive processes that compute one sample together; 1 = each has samples of its own,
        ``auto`` = as few as give every process a part of the samples of a step and, on GPUs, have
        the memory, see `bevatron.recipes.proteins.shared_samples`.
    """

    axial: int | Literal["auto"] = 1

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        if self.axial != "auto" and self.axial < 1:
            raise ConfigError(f"parallel.axial: expected 1 or more, got {self.axial}")


@dataclass(frozen=True, kw_only=True)
class StagedRun(RunConfig):
    """Configuration of a run in stages; a system adds ``stages``, by name in their order."""

    start_from: Path | None = None
    stages: Any = None
    schedule: ScheduleConfig = field(
        default_factory=lambda: ScheduleConfig(
            kind="exponential", gamma=0.95, gamma_steps=50_000, warmup_steps=1000
        )
    )
    checkpoint: CheckpointConfig = field(default_factory=lambda: CheckpointConfig(every_steps=200))
    train: TrainConfig = field(default_factory=lambda: TrainConfig(dtype="float32"))
    precision: Literal["auto", "bfloat16", "float32"] = "auto"
    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    def __post_init__(self) -> None:
        """Refuse values that cannot be trained on."""
        super().__post_init__()
        if not self.stages:
            raise ConfigError("stages: expected at least one")
        if self.batch.size != 1 or self.batch.algorithm != "fixed_count":
            raise ConfigError(
                "batch: a batch of proteins is one sample (algorithm fixed_count, size 1); "
                "stages.NAME.samples_per_step is the number of samples of a step"
            )
        for name, instead in (("epochs", "steps"), ("evaluate_every", "evaluate_every")):
            if getattr(self.train, name) != getattr(TrainConfig, name):
                raise ConfigError(
                    f"train.{name}: this run has no epochs; give stages.NAME.{instead}, in steps"
                )
        if self.processes_per_sample[0] > 1 and (self.loader.window > 1 or self.loader.leave_out):
            raise ConfigError(
                "loader: processes that share a sample must load the same ones in the same order; "
                "with parallel.axial above 1 leave out loader.window and loader.leave_out"
            )

    @property
    def processes_per_sample(self) -> list[int]:
        """Possible numbers of processes per sample, ascending."""
        given = self.parallel.axial
        if given != "auto":
            return [given]
        train = ranks_from_environment(os.environ)[1] - self.train.evaluation_ranks
        fewest = min(stage.samples_per_step for stage in self.stages.values())
        # A run whose processes would all validate is refused when it is divided.
        return axial.sizes_per_sample(max(train, 1), fewest)

    @property
    def sharing(self) -> Sharing:
        """Choose the processes that share a sample, given their memory."""
        size = self.processes_per_sample[0]
        return SamplesInGroups(size) if size > 1 else SamplesApart()

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> Self:
        """Build a configuration; stages that are given replace those of the preset.

        A stage of the preset's name changes only what it gives.
        """
        given = values.get("stages")
        if not isinstance(given, Mapping):
            return super().from_values(values)
        own = super().from_values({k: v for k, v in values.items() if k != "stages"})
        known = {name: to_dict(stage) for name, stage in own.stages.items()}
        stages = merged({name: known.get(name) for name in given}, given)
        hint = typing.get_type_hints(cls)["stages"]
        only: Any = dataclasses.make_dataclass("Stages", [("stages", hint)], frozen=True)
        return dataclasses.replace(own, stages=from_dict(only, {"stages": stages}).stages)

    @property
    def activations(self) -> torch.dtype | None:
        """Type of the activations; None = that of the weights.

        Raises ConfigError if bfloat16 is asked for with weights that are not float32.
        """
        device = parse_device(self.train.device, "train.device")
        chosen = self.precision
        if chosen == "auto":
            chosen = "bfloat16" if device.type == "cuda" else "float32"
        if chosen == "bfloat16" and self.train.dtype != "float32":
            raise ConfigError(
                f"precision: bfloat16 needs train.dtype float32, not {self.train.dtype}"
            )
        return torch.bfloat16 if chosen == "bfloat16" else None


def changes_of(preset: str | None, known: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return what a preset changes, stages as plain values; ConfigError if there is no such one."""
    if preset not in known:
        raise ConfigError(f"preset: there is no '{preset}' (known: {', '.join(known)})")
    changes = dict(known[str(preset)])
    if "stages" in changes:
        changes["stages"] = {name: to_dict(stage) for name, stage in changes["stages"].items()}
    return changes


LARGEST_BATCH = 256
"""Samples of a step in the published training of AlphaFold3; above it AlphaFold2 fails to converge
(ScaleFold, section 4.2)."""


def staged_run(
    config: Any, system: System, model: torch.nn.Module, task: Task[Any], data: Any, **options: Any
) -> Run:
    """Assemble the run of a configuration from what a system has built; ``options`` are the rest.

    ``data.draws(sizes, seed)`` are the training samples of a stage.
    """
    stages, notes = [], list(data.report)
    parameters = sum(weight.numel() for weight in model.parameters())
    if parameters > LARGE_MODEL and parse_device(config.train.device, "train.device").type == "cpu":
        size = f"{parameters / 1e6:.0f} million parameters"
        notes.append(f"a model of {size} is meant for GPUs; preset small trains on a CPU")
    for name, stage in config.stages.items():
        draws = data.draws(stage.sizes, config.train.seed)
        stages.append(Stage(name, stage, draws, token_sizes(draws.lengths("tokens"))))
    report = f"bevatron.recipes.{system.name}.report"
    run = Run(
        model=model,
        task=task,
        train=stages[0].train,
        sizes=stages[0].sizes,
        valid=data.valid,
        valid_sizes=None if data.valid is None else token_sizes(data.valid.lengths("tokens")),
        folder=config.output,
        settings=config.settings,
        config={"recipe": config.recipe, **to_dict(config)},
        identity={
            "model": to_dict(config.model),
            "data": {"fingerprints": list(data.fingerprints)},
        },
        save_model=SaveModel(system.kind, config.model),
        sharing=config.sharing,
        stages=stages,
        most_samples=LARGEST_BATCH,
        notes=notes,
        on_end=WriteReport(report, model, data.report) if config.report else None,
        **options,
    )
    chooses = config.parallel.axial == "auto" or automatic(model)
    memory = gpu_memory(config.train) if chooses else None
    if memory is not None:
        run = fitted(run, config.processes_per_sample, memory)
        parallel = ParallelConfig(run.sharing.repeats)
        dataclasses.replace(config, parallel=parallel)  # refuses what forbids such groups
    return run


def token_sizes(tokens: IntArray) -> dict[str, IntArray]:
    """Return the counts that the cost of samples with these numbers of tokens depends on."""
    return {"tokens": tokens, "tokens_squared": tokens**2, "tokens_cubed": tokens**3}
