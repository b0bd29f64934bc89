"""The recipe ``gpspp``: properties of molecules from SMILES, a new GPS++ or a fine-tuned one."""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch

from bevatron.config import to_dict
from bevatron.data.dataset import Dataset
from bevatron.errors import ConfigError
from bevatron.kernels import use
from bevatron.models.gpspp import (
    FROM_DATA,
    CorruptionConfig,
    GPSPlusPlus,
    GPSPlusPlusConfig,
    GPSPlusPlusTask,
    LossConfig,
    Mode,
)
from bevatron.parallel.mesh import parse_device
from bevatron.recipes.frozen import freeze
from bevatron.recipes.gpspp import SYSTEM
from bevatron.recipes.gpspp.data import (
    MoleculeData,
    MoleculeDataConfig,
    load_molecules,
    molecule_sizes,
)
from bevatron.recipes.gpspp.domain import trained_on
from bevatron.recipes.gpspp.finetune import FinetuneConfig, started_from, trained_model
from bevatron.recipes.gpspp.outcome import WriteOutcome
from bevatron.recipes.gpspp.targets import TargetConfig, targets_of
from bevatron.recipes.run_config import RunConfig, SaveModel, WriteReport
from bevatron.train.precision import dtype_of
from bevatron.train.run import Run
from bevatron.train.settings import BatchConfig, OptimConfig, ScheduleConfig, Settings, TrainConfig

REPORT = "bevatron.recipes.gpspp.report"

SMALL_OPTIM = {"lr": 2e-3, "ema": 0.98}
"""Settings of gpspp-small: narrow layers bear a higher rate."""

ROOM = 1.03
"""Capacity of a batch over the needs of its average molecules: packing needs some slack."""


