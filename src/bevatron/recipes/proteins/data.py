"""Data of a run on drawn proteins: which stores, how they are divided, their samples."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import InitVar, dataclass, replace
from pathlib import Path
from typing import Any, SupportsIndex

from bevatron.config import take_renamed
from bevatron.data.dataset import check_sizes, set_aside
from bevatron.data.packing.draws import Draws, Source
from bevatron.errors import ConfigError
from bevatron.models.common.hyper_parameters import check_ranges
from bevatron.output import counted
from bevatron.typing import Arrays, IntArray


@dataclass(frozen=True)
class ProteinDataConfig:
    """Stores of proteins and how they are divided.

    Attributes
    ----------
    train
        Stores, or folders of structures and alignments, which are prepared into the run's folder,
        all into one store.
    shares
        How often each store is drawn from, relative to the others, such as 1 3 for known and
        predicted structures; by default in proportion to their sizes.
    valid : stores or folders for validation; by default a part of the first of ``train``
    valid_size
        Size of that random part: a fraction below 1, or a number, of clusters of similar sequences
        (chains) or of entries (complexes).
    valid_most : maximum number of chains or complexes for validation
    split_seed : seed of the random split
    valid_fraction : old name of ``valid_size``
    """

    train: tuple[Path, ...] = ()
    shares: tuple[float, ...] = ()
    valid: tuple[Path, ...] = ()
    valid_size: float = 0.05
    valid_most: int = 64
    split_seed: int = 0
    valid_fraction: InitVar[float | None] = None

    def __post_init__(self, valid_fraction: float | None) -> None:
        """Convert an old key; refuse values out of range."""
        take_renamed(self, "data", valid_fraction=valid_fraction)
        check_sizes(valid_size=self.valid_size)
        check_ranges(self, [("valid_most", 1, math.inf)])

    def divided(self, number: int) -> tuple[IntArray, IntArray]:
        """Divide what is trained on from what validates, both of the first store.

        Raises ConfigError if nothing would be left to train on.
        """
        kept, taken = set_aside(number, self.split_seed, valid_size=self.valid_size)
        return kept, taken

    def check_given(self, what: str) -> None:
        """Refuse nothing or twice the same to train on, other shares, several validation stores."""
        if not self.train:
            raise ConfigError(f"data.train: expected a store of {what} or a folder of structures")
        places = [path.resolve() for path in self.train]
        for path, place in zip(self.train, places, strict=True):
            if places.count(place) > 1:
                raise ConfigError(f"data.train: {path} is there twice; give it once")
        if self.shares and len(self.shares) != len(self.train):
            raise ConfigError(
                f"data.shares: has {counted(len(self.shares), 'number')} for "
                f"{counted(len(self.train), 'store')}; expected one for each (folders of "
                "structures become one store)"
            )
        if not all(0 < share < math.inf for share in self.shares):
            raise ConfigError("data.shares: expected numbers above 0")
        if len(self.valid) > 1:
            raise ConfigError("data.valid: expected one store; prepare the folders together")

    def warnings(self) -> list[str]:
        """Name stores that are, or may hold what is, both trained on and validated on."""
        if len(self.train) > 1 and not self.valid and self.valid_size:
            part = f"a part of {self.train[0]} is held out for validation"
            return [f"warning: {part}, but other stores may hold its like; give data.valid"]
        train = [path.resolve() for path in self.train]
        both = [path for path in self.valid if path.resolve() in train]
        return [f"warning: {path} is validated on and trained on" for path in both]


class StoredSamples(ABC):
    """Samples that are drawn from a store, which each process opens for itself.

    Attributes
    ----------
    path : the store
    units : int64 [n, _]
        Of each sample the entry, and what of it the sample is about.
    """

    def __init__(self, path: Path, units: IntArray) -> None:
        self.path, self.units = Path(path), units

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "opened"}

    def __len__(self) -> int:
        return len(self.units)

    def __getitem__(self, index: SupportsIndex) -> Arrays:
        return self.sample(index, 0)

    @property
    @abstractmethod
    def opened(self) -> tuple[Any, ...]:
        """The store and what belongs to it, a `functools.cached_property`."""

    @abstractmethod
    def sample(self, index: SupportsIndex, seed: int) -> Arrays:
        """Make the sample of a seed."""


def mixture(sources: Sequence[Source], shares: Sequence[float], seed: int) -> Draws:
    """Return the draws from stores, with the shares of the configuration if it has any.

    Stores in folders of one name are told apart by their numbers.
    """
    names = [source.name for source in sources]
    named = [
        name if names.count(name) == 1 else f"{name} ({number})"
        for number, name in enumerate(names, start=1)
    ]
    given = shares or [source.share for source in sources]
    parts = zip(sources, named, given, strict=True)
    return Draws([replace(each, name=name, share=share) for each, name, share in parts], seed)
