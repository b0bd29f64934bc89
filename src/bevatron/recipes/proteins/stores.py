"""Preparation common to stores of complexes and of chains."""

import datetime as dt
import shlex
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from bevatron.data.proteins.clusters import read_clusters
from bevatron.data.proteins.filters import certain
from bevatron.data.proteins.hit_files import NamedChain, entry_code
from bevatron.data.readers.proteins import Structure, read_release_dates, read_structure
from bevatron.data.readers.proteins.folders import ProteinFiles, StructureFiles, find_protein_files
from bevatron.data.samples import Field
from bevatron.data.store.prepare import prepare, rank_and_world
from bevatron.data.store.store import MANIFEST, Store
from bevatron.data.store.writer import REPLACE
from bevatron.errors import ConfigError, DataError, OtherInputsError, StoreError, reason_of
from bevatron.files import is_kept
from bevatron.output import counted, say
from bevatron.recipes.proteins.clusters import CLUSTERS, write_clusters
from bevatron.recipes.proteins.copies import without_copies
from bevatron.recipes.proteins.dates import OtherDateError, Released
from bevatron.recipes.proteins.rejects import lines_of_rejects, unusable
from bevatron.recipes.proteins.searches import prepare_searches, tables
from bevatron.recipes.rejects import list_rejects, rejects_file
from bevatron.typing import Array, Arrays

Chains = tuple[Sequence[NamedChain], Sequence[bytes]]
"""The proteins of a store, and the classes of its RNA."""

UNSET = "strict", "lowest_plddt", "released"
"""Options of `Featurizer` that are no settings of a store, or only where they are given."""


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
        for dates in tables(found.dates, read_release_dates, refused, strict=featurize.strict):
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
        list_rejects(store, ("file", "reason"), rejects)
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


def text_bytes(text: str) -> Array:
    """Return a text as a field of a store has it, uint8."""
    return np.frombuffer(text.encode(), dtype=np.uint8)
