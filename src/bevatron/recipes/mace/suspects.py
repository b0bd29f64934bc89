"""Suspicious structures: atoms too close or all too far apart, energies far from the others.

Such structures are not refused, because some data sets hold them on purpose; each is named.
"""

import numpy as np
from ase.data import covalent_radii

from bevatron.data.store.store import Store
from bevatron.data.summary.structures import edge_lengths
from bevatron.output import counted
from bevatron.typing import Array, BoolArray, FloatArray, IntArray

CLOSE = 0.5
"""Å; the shortest bond, that of H2, is 0.74."""

STRETCHED = 1.4
"""Nearest neighbours over covalent bonds; metals and salts reach 1.2, molecules in Bohr 1.9."""

LOOKED_AT = 100
"""Structures whose nearest neighbours are compared with covalent bonds."""

NOBLE_GASES = (2, 10, 18, 36, 54, 86)

FAR = 200.0
"""Robust standard deviations of the energy per atom; highly excited structures reach 160."""

LEAST_FAR = 1.0
"""eV per atom; below this an energy is never far, however narrow the others are."""

FITTED = 20_000
"""Structures from which energies per element are fitted; all are compared."""

NAMED = 3
"""Structures that a warning names."""


def suspects(store: Store) -> list[str]:
    """Warn of structures in a store whose distances or energies are out of line.

    Returns
    -------
    Lines that name file and frame.
    """
    return [*_close_atoms(store), *_stretched(store), *_far_energies(store)]


def _stretched(store: Store) -> list[str]:
    """Warn of distances that look like those of Bohr read as Å, in most structures."""
    chosen = np.unique(np.linspace(0, len(store) - 1, LOOKED_AT).astype(int)).tolist()
    ratios = {index: ratio for index in chosen if (ratio := _nearest(store, index)) is not None}
    usual = float(np.median(list(ratios.values()))) if ratios else 0.0
    if usual <= STRETCHED:
        return []
    index = min(ratios, key=lambda i: abs(ratios[i] - usual))
    warning = (
        f"warning: atoms are far apart in most structures, such as {store.describe(index)}, whose "
        f"nearest neighbours are at {ratios[index]:.2g} times the length of a covalent bond; are "
        "positions and cell in Å? (1 Å is 1.89 Bohr)"
    )
    return [warning]


def _nearest(store: Store, index: int) -> float | None:
    """Return the median distance of nearest neighbours over that of covalent bonds, if any."""
    sample = store[index]
    numbers = sample["atomic_numbers"]
    senders, receivers = sample["edges"].T
    bonds = covalent_radii[numbers[senders]] + covalent_radii[numbers[receivers]]
    nearest = np.full(len(numbers), np.inf)
    np.minimum.at(nearest, receivers, edge_lengths(sample) / bonds)
    known = np.isfinite(nearest) & ~np.isin(numbers, NOBLE_GASES)
    return float(np.median(nearest[known])) if known.any() else None


def _close_atoms(store: Store) -> list[str]:
    """Find structures with atoms closer than `CLOSE`; a store of an earlier version is passed."""
    summary = (store.manifest.get("summary") or {}).get("all") or {}
    if summary.get("distances", {}).get("min", CLOSE) >= CLOSE:
        return []
    found: list[tuple[float, int, list[int]]] = []
    for index in range(len(store)):
        sample = store[index]
        lengths = edge_lengths(sample)
        if len(lengths) and lengths.min() < CLOSE:
            pair = sorted(sample["edges"][lengths.argmin()].tolist())
            found.append((float(lengths.min()), index, pair))
    found.sort(key=lambda one: one[0])
    named = [
        f"{store.describe(index)}: atoms {pair[0]} and {pair[1]}, {length:.2g} Å apart"
        for length, index, pair in found[:NAMED]
    ]
    if not found:
        return []
    warning = (
        f"warning: atoms closer than {CLOSE} Å in {_number(len(found), named)}; their energies and "
        "forces outweigh all others: leave such structures out unless intended"
    )
    return [warning]


