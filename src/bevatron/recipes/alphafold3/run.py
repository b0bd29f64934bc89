"""The recipe ``alphafold3``: structures of complexes, trained on crops that are drawn."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch

from bevatron.config import to_dict
from bevatron.data.proteins.crop import CropSizes
from bevatron.data.proteins.sample import SampleSizes
from bevatron.errors import ConfigError
from bevatron.kernels import use
from bevatron.models.alphafold3.config import AlphaFold3Config
from bevatron.models.alphafold3.losses import STAGES, LossWeights
from bevatron.models.alphafold3.model import AlphaFold3
from bevatron.models.alphafold3.task import AlphaFold3Task, StepOptions
from bevatron.models.common.hyper_parameters import check_ranges
from bevatron.recipes.alphafold3 import SYSTEM
from bevatron.recipes.alphafold3.data import ComplexDataConfig, load_complexes, sizes_for_validation
from bevatron.recipes.alphafold3.start import started_from
from bevatron.recipes.alphafold3.stores import prepared
from bevatron.recipes.proteins.staged_run import StagedRun, changes_of, staged_run
from bevatron.train.run import Run
from bevatron.train.settings import BatchConfig, OptimConfig, StageConfig

LARGEST_RESIDUE = 24
"""Heavy atoms of guanosine monophosphate; a crop of fewer atoms might hold no residue at all."""


@dataclass(frozen=True)
class ComplexStage(StageConfig):
    """A stage: its length, its crops and its loss.

    Attributes
    ----------
    crop : maximum number of tokens of a crop
    atoms : maximum number of atoms of a crop
    rows : maximum number of MSA rows
    step : noisy copies, confidences and weights of the loss
    """

    crop: int = 384
    atoms: int = 9216
    rows: int = 1024
    step: StepOptions = field(default_factory=StepOptions)

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = (("crop", 1), ("atoms", LARGEST_RESIDUE), ("rows", 1))
        check_ranges(self, [(name, least, math.inf) for name, least in sizes])

    @property
    def sizes(self) -> SampleSizes:
        """Maximum sizes of a sample."""
        return SampleSizes(CropSizes(tokens=self.crop, atoms=self.atoms), self.rows)


def published_stages() -> dict[str, ComplexStage]:
    """Return the four stages of AlphaFold3: table 6 of its supplement, lengths as Protenix's."""
    crops, copies = (384, 640, 768, 768), (48, 32, 32, 32)
    steps = (75_000, 15_000, 5_000, 4_000)
    return {
        name: ComplexStage(
            steps=length, samples_per_step=256, crop=crop, atoms=24 * crop,
            step=StepOptions(copies=number, loss=weights),
        )
        for (name, weights), crop, number, length in zip(
            STAGES.items(), crops, copies, steps, strict=True
        )
    }  # fmt: skip


COST = {"constant": 30.0, "tokens": 0.97, "tokens_cubed": 3.4e-6}
"""Milliseconds of a sample: fitted to steps of 128 to 768 tokens on an H200."""

MEGAFOLD_STAGES = {
    "initial": ComplexStage(
        steps=20_000, samples_per_step=1, evaluate_every=1000, atoms=7_000, rows=16_384,
        step=StepOptions(confidence_every=10, loss=LossWeights(pae=1.0)),
    )
}  # fmt: skip
"""Of MegaFold's configuration for one GPU."""

SMALL_STAGES = {
    "initial": ComplexStage(
        steps=1_000, samples_per_step=1, evaluate_every=100, crop=64, atoms=1024, rows=32,
        step=StepOptions(copies=8, confidence_every=4),
    )
}  # fmt: skip
"""For a CPU."""

CHANGES: Mapping[str, Mapping[str, Any]] = {
    "alphafold3": {},
    "megafold": {"stages": MEGAFOLD_STAGES, "optim": {"lr": 1e-4}},
    "small": {
        "stages": SMALL_STAGES,
        "optim": {"lr": 1e-3, "ema": 0.99},
        "schedule": {"warmup_steps": 100},
    },
}
"""Settings that each preset changes."""


