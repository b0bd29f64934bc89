"""Violations of the geometry of proteins: peptide bonds, clashes, distances within residues.

Section 1.9.11. Tolerances: 12 standard deviations for bonds and angles, 1.5 Å of overlap for atoms
that are not bonded.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from bevatron.data.proteins.atoms14 import of_residues
from bevatron.data.proteins.constants import RESIDUES
from bevatron.data.proteins.stereochemistry import (
    COS_C_N_CA,
    COS_CA_C_N,
    PEPTIDE_BOND,
    PEPTIDE_BOND_PROLINE,
    distance_bounds,
)
from bevatron.maths.constants import computed_once
from bevatron.models.alphafold2.naming import distances
from bevatron.parallel.axial import all_of, all_together, own

DEVIATIONS = 12.0
"""Standard deviations within which bonds and angles are free."""
OVERLAP = 1.5
"""Overlap of van der Waals spheres that is free, Å."""
N, CA, C, SG = 0, 1, 2, 5
"""Slots in atom14; SG is that of cysteine."""
_EPS, _LENGTH_EPS, _COUNT_EPS = 1e-6, 1e-10, 1e-8


class Violations(NamedTuple):
    """Violations: how far a predicted structure exceeds the tolerances.

    Attributes
    ----------
    bond, angle_at_c, angle_at_n : [...]
        Means over the peptide bonds: C-N in Å, cosines of CA-C-N and C-N-CA.
    clashes, within : [..., N, 14]
        Sums over the partners of each atom in other residues, and in its own, Å.
    """

    bond: Float[Tensor, "*batch"]
    angle_at_c: Float[Tensor, "*batch"]
    angle_at_n: Float[Tensor, "*batch"]
    clashes: Float[Tensor, "*batch N 14"]
    within: Float[Tensor, "*batch N 14"]


def violations(position: Float[Tensor, "*batch N 14 3"], batch: Mapping[str, Tensor]) -> Violations:
    """Measure all violations.

    Parameters
    ----------
    position : predicted atoms, Å
    batch : ``aatype``, ``residue_index`` and ``atom14_atom_exists``
    """
    exists = batch["atom14_atom_exists"].to(position.dtype)
    bond, angle_at_c, angle_at_n = _peptide_bonds(position, exists, batch)
    clashes = _clashes(position, exists, batch)
    return Violations(
        bond, angle_at_c, angle_at_n, clashes, _within(position, exists, batch["aatype"])
    )


def violation_loss(
    position: Float[Tensor, "*batch N 14 3"], batch: Mapping[str, Tensor]
) -> Float[Tensor, "*batch"]:
    """Sum of the means over bonds, both angles and, of clashes, over all atoms of the sample."""
    found = violations(position, batch)
    per_atom = (found.clashes + found.within).sum((-1, -2))
    atoms = batch["atom14_atom_exists"].sum((-1, -2))
    clash = per_atom / (_COUNT_EPS + atoms)
    return found.bond + found.angle_at_c + found.angle_at_n + clash


def _peptide_bonds(position: Tensor, exists: Tensor, batch: Mapping[str, Tensor]) -> list[Tensor]:
    """Equations 44 and 45: means of the three errors."""
    ca, c = position[..., :-1, CA, :], position[..., :-1, C, :]
    next_n, next_ca = position[..., 1:, N, :], position[..., 1:, CA, :]
    index = batch["residue_index"]
    joined = (index[..., 1:] - index[..., :-1] == 1) * exists[..., :-1, C] * exists[..., 1:, N]

    c_n, c_ca, n_ca = next_n - c, ca - c, next_ca - next_n
    length, ca_length, next_length = (
        torch.sqrt(_EPS + x.square().sum(-1)) for x in (c_n, c_ca, n_ca)
    )
    at_c = (c_ca * c_n).sum(-1) / (ca_length * length)
    at_n = -(c_n * n_ca).sum(-1) / (length * next_length)
    proline = (batch["aatype"][..., 1:] == RESIDUES.index("PRO")).to(length.dtype)
    mean, deviation = (
        a + proline * (b - a) for a, b in zip(PEPTIDE_BOND, PEPTIDE_BOND_PROLINE, strict=True)
    )
    errors: list[tuple[Tensor, Tensor | float, Tensor | float, Tensor]] = [
        (length, mean, deviation, joined),
        # AlphaFold2 takes the deviation of the bond's length here.
        (at_c, COS_CA_C_N[0], PEPTIDE_BOND[1], joined * exists[..., :-1, CA]),
        (at_n, *COS_C_N_CA, joined * exists[..., 1:, CA]),
    ]
    means = []
    for value, target, spread, mask in errors:
        excess = torch.sqrt(_EPS + (value - target).square()) - DEVIATIONS * spread
        means.append((mask * excess.relu()).sum(-1) / (mask.sum(-1) + _EPS))
    return means


def _clashes(position: Tensor, exists: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """Equation 46 between residues: overlap of each atom with all others."""
    index = batch["residue_index"]
    first, second = own(index, -1)[..., :, None], index[..., None, :]
    counts = (
        own(exists, -2)[..., :, None, :, None]
        * exists[..., None, :, None, :]
        * (first < second)[..., None, None]
    )
    counts = counts * _not_bonded(first + 1 == second)
    radius = exists * of_residues("ATOM14_RADIUS", batch["aatype"]).to(exists.dtype)
    reach = own(radius, -2)[..., :, None, :, None] + radius[..., None, :, None, :] - OVERLAP
    overlap = counts * (reach - distances(position)).relu()
    of_first = all_of(overlap.sum((-3, -1)), -2, index.shape[-1])
    return all_together(overlap.sum((-4, -2))) + of_first


def _not_bonded(neighbours: Tensor) -> Tensor:
    """Return 0 for C-N of neighbours and for SG-SG, [..., N, N, 14, 14]."""
    slot = torch.arange(14, device=neighbours.device)
    sulfur = slot == SG
    peptide = (slot == C)[:, None] & (slot == N)
    # Disulfides are let through by slot, whatever the residues are, as in AlphaFold2.
    return ~(sulfur[:, None] & sulfur) & ~(neighbours[..., None, None] & peptide)


def _within(position: Tensor, exists: Tensor, aatype: Tensor) -> Tensor:
    """Equation 46 within residues: distances outside their bounds."""
    lower, upper = (x[aatype].to(position.dtype) for x in _bounds(position.device))
    gap = position[..., :, None, :] - position[..., None, :, :]
    distance = torch.sqrt(_LENGTH_EPS + gap.square().sum(-1))
    pairs = exists[..., :, None] * exists[..., None, :]
    pairs = pairs * (1 - torch.eye(14, dtype=exists.dtype, device=exists.device))
    excess = pairs * ((lower - distance).relu() + (distance - upper).relu())
    # Each pair counts twice, as in AlphaFold2.
    return excess.sum(-1) + excess.sum(-2)


@computed_once
def _bounds(device: torch.device) -> tuple[Tensor, Tensor]:
    bounds = distance_bounds(OVERLAP, DEVIATIONS)
    lower, upper = (torch.from_numpy(x).to(device) for x in bounds)
    return lower, upper