def _far_energies(store: Store) -> list[str]:
    """Find energies far from what the elements of a structure predict, per head."""
    counts, energy, head = _compositions(store)
    lines = []
    for number in np.unique(head):
        own = np.flatnonzero((head == number) & np.isfinite(energy) & (counts.sum(axis=1) > 1))
        lines += _far_of_head(store, counts[own], energy[own], own)
    return lines


def _far_of_head(store: Store, counts: Array, energy: FloatArray, indices: IntArray) -> list[str]:
    """Find them among structures of one head."""
    present = counts.any(axis=0)
    if len(energy) < 2 * present.sum() + 8:
        return []
    num_atoms = counts.sum(axis=1)
    shares, per_atom = counts[:, present] / num_atoms[:, None], energy / num_atoms
    residual, known = robust_residuals(shares, per_atom)
    centre = np.median(residual[known])
    deviation = np.abs(residual - centre)
    usual = float(1.4826 * np.median(deviation[known]))
    far = np.flatnonzero(known & (deviation > max(FAR * usual, LEAST_FAR)))
    if not len(far):
        return []
    far = far[np.argsort(-deviation[far], kind="stable")]
    named = [
        f"{store.describe(int(indices[i]))}: {energy[i]:.6g} eV, {deviation[i]:.3g} eV/atom off"
        for i in far[:NAMED]
    ]
    warning = (
        f"warning: energies far from the others in {_number(len(far), named)}; the others lie "
        f"within {usual:.2g} eV/atom of what their elements predict: check them, and leave out "
        "failed calculations and those in another unit or reference"
    )
    return [warning]


def robust_residuals(shares: FloatArray, per_atom: FloatArray) -> tuple[FloatArray, BoolArray]:
    """Fit energies per atom by those of the elements and return the residuals.

    Least absolute residuals, by least squares with weights 1 / |residual| (Huber's near zero), so
    that a few energies of any size do not move the fit.

    Parameters
    ----------
    shares : [S, Z]
        Share of each element.
    per_atom : [S] eV

    Returns
    -------
    residual : [S] eV
    known : [S]
        Whether the fit knows all elements of a structure.
    """
    order = np.random.default_rng(0).permutation(len(per_atom))[:FITTED]
    x, y = shares[order], per_atom[order]
    root = np.ones(len(y))
    energies: FloatArray = np.zeros(shares.shape[1])
    for _ in range(30):
        energies = np.asarray(np.linalg.lstsq(x * root[:, None], y * root, rcond=None)[0])
        left = np.abs(y - x @ energies)
        root = 1 / np.sqrt(np.maximum(left, max(float(np.median(left)), 1e-9)))
    unseen = np.asarray(shares[:, ~x.any(axis=0)])
    known: BoolArray = np.asarray(~unseen.any(axis=1))
    return per_atom - shares @ energies, known


def _compositions(store: Store) -> tuple[Array, FloatArray, IntArray]:
    """Return atoms by structure and element [S, Z], energies [S] and heads [S]."""
    present = [np.unique(numbers) for numbers, _ in store.flat("atomic_numbers")]
    elements = np.unique(np.concatenate(present))
    column = np.zeros(120, dtype=np.int64)
    column[elements] = np.arange(len(elements))
    counts, energies, heads = [], [], []
    columns = (store.flat(name) for name in ("atomic_numbers", "energy", "head"))
    for (numbers, ptr), (energy, _), (head, _) in zip(*columns, strict=True):
        size = len(ptr) - 1
        places = np.repeat(np.arange(size), np.diff(ptr)) * len(elements) + column[numbers]
        flat = np.bincount(places, minlength=size * len(elements)).astype(np.int32)
        counts.append(flat.reshape(size, len(elements)))
        energies.append(np.asarray(energy, dtype=np.float64).reshape(-1))
        heads.append(np.asarray(head, dtype=np.int64).reshape(-1))
    return np.concatenate(counts), np.concatenate(energies), np.concatenate(heads)


def _number(count: int, named: list[str]) -> str:
    more = "; ..." if count > len(named) else ""
    return f"{counted(count, 'structure')} ({'; '.join(named)}{more})"
