"""The recipe ``mace``: an interatomic potential from files of structures, new or fine-tuned."""

import copy
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch

from bevatron.config import to_dict
from bevatron.data.dataset import Dataset, Subset
from bevatron.errors import ConfigError
from bevatron.kernels import current, use
from bevatron.models.mace import (
    MACE,
    AtomicEnergies,
    LossConfig,
    MaceConfig,
    MaceTask,
    StageTwo,
    Statistics,
    statistics,
)
from bevatron.parallel.mesh import parse_device
from bevatron.recipes.frozen import freeze
from bevatron.recipes.mace import SYSTEM
from bevatron.recipes.mace.capacity import ON_CPU, capacity_of_run
from bevatron.recipes.mace.data import DataConfig, StructureData, batch_sizes, load_structures
from bevatron.recipes.mace.finetune import FinetuneConfig, FineTuning, transfer_table
from bevatron.recipes.mace.loss_stages import (
    check_labels,
    loss_identity,
    monitors,
    named_weights,
    stage_two_notes,
)
from bevatron.recipes.mace.potential import trained_model
from bevatron.recipes.mace.splits import check_elements
from bevatron.recipes.mace.step_cost import StepMeter
from bevatron.recipes.run_config import RunConfig, SaveModel, WriteReport
from bevatron.train.precision import dtype_of
from bevatron.train.run import Run
from bevatron.train.settings import BatchConfig, Settings

SHOWN_METRICS = ("energy_per_atom_rmse", "forces_rmse", "stress_rmse")
"""Metrics that the console shows after an epoch, in eV and eV/Å."""

FROM_DATA = (
    *("atomic_numbers", "heads", "default_head", "atomic_energies"),
    *("avg_num_neighbors", "scale", "shift"),
)
"""Hyper-parameters that come from the data unless the configuration gives them."""

REPORT = "bevatron.recipes.mace.report"

SUSPECT_FORCE = 10.0
"""eV/Å; a larger RMS gives a warning. Forces in kcal/mol/Å are 23 times as large."""


@dataclass(frozen=True, kw_only=True)
class MaceRun(RunConfig):
    """Configuration of a training run of MACE.

    Attributes
    ----------
    output : the run's folder
    preset
        Hyper-parameters by name, which `model` changes: default (those of mace-torch's command
        line), small, paper, mp-0-small, mp-0-medium, mp-0-large, mp-0b2-*.
    data : files, labels, E0
    model : hyper-parameters
    optim, schedule, batch, loader, checkpoint, train, kernels, report
        See `bevatron.recipes.run_config.RunConfig`.
    scaling
        Scale and shift of the interaction energy: ``rms_forces`` (scale = RMS of the forces, shift
        = mean energy per atom without E0), ``rms_forces_only`` (shift 0: an atom alone has E0) or
        ``none`` (1 and 0).
    loss : the loss and its weights
    start_from
        A run or a model folder whose weights this run starts from, or the name of one in
        $BEVATRON_MODELS (~/.cache/bevatron without it), such as mace-mp-0-small; see `finetune`.
    finetune : what is kept of `start_from`
    """

    recipe: ClassVar[str] = SYSTEM.name

    output: Path = Path("runs/mace")
    preset: str = "default"
    data: DataConfig = field(default_factory=DataConfig)
    model: MaceConfig = field(default_factory=MaceConfig)
    scaling: Literal["rms_forces", "rms_forces_only", "none"] = "rms_forces_only"
    batch: BatchConfig = field(default_factory=lambda: BatchConfig(capacity="auto"))
    loss: LossConfig = field(default_factory=LossConfig)
    start_from: Path | None = None
    finetune: FinetuneConfig = field(default_factory=FinetuneConfig)

    def __post_init__(self) -> None:
        """Refuse contradictory settings."""
        super().__post_init__()
        two, schedule = self.loss.stage_two_start, self.schedule.stage_two_start
        if two is not None and schedule is not None and two != schedule:
            raise ConfigError(
                f"loss.stage_two.start_epoch is {two} but schedule.stage_two_start is {schedule}: "
                "both say when the second stage begins; leave one of them out"
            )
        if self.train.compile:
            raise ConfigError(
                "train.compile: forces are gradients, and torch.compile does not differentiate "
                "its own gradients again; leave it out"
            )

    @classmethod
    def preset_values(cls, name: str | None) -> dict[str, Any]:
        """Return the hyper-parameters of a preset."""
        return {"model": to_dict(MaceConfig.preset(str(name)))}

    @property
    def settings(self) -> Settings:
        """The trainer's settings; stage two begins with that of the loss."""
        schedule = dataclasses.replace(self.schedule, stage_two_start=self._stage_two_start)
        return dataclasses.replace(super().settings, schedule=schedule)

    @property
    def staged_loss(self) -> LossConfig:
        """The loss; its second stage begins when that of the schedule does."""
        two = self.loss.stage_two or StageTwo()
        two = dataclasses.replace(two, start_epoch=self._stage_two_start)
        return dataclasses.replace(self.loss, stage_two=two)

    @property
    def _stage_two_start(self) -> int | None:
        two = self.loss.stage_two_start
        return self.schedule.stage_two_start if two is None else two


