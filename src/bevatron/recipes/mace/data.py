"""Data sets of labelled structures for a recipe: from paths in a configuration to samples.

A path is a prepared store or a file of structures; files are prepared on the fly. The data
of several heads are joined into one data set whose samples carry the index of their head.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import tyro

from bevatron.config import fingerprint, to_dict
from bevatron.data.dataset import Concatenated, Dataset, Subset, split
from bevatron.data.neighbours import add_neighbours
from bevatron.data.readers import LabelOptions, open_reader
from bevatron.data.samples import STRUCTURE_FIELDS
from bevatron.data.store.prepare import prepare
from bevatron.data.store.stage import stage
from bevatron.data.store.store import MANIFEST, PREPARATION, Store
from bevatron.data.summary.structures import summarise_structures
from bevatron.errors import ConfigError, DataError
from bevatron.models.mace import MaceConfig
from bevatron.typing import BoolArray, IntArray

E0Choice = Literal["auto", "least_squares", "isolated"] | dict[str, float]
"""Source of the energies of isolated atoms; explicit ones are by chemical symbol, in eV."""

ISOLATED_GROUP = "IsolatedAtom"


@dataclass(frozen=True)
class SourceConfig:
    """Files or stores and how to split them.

    Attributes
    ----------
    train
        Files of structures or prepared stores (also ``--data``).
    valid
        The same, for validation.
    test
        The same, for the errors in the report.
    valid_fraction
        Fraction of ``train`` set aside for validation if there are no such files.
    test_fraction
        The same for tests.
    labels
        Names of the labels in the files.
    e0
        Energies of isolated atoms, eV: ``auto`` (isolated atoms in the data if every element has
        one, else least squares), one of both, or one value for each element.
    """

    train: tuple[Path, ...] = ()
    valid: tuple[Path, ...] = ()
    test: tuple[Path, ...] = ()
    valid_fraction: float = 0.1
    test_fraction: float = 0.0
    labels: LabelOptions = field(default_factory=LabelOptions)
    e0: E0Choice = "auto"

    def __post_init__(self) -> None:
        """Reject fractions that leave nothing to train on."""
        shares = (self.valid_fraction, self.test_fraction)
        if any(not 0 <= share < 1 for share in shares) or sum(shares) >= 1:
            raise ConfigError(
                f"valid_fraction and test_fraction: expected shares that leave something to train "
                f"on, got {shares[0]} and {shares[1]}"
            )


@dataclass(frozen=True)
class DataConfig(SourceConfig):
    """Data of one model; data sets with their own heads go under ``heads``.

    Attributes
    ----------
    heads
        Head name -> its files. Without it there is one head, named ``default``.
    split_seed
        Seed of the random split.
    prepared
        Where files are prepared; the run's folder by default.
    prepare_workers
        Processes that prepare; all usable cores by default.
    """

    heads: Annotated[dict[str, SourceConfig], tyro.conf.Suppress] = field(default_factory=dict)
    split_seed: int = 0
    prepared: Path | None = None
    prepare_workers: int | None = None

    def sources(self) -> dict[str, SourceConfig]:
        """Head name -> its files.

        Raises
        ------
        ConfigError
            If there is nothing to train on, or both ``train`` and ``heads``.
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
                    f"{where}: expected a file of structures or a store (--data FILE)"
                )
        return sources


@dataclass(frozen=True)
class StructureData:
    """The data sets of a run.

    Attributes
    ----------
    train, valid, test
        ``valid`` and ``test`` are None where nothing was set aside.
    heads
        Names; a sample's ``head`` is an index into them.
    e0
        For each head with data: how E0 is found, given energies by atomic number.
    fingerprint
        Hash of the training structures and their split; a run is not resumed with others.
    report
        Lines for the log: what the readers found.
    """

    train: Dataset
    valid: Dataset | None
    test: Dataset | None
    heads: tuple[str, ...]
    e0: Mapping[str, Literal["auto", "least_squares", "isolated"] | Mapping[int, float]]
    fingerprint: str
    report: tuple[str, ...]


def open_structures(
    paths: Sequence[str | Path],
    cutoff: float,
    labels: LabelOptions,
    prepared: Path,
    workers: int | None = None,
    overwrite: bool = False,
) -> list[Store]:
    """Open stores and prepare files.

    Parameters
    ----------
    paths
        Stores and files of structures; the files become one store in ``prepared``.
    cutoff
        Of the neighbours, Å.
    labels
        Names of the labels in the files.
    prepared
        Folder of the prepared store; an existing one is used if its inputs are the same.
    workers
        Processes; None = all usable cores.
    overwrite
        Replace a store of other files or settings there.

    Raises
    ------
    DataError
        If a store was prepared with another cutoff, or a file cannot be trained on.
    """
    stores, files = [], []
    for path in map(Path, paths):
        if path.is_dir() and ((path / MANIFEST).exists() or (path / PREPARATION).exists()):
            store = Store.open(path)
            found = store.manifest["settings"].get("cutoff")
            if found != cutoff:
                raise DataError(
                    f"{path}: prepared with a cutoff of {found} Å, the model needs {cutoff} Å; "
                    f"prepare it again with --cutoff {cutoff}"
                )
            stores.append(store)
        else:
            files.append(path)
    if files:
        stores.append(
            prepare_structures(
                files, prepared, cutoff, labels, workers=workers, overwrite=overwrite
            )
        )
    return stores


