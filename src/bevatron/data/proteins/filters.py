"""Chains that AlphaFold3 is not trained on (supplement, section 2.5.4).

Crystallization aids in crystal structures; polymers with only unknown residues or fewer than 4
resolved ones; proteins with consecutive residues whose CA are more than 10 Å apart; and of two
clashing chains, where one has more than 30 % of its atoms within 1.7 Å of the other, the one with
the larger share. Structures above 9 Å or with more than 300 polymers are left out.
"""

from itertools import combinations

import numpy as np
import numpy.typing as npt

from bevatron.data.proteins.crop import near_atoms
from bevatron.data.readers.proteins.structure import POLYMERS, Structure
from bevatron.errors import DataError
from bevatron.typing import Array, BoolArray, IntArray

FILTERS = (
    "crystallization aids",
    "unknown residues alone",
    "short of observed residues",
    "broken backbones",
    "clashing chains",
)
"""Names of the filters, in order."""

WORST_RESOLUTION, MOST_POLYMERS, FEWEST_OBSERVED = 9.0, 300, 4

# fmt: off
_AIDS = ["SO4", "GOL", "EDO", "PO4", "ACT", "PEG", "DMS", "TRS", "PGE", "PG4", "FMT", "EPE", "MPD",
         "MES", "CD", "IOD"]
# fmt: on
_CRYSTALS = {
    "X-RAY DIFFRACTION",
    "NEUTRON DIFFRACTION",
    "ELECTRON CRYSTALLOGRAPHY",
    "POWDER DIFFRACTION",
    "FIBER DIFFRACTION",
}
_UNKNOWN = ("UNK", "N", "DN")
_FARTHEST_CA, _CLASH, _MOST_CLASHING = 10.0, 1.7, 0.3


def filter_chains(structure: Structure) -> tuple[Structure, npt.NDArray[np.int32]]:
    """Leave out the chains of an assembly that AlphaFold3 is not trained on.

    Returns
    -------
    structure
        The rest, which may have no chain.
    removed : int32 [5]
        Number of chains that each of `FILTERS` removed.
    """
    left_out = [_aids(structure), _unknown(structure), _short(structure), _broken(structure)]
    kept = ~np.any(left_out, axis=0)
    clashing = np.zeros_like(kept)
    clashing[kept] = _clashing(structure.take_chains(np.flatnonzero(kept)))
    counts: list[int] = []
    before = np.zeros_like(kept)
    for mask in (*left_out, clashing):
        counts.append(int((mask & ~before).sum()))
        before |= mask
    rest = structure.take_chains(np.flatnonzero(~before)) if before.any() else structure
    return rest, np.array(counts, dtype=np.int32)


def certain(structure: Structure, lowest_plddt: float) -> Structure:
    """Return a predicted structure without the atoms of uncertain residues, which stay unobserved.

    Raises DataError if its B-factors are no pLDDT of 0 to 100.

    Parameters
    ----------
    lowest_plddt : a residue is certain if the B-factor of any of its atoms is above it
    """
    atoms, number = structure.atoms, len(structure.residues.number)
    low, high = float(atoms.b_factor.min()), float(atoms.b_factor.max())
    if not (low >= 0 and 1 < high <= 100):
        raise DataError(
            f"{structure.name}: its B-factors are {low:g} to {high:g}; expected the pLDDT of a "
            "prediction, 0 to 100"
        )
    above = np.bincount(atoms.residue, weights=atoms.b_factor > lowest_plddt, minlength=number) > 0
    return structure.take_atoms(above[atoms.residue])


def check_structure(structure: Structure) -> None:
    """Refuse an assembly that AlphaFold3 is not trained on.

    Raises DataError saying why.
    """
    resolution = structure.resolution
    if resolution is not None and resolution > WORST_RESOLUTION:
        raise DataError(
            f"{structure.name}: AlphaFold3 is not trained on a resolution of {resolution:g} Å, "
            f"above {WORST_RESOLUTION:g} Å; --keep-all keeps it"
        )
    polymers = int(np.isin(structure.chains.kind, POLYMERS).sum())
    if polymers > MOST_POLYMERS:
        raise DataError(
            f"{structure.name}: AlphaFold3 is not trained on assemblies of {polymers:,} polymers, "
            f"above {MOST_POLYMERS}; --keep-all keeps it"
        )