@dataclass(frozen=True, kw_only=True)
class GpsppRun(RunConfig):
    """Configuration of a training run of GPS++.

    Attributes
    ----------
    output : the run's folder
    preset
        gpspp-16 (44 million parameters), gpspp-8, gpspp-4, or one of them with -mpnn, without
        attention; gpspp-small (0.36 million), which a CPU trains on thousands of molecules in
        minutes. `model` changes it.
    data : files of molecules or stores, their columns, the split
    targets : kinds and units of the targets
    model : hyper-parameters; the targets and the feature set come from the data
    loss : the loss and its weights
    corruption : noise and masking of the inputs in training
    mode
        Inputs in validation: ``2d``, ``3d`` or ``both``, by which the best
        epoch is chosen. With 3D structures, the other of 2d and 3d is reported too.
    molecules
        Average number of molecules per step and GPU; None = about the square root of the number
        of training molecules, 8 to 256. Unless ``batch.capacity`` is given, batches hold the atoms,
        bonds and squared atoms of this many.
    precision
        ``auto``: matmuls in bfloat16 on a GPU (weights, norms and sums stay float32), in
        float32 elsewhere; or ``bfloat16``, ``float16`` (the loss is scaled, steps are not captured)
        or ``float32`` anywhere.
    optim, schedule, batch, loader, checkpoint, train, kernels
        See `bevatron.recipes.run_config.RunConfig`. A warm-up takes at most a tenth of a run's
        epochs.
    start_from : a run or a model folder whose weights this run starts from; see `finetune`
    finetune : what is kept of `start_from`
    report : write report.html and the figures at the end
    """

    recipe: ClassVar[str] = SYSTEM.name

    output: Path = Path("runs/gpspp")
    preset: str = "gpspp-4"
    data: MoleculeDataConfig = field(default_factory=MoleculeDataConfig)
    model: GPSPlusPlusConfig = field(default_factory=lambda: GPSPlusPlusConfig.preset("gpspp-4"))
    optim: OptimConfig = field(
        default_factory=lambda: OptimConfig(
            algorithm="adam", lr=4e-4, weight_decay=0.0, clip=5.0, clip_norm="tensor", ema=None
        )
    )
    schedule: ScheduleConfig = field(
        default_factory=lambda: ScheduleConfig(kind="linear", warmup_epochs=10.0)
    )
    batch: BatchConfig = field(default_factory=lambda: BatchConfig(capacity="auto"))
    train: TrainConfig = field(default_factory=lambda: TrainConfig(dtype="float32"))
    targets: TargetConfig = field(default_factory=TargetConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    corruption: CorruptionConfig = field(default_factory=CorruptionConfig)
    mode: Mode = "2d"
    molecules: int | None = None
    precision: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    start_from: Path | None = None
    finetune: FinetuneConfig = field(default_factory=FinetuneConfig)

    def __post_init__(self) -> None:
        """Reject values out of range."""
        super().__post_init__()
        if self.molecules is not None and self.molecules < 1:
            raise ConfigError(f"molecules: expected 1 or more, got {self.molecules}")

    @classmethod
    def preset_values(cls, name: str | None) -> dict[str, Any]:
        """Return the hyper-parameters of a preset, and the optimizer's of the small model."""
        model = to_dict(GPSPlusPlusConfig.preset(str(name)))
        return {"model": model, **({"optim": SMALL_OPTIM} if name == "gpspp-small" else {})}


def build(config: GpsppRun, *, resume: bool = False) -> Run:
    """Build a complete run: molecules read or prepared, labels normalised, model, task.

    Raises BevatronError for data that must not be trained on and settings that contradict each
    other.
    """
    use(config.kernels)
    source = None if config.start_from is None else trained_model(config.start_from)
    config = _with_feature_set(config, source)
    data = load_molecules(
        config.data,
        config.output / "prepared",
        config.loader.stage_to,
        None if source is None else source.config.features_version,
    )
    targets, notes = targets_of(config.targets, data)
    asked = dataclasses.replace(
        config.model,
        targets=targets,
        features_version=data.features_version,
        trained_on=trained_on(data.train, config.model, config.corruption),
    )
    torch.manual_seed(config.train.seed)
    if source is None:
        model = GPSPlusPlus(asked, dtype_of(config.train.dtype))
    else:
        preset = GPSPlusPlusConfig.preset(config.preset)
        model, rows = started_from(source, asked, preset, config.finetune)
        model = model.to(dtype_of(config.train.dtype))
        notes += rows
    freeze(model, config.finetune.frozen)
    modes = _modes(config.mode, model.config, data)
    task = GPSPlusPlusTask(model.config, config.loss, config.corruption, modes)
    settings, more = _complete(config, data)
    values = to_dict(config)
    for name in FROM_DATA:
        del values["model"][name]
    return Run(
        model=model,
        task=task,
        train=data.train,
        sizes=molecule_sizes(data.train),
        valid=data.valid,
        valid_sizes=None if data.valid is None else molecule_sizes(data.valid),
        folder=config.output,
        settings=settings,
        config={"recipe": config.recipe, **values},
        identity={
            "model": _identity(model.config),
            "loss": to_dict(config.loss),
            "corruption": to_dict(config.corruption),
            "data": {"molecules": len(data.train), "fingerprint": data.fingerprint},
            "frozen": list(config.finetune.frozen),
        },
        monitor=monitored(model.config, data),
        resume=resume,
        save_model=SaveModel(SYSTEM.kind, model.config),
        shown_metrics=_shown(model.config, modes),
        size_names={"graphs": SYSTEM.samples},
        size_setting=(
            f"`molecules` (now {_molecules(config, data)})"
            if config.batch.capacity == "auto"
            else ""
        ),
        on_end=WriteOutcome(
            data, modes, WriteReport(REPORT, data, modes, settings.batch) if config.report else None
        ),
        notes=[*data.report, *_unused_positions(model.config, data), *notes, *more],
    )


def _identity(model: GPSPlusPlusConfig) -> dict[str, Any]:
    """Return the hyper-parameters; the version and kind of the data are in their fingerprint."""
    values = to_dict(model)
    del values["features_version"], values["trained_on"]
    return values


def _with_feature_set(config: GpsppRun, source: GPSPlusPlus | None) -> GpsppRun:
    """Make data and model use the same features: the configured ones, or the source's."""
    plain = GPSPlusPlusConfig().feature_set
    of_data, of_model = config.data.feature_set, config.model.feature_set
    chosen = of_model if of_data == plain else of_data
    if source is not None:
        chosen = source.config.feature_set
    for name, key in ((of_data, "data.feature_set"), (of_model, "model.feature_set")):
        if name not in {plain, chosen}:
            raise ConfigError(f"{key}: is '{name}', but the model's is '{chosen}'; give one")
    return dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, feature_set=chosen),
        model=dataclasses.replace(config.model, feature_set=chosen),
    )


def _modes(first: Mode, model: GPSPlusPlusConfig, data: MoleculeData) -> tuple[Mode, ...]:
    """List the modes of validation: the requested one, and 2D and 3D if there are positions."""
    known = data.valid is not None and _with_positions(data.valid)
    if first != "2d" and not model.uses_positions:
        raise ConfigError(f"mode: '{first}' needs a model that uses positions")
    for role, part in (("training", data.train), ("validation", data.valid)):
        if first != "2d" and part is not None and not _with_positions(part):
            raise ConfigError(
                f"mode: '{first}' needs positions, but no {role} molecule has any; give structures "
                "(an SDF, data.columns.geometry) or leave it out"
            )
    if not known or not model.uses_positions:
        return (first,)
    rest: tuple[Mode, ...] = ("2d", "3d")
    return (first, *(mode for mode in rest if mode != first))


def _with_positions(dataset: Dataset) -> bool:
    return bool(dataset.lengths("positions").any())


