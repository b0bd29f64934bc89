"""Stores of protein chains: residues and atoms of all chains of a file, and their alignments.

A store of chains is a folder that holds a store with an entry for each file, ``clusters.txt`` and,
in ``alignments``, a store of alignments; a chain's alignment is found by its sequence.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bevatron.data.proteins.chain_index import SHORTEST_CLUSTERED, chain_key, day_number
from bevatron.data.proteins.chains import CHAIN_FIELDS, chain_entry
from bevatron.data.proteins.constants import CA
from bevatron.data.proteins.hit_files import NamedChain, entry_code
from bevatron.data.readers.proteins import read_structure
from bevatron.data.readers.proteins.alphabet import CLASSES
from bevatron.data.readers.proteins.folders import StructureFiles
from bevatron.data.samples import Field
from bevatron.data.store.prepare import prepare
from bevatron.data.store.store import Store
from bevatron.errors import DataError, reason_of
from bevatron.recipes.proteins import (
    begin,
    find_structures,
    lines_of_rejects,
    list_rejects,
    nothing,
    open_prepared,
    prepare_searches,
    stores_of,
    text_bytes,
    unusable,
    write_clusters,
)
from bevatron.typing import Array, Arrays

KIND = "chains"
"""Kind of these stores in their settings."""

FEATURES_VERSION = 4
"""Version of what is stored of a chain; a store of another version is prepared again."""

RESIDUE_FIELDS = tuple(field for field in CHAIN_FIELDS if field.ragged)

FIELDS = (
    *CHAIN_FIELDS,
    Field("chain_length", "int32", (), True, "[C] residues of each chain of the file, in order"),
    Field("chain_key", "uint64", (), True, "[C] equal for chains of equal sequence"),
    Field("chain_label", "uint8", (), True, "labels of the chains, a line each, UTF-8"),
    Field("most_of_one", "float32", (), True, "[C] share of the most frequent residue type"),
    Field("resolved", "int32", (), True, "[C] residues whose CA is resolved"),
    Field("released", "int32", (), False, "days since 1970-01-01; -1 if unknown"),
    Field("reason", "uint8", (), True, "why the file or chains of it were left out, UTF-8"),
    Field("source", "int64", (2,), False, "(file, 0): index into the manifest"),
)
"""The residues of all chains of a file, chain after chain, and what is known of each chain."""


@dataclass(frozen=True)
class ChainFeaturizer:
    """From the path of a structure to its protein chains; what cannot be used becomes its reason.

    Attributes
    ----------
    strict : an unusable file is an error
    """

    strict: bool = False

    def __call__(self, raw: Arrays) -> Arrays:
        """Read one file."""
        path = np.asarray(raw["path"]).tobytes().decode()
        source = np.array([int(raw["number"]), 0], dtype=np.int64)
        try:
            return {**chains_of_file(path), "source": source}
        except DataError as error:
            if self.strict:
                raise
            reason = reason_of(error, path)
            return {**nothing(FIELDS), "reason": text_bytes(reason), "source": source}


def chains_of_file(path: str | Path) -> Arrays:
    """Return the protein chains of a structure, with all `FIELDS` but ``source``.

    Raises DataError if the file cannot be read, or no CA of any protein chain is resolved.
    """
    structure = read_structure(path)
    chains, labels, reasons = [], [], []
    for chain in np.flatnonzero(structure.chains.kind == "protein").tolist():
        try:
            chains.append(chain_entry(structure, chain))
            labels.append(str(structure.chains.author[chain]))
        except DataError as error:
            reasons.append(str(error).removeprefix(f"{structure.name}, "))
    if not chains:
        raise DataError(f"{path}: {'; '.join(reasons) or 'holds no protein'}")
    joined = {
        field.name: np.concatenate([chain[field.name] for chain in chains])
        for field in RESIDUE_FIELDS
    }
    return {
        **joined,
        "resolution": chains[0]["resolution"],
        "released": np.array(day_number(structure.released), dtype=np.int32),
        **_columns(chains),
        "chain_label": text_bytes("\n".join(labels)),
        "reason": text_bytes("; ".join(reasons)),
    }


def _columns(chains: Sequence[Arrays]) -> dict[str, Array]:
    types = [np.bincount(chain["aatype"], minlength=1) for chain in chains]
    return {
        "chain_length": np.array([len(chain["aatype"]) for chain in chains], dtype=np.int32),
        "chain_key": np.array(
            [_key(chain["query"].tobytes()) for chain in chains], dtype=np.uint64
        ),
        "most_of_one": np.array([t.max() / t.sum() for t in types], dtype=np.float32),
        "resolved": np.array(
            [chain["all_atom_mask"][:, CA].sum() for chain in chains], dtype=np.int32
        ),
    }


def prepare_chains(
    files: Sequence[str | Path],
    out: Path,
    *,
    strict: bool = False,
    clusters: Path | None = None,
    samples_per_shard: int | None = None,
    workers: int | None = None,
    overwrite: bool = False,
    progress: bool | None = None,
) -> list[str]:
    """Turn folders of structures and alignments into a store of chains; a kill loses nothing.

    Raises DataError or StoreError if there is no structure, with ``strict`` if one is unusable, or
    ``out`` holds something else.

    Parameters
    ----------
    files : structures (mmCIF, PDB), alignments (a3m, Stockholm) and folders of them, at any depth
    strict : see `ChainFeaturizer`
    clusters : a file of clusters of proteins, see `bevatron.recipes.proteins.write_clusters`
    samples_per_shard, workers, overwrite, progress : as in `bevatron.data.store.prepare.prepare`

    Returns
    -------
    Lines for the user: what was found and what was left out.
    """
    found = find_structures(files)
    begin(out, overwrite=overwrite)
    store = prepare(
        StructureFiles(found.structures),
        ChainFeaturizer(strict),
        out,
        FIELDS,
        {"kind": KIND, "features": FEATURES_VERSION, "unit": "file"},
        samples_per_shard=samples_per_shard,
        workers=workers,
        overwrite=overwrite,
        progress=progress,
        summarise=summarise,
    )
    lines, damaged = prepare_searches(
        found,
        store,
        named_chains(store),
        strict=strict,
        workers=workers,
        overwrite=overwrite,
        progress=progress,
    )
    rows = [*unusable(store), *damaged]
    list_rejects(store, rows)
    named = {} if clusters is None else named_keys(store)
    warnings = write_clusters(clustered_sequences(store), store.path, clusters, named)
    return [*warnings, *summary_lines(store, lines, found.others, rows)]


def named_chains(store: Store) -> list[NamedChain]:
    """List the chains of a store by the names of their files."""
    found: list[NamedChain] = []
    sources = iter(store.manifest["sources"])
    names = "query", "chain_length", "chain_label", "released"
    for queries, lengths, labels, released in zip(*map(store.flat, names), strict=True):
        parts = iter(np.split(queries[0], np.cumsum(lengths[0])[:-1]))
        for row, day in enumerate(released[0].tolist()):
            code = entry_code(next(sources))
            of_row = labels[0][labels[1][row] : labels[1][row + 1]].tobytes().decode()
            for label in of_row.split("\n") if of_row else ():
                classes = np.asarray(next(parts), dtype=np.int8).tobytes()
                found.append(NamedChain(code, (label,), classes, day))
    return found


def labels_of(entry: Arrays) -> list[str]:
    """Return the names of the chains of an entry."""
    text = np.asarray(entry["chain_label"]).tobytes().decode()
    return text.split("\n") if len(entry["chain_length"]) else []


def clustered_sequences(store: Store) -> dict[int, str]:
    """Return the distinct sequences of a store by chain key; peptides are left out."""
    classes = dict.fromkeys(chain.classes for chain in named_chains(store))
    return {_key(each): _letters(each) for each in classes if len(each) >= SHORTEST_CLUSTERED}


def named_keys(store: Store) -> dict[str, int]:
    """Return the chain keys by ``code_chain``."""
    return {f"{each.entry}_{each.names[0]}": _key(each.classes) for each in named_chains(store)}


def _key(classes: bytes) -> int:
    return chain_key("protein", _letters(classes))


def _letters(classes: bytes) -> str:
    return "".join(CLASSES[number] for number in classes)


def prepared(paths: Sequence[Path], out: Path) -> tuple[Path, ...]:
    """Return the stores among paths and one, in ``out``, of everything else that they hold."""
    return stores_of(paths, out, prepare_chains)


def summarise(samples: Sequence[Arrays]) -> dict[str, object]:
    """Count what the entries of a shard hold."""
    return {
        "files": len(samples),
        "usable": sum(len(sample["chain_length"]) > 0 for sample in samples),
        "chains": sum(len(sample["chain_length"]) for sample in samples),
        "residues": sum(len(sample["aatype"]) for sample in samples),
        "resolved": sum(int(sample["resolved"].sum()) for sample in samples),
    }


def open_chains(path: str | Path) -> Store:
    """Open the entries of a store of chains.

    Raises DataError if it is a store of something else, of features of another version, or one
    whose preparation was stopped; StoreError if there is no finished store.
    """
    return open_prepared(path, KIND, FEATURES_VERSION, "alphafold2")


def summary_lines(
    store: Store, searches: Sequence[str], others: int, rejects: Sequence[tuple[str, str]]
) -> list[str]:
    """Say in a few lines what was found and what was left out."""
    summary = store.manifest["summary"]
    return [
        f"{summary['usable']} of {summary['files']} structures are usable",
        f"{summary['chains']:,} chains of {summary['residues']:,} residues",
        f"{summary['resolved']:,} residues are resolved",
        *searches,
        f"files of other kinds, passed over: {others}",
        *lines_of_rejects(store, rejects),
        f"train with: bevatron train alphafold2 --data {store.path} --output RUN",
    ]
