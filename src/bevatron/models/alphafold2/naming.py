"""Renaming of symmetric atoms of the reference to match the prediction."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from bevatron.parallel.axial import all_of, own

_EPS = 1e-10


class Renamed(NamedTuple):
    """A reference with the names of interchangeable atoms chosen.

    Attributes
    ----------
    swapped : [..., N], 1 where the alternative names are nearer
    position : [..., N, 14, 3] Å
    resolved : [..., N, 14]
    """

    swapped: Float[Tensor, "*batch N"]
    position: Float[Tensor, "*batch N 14 3"]
    resolved: Float[Tensor, "*batch N 14"]


def renamed_reference(
    position: Float[Tensor, "*batch N 14 3"], batch: Mapping[str, Tensor]
) -> Renamed:
    r"""Choose the names under which distances agree best with the prediction (algorithm 26).

    .. math::
        \sum_{a \in \mathrm{amb}} \sum_{b \notin \mathrm{amb}} |d_{ab} - d^{*}_{ab}|

    over the atoms a of a residue with interchangeable names and all atoms b with unique ones is
    compared under both names. Where processes share a sample, each chooses for its own residues.

    Parameters
    ----------
    position : predicted atoms, Å
    batch
        ``atom14_gt_positions``, ``atom14_gt_exists``, the same with ``alt``,
        ``atom14_atom_is_ambiguous``.
    """
    reference, exists = batch["atom14_gt_positions"], batch["atom14_gt_exists"]
    alternative = batch["atom14_alt_gt_positions"]
    ambiguous = batch["atom14_atom_is_ambiguous"].to(exists.dtype)
    with torch.no_grad():
        mask = (
            own(exists * ambiguous, -2)[..., :, None, :, None]
            * (exists * (1 - ambiguous))[..., None, :, None, :]
        )
        predicted = distances(position.detach())
        error = torch.sqrt(_EPS + (predicted - distances(reference)).square())
        swapped_error = torch.sqrt(_EPS + (predicted - distances(alternative)).square())
        first, other = ((mask * e).sum((-1, -2, -3)) for e in (error, swapped_error))
        swapped = all_of((other < first).to(exists.dtype), -1, exists.shape[-2])
    return Renamed(
        swapped,
        torch.where(swapped[..., None, None] > 0, alternative, reference),
        torch.where(swapped[..., None] > 0, batch["atom14_alt_gt_exists"], exists),
    )


def distances(position: Float[Tensor, "*batch N A 3"]) -> Float[Tensor, "*batch R N A A"]:
    """Distances from the atoms of own residues to all atoms, one coordinate at a time."""
    squared = torch.full((), _EPS, dtype=position.dtype, device=position.device)
    for x in position.unbind(-1):
        gap = own(x, -2)[..., :, None, :, None] - x[..., None, :, None, :]
        squared = squared + gap.square()
    return squared.sqrt()
