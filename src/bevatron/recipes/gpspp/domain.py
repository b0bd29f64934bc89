"""The domain of a model: the molecules it was trained on, and how others differ from them."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from ase.data import chemical_symbols

from bevatron.data.dataset import Concatenated, Dataset, Subset
from bevatron.data.samples import feature_set
from bevatron.models.gpspp import CorruptionConfig, GPSPlusPlusConfig, TrainedOn
from bevatron.typing import Array, IntArray

OFFSETS = {"atomic_number": 1, "formal_charge": -5}
"""Columns of atoms that are compared, and what their index 0 stands for."""


def trained_on(train: Dataset, model: GPSPlusPlusConfig, corruption: CorruptionConfig) -> TrainedOn:
    """Describe the training molecules for model.json; positions count if they are ever shown."""
    atoms = train.lengths("atom_features")
    _, only_3d, both = corruption.shares
    shown = model.uses_positions and only_3d + both > 0
    has_charges = "formal_charge" in feature_set(model.feature_set).atom
    charges = _occurring(train, model, "formal_charge") if has_charges else None
    return TrainedOn(
        atomic_numbers=_occurring(train, model, "atomic_number"),
        min_atoms=int(atoms.min()),
        max_atoms=int(atoms.max()),
        positions=shown and bool(train.lengths("positions").any()),
        formal_charges=charges,
    )


def differences(dataset: Dataset, model: GPSPlusPlusConfig) -> list[str]:
    """Say for every molecule in what it differs from those that a model was trained on.

    Returns
    -------
    A sentence for each; empty if it does not differ, is not a usable molecule or nothing is known.
    """
    known = model.trained_on
    reasons = [""] * len(dataset)
    if known is None:
        return reasons
    seen = {"atomic_number": known.atomic_numbers}
    if known.formal_charges is not None:
        seen["formal_charge"] = known.formal_charges
    start = 0
    for atoms, offsets in _atoms(dataset, model, tuple(seen)):
        sizes = np.diff(offsets)
        new = {name: ~np.isin(values, seen[name]) for name, values in atoms.items()}
        owner = np.repeat(np.arange(len(sizes)), sizes)
        strange = np.bincount(owner[np.any([*new.values()], axis=0)], minlength=len(sizes)) > 0
        beyond = (sizes > 0) & ((sizes < known.min_atoms) | (sizes > known.max_atoms))
        for row in np.flatnonzero(strange | beyond):
            own = slice(offsets[row], offsets[row + 1])
            unseen = {name: np.unique(atoms[name][own][new[name][own]]) for name in atoms}
            reasons[start + row] = _sentence(known, unseen, int(sizes[row]))
        start += len(sizes)
    return reasons


def _sentence(known: TrainedOn, unseen: Mapping[str, IntArray], size: int) -> str:
    elements = [chemical_symbols[number] for number in unseen["atomic_number"]]
    charges = [f"{charge:+d}" for charge in unseen.get("formal_charge", ())]
    parts = []
    if elements:
        parts.append(f"no {', '.join(elements)}")
    if charges:
        parts.append(f"no atom of charge {', '.join(charges)}")
    if size > known.max_atoms:
        parts.append(f"at most {known.max_atoms} heavy atoms ({size} here)")
    if size < known.min_atoms:
        parts.append(f"at least {known.min_atoms} heavy atoms ({size} here)")
    return f"outside the training data, which have {' and '.join(parts)}"


def _atoms(
    dataset: Dataset, model: GPSPlusPlusConfig, names: Sequence[str]
) -> Iterator[tuple[dict[str, IntArray], IntArray]]:
    """Yield columns of the atoms of many molecules, and where each molecule begins."""
    columns = feature_set(model.feature_set).atom
    for features, offsets in dataset.flat("atom_features"):  # type: ignore[attr-defined]
        found = {
            name: features[:, columns.index(name)].astype(np.int64) + OFFSETS[name]
            for name in names
        }
        yield found, np.asarray(offsets, dtype=np.int64)


def _occurring(
    dataset: Dataset, model: GPSPlusPlusConfig, name: str, rows: Array | None = None
) -> tuple[int, ...]:
    """List the values of a column that occur in some molecules, all by default."""
    if isinstance(dataset, Subset):
        own = dataset.indices if rows is None else dataset.indices[rows]
        return _occurring(dataset.dataset, model, name, own)
    chosen = np.ones(len(dataset), dtype=bool)
    if rows is not None:
        chosen[:] = False
        chosen[rows] = True
    found: set[int] = set()
    if isinstance(dataset, Concatenated):
        parts: Sequence[Array] = np.split(chosen, dataset.starts[1:-1])
        for part, own in zip(dataset.datasets, parts, strict=True):
            found |= {*_occurring(part, model, name, np.flatnonzero(own))}
        return tuple(sorted(found))
    start = 0
    for atoms, offsets in _atoms(dataset, model, (name,)):
        stop = start + len(offsets) - 1
        own = atoms[name][np.repeat(chosen[start:stop], np.diff(offsets))]
        found |= {*np.unique(own).tolist()}
        start = stop
    return tuple(sorted(found))