def prepare_structures(
    files: Sequence[str | Path],
    out: Path,
    cutoff: float,
    labels: LabelOptions | None = None,
    *,
    samples_per_shard: int | None = None,
    workers: int | None = None,
    overwrite: bool = False,
) -> Store:
    """Check the labels of structures and find their neighbours once, in parallel, into a store.

    Parameters
    ----------
    files
        What the readers of structures read.
    out
        Folder of the store.
    cutoff : Å
        Of the neighbours.
    labels
        Names of the labels in the files.
    samples_per_shard, workers, overwrite
        As in `bevatron.data.store.prepare.prepare`.

    Raises
    ------
    ConfigError
        For a cutoff that is not a positive length.
    DataError, StoreError
        If a file holds what must not be trained on, or ``out`` holds something else.
    """
    if not cutoff > 0:
        raise ConfigError(f"cutoff: expected a length above 0 Å, got {cutoff}")
    reader = open_reader([Path(file) for file in files], labels or LabelOptions())
    return prepare(
        reader,
        partial(add_neighbours, cutoff=cutoff),
        out,
        STRUCTURE_FIELDS,
        {"cutoff": cutoff, "labels": to_dict(labels or LabelOptions())},
        samples_per_shard=samples_per_shard,
        workers=workers,
        summarise=summarise_structures,
        overwrite=overwrite,
    )


def prepare_files(
    files: Sequence[Path],
    out: Path,
    cutoff: float | None,
    labels: LabelOptions | None = None,
    **options: Any,
) -> list[str]:
    """Prepare structures as ``bevatron prepare`` does; options are those of `prepare_structures`.

    Returns
    -------
    Lines for the user: what was found, and how to train on it.

    Raises
    ------
    ConfigError
        If there is no file or no cutoff.
    """
    if not files:
        raise ConfigError("prepare: expected at least one file of structures or molecules")
    if cutoff is None:
        raise ConfigError(
            "--cutoff: structures need the cutoff of their neighbours in Å, that of the model to "
            f"be trained (model.r_max, {MaceConfig.r_max:g} unless a preset says otherwise)"
        )
    store = prepare_structures(files, out, cutoff, labels, **options)
    return [
        *store.manifest["report"],
        f"{len(store)} structures are in {out}",
        f"train with: bevatron train mace --data {out} --model.r-max {cutoff:g} --output RUN",
    ]