def _of_all_residues(structure: Structure, holds: BoolArray) -> BoolArray:
    """Whether something holds for all residues of each chain, [C]."""
    failing = np.bincount(structure.residues.chain[~holds], minlength=len(structure.chains.label))
    return np.equal(failing, 0)


def _aids(structure: Structure) -> BoolArray:
    if not _CRYSTALS & {method.upper() for method in structure.methods}:
        return np.zeros(len(structure.chains.label), dtype=np.bool_)
    of_aids = _of_all_residues(structure, np.isin(structure.residues.component, _AIDS))
    return of_aids & ~np.isin(structure.chains.kind, POLYMERS)


def _unknown(structure: Structure) -> BoolArray:
    unknown = np.isin(structure.residues.component, _UNKNOWN)
    return _of_all_residues(structure, unknown) & np.isin(structure.chains.kind, POLYMERS)


def _short(structure: Structure) -> BoolArray:
    observed = np.bincount(
        structure.residues.chain[structure.residues.observed], minlength=len(structure.chains.label)
    )
    return (observed < FEWEST_OBSERVED) & np.isin(structure.chains.kind, POLYMERS)


def _broken(structure: Structure) -> BoolArray:
    """Whether CA of neighbours are too far apart, of proteins."""
    atoms, residues = structure.atoms, structure.residues
    ca = np.flatnonzero(
        (atoms.name == "CA") & (structure.chains.kind[residues.chain[atoms.residue]] == "protein")
    )
    residue = atoms.residue[ca]
    chain, number = residues.chain[residue], residues.number[residue]
    apart = np.linalg.norm(np.diff(atoms.position[ca], axis=0), axis=1) > _FARTHEST_CA
    wrong = apart & (np.diff(chain) == 0) & (np.diff(number) == 1)
    broken = np.zeros(len(structure.chains.label), dtype=np.bool_)
    broken[chain[:-1][wrong]] = True
    return broken


def _clashing(structure: Structure) -> BoolArray:
    """Choose the chains to remove: the larger share of clashes, then fewer atoms, then the later.

    Chains that a bond joins do not clash.
    """
    atoms = structure.atoms
    chain = structure.residues.chain[atoms.residue]
    heavy = (atoms.element > 1) & (structure.chains.kind != "water")[chain]
    number = len(structure.chains.label)
    members = [np.flatnonzero(heavy & (chain == i)) for i in range(number)] if number > 1 else []
    joined = {tuple(sorted(pair)) for pair in chain[structure.links.atoms].tolist()}
    removed = np.zeros(number, dtype=np.bool_)
    for first, second in _close(atoms.position, members):
        if removed[first] or removed[second] or (first, second) in joined:
            continue
        own, other = members[first], members[second]
        shares = [
            near_atoms(atoms.position[a], atoms.position[b], _CLASH).sum() / len(a)
            for a, b in ((own, other), (other, own))
        ]
        if max(shares) > _MOST_CLASHING:
            worse = (shares[0], -len(own)) > (shares[1], -len(other))
            removed[first if worse else second] = True
    return removed


def _close(position: Array, members: list[IntArray]) -> list[tuple[int, int]]:
    """List the pairs of chains whose boxes are near each other."""
    filled = [i for i, atoms in enumerate(members) if len(atoms)]
    low = {i: position[members[i]].min(axis=0) for i in filled}
    high = {i: position[members[i]].max(axis=0) for i in filled}
    return [
        (i, j)
        for i, j in combinations(filled, 2)
        if np.maximum(low[i] - high[j], low[j] - high[i]).max() < _CLASH
    ]
