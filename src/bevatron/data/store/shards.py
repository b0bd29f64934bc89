"""One shard of a store: an Arrow IPC file with one record batch, one column per field.

A ragged field is a column of large lists, a fixed field a column of (nested) fixed-size lists or
plain numbers, so any tool that reads Arrow can open a shard. The column ``checksum`` holds one
xxh3_64 per sample over the lengths of its ragged fields and the bytes of all fields but those that
are read in parts. The schema's metadata holds the fingerprint of the store's inputs and a digest of
every column.
"""

import json
import os
import struct
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from xxhash import xxh3_64, xxh3_64_hexdigest

from bevatron.data.ragged import pointer
from bevatron.data.samples import Field
from bevatron.errors import StoreError
from bevatron.files import atomic_write
from bevatron.typing import Array, Arrays, IntArray

CHECKSUM = "checksum"
"""Name of the column of checksums."""

METADATA_KEY = b"bevatron"


@dataclass(frozen=True)
class Columns:
    """The fields of many samples as flat arrays.

    Attributes
    ----------
    arrays : by field: the rows of all samples concatenated (ragged), or one entry per sample
    offsets : by ragged field: int64 [num_samples + 1], where the rows of each sample start
    """

    num_samples: int
    arrays: Mapping[str, Array]
    offsets: Mapping[str, IntArray]


def concatenate(samples: Sequence[Arrays], fields: Sequence[Field]) -> Columns:
    """Concatenate samples into flat columns.

    Raises ValueError if a field is missing or has the wrong type or shape.
    """
    arrays: dict[str, Array] = {}
    offsets: dict[str, IntArray] = {}
    for spec in fields:
        values = [np.asarray(sample[spec.name]) for sample in samples]
        for value in values:
            spec.check(value)
        if spec.ragged:
            offsets[spec.name] = pointer([len(value) for value in values])
            empty = np.empty((0, *spec.shape), dtype=spec.dtype)
            arrays[spec.name] = np.concatenate(values) if values else empty
        else:
            arrays[spec.name] = np.array(values, dtype=spec.dtype).reshape(-1, *spec.shape)
    return Columns(len(samples), arrays, offsets)


def write_shard(
    path: Path, fields: Sequence[Field], columns: Columns, metadata: Mapping[str, Any]
) -> None:
    """Write one shard from flat arrays; it appears under ``path`` only when complete.

    Raises StoreError if the file cannot be written.

    Parameters
    ----------
    fields : type and shape of every column; ``columns`` must hold all of them
    metadata : plain values stored in the file; see `read_metadata`
    """
    arrow_arrays = []
    arrow_fields = []
    digests = {}
    for spec in fields:
        values = np.ascontiguousarray(columns.arrays[spec.name], dtype=spec.dtype)
        digests[spec.name] = xxh3_64_hexdigest(values.data)
        column = _nested(values, spec)
        if spec.ragged:
            offsets = np.ascontiguousarray(columns.offsets[spec.name], dtype=np.int64)
            digests[spec.name + "/offsets"] = xxh3_64_hexdigest(offsets.data)
            column = pa.LargeListArray.from_arrays(_column(offsets), column)
        arrow_arrays.append(column)
        note = {"dtype": spec.dtype, "meaning": spec.meaning}
        arrow_fields.append(pa.field(spec.name, column.type, nullable=False, metadata=note))
    arrow_arrays.append(_column(_checksums(fields, columns)))
    arrow_fields.append(pa.field(CHECKSUM, pa.uint64(), nullable=False))
    described = {**metadata, "digests": digests}
    schema = pa.schema(arrow_fields, metadata={METADATA_KEY: json.dumps(described)})
    batch = pa.record_batch(arrow_arrays, schema=schema)
    with atomic_write(path, StoreError) as file, pa.ipc.new_file(file, schema) as writer:
        writer.write_batch(batch)


