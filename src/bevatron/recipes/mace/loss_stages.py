"""The loss of a run in its two stages: labels it needs, errors that decide, notes for the log."""

from typing import Any

import numpy as np

from bevatron.config import to_dict
from bevatron.data.dataset import Dataset
from bevatron.errors import DataError
from bevatron.models.mace import LossConfig
from bevatron.train.settings import Settings


def check_labels(loss: LossConfig, train: Dataset) -> None:
    """Refuse a loss term whose label no structure has.

    Raises
    ------
    DataError
        Naming the weight to set to 0.
    """
    stages = {"loss.": loss.weights(0)}
    if loss.stage_two_start is not None:
        stages["loss.stage_two."] = loss.weights(loss.stage_two_start)
    forces = bool(train.lengths("forces").any())
    for where, weights in stages.items():
        if weights["forces"] > 0 and not forces:
            raise DataError(
                f"the training data have no forces but {where}forces_weight is "
                f"{weights['forces']:g}; set it to 0 to train on energies alone, or name the "
                "forces with data.labels.forces_key"
            )
        stress = max(weights["stress"], weights["virials"])
        if stress > 0 and not _any_stress(train):
            raise DataError(
                f"the training data have no stress but {where}stress_weight or "
                f"{where}virials_weight is {stress:g}; set it to 0, or name the stress with "
                "data.labels.stress_key"
            )


def _any_stress(train: Dataset) -> bool:
    """Whether any structure has a label for stress."""
    return any(not np.isnan(train[i]["stress"]).any() for i in range(len(train)))


def monitor(loss: LossConfig, valid: Dataset | None) -> str:
    """Name the error by which the best epoch is chosen."""
    forces = valid is not None and bool(valid.lengths("forces").any())
    return "forces_rmse" if forces and loss.forces_weight > 0 else "energy_per_atom_rmse"


def stage_two_monitor(loss: LossConfig, valid: Dataset | None) -> str:
    """Name the error that decides in the second stage: energies, where it stresses them."""
    start = loss.stage_two_start
    first, second = loss.weights(0), loss.weights(0 if start is None else start)
    stressed = second["energy"] * first["forces"] > first["energy"] * second["forces"]
    return "energy_per_atom_rmse" if stressed else monitor(loss, valid)


def stage_two_notes(loss: LossConfig, settings: Settings) -> list[str]:
    """Say when stage two begins and with what; warn if it never does or has the larger rate."""
    start, rate, first_rate = (
        loss.stage_two_start,
        settings.schedule.stage_two_lr,
        settings.optim.lr,
    )
    if start is None:
        return []
    if start >= settings.train.epochs:
        line = (
            f"warning: stage two begins with epoch {start + 1}, but train.epochs is "
            f"{settings.train.epochs}: it is never reached"
        )
        return [line]
    weights = ", ".join(f"{term} {weight:g}" for term, weight in loss.weights(start).items())
    line = (
        f"stage two begins with epoch {start + 1}: loss weights {weights}; learning rate {rate:g}"
    )
    if rate <= first_rate:
        return [line]
    warning = (
        f"warning: schedule.stage_two_lr is {rate:g}, above optim.lr "
        f"({first_rate:g}): stage two is meant to have the smaller learning rate"
    )
    return [line, warning]


def loss_identity(loss: LossConfig) -> dict[str, Any]:
    """Return the weights that a run is not resumed without, those of both stages written out."""
    start = loss.stage_two_start
    two = None if start is None else {"start_epoch": start, **named_weights(loss, start)}
    return {**to_dict(loss), "stage_two": two}


def named_weights(loss: LossConfig, epoch: int) -> dict[str, float]:
    """Return the weights of an epoch by the names of their keys."""
    return {f"{term}_weight": value for term, value in loss.weights(epoch).items()}
