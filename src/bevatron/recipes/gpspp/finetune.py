"""Fine-tuning of GPS++: weights kept from another model, and new ones."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from bevatron.config import to_dict
from bevatron.errors import ConfigError
from bevatron.models.gpspp import (
    FROM_DATA,
    DropoutConfig,
    GPSPlusPlus,
    GPSPlusPlusConfig,
    load_model,
)
from bevatron.recipes.kinds import newest_model

OF_TARGETS = "decoder."
"""Prefix of the names of weights that belong to targets."""

FREE = frozenset({"dropout", "noisy_nodes", "noisy_edges", "denoising", "feature_set", *FROM_DATA})
"""Hyper-parameters that a run may change although it starts from another's weights."""


@dataclass(frozen=True)
class FinetuneConfig:
    """The parts of the initial model that a run keeps.

    Dropouts are the old model's unless the run sets them otherwise than its preset.

    Attributes
    ----------
    head
        ``auto``: the old model's readout is kept if its targets have the same names and kinds, with
        their mean and standard deviation, and is new otherwise; ``new``: always new.
    frozen
        Names of parameters that are not trained, with wildcards: ``encoders.*``, ``blocks.0.*``.
    """

    head: Literal["auto", "new"] = "auto"
    frozen: tuple[str, ...] = ()


def trained_model(path: Path | str, dtype: torch.dtype | None = None) -> GPSPlusPlus:
    """Read a model folder or a run folder; of an unfinished run, the best model so far.

    Raises CheckpointError if there is none, or one of another kind.
    """
    return load_model(newest_model(Path(path)), dtype)


def started_from(
    source: GPSPlusPlus, asked: GPSPlusPlusConfig, preset: GPSPlusPlusConfig, config: FinetuneConfig
) -> tuple[GPSPlusPlus, list[str]]:
    """Build the model to fine-tune.

    Raises ConfigError if the run asks for another architecture than the source has.

    Parameters
    ----------
    asked : the run's own hyper-parameters, with those that follow from the new data
    preset : the hyper-parameters of the run's preset

    Returns
    -------
    model, lines for the log
    """
    old, plain, targets = to_dict(source.config), to_dict(preset), asked.targets
    for name, value in to_dict(asked).items():
        if name not in FREE and value not in (plain[name], old[name]):
            raise ConfigError(
                f"model.{name}: is {value}, that of the model to start from is {old[name]} and "
                "cannot be changed; leave it out"
            )
    same = [(t.name, t.kind, t.num_classes) for t in source.config.targets] == [
        (t.name, t.kind, t.num_classes) for t in targets
    ]
    keep = same and config.head == "auto"
    before = source.config.trained_on
    architecture = dataclasses.replace(
        source.config,
        targets=source.config.targets if keep else targets,
        trained_on=None if asked.trained_on is None else asked.trained_on.joined(before),
        dropout=_dropout(source.config, asked, preset),
        noisy_nodes=asked.noisy_nodes,
        noisy_edges=asked.noisy_edges,
        denoising=asked.denoising,
    )
    model = GPSPlusPlus(architecture, next(source.parameters()).dtype)
    state, fresh = model.state_dict(), []
    for name, value in source.state_dict().items():
        if name in state and (keep or not name.startswith(OF_TARGETS)):
            state[name] = value
    fresh = sorted({n.split(".")[0] for n in state if not _taken(n, source, keep=keep)})
    model.load_state_dict(state)
    number = sum(v.numel() for n, v in state.items() if _taken(n, source, keep=keep))
    lines = [f"started from a trained model: {number:,} weights kept"]
    rates = ", ".join(f"{name} {rate:g}" for name, rate in to_dict(architecture.dropout).items())
    lines.append(f"dropout, as in the old model unless given: {rates}")
    if fresh:
        lines.append(f"new weights: {', '.join(fresh)}")
    if keep:
        means = ", ".join(f"'{t.name}' {t.mean:.5g} ± {t.std:.5g}" for t in architecture.targets)
        lines.append(f"the old readout is kept, with its mean and std: {means}")
    return model, lines


def _dropout(
    source: GPSPlusPlusConfig, asked: GPSPlusPlusConfig, preset: GPSPlusPlusConfig
) -> DropoutConfig:
    """Keep the source's rates, except those in which the run differs from its preset."""
    plain = to_dict(preset.dropout)
    given = {n: rate for n, rate in to_dict(asked.dropout).items() if rate != plain[n]}
    return dataclasses.replace(source.dropout, **given)


def _taken(name: str, source: GPSPlusPlus, *, keep: bool) -> bool:
    return name in source.state_dict() and (keep or not name.startswith(OF_TARGETS))
