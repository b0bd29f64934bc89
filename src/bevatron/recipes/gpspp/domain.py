"""What molecules a model was trained on, and in what others differ from them."""

from collections.abc import Iterator, Sequence

import numpy as np
from ase.data import chemical_symbols

from bevatron.data.dataset import Concatenated, Dataset, Subset
from bevatron.data.samples import feature_set
from bevatron.models.gpspp import CorruptionConfig, GPSPlusPlusConfig, TrainedOn
from bevatron.typing import Array, BoolArray, IntArray


def trained_on(train: Dataset, model: GPSPlusPlusConfig, corruption: CorruptionConfig) -> TrainedOn:
    """Describe the training molecules for model.json; positions count if they are ever shown."""
    atoms = train.lengths("atom_features")
    _, only_3d, both = corruption.shares
    shown = model.uses_positions and only_3d + both > 0
    return TrainedOn(
        atomic_numbers=tuple(np.flatnonzero(_elements(train, model)).tolist()),
        min_atoms=int(atoms.min()),
        max_atoms=int(atoms.max()),
        positions=shown and bool(train.lengths("positions").any()),
    )


def differences(dataset: Dataset, model: GPSPlusPlusConfig) -> list[str]:
    """Say for every molecule in what it differs from those that a model was trained on.

    Returns
    -------
    A sentence for each; empty if it does not differ, is no usable molecule or nothing is known.
    """
    known = model.trained_on
    reasons = [""] * len(dataset)
    if known is None:
        return reasons
    seen = np.zeros(len(chemical_symbols), dtype=bool)
    seen[list(known.atomic_numbers)] = True
    start = 0
    for numbers, offsets in _atomic_numbers(dataset, model):
        sizes = np.diff(offsets)
        new = ~seen[numbers]
        owner = np.repeat(np.arange(len(sizes)), sizes)
        strange = np.bincount(owner[new], minlength=len(sizes)) > 0
        beyond = (sizes > 0) & ((sizes < known.min_atoms) | (sizes > known.max_atoms))
        for row in np.flatnonzero(strange | beyond):
            own = slice(offsets[row], offsets[row + 1])
            elements = np.unique(numbers[own][new[own]])
            reasons[start + row] = _sentence(known, elements, int(sizes[row]))
        start += len(sizes)
    return reasons


def _sentence(known: TrainedOn, elements: IntArray, size: int) -> str:
    parts = []
    if len(elements):
        parts.append(f"no {', '.join(chemical_symbols[z] for z in elements)}")
    if size > known.max_atoms:
        parts.append(f"at most {known.max_atoms} heavy atoms ({size} here)")
    if size < known.min_atoms:
        parts.append(f"at least {known.min_atoms} heavy atoms ({size} here)")
    return f"outside the training data, which have {' and '.join(parts)}"


def _atomic_numbers(
    dataset: Dataset, model: GPSPlusPlusConfig
) -> Iterator[tuple[IntArray, IntArray]]:
    """Yield atomic numbers of the atoms of many molecules and the molecules' offsets."""
    column = feature_set(model.feature_set).atom.index("atomic_number")
    for features, offsets in dataset.flat("atom_features"):  # type: ignore[attr-defined]
        yield features[:, column].astype(np.int64) + 1, np.asarray(offsets, dtype=np.int64)


def _elements(dataset: Dataset, model: GPSPlusPlusConfig, rows: Array | None = None) -> BoolArray:
    """Whether each atomic number occurs in some molecules, all by default."""
    if isinstance(dataset, Subset):
        own = dataset.indices if rows is None else dataset.indices[rows]
        return _elements(dataset.dataset, model, own)
    chosen = np.ones(len(dataset), dtype=bool)
    if rows is not None:
        chosen[:] = False
        chosen[rows] = True
    found = np.zeros(len(chemical_symbols), dtype=bool)
    if isinstance(dataset, Concatenated):
        parts: Sequence[Array] = np.split(chosen, dataset.starts[1:-1])
        for part, own in zip(dataset.datasets, parts, strict=True):
            found |= _elements(part, model, np.flatnonzero(own))
        return found
    start = 0
    for numbers, offsets in _atomic_numbers(dataset, model):
        stop = start + len(offsets) - 1
        found[numbers[np.repeat(chosen[start:stop], np.diff(offsets))]] = True
        start = stop
    return found
