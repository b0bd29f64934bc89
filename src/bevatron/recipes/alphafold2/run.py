"""The recipe ``alphafold2``: structures of protein chains, trained on crops that are drawn."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch

from bevatron.config import to_dict
from bevatron.data.proteins.chain_samples import ChainSizes
from bevatron.kernels import use
from bevatron.models.alphafold2.config import FINE_TUNING_SIZES, AlphaFold2Config
from bevatron.models.alphafold2.losses import FINE_TUNING_WEIGHTS, LossWeights
from bevatron.models.alphafold2.model import AlphaFold2
from bevatron.models.alphafold2.task import CYCLES, AlphaFold2Task
from bevatron.models.common.hyper_parameters import check_ranges
from bevatron.recipes.alphafold2 import SYSTEM
from bevatron.recipes.alphafold2.data import ChainDataConfig, load_chains
from bevatron.recipes.alphafold2.start import Started, started_from
from bevatron.recipes.alphafold2.stores import prepared
from bevatron.recipes.proteins.staged_run import StagedRun, changes_of, staged_run
from bevatron.train.run import Run
from bevatron.train.settings import BatchConfig, OptimConfig, ScheduleConfig, StageConfig


@dataclass(frozen=True)
class ChainStage(StageConfig):
    """A stage: its length, its crops and its loss.

    Attributes
    ----------
    crop : maximum number of residues of a crop
    rows : maximum number of MSA cluster centres
    extra_rows : maximum number of extra MSA rows
    clamped
        Share of the samples whose frame-aligned errors above 10 Å do not count; of few samples,
        those of others bring distant parts together.
    deleted_blocks
        Blocks, each of 30 % of the rows, that are deleted from the alignment of a sample; 5 as
        published, none in ScaleFold and MLPerf HPC.
    loss : weights of the terms
    """

    crop: int = 256
    rows: int = 124
    extra_rows: int = 1024
    clamped: float = 0.9
    deleted_blocks: int = 0
    loss: LossWeights = field(default_factory=LossWeights)

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = [(name, 1, math.inf) for name in ("crop", "rows", "extra_rows")]
        check_ranges(self, [*sizes, ("clamped", 0, 1), ("deleted_blocks", 0, 100)])

    @property
    def sizes(self) -> ChainSizes:
        """Maximum sizes of a sample."""
        return ChainSizes(
            self.crop,
            self.rows,
            self.extra_rows,
            clamped=self.clamped,
            deleted_blocks=self.deleted_blocks,
        )


def published_stages(tm: float = 0.0) -> dict[str, ChainStage]:
    """Return initial training and fine-tuning: table 4 of the supplement, 128 samples a step.

    Parameters
    ----------
    tm : weight of the aligned error in fine-tuning
    """
    sizes = FINE_TUNING_SIZES
    return {
        "initial": ChainStage(steps=78_125, samples_per_step=128, deleted_blocks=5),
        "fine-tuning": ChainStage(
            steps=11_719, samples_per_step=128, lr=5e-4, schedule=ScheduleConfig(kind="constant"),
            crop=sizes.residues, rows=sizes.msa_rows, extra_rows=sizes.extra_rows,
            deleted_blocks=5,
            loss=dataclasses.replace(FINE_TUNING_WEIGHTS, tm=tm),
        ),
    }  # fmt: skip


SCALEFOLD_STAGES = {
    "128": ChainStage(steps=5_000, samples_per_step=128, evaluate_every=500, target=0.8),
    "256": ChainStage(
        steps=55_000, samples_per_step=256, evaluate_every=500, target=0.9, ends_at_target=True
    ),
}
"""Settings of ScaleFold's training from scratch."""

MLPERF_STAGES = {
    "initial": ChainStage(
        steps=2_000, samples_per_step=256, evaluate_every=40, target=0.8, ends_at_target=True
    )
}
"""Settings of MLPerf HPC, which starts from a checkpoint."""

SMALL_STAGES = {
    "initial": ChainStage(
        steps=2_000, samples_per_step=4, evaluate_every=200, crop=64, rows=16, extra_rows=32
    )
}
"""For a CPU."""

