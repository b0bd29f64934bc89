"""Data of a run of AlphaFold3: stores of complexes, from which chains and interfaces are drawn."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import SupportsIndex

import numpy as np

from bevatron.data.dataset import column
from bevatron.data.packing.draws import Draws, Source
from bevatron.data.proteins.chain_index import Choices
from bevatron.data.proteins.poses import open_poses
from bevatron.data.proteins.sample import SampleSizes, Sources, sample
from bevatron.data.store.store import Store
from bevatron.errors import DataError
from bevatron.models.alphafold3.losses import BEST_RESOLUTION, WORST_RESOLUTION
from bevatron.recipes.alphafold3.stores import POSES, open_complexes
from bevatron.recipes.proteins.clusters import clusters_of
from bevatron.recipes.proteins.data import ProteinDataConfig, StoredSamples, mixture
from bevatron.recipes.proteins.searches import opened_searches
from bevatron.typing import Arrays, FloatArray, IntArray


@dataclass(frozen=True)
class ComplexDataConfig(ProteinDataConfig):
    """Stores of complexes and how they are divided.

    Attributes
    ----------
    components
        The chemical component dictionary for folders that are prepared: a file, or ``biotite``.
    """

    components: str = "biotite"


class ComplexDataset(StoredSamples):
    """Crops of the entries of a store, by entry or by chain and interface.

    Parameters
    ----------
    path : a store of complexes
    units : int64 [n, 3]
        Of each sample the entry and the chains, ``asym_id``, that its crop is about; 0 for none.
    sizes : how much a sample holds at most
    """

    def __init__(self, path: Path, units: IntArray, sizes: SampleSizes) -> None:
        super().__init__(path, units)
        self.sizes = sizes

    def sample(self, index: SupportsIndex, seed: int) -> Arrays:
        """Make the sample of a seed."""
        store, sources = self.opened
        entry, first, second = self.units[int(index)].tolist()
        chains = [chain for chain in (first, second) if chain]
        return sample(store[entry], seed, sources, self.sizes, chains)

    def describe(self, index: SupportsIndex) -> str:
        """Name a sample: its file, and its chains."""
        entry, first, second = self.units[int(index)].tolist()
        file = self.opened[0].manifest["sources"][entry]
        chains = " and ".join(str(chain) for chain in (first, second) if chain)
        return f"{file}, chain {chains}" if chains else str(file)

    def lengths(self, field: str) -> IntArray:
        """Return the number of rows of a ragged field in the entry of every sample, [n].

        Those of ``tokens`` are what the crops hold at most.
        """
        if field == "tokens":
            return self.tokens
        return self.opened[0].lengths(field)[self.units[:, 0]]

    @property
    def tokens(self) -> IntArray:
        """Largest number of tokens of every sample, [n]."""
        return np.minimum(self.lengths("restype"), self.sizes.crop.tokens)

    @cached_property
    def opened(self) -> tuple[Store, Sources]:
        """The store, and poses, alignments and templates."""
        poses = open_poses(self.path / POSES)
        return open_complexes(self.path), Sources(poses, *opened_searches(self.path))


@dataclass(frozen=True)
class ComplexData:
    """Training and validation data of a run.

    Attributes
    ----------
    train : stores, and of each the entries that are trained on
    valid : entries for validation, in crops that are always the same; None without any
    fingerprints : fingerprints of the stores
    report : lines about what was found
    shares : how often each store is drawn from; nothing for as often as it has samples
    """

    train: Sequence[tuple[Path, IntArray]]
    valid: ComplexDataset | None
    fingerprints: Sequence[str]
    report: Sequence[str]
    shares: Sequence[float] = ()

    def draws(self, sizes: SampleSizes, seed: int) -> Draws:
        """Return the mixture of all training stores, by shares or their numbers of entries."""
        sources = []
        for path, entries in self.train:
            units, weights = units_of(open_complexes(path), entries)
            dataset = ComplexDataset(path, units, sizes)
            sources.append(Source(path.name, dataset, weights, float(len(entries))))
        return mixture(sources, self.shares, seed)


def load_complexes(config: ComplexDataConfig, valid_sizes: SampleSizes) -> ComplexData:
    """Open the stores of a run and divide their entries.

    Raises ConfigError if there is nothing to train on; DataError or StoreError if a store cannot be
    used.
    """
    config.check_given("complexes")
    train: list[tuple[Path, IntArray]] = []
    valid: list[tuple[Path, IntArray]] = []
    report, fingerprints = [], []
    for divided, paths in ((train, config.train), (valid, config.valid)):
        for path in paths:
            store = open_complexes(path)
            fingerprints.append(str(store.manifest["fingerprint"]))
            entries = np.flatnonzero(store.lengths("restype"))
            if not len(entries):
                raise DataError(f"{path}: holds no entry that can be used")
            divided.append((Path(path), entries))
    report += config.warnings()
    if not valid and config.valid_size:
        train, valid = _divide(train, config)
    for path, entries in train:
        report.append(f"complexes for training: {len(entries):,} of {path}")
        if unsure := _unsure(open_complexes(path), entries):
            report.append(
                f"{path}: confidences are not trained on {unsure:,} of them, whose resolution "
                f"is unknown or not {BEST_RESOLUTION:g} to {WORST_RESOLUTION:g} Å"
            )
    dataset = None
    if valid:
        path, entries = valid[0]
        entries = entries[: config.valid_most]
        units = np.stack([entries, 0 * entries, 0 * entries], axis=1)
        dataset = ComplexDataset(path, units, valid_sizes)
        report.append(f"complexes for validation: {len(entries)} of {path}, in fixed crops")
    elif config.valid_size:
        report.append("warning: nothing is validated, there is one complex alone")
    return ComplexData(train, dataset, fingerprints, report, config.shares)


def _unsure(store: Store, entries: IntArray) -> int:
    """Count the entries whose resolution excludes them from training the confidences."""
    resolution = column(store, "resolution")[entries]
    return int((~((resolution >= BEST_RESOLUTION) & (resolution <= WORST_RESOLUTION))).sum())


def _divide(
    train: list[tuple[Path, IntArray]], config: ComplexDataConfig
) -> tuple[list[tuple[Path, IntArray]], list[tuple[Path, IntArray]]]:
    """Take validation entries out of the first store."""
    (path, entries), *others = train
    if len(entries) < 2:
        return train, []
    kept, taken = (entries[part] for part in config.divided(len(entries)))
    return [(path, kept), *others], [(path, taken)]


def units_of(store: Store, entries: IntArray) -> tuple[IntArray, FloatArray]:
    """List the chains and interfaces of some entries, and how often each is drawn.

    Returns
    -------
    units : int64 [n, 3]
        See `ComplexDataset`.
    weights : float64 [n]
    """
    allowed = np.zeros(len(store), dtype=np.bool_)
    allowed[entries] = True
    found = Choices.of(store, clusters_of(store.path), allowed)
    return np.column_stack([found.entry, found.chains.astype(np.int64)]), found.weight


def sizes_for_validation(sizes: SampleSizes) -> SampleSizes:
    """Return the limits of validation: spatial crops, none at interfaces.

    The best templates are shown.
    """
    crop = replace(sizes.crop, shares=(0.0, 1.0, 0.0))
    return replace(sizes, crop=crop, best_templates=True)
