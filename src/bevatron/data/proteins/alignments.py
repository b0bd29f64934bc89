"""Alignments of distinct sequences in a store, read by row and column.

An alignment is cut into blocks: one row, up to `BLOCK` columns, its residues and then its
deletions. Each has its own checksum, so a sample reads and verifies only the rows and columns that
it draws, and a stream of all rows needs no more memory than the rows it yields at once. What every
sample needs of all rows is stored beside them: the profile, the mean of the deletions, and which
rows are of which species.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest, xxh3_128_digest

from bevatron.data.proteins.alignment_files import AlignmentReader
from bevatron.data.readers.proteins.alphabet import CLASSES
from bevatron.data.samples import Field
from bevatron.data.store.prepare import prepare
from bevatron.data.store.shards import REBUILD
from bevatron.data.store.store import Store
from bevatron.errors import DataError, StoreError
from bevatron.typing import Array, Arrays, IntArray

Integers: TypeAlias = npt.NDArray[np.integer[Any]]

ALIGNMENTS_VERSION = 1
"""Of what `merge_alignment` returns; an alignment of another version is prepared again."""

BLOCK = 512
"""Columns of a block."""

MAX_DELETIONS = np.iinfo(np.uint8).max
"""More deletions before one column are stored as this."""

ALIGNMENT_FIELDS = (
    Field("key", "uint8", (16,), False, "xxh3_128 of the query's classes"),
    Field("source", "int64", (2,), False, "(first file, 0)"),
    Field("num_rows", "int64", (), False, "number of distinct rows, the query first"),
    Field("files", "int32", (), True, "numbers of the source files, in the order of their rows"),
    Field("file_rows", "int32", (), True, "rows of each file that no row before equals"),
    Field("profile", "float32", (len(CLASSES),), True, "[L, 32] share of each class of all rows"),
    Field("deletion_mean", "float32", (), True, "[L] mean deletions before a column, of all rows"),
    Field("species", "int32", (), True, "ascending, see species_number; may repeat"),
    Field("species_row", "int32", (), True, "row of that species, most similar to the query first"),
    Field("reason", "uint8", (), True, "lines 'file TAB reason' of damaged files, left out"),
    Field("cells", "uint8", (), True, "block columns by rows by (residues, deletions)", True),
    Field("block_checksums", "uint64", (), True, "xxh3_64 of each block, as in cells", True),
)
"""Fields of an alignment in a store."""

_SEQUENCES_PER_SHARD = 64  # of typical depth some hundred MB, so that a worker holds little more

_RESIDENT = (
    64 * 2**20
)  # a thousand shards, touched to find their keys, would count as hundreds of MB


def sequence_key(classes: npt.NDArray[np.int8]) -> bytes:
    """Return the key of a sequence given as classes of the alphabet, [L]: 16 bytes."""
    return xxh3_128_digest(np.ascontiguousarray(classes, dtype=np.int8).data)


def merge_alignment(raw: Arrays) -> Arrays:
    """Return an alignment as stored, from the rows of all its files.

    A row that equals an earlier one is removed; the species of both are kept for the row.

    Parameters
    ----------
    raw
        A sample of `AlignmentReader`.

    Returns
    -------
    Arrays
        With `ALIGNMENT_FIELDS`.
    """
    rows = np.asarray(raw["rows"], dtype=np.int8)
    first: dict[bytes, int] = {}
    place = np.array([first.setdefault(xxh3_128_digest(row), len(first)) for row in rows])
    kept = np.unique(place, return_index=True)[1]
    deletions = np.asarray(raw["deletions"])[kept]
    distinct = rows[kept]
    species, species_row = _species_table(distinct, np.asarray(raw["species"]), place)
    ends = np.cumsum(raw["file_rows"])
    counts = np.histogram(kept, bins=np.concatenate([[0], ends]))[0] if len(kept) else ends
    cells, checksums = _blocks(distinct, np.minimum(deletions, MAX_DELETIONS).astype(np.uint8))
    return {
        "key": np.frombuffer(sequence_key(rows[0]), dtype=np.uint8),
        "source": np.array([np.asarray(raw["files"])[0], 0], dtype=np.int64),
        "num_rows": np.array(len(kept), dtype=np.int64),
        "files": np.asarray(raw["files"], dtype=np.int32),
        "file_rows": counts.astype(np.int32),
        "profile": _profile(distinct),
        "deletion_mean": deletions.mean(axis=0, dtype=np.float64).astype(np.float32),
        "species": species,
        "species_row": species_row,
        "reason": np.asarray(raw.get("reason", np.zeros(0)), dtype=np.uint8),
        "cells": cells,
        "block_checksums": checksums,
    }


def _species_table(
    distinct: npt.NDArray[np.int8], species: Array, place: IntArray
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Return the pairs of species and row, by species and then by similarity to the query."""
    known = np.flatnonzero(species)
    pairs = np.unique(np.stack([species[known], place[known]], axis=1).astype(np.int64), axis=0)
    similarity = (distinct[pairs[:, 1]] == distinct[0]).sum(axis=1)
    order = np.lexsort((pairs[:, 1], -similarity, pairs[:, 0]))
    return pairs[order, 0].astype(np.int32), pairs[order, 1].astype(np.int32)


