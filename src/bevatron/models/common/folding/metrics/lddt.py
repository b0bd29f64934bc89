"""lDDT: how many distances of the truth a prediction keeps (Mariani et al., 2013)."""

from collections.abc import Iterator

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from bevatron.kernels.shared.checks import (
    check_axes,
    check_devices,
    check_index,
    check_shapes,
    no_tensor,
)

THRESHOLDS = (0.5, 1.0, 2.0, 4.0)
"""Å; the score of a pair is the fraction of these that exceed the error of its distance."""

RADIUS = 15.0
RADIUS_NUCLEIC = 30.0
"""Å; pairs further apart in the truth do not count. The larger one if an atom is nucleic."""

KINDS = ("protein", "rna", "dna", "ligand")
"""By ``molecule_type``."""

_PAIRS_IN_A_TILE = 1 << 22


def lddt(
    predicted: Float[Tensor, "A 3"],
    truth: Float[Tensor, "A 3"],
    resolved: Bool[Tensor, "A"],
    residue: Int[Tensor, "A"],
    radius: float = RADIUS,
) -> tuple[Float[Tensor, "A"], Float[Tensor, "A"]]:
    r"""Compute the lDDT of each atom as (sum of the scores of its pairs, number of its pairs).

    A pair l, m counts if both are resolved, are of different residues and closer than ``radius`` in
    the truth; its score is :math:`\frac14 \sum_t [|d_{lm} - d_{lm}^{true}| < t]`. The lDDT of any
    atoms is the sum of the first over the sum of the second. Raises ValueError if a shape, a type
    or a device does not fit, naming the argument.

    Parameters
    ----------
    predicted, truth : Å, float32 or float64
    resolved : True for atoms that the truth has
    residue : number of the residue of an atom
    radius : Å
    """
    _check("lddt", predicted, truth, resolved, residue=residue)
    preserved, considered = [], []
    for tile, score, distance in _tiles(predicted, truth):
        counts = (distance < radius) & resolved[tile, None] & resolved
        counts &= residue[tile, None] != residue
        preserved.append((score * counts).sum(-1))
        considered.append(counts.sum(-1).to(score.dtype))
    return torch.cat(preserved), torch.cat(considered)


def ca_lddt(
    predicted: Float[Tensor, "L 3"], truth: Float[Tensor, "L 3"], resolved: Bool[Tensor, "L"]
) -> Float[Tensor, ""]:
    """Compute the lDDT of C-alpha atoms, 0 to 1; 1 if no pair counts.

    Every pair weighs the same, as where OpenFold and MLPerf HPC validate; the mean of the residues'
    own scores would weigh those with few neighbours more. Raises ValueError as `lddt`.
    """
    _check("ca_lddt", predicted, truth, resolved)
    residue = torch.arange(len(truth), device=truth.device)
    preserved, considered = lddt(predicted, truth, resolved, residue)
    number = considered.sum()
    return torch.where(number > 0, preserved.sum() / number.clamp(min=1), 1.0)


def lddt_by_kind(
    predicted: Float[Tensor, "A 3"],
    truth: Float[Tensor, "A 3"],
    resolved: Bool[Tensor, "A"],
    residue: Int[Tensor, "A"],
    chain: Int[Tensor, "A"],
    kind: Int[Tensor, "A"],
) -> dict[str, tuple[Float[Tensor, ""], Float[Tensor, ""]]]:
    """Compute lDDT within chains of each kind and across interfaces of each two kinds.

    Raises ValueError as `lddt`.

    Parameters
    ----------
    residue
        As for `lddt`. In a ligand every pair of atoms counts.
    chain : number of the chain of an atom
    kind : ``molecule_type`` of the atom, into `KINDS`

    Returns
    -------
    By name, (sum of scores, number of pairs): ``protein``, ``rna``, ``dna``, ``ligand`` for pairs
    within a chain, ``protein_protein``, ``protein_rna`` ... for pairs of different chains. Pairs
    count to 15 Å, to 30 Å if one of the atoms is nucleic, and twice: for either atom. Sums of
    several structures may be added.
    """
    _check("lddt_by_kind", predicted, truth, resolved, residue=residue, chain=chain, kind=kind)
    number = len(KINDS)
    is_kind = (kind[:, None] == torch.arange(number, device=kind.device)).to(torch.float32)
    nucleic = (kind == 1) | (kind == 2)
    ligand = kind == 3
    sums = torch.zeros(2, 2, number, number, dtype=torch.float64, device=truth.device)
    for tile, score, distance in _tiles(predicted, truth):
        radius = torch.where(nucleic[tile, None] | nucleic, RADIUS_NUCLEIC, RADIUS)
        counts = (distance < radius) & resolved[tile, None] & resolved
        here = torch.arange(len(truth), device=truth.device)
        counts &= torch.where(
            ligand[tile, None] & ligand, here[tile, None] != here, residue[tile, None] != residue
        )
        same = chain[tile, None] == chain
        for i, of_chain in enumerate((same, ~same)):
            for j, value in enumerate((score, torch.ones_like(score))):
                # Quarters and ones: sums of them are exact.
                of_column = (value * (counts & of_chain)).float() @ is_kind
                sums[i, j] += (is_kind[tile].mT @ of_column).double()
    within = {name: (sums[0, 0, k, k], sums[0, 1, k, k]) for k, name in enumerate(KINDS)}
    across = sums[1] + sums[1].mT
    across.diagonal(dim1=-2, dim2=-1).div_(2)
    between = {
        f"{first}_{second}": (across[0, i, j], across[1, i, j])
        for i, first in enumerate(KINDS)
        for j, second in enumerate(KINDS)
        if i <= j
    }
    return within | between


def _check(
    name: str, predicted: Tensor, truth: Tensor, resolved: Tensor, **indices: Tensor
) -> None:
    check_axes(name, "[A, 3]", predicted=predicted)
    A = len(predicted)
    points = {"predicted": predicted, "truth": truth}
    check_shapes(name, {key: (x, (A, 3)) for key, x in points.items()}, predicted=predicted)
    for key, x in points.items():
        if x.dtype.itemsize < 4:  # distances are not computed in 16 bits, nor exact in them
            kind = str(x.dtype).removeprefix("torch.")
            raise ValueError(f"{name}: {key} is {kind}, expected float32 or float64")
    if error := no_tensor(name, [("resolved", resolved)]):
        raise error
    if resolved.shape != (A,) or resolved.dtype != torch.bool:
        raise ValueError(
            f"{name}: resolved is {str(resolved.dtype).removeprefix('torch.')} "
            f"{tuple(resolved.shape)}, expected bool ({A},)"
        )
    check_devices(name, predicted=predicted, resolved=resolved)
    for key, index in indices.items():
        check_index(name, key, index, (A,), predicted=predicted)


def _tiles(
    predicted: Float[Tensor, "A 3"], truth: Float[Tensor, "A 3"]
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield rows of atoms, the score of each of their pairs and its distance in the truth."""
    rows = max(1, _PAIRS_IN_A_TILE // max(len(truth), 1))
    for start in range(0, max(len(truth), 1), rows):
        tile = slice(start, start + rows)
        distance = _distances(truth, tile)
        error = (_distances(predicted, tile) - distance).abs()
        score = torch.zeros_like(error)
        for threshold in THRESHOLDS:
            score += error < threshold
        yield tile, score / len(THRESHOLDS), distance


def _distances(points: Tensor, tile: slice) -> Tensor:
    return torch.cdist(points[tile], points, compute_mode="donot_use_mm_for_euclid_dist")
