"""Preparation common to stores of complexes and of chains: alignments, templates, structures."""

import datetime as dt
import math
import shlex
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import InitVar, asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from bevatron.config import take_renamed
from bevatron.data.archives import archive_of
from bevatron.data.dataset import check_sizes, set_aside
from bevatron.data.packing.draws import Draws, Source
from bevatron.data.proteins.alignment_files import OF_NO_CHAIN, AlignmentReader
from bevatron.data.proteins.alignments import Alignments, prepare_alignments
from bevatron.data.proteins.chain_index import day_number
from bevatron.data.proteins.clusters import read_clusters
from bevatron.data.proteins.filters import certain
from bevatron.data.proteins.hit_files import NamedChain, entry_code, template_queries
from bevatron.data.proteins.places import ChainSequences
from bevatron.data.proteins.template_store import StoredTemplates, prepare_templates
from bevatron.data.readers.proteins import (
    Structure,
    read_duplicate_chains,
    read_release_dates,
    read_structure,
)
from bevatron.data.readers.proteins.folders import (
    ProteinFiles,
    StructureFiles,
    find_protein_files,
    is_rna,
)
from bevatron.data.readers.proteins.openfold import read_obsolete
from bevatron.data.samples import Field
from bevatron.data.store.prepare import prepare, rank_and_world
from bevatron.data.store.store import MANIFEST, Store
from bevatron.data.store.writer import REPLACE
from bevatron.errors import ConfigError, DataError, OtherInputsError, StoreError, reason_of
from bevatron.files import TEMPORARY, is_kept, remove_folder, write_csv_atomically
from bevatron.models.common.hyper_parameters import check_ranges
from bevatron.output import counted, say
from bevatron.recipes.proteins.clusters import CLUSTERS, write_clusters
from bevatron.recipes.proteins.copies import names_of_copies, without_copies
from bevatron.recipes.proteins.dates import OtherDateError, Released
from bevatron.typing import Array, Arrays, IntArray

Chains = tuple[Sequence[NamedChain], Sequence[bytes]]
"""The proteins of a store, and the classes of its RNA."""

ALIGNMENTS, TEMPLATES = "alignments", "templates"
"""Folders inside that of a store."""

UNSET = "strict", "lowest_plddt", "released"
"""Options of `Featurizer` that are no settings of a store, or only where they are given."""

MOST_SHOWN = 10
"""Files that were left out, or reasons, that are named on the terminal."""


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


@dataclass(frozen=True)
class Featurizer(ABC):
    """From the path of a structure to what is stored; an unusable file becomes its reason.

    Attributes
    ----------
    strict : an unusable file is an error
    lowest_plddt
        Of predicted structures: residues whose B-factors, the pLDDT, are not above it count as not
        observed (OpenFold: 50). None for observed structures. At least 1, as a share of 1 would
        let all residues pass.
    released : which structures are taken, by their release dates; others are left out
    """

    fields: ClassVar[Sequence[Field]]
    strict: bool = field(default=False, kw_only=True)
    lowest_plddt: float | None = field(default=None, kw_only=True)
    released: Released = field(default=Released(), kw_only=True)

    def __post_init__(self) -> None:
        if self.lowest_plddt is not None and not 1 <= self.lowest_plddt < 100:
            raise ConfigError(
                f"lowest_plddt: expected 1 or more and less than 100, got {self.lowest_plddt:g}"
            )

    def __call__(self, raw: Arrays) -> Arrays:
        """Read one file."""
        path = np.asarray(raw["path"]).tobytes().decode()
        try:
            entry = self.entry(path)
        except DataError as error:
            if self.strict and not isinstance(error, OtherDateError):
                raise
            entry = {**nothing(self.fields), "reason": text_bytes(reason_of(error, path))}
        return {**entry, "source": np.array([int(raw["number"]), 0], dtype=np.int64)}

    def read(self, path: str) -> Structure:
        """Read a structure, of a predicted one what is certain."""
        structure = self.released.dated(read_structure(path), entry_code(path))
        return structure if self.lowest_plddt is None else certain(structure, self.lowest_plddt)

    @abstractmethod
    def entry(self, path: str) -> Arrays:
        """Return all fields but ``source`` of a file; DataError if it cannot be used."""