def build(config: MaceRun, *, resume: bool = False) -> Run:
    """Build a complete run: data read or prepared, statistics, model, task.

    Raises BevatronError for data that must not be trained on and settings that contradict each
    other.
    """
    use(config.kernels)
    source = None if config.start_from is None else trained_model(config.start_from)
    data = _load(config, source)
    check_labels(config.staged_loss, data.train)
    if source is None:
        model, found, notes = _new_model(config, data)
    else:
        model, found, notes = _finetuned_model(config, data, source)
    notes = [*data.report, *notes, *_suspect_forces(data.train, found)]
    for part, what in ((data.valid, "validation"), (data.test, "test")):
        if part is not None:
            check_elements(part, model.config.atomic_numbers, what)
    model = model.to(dtype_of(config.train.dtype))
    freeze(model, config.finetune.frozen)
    data = dataclasses.replace(data, train=_without_isolated(data.train, found))
    task = MaceTask(config.staged_loss, model.config.heads)
    config, chosen = _with_capacity(config, model, task, data.train)
    notes += [*chosen, *stage_two_notes(config.staged_loss, config.settings)]
    notes += [*_slow_here(config), _in_short(model, data)]
    return _run(config, data, model, task, notes, resume)


def _slow_here(config: MaceRun) -> list[str]:
    """Name the preset for a CPU where the default one would train for days."""
    on_gpu = parse_device(config.train.device, "train.device").type == "cuda"
    if on_gpu or config.start_from is not None or config.model != MaceConfig():
        return []
    return ["preset default is slow on a CPU; preset small trains ten times as fast"]


def _load(config: MaceRun, source: MACE | None) -> StructureData:
    if source is not None:
        _check_architecture(config, source.config)
    cutoff = config.model.r_max if source is None else source.config.r_max
    kept = source.config.heads if source is not None and config.finetune.keep_heads else ()
    prepared = config.output / "prepared"
    return load_structures(config.data, cutoff, prepared, kept, config.loader.stage_to)


def _new_model(config: MaceRun, data: StructureData) -> tuple[MACE, Statistics, list[str]]:
    """Make a model with random weights for the elements, heads and scales of the data."""
    asked = config.model.atomic_numbers
    found = statistics(data.train, heads=data.heads, e0=dict(data.e0), elements=asked)
    further = sorted(set(found.atomic_numbers) - set(asked))
    if asked and further:
        raise ConfigError(
            f"model.atomic_numbers: the data hold also {further}; add them or leave the key out"
        )
    torch.manual_seed(config.train.seed)
    complete = _with_statistics(config.model, config.scaling, found, data.heads)
    return MACE(complete, torch.float64), found, _origins(data.heads, found.e0)


def _finetuned_model(
    config: MaceRun, data: StructureData, source: MACE
) -> tuple[MACE, Statistics, list[str]]:
    """Make a model with the weights of another for the elements and heads of the data."""
    start = FineTuning(source, config.finetune, config.data, data)
    found = statistics(data.train, heads=data.heads, e0=start.e0_choices())
    torch.manual_seed(config.train.seed)
    model, e0, rows = start.initialise(found)
    return model, found, [*_origins(data.heads, e0), start.heads, *transfer_table(rows)]


def _origins(heads: Sequence[str], e0: Sequence[AtomicEnergies]) -> list[str]:
    """Say where E0 of each head comes from."""
    return [f"E0 of head '{head}': {e.origin}" for head, e in zip(heads, e0, strict=True)]


def _run(
    config: MaceRun,
    data: StructureData,
    model: MACE,
    task: MaceTask,
    notes: list[str],
    resume: bool,
) -> Run:
    first, second = monitors(config.staged_loss, data.valid)
    return Run(
        model=model,
        task=task,
        train=data.train,
        sizes=batch_sizes(data.train),
        valid=data.valid,
        valid_sizes=None if data.valid is None else batch_sizes(data.valid),
        folder=config.output,
        settings=config.settings,
        config={"recipe": config.recipe, **_as_set(config)},
        identity={
            # First, so that changed data are reported as such and not as a changed E0.
            "data": {"structures": len(data.train), "fingerprint": data.fingerprint},
            # Which head is the default changes no number, and runs of 0.1 have none.
            "model": {k: v for k, v in to_dict(model.config).items() if k != "default_head"},
            "loss": loss_identity(config.staged_loss),
            "frozen": list(config.finetune.frozen),
        },
        monitor=first,
        stage_two_monitor=second,
        shown_metrics=SHOWN_METRICS,
        size_names={"graphs": SYSTEM.samples},
        resume=resume,
        save_model=SaveModel(SYSTEM.kind, model.config),
        on_end=WriteReport(REPORT, data, config.batch) if config.report else None,
        notes=notes,
        model_options=f" --head {model.config.default_head}" if len(data.heads) > 1 else "",
    )


