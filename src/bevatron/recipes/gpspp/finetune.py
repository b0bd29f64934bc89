"""Fine-tuning of GPS++: which weights of another model are kept and which are new."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from bevatron.config import to_dict
from bevatron.errors import ConfigError
from bevatron.models.gpspp import GPSPlusPlus, GPSPlusPlusConfig, Target, load_model
from bevatron.recipes.kinds import newest_model

OF_TARGETS = "decoder."
"""Prefix of the names of weights that belong to targets."""

FREE = frozenset({"targets", "dropout", "noisy_nodes", "noisy_edges", "denoising", "feature_set"})
"""Hyper-parameters that a run may change although it starts from another's weights."""


@dataclass(frozen=True)
class FinetuneConfig:
    """What a run keeps of the model it starts from.

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

    Raises
    ------
    CheckpointError
        If there is none, or one of another kind.
    """
    return load_model(newest_model(Path(path)), dtype)


def started_from(
    source: GPSPlusPlus,
    asked: GPSPlusPlusConfig,
    preset: GPSPlusPlusConfig,
    config: FinetuneConfig,
    targets: Sequence[Target],
) -> tuple[GPSPlusPlus, list[str]]:
    """Build the model to fine-tune.

    Parameters
    ----------
    source
        The trained model.
    asked
        The run's own hyper-parameters.
    preset
        The hyper-parameters of the run's preset.
    config
        What is kept.
    targets
        Of the new data.

    Returns
    -------
    model, lines for the log

    Raises
    ------
    ConfigError
        If the run asks for another architecture than the source has.
    """
    old, plain = to_dict(source.config), to_dict(preset)
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
    architecture = dataclasses.replace(
        source.config,
        targets=source.config.targets if keep else tuple(targets),
        dropout=asked.dropout,
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
    if fresh:
        lines.append(f"new weights: {', '.join(fresh)}")
    if keep:
        means = ", ".join(f"'{t.name}' {t.mean:.5g} ± {t.std:.5g}" for t in architecture.targets)
        lines.append(f"the old readout is kept, with its mean and std: {means}")
    return model, lines


def _taken(name: str, source: GPSPlusPlus, *, keep: bool) -> bool:
    return name in source.state_dict() and (keep or not name.startswith(OF_TARGETS))
