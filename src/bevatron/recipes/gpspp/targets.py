"""The targets of a run on molecules: kinds, and mean and standard deviation of labels."""

from dataclasses import dataclass, field

import numpy as np

from bevatron.data.dataset import Dataset, column
from bevatron.errors import ConfigError, DataError
from bevatron.models.gpspp import Target
from bevatron.recipes.gpspp.data import MoleculeData
from bevatron.typing import FloatArray

FEWEST_LABELS = 20
"""Labels from which on one that makes up most of their variance is suspicious."""


@dataclass(frozen=True)
class TargetConfig:
    """Kinds and units of the targets.

    Attributes
    ----------
    binary : targets with labels 0 or 1: the model learns a probability
    multiclass : targets whose labels are class indices, from 0
    units : by target, for tables: ``{gap: eV}``
    normalise
        Learn (label - mean) / std, mean and std being those of the training labels; they are kept
        with the model. False learns the labels as they are.
    """

    binary: tuple[str, ...] = ()
    multiclass: tuple[str, ...] = ()
    units: dict[str, str] = field(default_factory=dict)
    normalise: bool = True

    def __post_init__(self) -> None:
        """Reject a target of two kinds."""
        both = sorted(set(self.binary) & set(self.multiclass))
        if both:
            raise ConfigError(f"targets: '{both[0]}' is listed as binary and as multiclass")


def targets_of(config: TargetConfig, data: MoleculeData) -> tuple[tuple[Target, ...], list[str]]:
    """Describe the targets by the training labels.

    Raises ConfigError if there is no target of that name; DataError for a target without labels,
    and for labels that are not class indices.

    Parameters
    ----------
    data : the data sets; mean and spread are those of the training labels

    Returns
    -------
    targets, lines for the log
    """
    for name in (*config.binary, *config.multiclass, *config.units):
        if name not in data.targets:
            raise ConfigError(
                f"targets: there is no target '{name}' (the data have {', '.join(data.targets)})"
            )
    labels, found, notes = labels_of(data.train), [], []
    later = [labels_of(part) for part in (data.valid, data.test) if part is not None]
    for place, name in enumerate(data.targets):
        known = labels[np.isfinite(labels[:, place]), place]
        if not len(known):
            raise DataError(f"target '{name}': no molecule of the training set has a label")
        unit = config.units.get(name, "")
        if name in config.binary or name in config.multiclass:
            kind = "binary" if name in config.binary else "multiclass"
            everything = np.concatenate([known, *(part[:, place] for part in later)])
            classes = _classes(name, kind, everything[np.isfinite(everything)])
            number = classes if kind == "multiclass" else 0
            found.append(Target(name, kind, num_classes=number))  # type: ignore[arg-type]
            notes.append(f"target '{name}': {kind}, {_class_counts(known)}")
            continue
        if len(known) > 2 and set(np.unique(known).tolist()) == {0.0, 1.0}:
            notes.append(
                f"target '{name}' has only labels 0 and 1 but is learnt as a number; "
                f"targets.binary: [{name}] learns a probability"
            )
        mean, std = (float(known.mean()), float(known.std())) if config.normalise else (0.0, 1.0)
        if not std > 1e-12 * max(abs(mean), 1e-300):
            notes.append(f"warning: target '{name}': all training labels are {mean:g}")
            std = 1.0
        notes += _outlier(name, labels[:, place], data.train)
        found.append(Target(name, mean=mean, std=std, unit=unit))
        span = f"from {known.min():.5g} to {known.max():.5g} {unit}".rstrip()
        notes.append(f"target '{name}': labels of mean {mean:.5g} and spread {std:.5g}, {span}")
    return tuple(found), notes


def labels_of(dataset: Dataset) -> FloatArray:
    """Return all labels of a data set, [n, T] float64, NaN where there is none."""
    labels: FloatArray = column(dataset, "targets").astype(np.float64)
    return labels


def _outlier(name: str, labels: FloatArray, train: Dataset) -> list[str]:
    """Warn of one label that decides the spread of all, by which labels are normalised."""
    squares = np.nan_to_num((labels - np.nanmean(labels)) ** 2)
    worst, total = int(squares.argmax()), float(squares.sum())
    if np.isfinite(labels).sum() < FEWEST_LABELS or not squares[worst] > total / 2:
        return []
    warning = (
        f"warning: target '{name}': {train.describe(worst)} has the label {labels[worst]:.5g}, the "
        f"median is {np.nanmedian(labels):.5g}; this row makes up "
        f"{squares[worst] / total:.0%} of the variance: is it right?"
    )
    return [warning]


def _classes(name: str, kind: str, labels: FloatArray) -> int:
    """Count the classes; an error names a label that is not one."""
    top = 1 if kind == "binary" else np.inf
    wrong = labels[(labels != np.round(labels)) | (labels < 0) | (labels > top)]
    if len(wrong):
        expected = "0 or 1" if kind == "binary" else "whole numbers from 0"
        raise DataError(f"target '{name}': has the label {wrong[0]:g}, expected {expected}")
    return max(int(labels.max()) + 1, 2)


def _class_counts(labels: FloatArray) -> str:
    values, counts = np.unique(labels, return_counts=True)
    shown = [f"{n} of {v:g}" for v, n in zip(values[:8], counts[:8], strict=True)]
    return ", ".join(shown) + (" ..." if len(values) > 8 else "")
