"""The loss of a run in its two stages: labels it needs, errors that decide, notes for the log."""

from typing import Any

import numpy as np

from bevatron.config import to_dict
from bevatron.data.dataset import Dataset
from bevatron.errors import DataError
from bevatron.models.mace import LossConfig
from bevatron.train.settings import Settings


def check_labels(loss: LossConfig, train: Dataset) -> None:
    """Refuse a loss term whose label no structure has."""
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
        if stress > 0 and all(np.isnan(train[i]["stress"]).any() for i in range(len(train))):
            raise DataError(
                f"the training data have no stress but {where}stress_weight or "
                f"{where}virials_weight is {stress:g}; set it to 0, or name the stress with "
                "data.labels.stress_key"
            )


def monitors(loss: LossConfig, valid: Dataset | None) -> tuple[str, str]:
    """Name the errors by which the best epoch of each stage is chosen.

    That of the second stage is the energy's, where it stresses energies.
    """
    forces = valid is not None and bool(valid.lengths("forces").any())
    of_first = "forces_rmse" if forces and loss.forces_weight > 0 else "energy_per_atom_rmse"
    first, second = loss.weights(0), loss.weights(loss.stage_two_start or 0)
    stressed = second["energy"] * first["forces"] > first["energy"] * second["forces"]
    return of_first, "energy_per_atom_rmse" if stressed else of_first


def stage_two_notes(loss: LossConfig, settings: Settings) -> list[str]:
    """Say when stage two begins and with what; warn if it never does or has the larger rate."""
    start, epochs, lr = loss.stage_two_start, settings.train.epochs, settings.optim.lr
    if start is None:
        return []
    if start >= epochs:
        begins = f"stage two begins with epoch {start + 1}, but train.epochs is {epochs}"
        return [f"warning: {begins}: it is never reached"]
    weights = ", ".join(f"{term} {weight:g}" for term, weight in loss.weights(start).items())
    later = f"{settings.schedule.stage_two_lr:g}"
    notes = [
        f"stage two begins with epoch {start + 1}: loss weights {weights}; learning rate {later}"
    ]
    if settings.schedule.stage_two_lr > lr:
        notes.append(
            f"warning: schedule.stage_two_lr is {later}, above optim.lr ({lr:g}): stage two is "
            "meant to have the smaller learning rate"
        )
    return notes


def loss_identity(loss: LossConfig) -> dict[str, Any]:
    """Return the weights that a run is not resumed without, those of both stages written out."""
    start = loss.stage_two_start
    two = None if start is None else {"start_epoch": start, **named_weights(loss, start)}
    return {**to_dict(loss), "stage_two": two}


def named_weights(loss: LossConfig, epoch: int) -> dict[str, float]:
    """Return the weights of an epoch by the names of their keys."""
    return {f"{term}_weight": value for term, value in loss.weights(epoch).items()}
