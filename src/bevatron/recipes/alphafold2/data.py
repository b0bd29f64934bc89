"""Data of a run of AlphaFold2: stores of protein chains, from which chains are drawn."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, SupportsIndex

import numpy as np

from bevatron.data.dataset import column
from bevatron.data.packing.draws import Draws, Source
from bevatron.data.proteins.alignments import Alignments, sequence_key
from bevatron.data.proteins.chain_index import clusters_of_keys
from bevatron.data.proteins.chain_samples import ChainSizes, fitted, sample_chain
from bevatron.data.proteins.clusters_of_rows import AlignmentRows
from bevatron.data.proteins.rows_in_memory import RowsInMemory
from bevatron.data.proteins.sample import TemplateSource
from bevatron.data.proteins.template_store import StoredTemplates
from bevatron.data.proteins.weights import chain_weights
from bevatron.data.ragged import count_up
from bevatron.data.store.store import Store
from bevatron.errors import DataError
from bevatron.models.alphafold2.losses import BEST_RESOLUTION, WORST_RESOLUTION
from bevatron.output import counted
from bevatron.recipes.alphafold2.stores import RESIDUE_FIELDS, labels_of, open_chains
from bevatron.recipes.proteins.clusters import clusters_of
from bevatron.recipes.proteins.data import ProteinDataConfig, StoredSamples, mixture
from bevatron.recipes.proteins.searches import opened_searches
from bevatron.typing import Array, Arrays, IntArray

MAX_RESOLUTION = 9.0
"""Å; chains of a lower resolution are not trained on (section 1.2.5)."""

MOST_OF_ONE = 0.8
"""Chains are not trained on either if one residue type makes up more than this fraction."""


@dataclass(frozen=True)
class ChainDataConfig(ProteinDataConfig):
    """Stores of chains and how they are divided.

    Attributes
    ----------
    valid_longest
        Maximum length of a chain for validation, in residues; chains are not cropped there.
    """

    valid_most: int = 180
    valid_longest: int = 700


class ChainTable(NamedTuple):
    """The chains of a store.

    Attributes
    ----------
    units : int64 [n, 2]
        Entry, and number of the chain in it.
    length : int64 [n]
        Residues.
    cluster : int64 [n]
        Chains of similar sequences have the same number.
    usable : bool [n]
        Whether they may be trained on: by resolution and composition.
    sure : bool [n]
        Whether confidence is learnt from them: by resolution.
    """

    units: IntArray
    length: IntArray
    cluster: IntArray
    usable: Array
    sure: Array

    def take(self, rows: Array) -> "ChainTable":
        """Return some of the chains."""
        return ChainTable(*(column[rows] for column in self))


def chain_table(store: Store) -> ChainTable:
    """List the chains of a store."""
    counts = store.lengths("chain_length")
    entry = np.repeat(np.arange(len(store)), counts)
    length, key, most = (column(store, x) for x in ("chain_length", "chain_key", "most_of_one"))
    resolution = column(store, "resolution")[entry]
    # An unknown resolution, as in NMR entries, is no reason to leave a chain out.
    usable = ~np.greater_equal(resolution, MAX_RESOLUTION) & np.less_equal(most, MOST_OF_ONE)
    sure = np.greater_equal(resolution, BEST_RESOLUTION)
    sure &= np.less_equal(resolution, WORST_RESOLUTION)
    units = np.column_stack([entry, count_up(counts)]).astype(np.int64)
    cluster = clusters_of_keys(key, clusters_of(store.path))
    return ChainTable(units, length.astype(np.int64), cluster, usable, sure)


class ChainDataset(StoredSamples):
    """Crops of the chains of a store.

    Parameters
    ----------
    path : a store of chains
    units : int64 [n, 2]
        Entry and number of the chain of each sample.
    length : int64 [n]
        Residues of each.
    sizes : how much a sample holds at most
    cycles : recycling iterations, each with rows of its own
    """

    def __init__(
        self, path: Path, units: IntArray, length: IntArray, sizes: ChainSizes, cycles: int
    ) -> None:
        super().__init__(path, units)
        self.sizes, self.cycles = sizes, cycles
        self._length = length

    def sample(self, index: SupportsIndex, seed: int) -> Arrays:
        """Make the sample of a seed."""
        store, alignments, templates = self.opened
        entry, number = self.units[int(index)].tolist()
        whole = store[entry]
        chain = chain_of(whole, number)
        rows = alignment_of(chain["query"], alignments)
        shown = templates_of(chain["query"], templates, int(whole["released"]))
        sizes = self.sizes_for(rows, templates)
        found = sample_chain({**chain, **shown}, rows, seed, sizes, self.cycles)
        return {**found, "seed": np.array(seed, dtype=np.int64)}

    def sizes_for(self, rows: AlignmentRows, templates: object | None) -> ChainSizes:
        """Return the sizes of the sample of a chain with this alignment."""
        return fitted(self.sizes, rows, templates)

    def describe(self, index: SupportsIndex) -> str:
        """Name a sample: its file, and its chain."""
        store, *_ = self.opened
        entry, number = self.units[int(index)].tolist()
        label = labels_of(store[entry])[number]
        return f"{store.manifest['sources'][entry]}, chain {label}"

    def lengths(self, field: str) -> IntArray:
        """Return the number of residues of the crop of every sample, [n]."""
        if field not in {"tokens", "aatype"}:
            raise DataError(f"{self.path}: a sample of a chain has no lengths of '{field}'")
        return np.minimum(self._length, self.sizes.residues)

    @cached_property
    def opened(self) -> tuple[Store, Alignments | None, StoredTemplates | None]:
        """The store, its alignments and its templates."""
        return open_chains(self.path), *opened_searches(self.path)


def chain_of(entry: Arrays, number: int) -> Arrays:
    """Take one chain out of an entry, with `bevatron.data.proteins.chains.CHAIN_FIELDS`."""
    ends = np.cumsum(entry["chain_length"])
    rows = slice(int(ends[number] - entry["chain_length"][number]), int(ends[number]))
    found = {field.name: entry[field.name][rows] for field in RESIDUE_FIELDS}
    return {**found, "resolution": np.array(entry["resolution"])}


def alignment_of(query: Array, alignments: Alignments | None) -> AlignmentRows:
    """Return the alignment of a sequence; without one the sequence is its only row."""
    place = None if alignments is None else alignments.find(query)
    if alignments is None or place is None:
        rows = np.asarray(query, dtype=np.int8)[None]
        return RowsInMemory(rows, np.zeros(rows.shape, dtype=np.uint8))
    return alignments[place]


def templates_of(query: Array, templates: TemplateSource | None, released: int) -> Arrays:
    """Return the templates that a chain may see, `TEMPLATE_FIELDS`; nothing if there are none."""
    return {} if templates is None else templates.find(sequence_key(query), released) or {}


@dataclass(frozen=True)
class ChainData:
    """Training and validation data of a run.

    Attributes
    ----------
    train : stores, and of each the chains that are trained on
    valid : whole chains for validation; None without any
    fingerprints : fingerprints of the stores
    report : lines about what was found
    shares : how often each store is drawn from; nothing for as often as it has samples
    cycles : recycling iterations of a sample
    """

    train: Sequence[tuple[Path, ChainTable]]
    valid: ChainDataset | None
    fingerprints: Sequence[str]
    report: Sequence[str]
    cycles: int
    shares: Sequence[float] = ()

    def draws(self, sizes: ChainSizes, seed: int) -> Draws:
        """Return the mixture of all training stores, by shares or their sums of weights."""
        sources = []
        for path, table in self.train:
            weights = chain_weights(table.length, table.cluster)
            dataset = ChainDataset(path, table.units, table.length, sizes, self.cycles)
            sources.append(Source(path.name, dataset, weights, float(weights.sum())))
        return mixture(sources, self.shares, seed)


def load_chains(config: ChainDataConfig, valid_sizes: ChainSizes, cycles: int) -> ChainData:
    """Open the stores of a run and divide their chains.

    Raises ConfigError if there is nothing to train on, or there are several stores for validation;
    DataError or StoreError if a store cannot be used.
    """
    config.check_given("chains")
    report, fingerprints, train = [], [], []
    for path in config.train:
        store = open_chains(path)
        fingerprints.append(str(store.manifest["fingerprint"]))
        whole = chain_table(store)
        table = whole.take(whole.usable)
        if not len(table.length):
            raise DataError(f"{path}: holds no chain that can be trained on")
        left = len(whole.length) - len(table.length)
        report.append(
            f"{path}: {counted(len(table.length), 'chain')} in "
            f"{counted(len(np.unique(table.cluster)), 'cluster')}; "
            f"{left} left out (resolution of {MAX_RESOLUTION:g} Å or worse, or more than "
            f"{MOST_OF_ONE:.0%} of one residue type)"
        )
        if unsure := int(np.logical_not(table.sure).sum()):
            report.append(
                f"{path}: pLDDT is not trained on {unsure:,} of them, whose resolution is "
                f"unknown or not {BEST_RESOLUTION:g} to {WORST_RESOLUTION:g} Å"
            )
        train.append((Path(path), table))
    if config.valid:
        store = open_chains(config.valid[0])
        fingerprints.append(str(store.manifest["fingerprint"]))
        held: tuple[Path, ChainTable] | None = (Path(config.valid[0]), chain_table(store))
    else:
        train[0], held = _divided(*train[0], config)
    report += config.warnings()
    valid = None if held is None else _validated(*held, config, valid_sizes, cycles)
    if valid is not None:
        report.append(f"chains for validation: {len(valid)}, whole")
    elif held is not None:
        report.append(
            "warning: nothing is validated, all chains held out for it are longer than "
            f"data.valid_longest, {config.valid_longest} residues"
        )
    elif config.valid_size:
        report.append("warning: nothing is validated, all chains are in one cluster")
    return ChainData(train, valid, fingerprints, report, cycles, config.shares)


def _divided(
    path: Path, table: ChainTable, config: ChainDataConfig
) -> tuple[tuple[Path, ChainTable], tuple[Path, ChainTable] | None]:
    """Set aside the chains of some clusters, so that none resembles a training chain."""
    clusters = np.unique(table.cluster)
    if len(clusters) < 2 or not config.valid_size:
        return (path, table), None
    _, taken = config.divided(len(clusters))
    out = np.isin(table.cluster, clusters[taken])
    return (path, table.take(~out)), (path, table.take(out)) if out.any() else None


def _validated(
    path: Path, table: ChainTable, config: ChainDataConfig, sizes: ChainSizes, cycles: int
) -> ChainDataset | None:
    table = table.take(table.length <= config.valid_longest)
    table = table.take(np.arange(min(len(table.length), config.valid_most)))
    if not len(table.length):
        return None
    whole = replace(sizes, residues=config.valid_longest, best_templates=True, deleted_blocks=0)
    return ChainDataset(path, table.units, table.length, whole, cycles)
