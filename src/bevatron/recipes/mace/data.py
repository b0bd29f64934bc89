"""Data sets of labelled structures for a recipe: from paths in a configuration to samples.

A path is a prepared store or a file of structures; files are prepared on the fly. The data
of several heads are joined into one data set whose samples carry the index of their head.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import tyro

from bevatron.config import fingerprint, take_renamed
from bevatron.data.dataset import ROLES, Concatenated, Dataset, check_sizes
from bevatron.data.readers import LabelOptions
from bevatron.data.store.stage import stage
from bevatron.data.store.store import Store
from bevatron.errors import ConfigError
from bevatron.recipes.mace.splits import divide
from bevatron.recipes.mace.stores import open_structures
from bevatron.recipes.mace.suspects import suspects
from bevatron.typing import IntArray

E0Choice = Literal["auto", "least_squares", "isolated"] | dict[str, float]
"""Source of the energies of isolated atoms; explicit ones are by chemical symbol, in eV."""


@dataclass(frozen=True)
class SourceConfig:
    """Files or stores and how to split them.

    Attributes
    ----------
    train : files of structures or prepared stores (also ``--data``)
    valid : files or stores for validation
    test : files or stores for the errors in the report
    valid_size
        What is held out of ``train`` for validation if there are no such files: a fraction below 1,
        or a number of structures.
    test_size : what is held out for tests, likewise
    labels : names of the labels in the files
    e0
        Energies of isolated atoms, eV: ``auto`` (isolated atoms in the data if every element has
        one, else least squares), one of both, or one value for each element.
    valid_fraction : old name of ``valid_size``
    test_fraction : old name of ``test_size``
    """

    train: tuple[Path, ...] = ()
    valid: tuple[Path, ...] = ()
    test: tuple[Path, ...] = ()
    valid_size: float = 0.1
    test_size: float = 0.0
    labels: LabelOptions = field(default_factory=LabelOptions)
    e0: E0Choice = "auto"
    valid_fraction: InitVar[float | None] = None
    test_fraction: InitVar[float | None] = None

    def __post_init__(self, valid_fraction: float | None, test_fraction: float | None) -> None:
        """Convert old keys; reject sizes that leave nothing to train on."""
        take_renamed(self, "data", valid_fraction=valid_fraction, test_fraction=test_fraction)
        check_sizes(valid_size=self.valid_size, test_size=self.test_size)

    @property
    def sizes(self) -> dict[str, float]:
        """Sizes of what is taken out of ``train``, by role."""
        return {"valid": self.valid_size, "test": self.test_size}


@dataclass(frozen=True)
class DataConfig(SourceConfig):
    """Data of one model; data sets with their own heads go under ``heads``.

    Attributes
    ----------
    heads
        Files by the name of their head. Without it there is one head, named ``default``.
    split_seed : seed of the random split
    prepared : where files are prepared; the run's folder by default
    prepare_workers : processes that prepare; all usable cores by default
    """

    heads: Annotated[dict[str, SourceConfig], tyro.conf.Suppress] = field(default_factory=dict)
    split_seed: int = 0
    prepared: Path | None = None
    prepare_workers: int | None = None

    def sources(self) -> dict[str, SourceConfig]:
        """Head name -> its files.

        Raises ConfigError if there is nothing to train on, or both ``train`` and ``heads``.
        """
        if self.heads and self.train:
            raise ConfigError("data: give either 'train' or 'heads', each of which has 'train'")
        if self.heads:
            sources = dict(self.heads)
        else:
            plain = {item.name: getattr(self, item.name) for item in fields(SourceConfig)}
            sources = {"default": SourceConfig(**plain)}
        for name, source in sources.items():
            if not source.train:
                where = f"data.heads.{name}.train" if self.heads else "data.train"
                raise ConfigError(
                    f'{where}: expected a file of structures or a store (`data="FILE"`)'
                )
        return sources


@dataclass(frozen=True)
class StructureData:
    """The data sets of a run.

    Attributes
    ----------
    train, valid, test : ``valid`` and ``test`` are None where nothing was set aside
    heads : names; a sample's ``head`` is an index into them
    e0 : for each head with data: how E0 is found, given energies by atomic number
    fingerprint : hash of the training structures and their split; a run is not resumed with others
    report : lines for the log: what the readers found
    """

    train: Dataset
    valid: Dataset | None
    test: Dataset | None
    heads: tuple[str, ...]
    e0: Mapping[str, Literal["auto", "least_squares", "isolated"] | Mapping[int, float]]
    fingerprint: str
    report: tuple[str, ...]


def load_structures(
    config: DataConfig,
    cutoff: float,
    prepared: Path,
    first_heads: Sequence[str] = (),
    stage_to: Path | None = None,
) -> StructureData:
    """Open or prepare all data of a run and split them.

    Isolated atoms (group ``IsolatedAtom``) stay in the training set: they only determine E0. Raises
    DataError or ConfigError for data that must not be trained on and configurations that contradict
    each other.

    Parameters
    ----------
    cutoff : neighbour cutoff, Å
    prepared : where files are prepared unless the configuration names a folder
    first_heads : heads that a model already has; new heads of the data follow
    stage_to : node-local folder that stores are copied to and read from
    """
    sources = _named_sources(config, first_heads)
    own = _heads_of(sources)
    # The structures of one source may name their heads themselves.
    in_files = list(own) != list(sources)
    if first_heads and in_files:
        raise ConfigError("data.labels.heads: give data.heads instead, old heads are kept")
    heads = (*first_heads, *(name for name in own if name not in first_heads))
    parts: dict[str, dict[str, Dataset]] = {role: {} for role in ROLES}
    report: list[str] = []
    origins: list[list[str | float]] = []
    for name, source in sources.items():
        stores = _open(config, source, cutoff, (config.prepared or prepared) / name)
        if stage_to is not None:
            for opened in stores.values():
                opened[:] = [Store.open(stage(store.path, stage_to)) for store in opened]
        report += [*_found(stores), *_in_two_roles(source)]
        readers = [store.manifest["inputs"]["reader"] for store in stores["train"]]
        origins.append([*readers, *source.sizes.values(), config.split_seed])
        for role, dataset in divide(stores, source.sizes, config.split_seed).items():
            parts[role][name] = dataset
    joined = {
        role: next(iter(found.values()))
        if len(heads) == 1 or in_files
        else Concatenated(list(found.values()), [heads.index(name) for name in found])
        for role, found in parts.items()
        if found
    }
    return StructureData(
        train=joined["train"],
        valid=joined.get("valid"),
        test=joined.get("test"),
        heads=heads,
        e0={name: _e0(source.e0) for name, source in own.items()},
        fingerprint=fingerprint(origins),
        report=tuple(report),
    )


def batch_sizes(dataset: Dataset) -> dict[str, IntArray]:
    """Count what each structure uses of a batch's capacity.

    Returns
    -------
    ``atoms``, ``edges``, ``squared_atoms`` and ``graphs``, [n] each.
    """
    atoms = dataset.lengths("atomic_numbers")
    return {
        "atoms": atoms,
        "edges": dataset.lengths("edges"),
        "squared_atoms": atoms**2,
        "graphs": np.ones_like(atoms),
    }


def _named_sources(config: DataConfig, first_heads: Sequence[str]) -> dict[str, SourceConfig]:
    """Name the sources by head; data without heads train a new head."""
    sources = config.sources()
    if not first_heads or config.heads:
        return sources
    names = ("default", "finetuned", *(f"finetuned-{i}" for i in range(2, len(first_heads) + 2)))
    return {next(name for name in names if name not in first_heads): sources["default"]}


def _heads_of(sources: dict[str, SourceConfig]) -> dict[str, SourceConfig]:
    """Return the source of each head; one source may hold several."""
    first, *others = sources.values()
    if first.labels.heads and not others:
        return dict.fromkeys(first.labels.heads, first)
    return sources


def _open(
    config: DataConfig, source: SourceConfig, cutoff: float, prepared: Path
) -> dict[str, list[Store]]:
    """Open or prepare the stores of each role; the run's own folder keeps only what it needs."""
    workers, own = config.prepare_workers, config.prepared is None
    folders = {role: prepared.with_name(f"{prepared.name}-{role}") for role in ROLES}
    return {
        role: open_structures(getattr(source, role), cutoff, source.labels, folder, workers, own)
        for role, folder in folders.items()
    }


def _found(stores: Mapping[str, Sequence[Store]]) -> Iterator[str]:
    """Yield what the readers found, and suspicious structures."""
    for opened in stores.values():
        for store in opened:
            yield from store.manifest.get("report", ())
        for store in opened:
            yield from suspects(store)


def _in_two_roles(source: SourceConfig) -> list[str]:
    """Warn of files used both for training and for validation or test."""
    trained = {path.resolve() for path in source.train}
    return [
        f"warning: {path} is among the training data too, so errors on it do not "
        "measure those on new structures"
        for path in (*source.valid, *source.test)
        if path.resolve() in trained
    ]


def _e0(choice: E0Choice) -> Literal["auto", "least_squares", "isolated"] | dict[int, float]:
    if not isinstance(choice, dict):
        return choice
    from ase.data import atomic_numbers

    for symbol in choice:
        if symbol not in atomic_numbers:
            raise ConfigError(f"data.e0: '{symbol}' is not a chemical symbol")
    return {atomic_numbers[symbol]: energy for symbol, energy in choice.items()}