@dataclass
class StoreKind:
    """A kind of stores of proteins.

    Attributes
    ----------
    name : in the settings of a store
    system : the system whose ``bevatron prepare`` makes one
    version : of the features; a store of another is prepared again
    summarise : counts what the entries of a shard hold
    chains : what alignments and template hits are looked up for
    sequences, keys : the distinct proteins by chain key; chain keys by ``code_chain``
    told : lines about what a store holds
    """

    name: str
    system: str
    version: int
    summarise: Callable[[Sequence[Arrays]], dict[str, object]]
    chains: Callable[[Store], Chains]
    sequences: Callable[[Store], Mapping[int, str]]
    keys: Callable[[Store], Mapping[str, int]]
    told: Callable[[Mapping[str, Any]], list[str]]

    def open(self, path: str | Path) -> Store:
        """Open the entries of a store.

        Raises DataError if it is a store of something else, of features of another version, or one
        whose preparation was stopped; StoreError if there is no finished store.
        """
        store = Store.open(path)
        settings = store.manifest["settings"]
        if settings.get("kind") != self.name:
            raise DataError(
                f"{path}: not a store of {self.name}; make one with `bevatron prepare "
                f"{self.system}`"
            )
        if settings["features"] != self.version:
            raise DataError(
                f"{path}: has version {settings['features']} of the features, the code has version "
                f"{self.version}; prepare it again"
            )
        if not (store.path / CLUSTERS).exists():
            raise DataError(
                f"{path}: was not prepared completely; start the same `bevatron prepare` again"
            )
        return store

    def prepare(
        self,
        found: ProteinFiles,
        out: Path,
        featurize: Featurizer,
        settings: Mapping[str, Any] | None = None,
        *,
        clusters: Path | None = None,
        finish: Callable[[Store], object] | None = None,
        samples_per_shard: int | None = None,
        workers: int | None = None,
        overwrite: bool = False,
        progress: bool | None = None,
    ) -> list[str]:
        """Turn folders of structures and alignments into a store; a kill loses nothing.

        Raises DataError or StoreError if ``out`` holds something else, no structure is usable, or
        with ``strict`` one is not.

        Parameters
        ----------
        found : see `find_structures`
        featurize, settings : how, and what else the entries depend on
        clusters : a file of clusters of proteins, see `write_clusters`
        finish : makes what else the store has, before its clusters

        Returns
        -------
        Lines for the user: what was found and what was left out.
        """
        if clusters is not None:
            read_clusters(clusters)  # refused before the work, not after it
        if overwrite:  # from now on what is there counts as unfinished
            (out / CLUSTERS).unlink(missing_ok=True)
        refused: list[tuple[str, str]] = []
        known: dict[str, dt.date] = {}
        for dates in _tables(found.dates, read_release_dates, refused, strict=featurize.strict):
            for code, date in dates.items():
                if known.setdefault(code, date) != date:
                    raise DataError(
                        f"{', '.join(map(str, found.dates))}: entry '{code}' was released on "
                        f"{known[code]} in one and on {date} in another; leave out what is outdated"
                    )
        released = replace(featurize.released, known=known)
        featurize = replace(featurize, released=released)
        own = {name: value for name, value in asdict(featurize).items() if name not in UNSET}
        if featurize.lowest_plddt is not None:
            own["lowest_plddt"] = featurize.lowest_plddt
        options: dict[str, Any] = {"workers": workers, "overwrite": overwrite, "progress": progress}
        store = prepare(
            StructureFiles(found.structures),
            featurize,
            out,
            featurize.fields,
            {
                "kind": self.name,
                "features": self.version,
                "unit": "file",
                **own,
                **released.settings,
                **(settings or {}),
            },
            samples_per_shard=samples_per_shard,
            summarise=self.summarise,
            **options,
        )
        proteins, rna = self.chains(store)
        lines, damaged = prepare_searches(
            found, store, proteins, strict=featurize.strict, rna=rna, dates=known, **options
        )
        if finish is not None:
            finish(store)
        rejects = [*unusable(store), *refused, *damaged]
        list_rejects(store, rejects)
        named = {} if clusters is None else self.keys(store)
        summary = store.manifest["summary"]
        lines = [
            *write_clusters(
                self.sequences(store),
                store.path,
                clusters,
                named,
                progress=rank_and_world()[0] == 0 if progress is None else progress,
            ),
            f"usable: {summary['usable']:,} of {counted(summary['files'], 'structure')}",
            *self.told(summary),
            *lines,
            *([f"files of other kinds, ignored: {found.others}"] if found.others else []),
            *lines_of_rejects(store, rejects),
        ]
        if not summary["usable"]:
            say(*lines)  # why; otherwise the caller prints them
            left = counted(summary["files"], "structure")
            raise DataError(
                f"{store.path}: holds no usable structure: {left} left out, listed with the "
                f"reasons in {rejects_file(store)}"
            )
        quoted = shlex.quote(str(store.path))
        return [
            *lines,
            f"train with: bevatron train {self.system} --data {quoted} --output RUN",
        ]