def _unused_positions(model: GPSPlusPlusConfig, data: MoleculeData) -> list[str]:
    """Warn if a model uses positions and no training molecule has any."""
    if not model.uses_positions or _with_positions(data.train):
        return []
    warning = (
        "warning: no training molecule has a 3D structure, so all are seen in 2D and the model's "
        "parts for positions (distance_bias, distance_sum, bond_lengths) are not trained; without "
        "3D the paper halves the learning rate of attention (optim.lr), and a preset with -mpnn "
        "may do better"
    )
    return [warning]


def monitored(model: GPSPlusPlusConfig, data: MoleculeData) -> str:
    """Name the error by which the best epoch is chosen: MAE or AUROC of one target, else loss."""
    from bevatron.recipes.gpspp.targets import labels_of

    if len(model.targets) > 1:
        return "loss"
    (target,) = model.targets
    if target.kind == "regression":
        return f"{target.name}_mae"
    labels = np.zeros((0, 1)) if data.valid is None else labels_of(data.valid)
    both = target.kind == "binary" and {0.0, 1.0} <= set(labels[:, 0].tolist())
    return f"-{target.name}_auroc" if both else f"-{target.name}_accuracy"


def _shown(model: GPSPlusPlusConfig, modes: tuple[Mode, ...]) -> list[str]:
    kinds = {"regression": "mae", "binary": "auroc", "multiclass": "accuracy"}
    names = [f"{target.name}_{kinds[target.kind]}" for target in model.targets[:4]]
    prefixes = ["", *(f"{mode}/" for mode in modes[1:])]
    return [f"{prefix}{name}" for prefix in prefixes for name in names]


def _complete(config: GpsppRun, data: MoleculeData) -> tuple[Settings, list[str]]:
    """Fill in capacities, precision, warm-up and workers, which depend on data and device."""
    settings, notes = config.settings, []
    device = parse_device(config.train.device, "train.device")
    train, schedule = settings.train, settings.schedule
    on_gpu = device.type == "cuda"
    train = dataclasses.replace(train, autocast=_matmul_dtype(config, on_gpu=on_gpu))
    batch = settings.batch
    if batch.capacity == "auto":
        number = _molecules(config, data)
        batch = dataclasses.replace(batch, capacity=capacities(data, number))
        listed = ", ".join(f"{n} {name}" for name, n in batch.capacities().items())
        chosen = f", chosen for {len(data.train)} training molecules (`molecules` sets another)"
        chosen = "" if config.molecules else chosen
        notes.append(f"a batch holds at most {listed}: about {number} molecules{chosen}")
    plain = config.model == GPSPlusPlusConfig.preset(GpsppRun.preset)
    if plain and config.start_from is None and not on_gpu:
        notes.append(
            f"{config.preset} is slow on a CPU; preset gpspp-small trains on thousands of "
            "molecules in minutes"
        )
    longest = train.epochs / 10
    if schedule.warmup_epochs > longest:
        schedule = dataclasses.replace(schedule, warmup_epochs=longest)
        notes.append(f"warm-up of {longest:g} epochs, a tenth of the run")
    complete = dataclasses.replace(settings, train=train, batch=batch, schedule=schedule)
    return complete, notes


def _matmul_dtype(config: GpsppRun, *, on_gpu: bool) -> Literal["bfloat16", "float16"] | None:
    train, asked = config.train, config.precision
    if asked == "float32" or train.autocast is not None:
        return train.autocast
    if asked == "auto":
        return "bfloat16" if on_gpu and train.dtype == "float32" else None
    if train.dtype != "float32":
        raise ConfigError(f"precision: {asked} needs train.dtype float32, not {train.dtype}")
    return asked


def _molecules(config: GpsppRun, data: MoleculeData) -> int:
    """Return the average number of molecules of a batch whose capacities are not given."""
    return config.molecules or molecules_per_step(len(data.train))


def molecules_per_step(number: int) -> int:
    """Choose how many molecules a step has, from the number of training molecules.

    The power of two nearest its square root, 8 to 256: as many steps in an epoch as molecules in a
    step. Few molecules need small steps, or an epoch is too few of them.

    Examples
    --------
    >>> [molecules_per_step(n) for n in (20, 1_000, 10_000, 3_000_000)]
    [8, 32, 128, 256]
    """
    return int(np.clip(2 ** np.round(np.log2(max(number, 1)) / 2), 8, 256))


def capacities(data: MoleculeData, molecules: int) -> dict[str, int]:
    """Return the sizes of a number of average molecules, at least that of the largest one.

    Parameters
    ----------
    data : the data sets; the training molecules are counted
    molecules : their number in a batch

    Returns
    -------
    ``atoms``, ``edges`` and ``pairs``.
    """
    sizes = molecule_sizes(data.train)
    number = min(molecules, len(data.train))
    return {
        name: int(max(np.ceil(ROOM * number * sizes[name].mean()), sizes[name].max(), 1))
        for name in ("atoms", "edges", "pairs")
    }