def _profile(rows: npt.NDArray[np.int8]) -> npt.NDArray[np.float32]:
    num_classes, num_columns = len(CLASSES), rows.shape[1]
    counts = np.zeros(num_columns * num_classes, dtype=np.int64)
    column = np.arange(num_columns, dtype=np.int32) * num_classes
    for start in range(0, len(rows), 1024):
        cells = (rows[start : start + 1024] + column).ravel()
        counts += np.bincount(cells, minlength=len(counts))
    return (counts.reshape(num_columns, num_classes) / len(rows)).astype(np.float32)


def _blocks(
    rows: npt.NDArray[np.int8], deletions: npt.NDArray[np.uint8]
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint64]]:
    parts, checksums = [], []
    for start in range(0, rows.shape[1], BLOCK):
        columns = slice(start, start + BLOCK)
        table = np.concatenate([rows.view(np.uint8)[:, columns], deletions[:, columns]], axis=1)
        parts.append(table.ravel())
        checksums.append(_checksums(table))
    return np.concatenate(parts), np.concatenate(checksums)


def _checksums(table: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint64]:
    return np.fromiter(map(xxh3_64_intdigest, table), dtype=np.uint64, count=len(table))


@dataclass(frozen=True)
class StoredAlignment:
    """One alignment in a store: R rows, the query first, and L columns.

    Attributes
    ----------
    name
        Where it is, for messages.
    num_rows
        R.
    profile : float32 [L, 32]
        Share of each class in all rows.
    deletion_mean : float32 [L]
        Mean of the deletions before each column in all rows.
    species, species_row : int32 [pairs]
        Which species has which row, by species, the row most similar to the query first.
    """

    name: str
    num_rows: int
    profile: npt.NDArray[np.float32]
    deletion_mean: npt.NDArray[np.float32]
    species: npt.NDArray[np.int32]
    species_row: npt.NDArray[np.int32]
    cells: npt.NDArray[np.uint8]
    block_checksums: npt.NDArray[np.uint64]

    @property
    def num_columns(self) -> int:
        """L."""
        return len(self.profile)

    def read(
        self, rows: Integers | slice, columns: Integers
    ) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.uint8]]:
        """Read and verify rows at columns, both from 0 and in any order.

        Returns
        -------
        residues, deletions
            int8 and uint8, [rows, columns].

        Raises
        ------
        StoreError
            If a block does not match its checksum.
        """
        of_column = columns // BLOCK
        tables = [(block, self._table(block, rows)) for block in np.unique(of_column).tolist()]
        num_rows = len(tables[0][1]) if tables else len(np.arange(self.num_rows)[rows])
        residues = np.empty((num_rows, len(columns)), dtype=np.int8)
        deletions = np.empty((num_rows, len(columns)), dtype=np.uint8)
        for block, table in tables:
            chosen: IntArray | slice = np.flatnonzero(of_column == block)
            inside = columns[chosen] - block * BLOCK
            if len(tables) == 1:
                chosen = slice(None)
            residues[:, chosen] = np.take(table.view(np.int8), inside, axis=1)
            deletions[:, chosen] = np.take(table, inside + table.shape[1] // 2, axis=1)
        return residues, deletions

    def stream(
        self, rows_at_once: int = 64
    ) -> Iterator[tuple[npt.NDArray[np.int8], npt.NDArray[np.uint8]]]:
        """Read and verify all rows, ``rows_at_once`` at a time, with all columns."""
        columns = np.arange(self.num_columns)
        for start in range(0, self.num_rows, rows_at_once):
            yield self.read(slice(start, start + rows_at_once), columns)

    def _table(self, block: int, rows: Integers | slice) -> npt.NDArray[np.uint8]:
        """Copy and verify the blocks of some rows, [rows, residues and deletions]."""
        start, stop = block * BLOCK, min((block + 1) * BLOCK, self.num_columns)
        cells = self.cells[2 * self.num_rows * start : 2 * self.num_rows * stop]
        table = cells.reshape(self.num_rows, 2 * (stop - start))[rows]
        expected = self.block_checksums[block * self.num_rows : (block + 1) * self.num_rows][rows]
        wrong = np.flatnonzero(_checksums(table) != expected)
        if len(wrong):
            row = int(np.arange(self.num_rows)[rows][wrong[0]])
            raise StoreError(
                f"{self.name}: row {row} of the alignment is damaged at columns {start} to "
                f"{stop - 1}, its checksum does not match; {REBUILD}"
            )
        return table


class Alignments:
    """The alignments of a store, found by sequence.

    Parameters
    ----------
    store
        Written by `prepare_alignments`.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        version = store.manifest["settings"].get("features", 1)
        if version != ALIGNMENTS_VERSION:
            raise DataError(
                f"{store.path}: has version {version} of the features, the code has version "
                f"{ALIGNMENTS_VERSION}; prepare it again"
            )
        try:
            keys = [flat for flat, _ in store.flat("key")]
        except StoreError:
            raise DataError(f"{store.path}: is a store of something else than alignments") from None
        joined = np.concatenate(keys) if keys else np.empty((0, 16), dtype=np.uint8)
        self._places = {key.tobytes(): place for place, key in enumerate(joined)}

    @classmethod
    def open(cls, path: str | Path) -> "Alignments":
        """Open a store of alignments."""
        return cls(Store(path, resident_limit=_RESIDENT))

    def __len__(self) -> int:
        return len(self.store)

    def keys(self) -> list[bytes]:
        """Return `sequence_key` of each sequence, in order."""
        return list(self._places)

    def rejects(self) -> list[tuple[str, str]]:
        """List (file, reason) of the damaged files that were left out."""
        texts = [
            self.store[int(row)]["reason"].tobytes().decode()
            for row in np.flatnonzero(self.store.lengths("reason"))
        ]
        lines = [line.partition("\t") for text in texts for line in text.splitlines()]
        return [(file, reason) for file, _, reason in lines]

    def find(self, classes: npt.NDArray[np.int8]) -> int | None:
        """Return the index of the alignment of a sequence, [L] classes of the alphabet."""
        return self._places.get(sequence_key(classes))

    def __getitem__(self, index: int) -> StoredAlignment:
        """Return an alignment, of which only what is not rows has been read."""
        sample = self.store[index]
        values = {name: sample[name] for name in StoredAlignment.__annotations__ if name in sample}
        values |= {"num_rows": int(sample["num_rows"]), "name": self.store.describe(index)}  # type: ignore[dict-item]
        return StoredAlignment(**values)  # type: ignore[arg-type]


def prepare_alignments(
    reader: AlignmentReader,
    out: str | Path,
    *,
    workers: int | None = None,
    overwrite: bool = False,
    progress: bool | None = None,
) -> Alignments:
    """Write the alignments of files as a store, or continue an earlier call.

    Parameters
    ----------
    reader
        The files.
    out
        Folder of the store.
    workers, overwrite, progress
        As in `prepare`.
    """
    version = {} if ALIGNMENTS_VERSION == 1 else {"features": ALIGNMENTS_VERSION}
    store = prepare(
        reader,
        merge_alignment,
        out,
        ALIGNMENT_FIELDS,
        {"block": BLOCK, "unit": "query"} | version,
        samples_per_shard=_SEQUENCES_PER_SHARD,
        workers=workers,
        overwrite=overwrite,
        progress=progress,
    )
    return Alignments(store)