@dataclass(frozen=True, kw_only=True)
class AlphaFold3Run(StagedRun):
    """Configuration of a training run of AlphaFold3.

    Attributes
    ----------
    output : the run's folder
    preset
        alphafold3 (368 million parameters, the four published stages), megafold (trunk, confidence
        head, crops and rate of MegaFold's training, not its diffusion) or small (for a CPU).
        `model` and `stages` change it.
    data : stores or folders, and which complexes are held out
    model : sizes of the model
    start_from : weights to start from: a run, a model folder or a checkpoint of Protenix
    stages : stages by name, in their order
    precision
        ``auto``: activations in bfloat16 on a GPU (weights, coordinates, losses and confidences
        stay float32), in float32 elsewhere; or ``bfloat16`` or ``float32`` anywhere.
    validation_steps : diffusion steps in validation
    parallel : ``axial``: how many consecutive processes compute each sample together, or ``auto``
    optim, schedule, batch, loader, checkpoint, train, kernels
        See `bevatron.recipes.run_config.RunConfig`. A batch is one sample; ``samples_per_step`` of
        a stage is what others call the batch size.
    """

    recipe: ClassVar[str] = SYSTEM.name

    output: Path = Path("runs/alphafold3")
    preset: str = "alphafold3"
    data: ComplexDataConfig = field(default_factory=ComplexDataConfig)
    model: AlphaFold3Config = field(default_factory=AlphaFold3Config)
    stages: dict[str, ComplexStage] = field(default_factory=published_stages)
    optim: OptimConfig = field(
        default_factory=lambda: OptimConfig(
            algorithm="adam", lr=1.8e-3, weight_decay=0.0, betas=(0.9, 0.95), clip=10.0, ema=0.999
        )
    )
    batch: BatchConfig = field(
        default_factory=lambda: BatchConfig(algorithm="fixed_count", size=1, cost=dict(COST))
    )
    validation_steps: int = 20

    def __post_init__(self) -> None:
        """Refuse values that cannot be trained on."""
        super().__post_init__()
        check_ranges(self, [("validation_steps", 1, math.inf)])
        for name, stage in self.stages.items():
            size = self.processes_per_sample[0]
            if stage.step.copies < size:
                raise ConfigError(
                    f"stages.{name}.step.copies: {stage.step.copies} noisy copies cannot be "
                    f"divided among parallel.axial {size} processes; raise it to "
                    "that or lower parallel.axial"
                )

    @classmethod
    def preset_values(cls, name: str | None) -> dict[str, Any]:
        """Return the sizes of a preset and what else it changes."""
        changes = changes_of(name, CHANGES)
        return {"model": to_dict(AlphaFold3Config.preset(str(name))), **changes}


def build(config: AlphaFold3Run, *, resume: bool = False) -> Run:
    """Build a complete run: stores opened or prepared, model, task, stages.

    Raises BevatronError for data that must not be trained on and settings that contradict each
    other.
    """
    use(config.kernels)
    first = next(iter(config.stages.values()))
    given = dataclasses.replace(
        config.data,
        train=prepared(config.data.train, config.output / "prepared", config.data.components),
        valid=prepared(config.data.valid, config.output / "valid", config.data.components),
    )
    data = load_complexes(given, sizes_for_validation(first.sizes))
    torch.manual_seed(config.train.seed)
    if config.start_from is None or resume:
        model = AlphaFold3(config.model)
    else:
        model = started_from(config.start_from, config.model)
    options = [stage.step for stage in config.stages.values()]
    return staged_run(
        config,
        SYSTEM,
        model,
        AlphaFold3Task(config.model.cycles, options, config.activations, config.validation_steps),
        data,
        monitor="-lddt",
        shown_metrics=["lddt", "lddt_interface", "distogram", "plddt"],
        resume=resume,
    )