def load_structures(
    config: DataConfig,
    cutoff: float,
    prepared: Path,
    first_heads: Sequence[str] = (),
    stage_to: Path | None = None,
) -> StructureData:
    """Open or prepare all data of a run and split them.

    Isolated atoms (group ``IsolatedAtom``) stay in the training set: they only determine E0.

    Parameters
    ----------
    config
        The files.
    cutoff
        Of the neighbours, Å.
    prepared
        Where files are prepared unless the configuration names a folder.
    first_heads
        Heads that a model already has; new heads of the data follow.
    stage_to
        Node-local folder that stores are copied to and read from.

    Raises
    ------
    DataError, ConfigError
        For data that must not be trained on and configurations that contradict each other.
    """
    sources = config.sources()
    if first_heads and not config.heads:
        # Data without heads train a new head, whatever the names of the old ones.
        name = "default" if "default" not in first_heads else _free_name(first_heads)
        sources = {name: next(iter(sources.values()))}
    own = _head_names(sources)
    names = (*first_heads, *(name for name in own if name not in first_heads))
    if first_heads and own != tuple(sources):
        raise ConfigError("data.labels.heads: give data.heads instead, old heads are kept")
    prepared = config.prepared or prepared
    parts: dict[str, list[tuple[Dataset, int]]] = {"train": [], "valid": [], "test": []}
    report: list[str] = []
    origins: list[list[str | float]] = []
    for name, source in sources.items():
        opened = {
            role: _open(getattr(source, role), cutoff, source, prepared / f"{name}-{role}", config)
            for role in parts
        }
        if stage_to is not None:
            opened = {
                role: [Store.open(stage(store.path, stage_to)) for store in stores]
                for role, stores in opened.items()
            }
        origins.append([store.manifest["inputs"]["reader"] for store in opened["train"]])
        origins[-1] += [source.valid_fraction, source.test_fraction, config.split_seed]
        for stores in opened.values():
            report += [line for store in stores for line in store.manifest.get("report", ())]
        report += _in_two_roles(source)
        for role, dataset in _divide(opened, source, config.split_seed).items():
            if dataset is not None:
                parts[role].append((dataset, names.index(name) if name in names else 0))
    numbered = len(names) > 1 and own == tuple(sources)
    joined = {role: _join(found, numbered) for role, found in parts.items()}
    train = joined["train"]
    if train is None:
        raise DataError("data.train: there are no structures")
    return StructureData(
        train=train,
        valid=joined["valid"],
        test=joined["test"],
        heads=names,
        e0={name: _e0(sources.get(name, next(iter(sources.values()))).e0) for name in own},
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


def isolated_atoms(dataset: Dataset) -> IntArray:
    """Find the samples that are isolated atoms of the group that gives E0."""
    single = np.flatnonzero(dataset.lengths("atomic_numbers") == 1)
    marked = ISOLATED_GROUP.encode()
    return np.array([i for i in single if bytes(dataset[int(i)]["group"]) == marked], np.int64)


def _free_name(taken: Sequence[str]) -> str:
    """Choose an unused name for a new head."""
    names = ("finetuned", *(f"finetuned-{i}" for i in range(2, len(taken) + 3)))
    return next(name for name in names if name not in taken)


def _head_names(sources: Mapping[str, SourceConfig]) -> tuple[str, ...]:
    if len(sources) == 1:
        only = next(iter(sources.values()))
        if only.labels.heads:
            return only.labels.heads
    return tuple(sources)


def _open(
    paths: Sequence[Path], cutoff: float, source: SourceConfig, prepared: Path, config: DataConfig
) -> list[Store]:
    if not paths:
        return []
    # A run's own folder holds what this run needs, nothing else.
    own = config.prepared is None
    return open_structures(paths, cutoff, source.labels, prepared, config.prepare_workers, own)


def _in_two_roles(source: SourceConfig) -> list[str]:
    """Warn of files used both for training and for validation or test."""
    trained = {path.resolve() for path in source.train}
    return [
        f"warning: {path} is among the training data too, so errors on it do not "
        "measure those on new structures"
        for path in (*source.valid, *source.test)
        if path.resolve() in trained
    ]


def _divide(
    opened: Mapping[str, list[Store]], source: SourceConfig, seed: int
) -> dict[str, Dataset | None]:
    """Split off validation and test data that have no files of their own."""
    found: dict[str, Dataset | None] = {
        role: _join([(store, 0) for store in stores], several_heads=False)
        for role, stores in opened.items()
    }
    train = found["train"]
    wanted = {
        "valid": source.valid_fraction if found["valid"] is None else 0.0,
        "test": source.test_fraction if found["test"] is None else 0.0,
    }
    if train is None or not any(wanted.values()):
        return found
    single = isolated_atoms(train)
    others = np.setdiff1d(np.arange(len(train)), single)
    shares = (1 - sum(wanted.values()), *wanted.values())
    if len(others) < np.count_nonzero(shares):
        raise DataError(
            f"data.train: {len(others)} structures (isolated atoms apart) are too few to set some "
            "aside; give data.valid, or data.valid_fraction 0 to train without validation"
        )
    indices = split(len(others), shares, seed)
    kept = np.concatenate([others[indices[0]], single])
    for role, chosen in zip(wanted, indices[1:], strict=True):
        if wanted[role]:
            rare = _only_here(train, others[chosen], kept)
            kept = np.concatenate([kept, others[chosen][rare]])
            rest = others[chosen][~rare]
            found[role] = Subset(train, rest) if len(rest) else None
    found["train"] = Subset(train, np.sort(kept))
    return found


def _only_here(dataset: Dataset, aside: IntArray, kept: IntArray) -> BoolArray:
    """Mark held-out structures with an element that the training data lack."""
    elements = [frozenset(dataset[int(i)]["atomic_numbers"].tolist()) for i in aside]
    missing = set().union(*elements)
    for i in kept:
        if not missing:
            break
        missing -= set(dataset[int(i)]["atomic_numbers"].tolist())
    return np.array([bool(own & missing) for own in elements], dtype=bool)


def check_elements(dataset: Dataset | None, atomic_numbers: Sequence[int], what: str) -> None:
    """Reject structures with elements that the training data lack.

    Raises
    ------
    DataError
        Naming the first such structure.
    """
    known = set(atomic_numbers)
    for i in range(len(dataset) if dataset is not None else 0):
        unknown = set(dataset[i]["atomic_numbers"].tolist()) - known  # type: ignore[index]
        if unknown:
            from ase.data import chemical_symbols

            names = ", ".join(chemical_symbols[z] for z in sorted(unknown))
            raise DataError(
                f"{dataset.describe(i)}: holds {names}, but no structure to train on does; "  # type: ignore[union-attr]
                f"remove it from the {what} data"
            )


def _join(parts: Sequence[tuple[Dataset, int]], several_heads: bool) -> Dataset | None:
    if not parts:
        return None
    datasets, heads = [part[0] for part in parts], [part[1] for part in parts]
    if several_heads:
        return Concatenated(datasets, heads)
    return datasets[0] if len(datasets) == 1 else Concatenated(datasets)


def _e0(choice: E0Choice) -> Literal["auto", "least_squares", "isolated"] | dict[int, float]:
    if not isinstance(choice, dict):
        return choice
    from ase.data import atomic_numbers

    for symbol in choice:
        if symbol not in atomic_numbers:
            raise ConfigError(f"data.e0: '{symbol}' is no chemical symbol")
    return {atomic_numbers[symbol]: energy for symbol, energy in choice.items()}
