"""Data sets of molecules for a recipe: from paths in a configuration to samples.

A path is a prepared store or a file of molecules; files are prepared on the fly. Rows that are not
usable molecules stay in the store, so that row i of a store is row i of the file, but never reach a
model; they are listed in a file next to the store.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from bevatron.config import fingerprint
from bevatron.data.dataset import ROLES, Concatenated, Dataset, Subset, check_sizes
from bevatron.data.readers.molecules import MoleculeOptions
from bevatron.data.samples import feature_set
from bevatron.data.store.stage import stage
from bevatron.data.store.store import MANIFEST, PREPARATION, Store
from bevatron.errors import ConfigError, DataError
from bevatron.files import is_kept
from bevatron.recipes.gpspp.splits import SplitKind, divide, usable_rows, warn_of_duplicates
from bevatron.recipes.gpspp.stores import (
    check_molecules,
    features_version_of,
    prepare_molecules,
    rejects,
    summary_lines,
)
from bevatron.recipes.rejects import rejects_file
from bevatron.typing import IntArray


@dataclass(frozen=True)
class MoleculeDataConfig:
    """Files or stores of molecules and how to split them.

    Attributes
    ----------
    train : files of molecules or prepared stores (also ``--data``)
    valid : files or stores for validation
    test : files or stores for the errors in the report
    split
        How ``train`` is split if there are no such files: ``random``; ``scaffold`` (molecules of
        one Bemis-Murcko scaffold stay together, rare scaffolds are held out); ``given`` by the file
        (a column ``split``, OGB's split file); ``auto`` (given if available, else random).
    valid_size : size of the validation set: a fraction below 1, or a number of molecules
    test_size : size of the test set, likewise
    train_size : size of the training set, likewise; 0 = all that is left
    split_seed : seed of the random split
    feature_set : ``set1``, ``set2``, ``set3``, ``original``, ``ying21`` or ``ying21_periodic``
    columns : which columns hold the SMILES and the targets, and where 3D structures are
    prepared : where files are prepared; the run's folder by default
    prepare_workers : processes that prepare; all usable cores by default
    """

    train: tuple[Path, ...] = ()
    valid: tuple[Path, ...] = ()
    test: tuple[Path, ...] = ()
    split: SplitKind = "auto"
    valid_size: float = 0.1
    test_size: float = 0.0
    train_size: float = 0.0
    split_seed: int = 0
    feature_set: str = "set1"
    columns: MoleculeOptions = field(default_factory=MoleculeOptions)
    prepared: Path | None = None
    prepare_workers: int | None = None

    def __post_init__(self) -> None:
        """Reject unknown feature sets and sizes that leave nothing to train on."""
        feature_set(self.feature_set)
        check_sizes(train_size=self.train_size)
        check_sizes(valid_size=self.valid_size, test_size=self.test_size)
        sizes = (self.train_size, self.valid_size, self.test_size)
        if (whole := sum(size for size in sizes if size < 1)) > 1:
            raise ConfigError(
                f"data.train_size, data.valid_size and data.test_size: add up to {whole:g}, more "
                "than 1"
            )


@dataclass(frozen=True)
class MoleculeData:
    """The data sets of a run.

    Attributes
    ----------
    train, valid, test
        Usable molecules; ``valid`` and ``test`` are None where nothing was set aside. Those of
        ``train`` and ``valid`` have at least one label each.
    targets : names of the targets
    feature_set, features_version : those of the samples
    fingerprint : hash of the training molecules and their split; a run is not resumed with others
    report : lines for the log: what was found, left out and set aside
    """

    train: Dataset
    valid: Dataset | None
    test: Dataset | None
    targets: tuple[str, ...]
    feature_set: str
    features_version: int
    fingerprint: str
    report: tuple[str, ...]


def load_molecules(
    config: MoleculeDataConfig,
    prepared: Path,
    stage_to: Path | None = None,
    features_version: int | None = None,
) -> MoleculeData:
    """Open or prepare all data of a run and split them.

    Raises DataError or ConfigError for data that must not be trained on and configurations that
    contradict each other.

    Parameters
    ----------
    prepared : where files are prepared unless the configuration names a folder
    stage_to : node-local folder that stores are copied to and read from
    features_version
        That of the model that the molecules are for; None = that of the stores that are given.
    """
    if not config.train:
        raise ConfigError('data.train: expected a file of molecules or a store (`data="FILE"`)')
    given = {role: _given_stores(getattr(config, role), config.feature_set) for role in ROLES}
    version = _agreed_version([s for opened in given.values() for s in opened], features_version)
    stores = {}
    for role in ROLES:
        stores[role] = [*given[role], *_prepared_stores(config, prepared, role, version)]
        version = _agreed_version(stores[role], version)
    if stage_to is not None:
        stores = {
            role: [Store.open(stage(store.path, stage_to)) for store in opened]
            for role, opened in stores.items()
        }
    targets = _agreed_targets([store for opened in stores.values() for store in opened])
    report = [
        line
        for opened in stores.values()
        for store in opened
        for line in (*store.manifest.get("report", ()), *summary_lines(store))
    ]
    whole = {role: _joined(opened) for role, opened in stores.items()}
    parts = {role: usable_rows(data, role) for role, data in whole.items() if data is not None}
    train = whole["train"]
    assert train is not None
    if not len(parts["train"]):
        raise DataError(_nothing_usable(stores["train"]))
    wanted = {
        role: getattr(config, f"{role}_size") for role in ("valid", "test") if whole[role] is None
    }
    division = divide(
        train, parts["train"], wanted, config.split, config.split_seed, config.train_size, report
    )
    report += _without_label(train, np.concatenate([parts["train"], *division.values()]))
    datasets = {role: Subset(train, rows) for role, rows in division.items() if len(rows)}
    for role in ("valid", "test"):
        data = whole[role]
        if data is not None:
            datasets[role] = Subset(data, parts[role])
    if "train" not in datasets:
        raise DataError("data.train: no usable molecule with a label is left to train on")
    report += warn_of_duplicates(datasets)
    report.append(", ".join(f"{role}: {len(data)} molecules" for role, data in datasets.items()))
    origin = [store.manifest["fingerprint"] for store in stores["train"]]
    plan = [config.split, config.split_seed, config.train_size, *wanted.values()]
    return MoleculeData(
        train=datasets["train"],
        valid=datasets.get("valid"),
        test=datasets.get("test"),
        targets=targets,
        feature_set=config.feature_set,
        features_version=features_version_of(stores["train"][0]),
        fingerprint=fingerprint([origin, plan]),
        report=tuple(report),
    )


def molecule_sizes(dataset: Dataset) -> dict[str, IntArray]:
    """Count what each molecule uses of a batch's capacity.

    Returns
    -------
    ``atoms``, ``edges`` (two per bond), ``pairs`` (atoms squared) and ``graphs``, [n] each.
    """
    atoms = dataset.lengths("atom_features")
    return {
        "atoms": atoms,
        "edges": dataset.lengths("bonds"),
        "pairs": atoms**2,
        "graphs": np.ones_like(atoms),
    }


def _is_store(path: Path) -> bool:
    return path.is_dir() and ((path / MANIFEST).exists() or (path / PREPARATION).exists())


def _given_stores(paths: Sequence[Path], feature_set_name: str) -> list[Store]:
    stores = [Store.open(path) for path in map(Path, paths) if _is_store(path)]
    return [check_molecules(store, feature_set_name) for store in stores]


def _agreed_version(stores: Sequence[Store], wanted: int | None) -> int | None:
    """Return the version of the features of all stores; None if there are none."""
    for store in stores:
        if wanted is None:
            wanted = features_version_of(store)
        check_molecules(store, store.manifest["settings"]["feature_set"], wanted)
    return wanted


def _prepared_stores(
    config: MoleculeDataConfig, prepared: Path, role: str, version: int | None
) -> list[Store]:
    files = [path for path in map(Path, getattr(config, role)) if not _is_store(path)]
    if not files:
        return []
    store = prepare_molecules(
        files,
        (config.prepared or prepared) / f"molecules-{role}",
        config.feature_set,
        config.columns,
        workers=config.prepare_workers,
        overwrite=config.prepared is None,
        features_version=version,
    )
    return [store]


def _agreed_targets(stores: Sequence[Store]) -> tuple[str, ...]:
    named = [(store.path, tuple(store.manifest["settings"]["targets"])) for store in stores]
    for path, names in named:
        if names != named[0][1]:
            raise DataError(
                f"{path}: its targets are {', '.join(names) or 'none'}, those of {named[0][0]} are "
                f"{', '.join(named[0][1])}; choose the same for all"
            )
    if not named[0][1]:
        found = "; ".join(stores[0].manifest.get("report", ())) or str(named[0][0])
        raise DataError(
            f"{found}; training needs a target, set data.columns.targets (of a store by "
            "--columns.targets when it is prepared)"
        )
    return named[0][1]


def _joined(stores: Sequence[Store]) -> Dataset | None:
    if not stores:
        return None
    return stores[0] if len(stores) == 1 else Concatenated(list(stores))


def _nothing_usable(stores: Sequence[Store]) -> str:
    rows = sum(len(store) for store in stores)
    refused = [(place, why, store) for store in stores for place, _, why in rejects(store)]
    if not refused:
        return f"{stores[0].path}: none of the {rows} molecules has a label"
    place, why, store = refused[0]
    listed = rejects_file(store)
    told = f"{place}: {why}; none of the {rows} rows is a molecule with a label"
    return f"{told}, see {listed}" if is_kept(listed) else told


def _without_label(dataset: Dataset, taken: IntArray) -> list[str]:
    """Report how many molecules are left out because they have no label."""
    left = np.setdiff1d(np.flatnonzero(dataset.lengths("atom_features") > 0), taken)
    if not len(left):
        return []
    first = dataset.describe(int(left[0]))
    return [f"molecules without any label, left out: {len(left):,} (the first: {first})"]
