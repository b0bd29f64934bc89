"""Data sets for the loader and the trainer: stores, subsets and concatenations of them."""

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol, SupportsIndex, get_args, runtime_checkable

import numpy as np

from bevatron.errors import ConfigError, DataError
from bevatron.typing import Array, Arrays, FloatArray, IntArray

Role = Literal["train", "valid", "test"]
ROLES: tuple[Role, ...] = get_args(Role)
"""What samples, or vertices of a graph, are for."""


class SampleSource(Protocol):
    """Samples by index; picklable, because every loader worker opens it again."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def __getitem__(self, index: int) -> Arrays:
        """Read a sample."""

    def describe(self, index: int) -> str:
        """Return the origin of a sample: ``train.xyz, frame 12``."""


class Dataset(SampleSource, Protocol):
    """Samples and their sizes, which packing needs.

    `bevatron.data.store.store.Store` is one, `Subset` and `Concatenated` are made of others.
    """

    def lengths(self, field: str) -> IntArray:
        """Return the number of rows of a ragged field in every sample, [n]; reads no samples."""


@runtime_checkable
class SeededSource(Protocol):
    """A data set whose samples are partly random: crops, rows of an alignment, poses."""

    def sample(self, index: int, seed: int) -> Arrays:
        """Make a sample, equal for equal (index, seed) in every process."""


def seeded_sample(dataset: SampleSource, index: int, seed: int) -> Arrays:
    """Make a sample with a seed; a data set without random samples just reads it."""
    return dataset.sample(index, seed) if isinstance(dataset, SeededSource) else dataset[index]


@runtime_checkable
class Replaceable(Protocol):
    """A data set in which other samples may replace one, such as drawn ones."""

    def substitute(self, index: int, attempt: int) -> int:
        """Return the index of a replacement for a sample: the first for attempt 1, and so on."""


class Subset:
    """A selection of samples, in the given order; DataError if an index is out of range.

    Parameters
    ----------
    indices : indices into ``dataset``, [n]

    Examples
    --------
    >>> train, valid = split(10, (0.8, 0.2), seed=0)
    >>> sorted([*train.tolist(), *valid.tolist()]) == list(range(10))
    True
    """

    def __init__(self, dataset: Dataset, indices: Sequence[int] | IntArray) -> None:
        self.dataset = dataset
        self.indices: IntArray = np.array(indices, dtype=np.int64).reshape(-1)
        num = len(dataset)
        wrong = self.indices[(self.indices < 0) | (self.indices >= num)]
        if len(wrong):
            raise DataError(f"subset: there is no sample {wrong[0]}, the data set holds {num}")

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: SupportsIndex) -> Arrays:
        return self.dataset[int(self.indices[operator.index(index)])]

    def sample(self, index: SupportsIndex, seed: int) -> Arrays:
        """Make a sample with a seed."""
        return seeded_sample(self.dataset, int(self.indices[operator.index(index)]), seed)

    def describe(self, index: SupportsIndex) -> str:
        """Return the origin of a sample."""
        return self.dataset.describe(int(self.indices[operator.index(index)]))

    def lengths(self, field: str) -> IntArray:
        """Return the number of rows of a ragged field in every sample, [n]."""
        return self.dataset.lengths(field)[self.indices]


class InMemory:
    """Samples in memory; ``origin`` names the origin of each for `describe`."""

    def __init__(self, samples: Iterable[Arrays], origin: Callable[[int], str]) -> None:
        self.samples, self.origin = list(samples), origin

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: SupportsIndex) -> Arrays:
        return self.samples[index]

    def describe(self, index: int) -> str:
        """Return the origin of a sample."""
        return self.origin(index)

    def lengths(self, field: str) -> IntArray:
        """Return the number of rows of a ragged field in every sample, [n]."""
        return np.array([len(sample[field]) for sample in self.samples], dtype=np.int64)


class Concatenated:
    """Several data sets concatenated; DataError if there are no parts, or not one head for each.

    Parameters
    ----------
    heads
        For each part the number that replaces ``head`` of its samples, or one for each number that
        these have; None keeps the stored one.
    """

    def __init__(
        self, datasets: Sequence[Dataset], heads: Sequence[int | Sequence[int]] | None = None
    ) -> None:
        if not datasets:
            raise DataError("a data set of several needs at least one part")
        if heads is not None and len(heads) != len(datasets):
            raise DataError(f"there are {len(datasets)} data sets but {len(heads)} heads")
        self.datasets = list(datasets)
        self.heads: list[Array] | None = None
        if heads is not None:
            self.heads = [np.array(head, dtype=np.int32) for head in heads]
        self.starts: IntArray = np.cumsum([0, *map(len, self.datasets)], dtype=np.int64)

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __getitem__(self, index: SupportsIndex) -> Arrays:
        part, row = self.locate(index)
        return self._with_head(self.datasets[part][row], part)

    def sample(self, index: SupportsIndex, seed: int) -> Arrays:
        """Make a sample with a seed."""
        part, row = self.locate(index)
        return self._with_head(seeded_sample(self.datasets[part], row, seed), part)

    def _with_head(self, sample: Arrays, part: int) -> Arrays:
        if self.heads is None:
            return sample
        head = self.heads[part]
        return {**sample, "head": head[int(sample["head"])] if head.ndim else head}

    def locate(self, index: SupportsIndex) -> tuple[int, int]:
        """Return the part that holds a sample and the index within it.

        Raises IndexError if there is no such sample.
        """
        place = operator.index(index)
        if place < 0:
            place += len(self)
        if not 0 <= place < len(self):
            raise IndexError(f"the data set holds {len(self)} samples")
        part = int(np.searchsorted(self.starts, place, side="right")) - 1
        return part, place - int(self.starts[part])

    def describe(self, index: SupportsIndex) -> str:
        """Return the origin of a sample."""
        part, row = self.locate(index)
        return self.datasets[part].describe(row)

    def lengths(self, field: str) -> IntArray:
        """Return the number of rows of a ragged field in every sample, [n]."""
        return np.concatenate([dataset.lengths(field) for dataset in self.datasets])


def column(dataset: Any, field: str) -> Any:
    """Return a field of fixed shape of all samples, [n, ...]; of a store no other field is read."""
    if isinstance(dataset, Subset):
        return column(dataset.dataset, field)[dataset.indices]
    if isinstance(dataset, Concatenated):
        return np.concatenate([column(part, field) for part in dataset.datasets])
    if hasattr(dataset, "flat"):
        return np.concatenate([flat for flat, _ in dataset.flat(field)])
    return np.stack([dataset[i][field] for i in range(len(dataset))])


def split(num_samples: int, fractions: Sequence[float], seed: int) -> list[IntArray]:
    """Split samples at random into disjoint parts, identically on every machine and version.

    Raises ConfigError if a fraction is negative, the sum exceeds 1, or there are too few samples.

    Parameters
    ----------
    fractions
        Fraction of each part, at most 1 in sum. A part above 0 gets at least one sample.

    Returns
    -------
    list of int64 arrays
        Ascending indices of the samples of each part.

    Examples
    --------
    >>> [len(part) for part in split(100, (0.9, 0.1), seed=0)]
    [90, 10]
    """
    shares = np.asarray(fractions, dtype=np.float64)
    if not len(shares) or not np.isfinite(shares).all() or (shares < 0).any():
        raise ConfigError(f"fractions: expected numbers of at least 0, got {list(fractions)}")
    if shares.sum() > 1 + 1e-9:
        raise ConfigError(f"fractions: add up to {shares.sum():g}, more than 1")
    counts = _shares_to_counts(num_samples, shares)
    parts = int((shares > 0).sum())
    if num_samples < parts:
        raise ConfigError(f"fractions: {num_samples} samples are too few for {parts} parts")
    order = np.argsort(_random_keys(num_samples, seed), kind="stable")
    ends = np.cumsum(counts)
    return [np.sort(order[end - count : end]) for count, end in zip(counts, ends, strict=True)]


def set_aside(num_samples: int, seed: int, **sizes: float) -> list[IntArray]:
    """Take parts out of samples at random; see `split`.

    Raises ConfigError that names them if nothing would be left.

    Parameters
    ----------
    sizes : size of each part by its key in ``data``: a fraction below 1 or a number of samples

    Returns
    -------
    list of int64 arrays
        What is left, then each part.

    Examples
    --------
    >>> [len(part) for part in set_aside(100, 0, valid_size=0.1, test_size=20)]
    [70, 10, 20]
    """
    shares = [size if size < 1 else size / num_samples for size in sizes.values()]
    if sum(shares) >= 1:
        names, asked = _listed(sizes)
        raise ConfigError(f"{names}: {asked} of {num_samples} would leave nothing to train on")
    return split(num_samples, (1 - sum(shares), *shares), seed)


def check_sizes(**sizes: float) -> None:
    """Refuse sizes of parts that are neither fractions below 1 nor whole numbers.

    Raises ConfigError that names them, also of fractions that leave nothing.
    """
    names, given = _listed(sizes)
    if not all(
        0 <= size < 1 or (size >= 1 and float(size).is_integer()) for size in sizes.values()
    ):
        raise ConfigError(f"{names}: expected fractions below 1 or whole numbers, got {given}")
    if sum(size for size in sizes.values() if size < 1) >= 1:
        raise ConfigError(f"{names}: leave nothing to train on, got {given}")


def _listed(sizes: Mapping[str, float]) -> tuple[str, str]:
    """Return the keys and the values of sizes as they are written in a sentence."""
    names = " and ".join(f"data.{name}" for name in sizes)
    return names, " and ".join(f"{size:g}" for size in sizes.values())


def _shares_to_counts(num_samples: int, shares: FloatArray) -> list[int]:
    """Round shares to counts with the right total; a share above 0 gets at least 1."""
    exact = shares * num_samples
    counts = np.floor(exact + 1e-9).astype(np.int64)
    total = round(float(exact.sum()))
    for part in np.argsort(counts - exact, kind="stable")[: max(0, total - int(counts.sum()))]:
        counts[part] += 1
    for part in np.flatnonzero((counts == 0) & (shares > 0)):
        if counts.sum() >= num_samples:
            counts[np.argmax(counts)] -= 1
        counts[part] += 1
    return [int(count) for count in counts]


def _random_keys(num: int, seed: int) -> Array:
    """Return one pseudo-random uint64 per sample by splitmix64, which never changes."""
    golden = 0x9E3779B97F4A7C15
    x = np.arange(1, num + 1, dtype=np.uint64) * np.uint64(golden)
    x += np.uint64((seed * 0xD1342543DE82EF95 + 1) % 2**64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
