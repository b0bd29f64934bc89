"""Alignments of distinct sequences in a store, found by sequence.

The statistics of all rows that every sample needs are stored with them: profile, mean deletions,
and the species of the rows.
"""

from pathlib import Path

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_128_digest

from bevatron.data.proteins.alignment_files import AlignmentReader
from bevatron.data.proteins.stored_alignment import ROW_FIELDS, StoredAlignment, pack_rows
from bevatron.data.readers.proteins.alphabet import CLASSES
from bevatron.data.samples import Field
from bevatron.data.store.prepare import prepare
from bevatron.data.store.store import Store
from bevatron.errors import DataError, StoreError
from bevatron.typing import Array, Arrays, IntArray

ALIGNMENTS_VERSION = 2
"""Version of the fields of `merge_alignment`; other versions are prepared again."""

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
    *ROW_FIELDS,
)
"""Fields of an alignment in a store."""

_SEQUENCES_PER_SHARD = 64  # of typical depth some hundred MB, so that a worker holds little more

_RESIDENT = (
    64 * 2**20
)  # a thousand shards, touched to find their keys, would count as hundreds of MB


def sequence_key(classes: Array | bytes) -> bytes:
    """Return the key of a sequence given as classes of the alphabet, int8 [L]: 16 bytes."""
    if isinstance(classes, bytes):
        return xxh3_128_digest(classes)
    return xxh3_128_digest(np.ascontiguousarray(classes, dtype=np.int8).data)


def merge_alignment(raw: Arrays) -> Arrays:
    """Merge the rows of all files of an alignment.

    A row that equals an earlier one is removed; the species of both are kept for the row.

    Parameters
    ----------
    raw : a sample of `AlignmentReader`

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
        **pack_rows(distinct, deletions),
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


def places_by_key(store: Store) -> dict[bytes, int]:
    """Return the place of each sequence of a store by its `sequence_key`, in order."""
    keys = [flat for flat, _ in store.flat("key")]
    joined = np.concatenate(keys) if keys else np.empty((0, 16), dtype=np.uint8)
    return {key.tobytes(): place for place, key in enumerate(joined)}


class Alignments:
    """The alignments of a store, found by sequence.

    Parameters
    ----------
    store : written by `prepare_alignments`
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
            self._places = places_by_key(store)
        except StoreError:
            raise DataError(f"{store.path}: is not a store of alignments") from None

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

    def find(self, classes: Array | bytes) -> int | None:
        """Return the index of the alignment of a sequence, [L] classes of the alphabet."""
        return self._places.get(sequence_key(classes))

    def __getitem__(self, index: int) -> StoredAlignment:
        """Return an alignment, whose rows are read later."""
        return StoredAlignment.of(self.store[index], self.store.describe(index))


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
    workers, overwrite, progress : as in `prepare`
    """
    store = prepare(
        reader,
        merge_alignment,
        out,
        ALIGNMENT_FIELDS,
        {"features": ALIGNMENTS_VERSION, "unit": "query"},
        samples_per_shard=_SEQUENCES_PER_SHARD,
        workers=workers,
        overwrite=overwrite,
        progress=progress,
    )
    return Alignments(store)
