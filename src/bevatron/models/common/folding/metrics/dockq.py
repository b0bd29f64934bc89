"""DockQ: how well two partners of a complex are placed against each other."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from bevatron.maths.superposition import moved, superposition
from bevatron.models.common.folding.metrics.superposed import rmsd

CONTACT = 5.0
INTERFACE = 10.0
"""Å between heavy atoms: a contact, and a residue of the interface."""


@dataclass(frozen=True)
class DockQ:
    """DockQ and its components (Basu and Wallner, PLOS ONE 11, e0161879 (2016)).

    Attributes
    ----------
    fnat : share of the true contacts between residues that the prediction has
    interface_rmsd : RMSD of the backbone of the interface, superposed by itself, Å
    ligand_rmsd : RMSD of the backbone of the smaller partner after superposing the larger, Å
    """

    fnat: float
    interface_rmsd: float
    ligand_rmsd: float

    @property
    def score(self) -> float:
        r"""The mean of fnat, :math:`1/(1+(iRMS/1.5)^2)` and :math:`1/(1+(LRMS/8.5)^2)`."""
        interface = 1 / (1 + (self.interface_rmsd / 1.5) ** 2)
        return (self.fnat + interface + 1 / (1 + (self.ligand_rmsd / 8.5) ** 2)) / 3


def dockq(
    predicted: Float[Tensor, "A 3"],
    truth: Float[Tensor, "A 3"],
    resolved: Bool[Tensor, "A"],
    residue: Int[Tensor, "A"],
    partner: Int[Tensor, "A"],
    backbone: Bool[Tensor, "A"],
) -> DockQ | None:
    """Compute DockQ of two partners; None if no residues of the truth are in contact.

    Parameters
    ----------
    predicted, truth : positions of the same atoms, Å
    resolved : atoms to compare
    residue : number of the residue of an atom, from 0; no residue is in both partners
    partner : 0 and 1; atoms of any other number are left out
    backbone : N, CA, C and O of proteins
    """
    known = resolved & ((partner == 0) | (partner == 1))
    predicted, truth = predicted[known], truth[known]
    residue, partner, backbone = residue[known], partner[known], backbone[known]
    number = int(residue.max()) + 1 if len(residue) else 0
    closest = _closest(truth, residue, partner, number)
    contacts = closest < CONTACT
    if not contacts.any():
        return None
    kept = _closest(predicted, residue, partner, number)[contacts] < CONTACT
    near = closest < INTERFACE
    in_interface = near.any(0) | near.any(1)
    interface = backbone & in_interface[residue]
    sizes = [residue[partner == side].unique().numel() for side in (0, 1)]
    larger = 0 if sizes[0] >= sizes[1] else 1
    receptor = (backbone & (partner == larger)).to(truth.dtype)
    rotation, translation = superposition(predicted, truth, receptor)
    ligand = backbone & (partner != larger)
    error = (moved(predicted, rotation, translation) - truth)[ligand].square().sum(-1)
    return DockQ(
        fnat=float(kept.double().mean()),
        interface_rmsd=float(rmsd(predicted, truth, interface)),
        ligand_rmsd=float(error.mean().sqrt()),
    )


def _closest(
    points: Float[Tensor, "A 3"], residue: Tensor, partner: Tensor, number: int
) -> Float[Tensor, "R R"]:
    """Return the smallest distance of residue i of partner 0 from residue j of partner 1."""
    first, second = partner == 0, partner == 1
    distance = torch.cdist(
        points[first], points[second], compute_mode="donot_use_mm_for_euclid_dist"
    )
    rows = residue[first][:, None].expand_as(distance)
    far = points.new_full((number, distance.shape[1]), torch.inf)
    by_row = far.scatter_reduce(0, rows, distance, "amin")
    columns = residue[second].expand_as(by_row)
    far = points.new_full((number, number), torch.inf)
    return far.scatter_reduce(1, columns, by_row, "amin")