def _nested(values: Array, spec: Field) -> pa.Array:
    """Return ``values`` as an Arrow column; bool as uint8, since Arrow packs bits."""
    flat = values.reshape(-1)
    column = _column(flat.view(np.uint8) if flat.dtype == np.bool_ else flat)
    for length in reversed(spec.shape):
        column = pa.FixedSizeListArray.from_arrays(column, length)
    return column


def _column(values: Array) -> pa.Array:
    """Return flat values as an Arrow column, without a copy; `pa.array` would import pandas."""
    kind = pa.from_numpy_dtype(values.dtype)
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(values)])


def _checksums(fields: Sequence[Field], columns: Columns) -> Array:
    rows = _Rows(fields, columns.num_samples, columns.arrays, columns.offsets)
    return np.fromiter(
        (rows.checksum(i, rows.sample(i)) for i in range(columns.num_samples)),
        dtype=np.uint64,
        count=columns.num_samples,
    )


class _Rows:
    """Cheap views of single samples in flat arrays.

    Indexing a memoryview of the offsets is several times faster than indexing a numpy array.
    """

    def __init__(
        self,
        fields: Sequence[Field],
        num_samples: int,
        arrays: Mapping[str, Array],
        offsets: Mapping[str, IntArray],
    ) -> None:
        self.ragged: list[tuple[str, Array, memoryview]] = []
        self.fixed: list[tuple[str, Array]] = []
        for spec in fields:
            array = np.ascontiguousarray(arrays[spec.name], dtype=spec.dtype)
            if spec.ragged:
                starts = np.ascontiguousarray(offsets[spec.name], dtype=np.int64)
                if starts.shape != (num_samples + 1,):
                    raise ValueError(f"column '{spec.name}' holds another number of samples")
                # Under its own format code: 'l' and 'q' are both int64, only one is universal.
                view = starts.data.cast("B").cast("q")
                self.ragged.append((spec.name, array, view))
            elif len(array) == num_samples:
                self.fixed.append((spec.name, array))
            else:
                raise ValueError(f"column '{spec.name}' holds another number of samples")
        self.pack = struct.Struct(f"<{len(self.ragged)}q").pack
        self.in_parts = frozenset(spec.name for spec in fields if spec.in_parts)

    def sample(self, row: int) -> dict[str, Array]:
        """View the fields of one sample, ragged ones first."""
        sample = {name: array[at[row] : at[row + 1]] for name, array, at in self.ragged}
        for name, array in self.fixed:
            sample[name] = array[row, ...]
        return sample

    def checksum(self, row: int, sample: Mapping[str, Array]) -> int:
        """Hash the lengths and bytes of one sample, without what is read in parts."""
        digest = xxh3_64(self.pack(*[at[row + 1] - at[row] for _, _, at in self.ragged]))
        update = digest.update
        if self.in_parts:
            sample = {name: sample[name] for name in sample if name not in self.in_parts}
        for array in sample.values():
            update(array)  # type: ignore[arg-type]  # a memoryview would cost as much as the hash
        return digest.intdigest()


def read_metadata(path: Path) -> dict[str, Any]:
    """Read the metadata passed to `write_shard`, without reading data.

    Raises StoreError if the file is missing or not a complete shard.
    """
    try:
        with pa.OSFile(os.fsencode(path)) as source:
            schema = pa.ipc.open_file(source).schema
        return dict(json.loads(schema.metadata[METADATA_KEY]))
    except (OSError, pa.ArrowException, KeyError, TypeError, ValueError) as error:
        raise StoreError(f"{path}: not a complete shard ({_first_line(error)})") from None


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