def stores_of(
    paths: Sequence[Path], out: Path, prepare: Callable[[list[Path], Path], list[str]]
) -> tuple[Path, ...]:
    """Return the stores among paths and one, in ``out``, of everything else that they hold.

    It takes the place of the first of these. Raises StoreError if a store of other files is there.
    ``prepare`` makes it and returns lines for the user; the last one says how to train.
    """
    stores = tuple(path for path in paths if (path / MANIFEST).is_file())
    others = [path for path in paths if path not in stores]
    if not others:
        return stores
    try:
        lines = prepare(others, out)[:-1]
    except OtherInputsError as error:
        raise StoreError(
            f"{str(error).removesuffix(REPLACE)}; a run keeps its data, choose another folder "
            "for a run on others"
        ) from None
    if rank_and_world()[0] == 0:
        say(*(line for line in lines if is_kept(out) or str(out) not in line))
    first = paths.index(others[0])
    return (*stores[:first], out, *stores[first:])


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


def find_structures(files: Sequence[str | Path]) -> ProteinFiles:
    """List the files of proteins among paths and in folders, without copies of structures.

    Raises DataError if there is no structure.
    """
    if not files:
        raise DataError("no file or folder is given; name those of the structures")
    found = find_protein_files(files)
    if not found.structures:
        given = ", ".join(map(str, files))
        raise DataError(
            f"{given}: holds no structure; expected files that end in .cif or .pdb; sequences "
            "alone (FASTA, JSON) are for `bevatron predict`"
        )
    return without_copies(found)


def nothing(fields: Sequence[Field]) -> Arrays:
    """Return an entry without any rows."""
    return {
        field.name: np.zeros((0, *field.shape) if field.ragged else field.shape, field.dtype)
        for field in fields
    }


def prepare_searches(
    found: ProteinFiles,
    store: Store,
    chains: Sequence[NamedChain],
    *,
    strict: bool,
    workers: int | None,
    overwrite: bool,
    progress: bool | None = None,
    rna: Sequence[bytes] = (),
    dates: Mapping[str, dt.date],
) -> tuple[list[str], list[tuple[str, str]]]:
    """Prepare the alignments and the templates of the chains of a store, if there are any.

    Parameters
    ----------
    store : store of the structures
    chains : the proteins in that store
    strict : an unusable file is an error
    workers, overwrite, progress
        As in `bevatron.data.store.prepare.prepare`; ``overwrite`` also removes alignments and
        templates if there are none any more.
    rna : classes of the RNA in the store
    dates : release dates of structures whose files may name none

    Returns
    -------
    Lines for the user, and (file, reason) of what was left out.
    """
    names = {chain.classes: f"'{chain.entry}_{chain.names[0]}'" for chain in reversed(chains)}
    sequences = ChainSequences([*(chain.classes for chain in chains), *rna], names)
    options: dict[str, Any] = {"workers": workers, "overwrite": overwrite, "progress": progress}
    reader, rejects = _read_alignments(found, sequences, rna=bool(rna), strict=strict)
    lines = [f"alignment files: {len(found.alignments)}"]
    if reader is not None:
        lines[0] += f", sequences: {reader.num_samples}, parts of chains: {reader.partial}"
    if reader is not None and reader.num_samples:
        rejects += prepare_alignments(reader, store.path / ALIGNMENTS, **options).rejects()
    elif overwrite and (store.path / ALIGNMENTS).exists():
        remove_folder(store.path / ALIGNMENTS)
    duplicates = [
        group for groups in _tables(found.duplicates, read_duplicate_chains, rejects, strict=strict)
        for group in groups
    ]  # fmt: skip
    duplicates += names_of_copies(found, chains)
    known = {} if reader is None else reader.queries
    queries, of_none = template_queries(
        found.hits, chains, sequences, known, duplicates, strict=strict
    )
    rejects += [*found.refused, *of_none]
    folder = store.path / TEMPLATES
    if not queries:
        if overwrite and folder.exists():
            remove_folder(folder)
        return [*lines, f"template hit files: {len(found.hits)}"], rejects
    structures = {entry_code(path): first for path, first in reversed(found.copies)}
    structures |= {entry_code(path): path for path in reversed(found.structures)}
    for renamed in _tables(found.obsolete, read_obsolete, rejects, strict=strict):
        structures |= {
            old: structures[new] for old, new in renamed.items()
            if old not in structures and new in structures
        }  # fmt: skip
    made = prepare_templates(
        queries,
        structures,
        folder,
        dates={code: day_number(date) for code, date in dates.items()}
        | {chain.entry: chain.released for chain in chains},
        fingerprint=str(store.manifest["fingerprint"]),
        strict=strict,
        **options,
    )
    counts = made.counts()
    lines.append(
        f"template hit files: {len(found.hits)}, templates: {int(counts.sum())}, sequences with "
        f"templates: {np.count_nonzero(counts)}"
    )
    return lines, [*rejects, *made.rejects()]