def _as_set(config: MaceRun) -> dict[str, Any]:
    """Return the configuration for config.yaml; what comes from the data is in model.json."""
    values, plain = to_dict(config), to_dict(MaceConfig())
    values["model"] = {
        name: value
        for name, value in values["model"].items()
        if name not in FROM_DATA or value != plain[name]
    }
    start = config.staged_loss.stage_two_start
    if start is not None:
        values["loss"]["stage_two"] |= named_weights(config.staged_loss, start)
    return values


def _suspect_forces(train: Dataset, found: Statistics) -> list[str]:
    """Warn of forces so large that units or a calculation must be wrong."""
    rms = max(found.force_rms)
    if rms < SUSPECT_FORCE:
        return []
    largest = [float(np.abs(train[i]["forces"]).max(initial=0)) for i in range(len(train))]
    worst = int(np.argmax(largest))
    warning = (
        f"warning: forces have an RMS of {rms:.3g} eV/Å, the largest of {largest[worst]:.3g} in "
        f"{train.describe(worst)}: are they in eV/Å, and is that structure physical?"
    )
    return [warning]


def _in_short(model: MACE, data: StructureData) -> str:
    """Describe the sizes of data and model, and the units of errors, in one line."""
    parts = (("train", data.train), ("valid", data.valid), ("test", data.test))
    counts = ", ".join(f"{name}: {len(part)} structures" for name, part in parts if part)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return f"{counts}; {parameters:,} parameters; errors in eV per atom, eV/Å and eV/Å³"


def _with_capacity(
    config: MaceRun, model: MACE, task: MaceTask, train: Dataset
) -> tuple[MaceRun, list[str]]:
    """Choose ``batch.capacity: auto``, once for the run's folder, and say why."""
    batch = config.batch
    if batch.capacity != "auto":
        return config, []
    if batch.algorithm == "fixed_count":
        return dataclasses.replace(config, batch=dataclasses.replace(batch, capacity=ON_CPU)), []

    def meter(device: torch.device) -> StepMeter:
        dtype = dtype_of(config.train.dtype)
        return StepMeter(copy.deepcopy(model), task, train, device, dtype)

    path = config.output / "capacity.json"
    sizes, accumulate = batch_sizes(train), config.optim.accumulate
    described = {
        "model": to_dict(model.config),
        "loss": to_dict(task.config),
        "frozen": config.finetune.frozen,
        "kernels": str(current()),
        "dtype": config.train.dtype,
    }
    capacity, note = capacity_of_run(path, config.train, sizes, meter, accumulate, described)
    return dataclasses.replace(config, batch=dataclasses.replace(batch, capacity=capacity)), [note]


def _with_statistics(
    config: MaceConfig, scaling: str, found: Statistics, heads: tuple[str, ...]
) -> MaceConfig:
    """Fill in the hyper-parameters that depend on the data, unless the configuration sets them."""
    plain = MaceConfig()
    for name, instead in (("heads", "data.heads"), ("atomic_energies", "data.e0")):
        if getattr(config, name) not in {getattr(plain, name), heads}:
            raise ConfigError(f"model.{name}: comes from the data; set {instead} instead")
    ones, zeros = (1.0,) * len(heads), (0.0,) * len(heads)
    from_data: dict[str, Any] = {
        "avg_num_neighbors": found.avg_num_neighbors,
        "scale": ones if scaling == "none" else found.force_rms,
        "shift": found.mean_shift if scaling == "rms_forces" else zeros,
    }
    given = {name: getattr(config, name) for name in from_data}
    given = {name: value for name, value in given.items() if value != getattr(plain, name)}
    complete = config.with_data(
        atomic_numbers=found.atomic_numbers,
        atomic_energies=found.atomic_energies,
        heads=heads,
        **(from_data | given),
    )
    return dataclasses.replace(complete, default_head=heads[0])


def _check_architecture(config: MaceRun, architecture: MaceConfig) -> None:
    """Refuse changes to the architecture of the model to start from."""
    plain, given, old = to_dict(MaceConfig()), to_dict(config.model), to_dict(architecture)
    for name, value in given.items():
        if value not in (plain[name], old[name]):
            raise ConfigError(
                f"model.{name}: is {value}, but that of {config.start_from} is {old[name]} and "
                "cannot be changed; leave it (and preset) out"
            )


def _without_isolated(train: Dataset, found: Statistics) -> Dataset:
    """Leave out isolated atoms, which only determine E0."""
    if not found.isolated:
        return train
    return Subset(train, np.setdiff1d(np.arange(len(train)), np.array(found.isolated)))