@dataclass
class Shard:
    """A memory-mapped shard; its buffers are viewed once, when it is opened.

    Attributes
    ----------
    arrays, offsets : as in `Columns`, read-only views of the file
    """

    path: Path
    num_samples: int
    arrays: Mapping[str, Array]
    offsets: Mapping[str, IntArray]
    digests: Mapping[str, str]
    checksums: memoryview
    rows: _Rows
    mapping: tuple[int, int]
    verified: set[str] = field(default_factory=set)

    @classmethod
    def open(cls, path: Path, size: int, fields: Sequence[Field]) -> "Shard":
        """Map a shard; StoreError if the file is missing, unreadable, of another size or damaged.

        Parameters
        ----------
        size
            Size in bytes when it was written. It is checked before mapping, because access beyond
            the end of a mapped file kills the process (SIGBUS).
        """
        check_size(path, size)
        try:
            with pa.memory_map(os.fsencode(path)) as source:
                # The map outlives the file descriptor, so thousands of shards hold none open.
                whole = source.read_buffer(size)
            reader = pa.ipc.open_file(pa.BufferReader(whole))
            batch = reader.get_batch(0)
            columns = {name: batch.column(name) for name in batch.schema.names}
            arrays = {spec.name: _view(columns[spec.name], spec) for spec in fields}
            offsets = {s.name: _view_offsets(columns[s.name]) for s in fields if s.ragged}
            return cls(
                path=path,
                num_samples=batch.num_rows,
                arrays=arrays,
                offsets=offsets,
                digests=json.loads(batch.schema.metadata[METADATA_KEY])["digests"],
                checksums=memoryview(columns[CHECKSUM].buffers()[-1]).cast("B").cast("Q"),
                rows=_Rows(fields, batch.num_rows, arrays, offsets),
                mapping=(whole.address, whole.size),
            )
        except PermissionError:
            raise StoreError(f"{path}: cannot be read (Permission denied)") from None
        except (OSError, pa.ArrowException, KeyError, IndexError, TypeError, ValueError) as error:
            raise StoreError(
                f"{path}: the shard is damaged ({_first_line(error)}); {REBUILD}"
            ) from None

    def verify_column(self, name: str) -> None:
        """Compare a whole column (``field`` or ``field/offsets``) with its digest, once.

        Raises StoreError if it differs.
        """
        if name in self.verified:
            return
        base = name.removesuffix("/offsets")
        values = self.arrays[name] if base == name else self.offsets[base]
        if xxh3_64_hexdigest(values.data) != self.digests.get(name):
            raise StoreError(f"{self.path}: the column '{base}' is damaged; {REBUILD}")
        self.verified.add(name)

    def release_pages(self) -> None:
        """Release the resident pages of the map.

        Views stay valid; pages are read from the page cache when accessed again.
        """
        _dont_need(*self.mapping)


REBUILD = "delete that file and run prepare again, which rebuilds only what is missing"


def check_size(path: Path, size: int) -> None:
    """Check that a shard exists and has the size in the manifest.

    Raises StoreError if it is missing or of another size, giving both.
    """
    try:
        found = path.stat().st_size
    except OSError as error:
        raise StoreError(
            f"{path}: the shard cannot be read ({error.strerror}); "
            "run prepare again, which rebuilds only what is missing"
        ) from None
    if found != size:
        raise StoreError(
            f"{path}: the shard has {found} bytes where {size} were written; {REBUILD}"
        )


def _view(column: pa.Array, spec: Field) -> Array:
    buffer = column.buffers()[-1]
    if buffer is None or buffer.size == 0:
        values = np.empty(0, dtype=spec.dtype)
        values.flags.writeable = False
    else:
        values = np.frombuffer(buffer, dtype=spec.dtype)
    return values.reshape(-1, *spec.shape)


def _view_offsets(column: pa.Array) -> IntArray:
    return np.frombuffer(column.buffers()[1], dtype=np.int64)[: len(column) + 1]


def _dont_need(address: int, size: int) -> None:
    if not sys.platform.startswith("linux"):
        return
    import ctypes

    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    madv_dontneed = 4
    madvise(address, size, madv_dontneed)