def _tables(
    paths: Sequence[Path],
    read: Callable[[Path], Any],
    rejects: list[tuple[str, str]],
    *,
    strict: bool,
) -> Iterator[Any]:
    """Read files about all chains; one that is damaged is left out."""
    for path in paths:
        try:
            yield read(path)
        except DataError as error:
            if strict:
                raise
            rejects.append((str(path), reason_of(error, path)))


def _read_alignments(
    found: ProteinFiles, sequences: ChainSequences, *, rna: bool, strict: bool
) -> tuple[AlignmentReader | None, list[tuple[str, str]]]:
    """Find out whose alignments the files hold; those of RNA are passed over if there is none."""
    rnas = {path for path in found.alignments if is_rna(path)}
    proteins = [path for path in found.alignments if path not in rnas]
    if not proteins and not (rna and rnas):
        return None, []
    reader = AlignmentReader(proteins, sorted(rnas) if rna else (), chains=sequences, strict=strict)
    return reader, _summed_up(reader.rejects)


def _summed_up(rejects: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Count, per archive, alignments that belong to no chain: it may hold a whole database."""
    listed: list[tuple[str, str]] = []
    counts: dict[str, int] = {}
    for file, reason in rejects:
        inside = archive_of(Path(file)) if reason == OF_NO_CHAIN else None
        if inside is None:
            listed.append((file, reason))
        else:
            counts[str(inside[0])] = counts.get(str(inside[0]), 0) + 1
    return listed + [
        (archive, f"{counted(number, 'alignment')} in it of no chain of the structures")
        for archive, number in counts.items()
    ]


def unusable(store: Store) -> list[tuple[str, str]]:
    """List (file, reason) of the structures of a store that were left out, or chains of them."""
    return [
        (store.manifest["sources"][row], store[int(row)]["reason"].tobytes().decode())
        for row in np.flatnonzero(store.lengths("reason"))
    ]


def rejects_file(store: Store) -> Path:
    """Name the file that lists what was left out."""
    return store.path.with_name(f"{store.path.name}-rejects.csv")


def opened_searches(path: Path) -> tuple[Alignments | None, StoredTemplates | None]:
    """Open the alignments and the templates of a store, where it has them."""
    alignments, templates = path / ALIGNMENTS, path / TEMPLATES
    return (
        Alignments.open(alignments) if alignments.exists() else None,
        StoredTemplates.open(templates) if templates.exists() else None,
    )


def list_rejects(store: Store, rejects: Sequence[tuple[str, str]]) -> None:
    """Write that file, or remove it if there is nothing to list; rank 0 does."""
    path = rejects_file(store)
    if rank_and_world()[0]:
        return
    for unfinished in path.parent.glob(f"{path.name}.*{TEMPORARY}"):
        unfinished.unlink(missing_ok=True)
    if not rejects:
        path.unlink(missing_ok=True)
        return
    write_csv_atomically(path, [("file", "reason"), *rejects], StoreError)


def lines_of_rejects(store: Store, rejects: Sequence[tuple[str, str]]) -> list[str]:
    """Name the files that were left out; of many one for each reason, and where all are listed."""
    if len(rejects) <= MOST_SHOWN:
        lines = [f"left out: {file}: {reason}" for file, reason in rejects]
        return [*lines, f"files left out: {len(rejects)}"] if rejects else []
    files: dict[str, list[str]] = {}
    for file, reason in rejects:
        files.setdefault(reason, []).append(file)
    lines = []
    for reason, (first, *others) in list(files.items())[:MOST_SHOWN]:
        more = f" and {counted(len(others), 'other')}" if others else ""
        lines.append(f"left out: {first}{more}: {reason}")
    return [
        *lines,
        f"files left out: {len(rejects):,}",
        f"all are listed in {rejects_file(store)}",
    ]


def text_bytes(text: str) -> Array:
    """Return a text as a field of a store has it, uint8."""
    return np.frombuffer(text.encode(), dtype=np.uint8)