CHANGES: Mapping[str, Mapping[str, Any]] = {
    "alphafold2": {},
    "alphafold2-ptm": {"stages": published_stages(tm=0.1)},
    "scalefold": {"stages": SCALEFOLD_STAGES, "optim": {"eps": 1e-5}},
    "mlperf": {
        "stages": MLPERF_STAGES,
        "optim": {"ema": 0.9},
        "schedule": {"kind": "constant", "warmup_steps": 0},
    },
    "small": {
        "stages": SMALL_STAGES,
        "optim": {"clip": 10.0, "ema": 0.99},
        "schedule": {"warmup_steps": 100},
    },
}
"""Settings that each preset changes."""

MODELS = {"scalefold": "alphafold2", "mlperf": "alphafold2"}
"""Presets of models of the presets of runs, where the names differ."""


@dataclass(frozen=True, kw_only=True)
class AlphaFold2Run(StagedRun):
    """Configuration of a training run of AlphaFold2.

    Attributes
    ----------
    output : the run's folder
    preset
        alphafold2 (93 million parameters, initial training and fine-tuning as published),
        alphafold2-ptm (with a head for the aligned error), scalefold (from nothing, 128 samples a
        step, from step 5,000 on 256 if the lDDT has reached 0.8), mlperf (from a checkpoint to an
        lDDT of 0.8) or small (for a CPU). `model` and `stages` change it.
    data : stores or folders, and which chains are held out
    model : sizes of the model
    start_from
        Weights to start from: a run, a model folder, a file of OpenFold, MLPerf HPC (its resumable
        checkpoint with Adam's moments) or DeepMind.
    stages : stages by name, in their order
    precision
        ``auto``: alignment and pair in bfloat16 on a GPU (weights, structure module, heads and
        losses stay float32), in float32 elsewhere; or ``bfloat16`` or ``float32`` anywhere.
    parallel : ``axial``: how many consecutive processes compute each sample together, or ``auto``
    optim, schedule, batch, loader, checkpoint, train, kernels
        See `bevatron.recipes.run_config.RunConfig`. A batch is one sample; ``samples_per_step`` of
        a stage is what others call the batch size.
    """

    recipe: ClassVar[str] = SYSTEM.name

    output: Path = Path("runs/alphafold2")
    preset: str = "alphafold2"
    data: ChainDataConfig = field(default_factory=ChainDataConfig)
    model: AlphaFold2Config = field(default_factory=AlphaFold2Config)
    stages: dict[str, ChainStage] = field(default_factory=published_stages)
    optim: OptimConfig = field(
        default_factory=lambda: OptimConfig(
            algorithm="adam", lr=1e-3, weight_decay=0.0, eps=1e-6, clip=0.1, ema=0.999
        )
    )
    batch: BatchConfig = field(
        default_factory=lambda: BatchConfig(
            algorithm="fixed_count", size=1, cost={"tokens": 1.0, "tokens_squared": 0.01}
        )
    )

    @classmethod
    def preset_values(cls, name: str | None) -> dict[str, Any]:
        """Return the sizes of a preset and what else it changes."""
        changes = changes_of(name, CHANGES)
        model = AlphaFold2Config.preset(MODELS.get(str(name), str(name)))
        return {"model": to_dict(model), **changes}


def build(config: AlphaFold2Run, *, resume: bool = False) -> Run:
    """Build a complete run: stores opened or prepared, model, task, stages.

    Raises BevatronError for data that must not be trained on and settings that contradict each
    other.
    """
    use(config.kernels)
    first = next(iter(config.stages.values()))
    given = dataclasses.replace(
        config.data,
        train=prepared(config.data.train, config.output / "prepared"),
        valid=prepared(config.data.valid, config.output / "valid"),
    )
    data = load_chains(given, first.sizes, CYCLES)
    torch.manual_seed(config.train.seed)
    if config.start_from is None or resume:
        started = Started(AlphaFold2(config.model), {})
    else:
        started = started_from(config.start_from, config.model)
    losses = [stage.loss for stage in config.stages.values()]
    return staged_run(
        config,
        SYSTEM,
        started.model,
        AlphaFold2Task(CYCLES, losses, config.activations),
        data,
        optimizer_tensors=started.optimizer_tensors,
        monitor="-lddt_ca",
        shown_metrics=["loss", "lddt_ca", "plddt", "distogram"],
        resume=resume,
    )
