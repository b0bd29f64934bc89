"""Training, validation and test data of one head."""

from collections.abc import Mapping, Sequence

import numpy as np

from bevatron.data.dataset import Concatenated, Dataset, Subset, set_aside
from bevatron.errors import DataError
from bevatron.models.mace.features import ISOLATED_GROUP
from bevatron.typing import BoolArray, IntArray


def divide(
    given: Mapping[str, Sequence[Dataset]], sizes: Mapping[str, float], seed: int
) -> dict[str, Dataset]:
    """Split off data for each role that has a size and no data of its own.

    Isolated atoms stay in the training data, where they determine E0; so does what has an element
    that would be missing there. Raises a DataError if there are fewer structures than parts.
    """
    found: dict[str, Dataset] = {
        role: datasets[0] if len(datasets) == 1 else Concatenated(datasets)
        for role, datasets in given.items()
        if datasets
    }
    wanted = {role: size for role, size in sizes.items() if size and role not in found}
    if not wanted:
        return found
    train = found["train"]
    single = isolated_atoms(train)
    others = np.setdiff1d(np.arange(len(train)), single)
    if len(others) <= len(wanted):
        raise DataError(
            f"data.train: {len(others)} structures (isolated atoms apart) are too few to set some "
            "aside; give data.valid, or data.valid_size 0 to train without validation"
        )
    named = {f"{role}_size": size for role, size in wanted.items()}
    kept, *aside = [others[part] for part in set_aside(len(others), seed, **named)]
    kept = np.concatenate([kept, single])
    for role, chosen in zip(wanted, aside, strict=True):
        rare = _only_here(train, chosen, kept)
        kept = np.concatenate([kept, chosen[rare]])
        if not rare.all():
            found[role] = Subset(train, chosen[~rare])
    return found | {"train": Subset(train, np.sort(kept))}


def isolated_atoms(dataset: Dataset) -> IntArray:
    """Find the samples that are isolated atoms of the group that gives E0."""
    single = np.flatnonzero(dataset.lengths("atomic_numbers") == 1)
    marked = ISOLATED_GROUP.encode()
    return np.array([i for i in single if bytes(dataset[int(i)]["group"]) == marked], np.int64)


def check_elements(dataset: Dataset, atomic_numbers: Sequence[int], what: str) -> None:
    """Reject structures with elements that the training data lack, naming the first."""
    known = set(atomic_numbers)
    for i in range(len(dataset)):
        unknown = set(dataset[i]["atomic_numbers"].tolist()) - known
        if unknown:
            from ase.data import chemical_symbols

            names = ", ".join(chemical_symbols[z] for z in sorted(unknown))
            raise DataError(
                f"{dataset.describe(i)}: holds {names}, but no structure to train on does; "
                f"remove it from the {what} data"
            )


def _only_here(dataset: Dataset, aside: IntArray, kept: IntArray) -> BoolArray:
    """Mark held-out structures with an element that the training data lack."""
    elements = [frozenset(dataset[int(i)]["atomic_numbers"].tolist()) for i in aside]
    missing = set().union(*elements)
    for i in kept:
        if not missing:
            break
        missing -= set(dataset[int(i)]["atomic_numbers"].tolist())
    return np.array([bool(own & missing) for own in elements], dtype=bool)
