"""Accuracy of ligands in their pockets."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from bevatron.maths.superposition import moved, superposition

POCKET = 10.0
"""Å; residues of the polymer with an atom this near to the ligand make its pocket."""


def pocket_rmsd(
    predicted: Float[Tensor, "A 3"],
    truth: Float[Tensor, "A 3"],
    resolved: Bool[Tensor, "A"],
    residue: Int[Tensor, "A"],
    backbone: Bool[Tensor, "A"],
    orders: Int[Tensor, "P n"],
) -> Float[Tensor, ""]:
    """Compute the RMSD of a ligand after superposing the backbone of its pocket, Å.

    The smallest over all orders of the ligand's atoms that keep its bonds. NaN if no atom of the
    ligand or fewer than three of the pocket are resolved.

    Parameters
    ----------
    predicted, truth : positions of the same atoms, Å
    residue : number of the residue of an atom, from 0
    backbone : the atoms to superpose with: backbone of polymers
    orders
        The ligand's atoms in every order that keeps its bonds; the first row as in ``predicted``.
    """
    of_ligand = orders[0]
    known = of_ligand[resolved[of_ligand]]
    to_ligand = torch.cdist(truth, truth[known], compute_mode="donot_use_mm_for_euclid_dist")
    close = (to_ligand < POCKET).any(-1) & resolved
    close[of_ligand] = False
    near = torch.zeros(int(residue.max()) + 1, dtype=torch.bool, device=truth.device)
    near[residue[close]] = True
    pocket = backbone & resolved & near[residue]
    pocket[of_ligand] = False
    if not len(known) or pocket.sum() < 3:
        return truth.new_full((), torch.nan)
    rotation, translation = superposition(predicted, truth, pocket.to(truth.dtype))
    ligand = moved(predicted[of_ligand], rotation, translation)
    squared = (ligand - truth[orders]).square().sum(-1)
    counts = resolved[orders]
    return ((squared * counts).sum(-1) / counts.sum(-1)).amin().sqrt()
