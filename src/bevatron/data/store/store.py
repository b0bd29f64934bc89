"""The store: prepared samples in shards on disk, with random access in microseconds.

A store is a folder of `shards` and a ``manifest.json`` that is written last. ``store[i]`` gives
read-only numpy views of the memory-mapped file, after their checksum has been verified.
"""

import json
import operator
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, SupportsIndex

import numpy as np

from bevatron.data.readers.base import place_of_row
from bevatron.data.samples import Field
from bevatron.data.store.shards import REBUILD, Shard, check_size
from bevatron.errors import StoreError
from bevatron.files import checksum
from bevatron.typing import Array, IntArray

MANIFEST = "manifest.json"
"""The file that makes a folder a store."""

PREPARATION = "preparation.json"
"""The file with the inputs of a store that is not finished yet."""

STORE_KIND = "bevatron store"
STORE_FORMAT = 1

_SAMPLES_BETWEEN_PAGE_COUNTS = 16
_LARGE_SAMPLES_BETWEEN_PAGE_COUNTS = 4
_LARGE = 1 << 14  # bytes; a sample that takes longer to read than pages to count


class Store:
    """Random access to prepared samples.

    Raises StoreError if the folder is missing, not a store or not finished, or the size of a shard
    is wrong.

    Parameters
    ----------
    path : folder that `bevatron.data.store.prepare.prepare` wrote
    resident_limit
        Upper bound of resident bytes of the memory map; above it, pages are released (they stay in
        the page cache). None for no limit.

    Attributes
    ----------
    manifest : fingerprint, fields, sources, settings, summary, counts, num_samples, shards

    Examples
    --------
    >>> import tempfile, numpy as np
    >>> from bevatron.data.store.prepare import write_store
    >>> from bevatron.data.samples import Field
    >>> from bevatron.data.store.shards import Columns
    >>> fields = (Field("x", "float64", (), True),)
    >>> columns = Columns(2, {"x": np.arange(5.0)}, {"x": np.array([0, 2, 5])})
    >>> store = write_store(Path(tempfile.mkdtemp()) / "store", fields, [columns])
    >>> store[1]["x"]
    array([2., 3., 4.])
    """

    def __init__(self, path: str | Path, *, resident_limit: int | None = 512 * 2**20) -> None:
        self.path = Path(path)
        self.manifest: dict[str, Any] = read_manifest(self.path)
        self.fields = fields_from_plain(self.manifest["fields"])
        self._by_name = {spec.name: spec for spec in self.fields}
        self._num_samples: int = self.manifest["num_samples"]
        self._samples_per_shard: int = self.manifest["samples_per_shard"]
        self._entries: list[dict[str, Any]] = self.manifest["shards"]
        self._shards: list[Shard | None] = [None] * len(self._entries)
        for entry in self._entries:
            check_size(self.path / entry["name"], entry["size"])
        self._resident_limit = resident_limit
        size = sum(entry["size"] for entry in self._entries)
        self._between_page_counts = (
            _LARGE_SAMPLES_BETWEEN_PAGE_COUNTS
            if size > _LARGE * self._num_samples
            else _SAMPLES_BETWEEN_PAGE_COUNTS
        )
        self._until_page_count = self._between_page_counts
        self._pages_before = _file_pages()

    @classmethod
    def open(cls, path: str | Path) -> "Store":
        """Open a store with the default limits."""
        return cls(path)

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: SupportsIndex) -> dict[str, Array]:
        """Return a sample as read-only views, after verifying its checksum.

        It covers all fields but those that are read in parts, whose pages stay untouched. Raises
        IndexError if there is no such sample; StoreError if the sample does not match its checksum;
        it is named.
        """
        number, row = self._locate(index)
        shard = self._shards[number] or self._open_shard(number)
        rows = shard.rows
        sample = rows.sample(row)
        if rows.checksum(row, sample) != shard.checksums[row]:
            raise StoreError(
                f"{shard.path}: sample {operator.index(index)} ({self.describe(index)}) is "
                f"damaged, its checksum does not match; {REBUILD}"
            )
        self._until_page_count -= 1
        if self._until_page_count <= 0:
            self._bound_pages()
        return sample

    def __iter__(self) -> Iterator[dict[str, Array]]:
        for index in range(len(self)):
            yield self[index]

    def describe(self, index: SupportsIndex) -> str:
        """Return the origin of a sample: ``train.xyz, frame 12``, ``train.csv, line 14``."""
        number, row = self._locate(index)
        shard = self._shards[number] or self._open_shard(number)
        sources = self.manifest["sources"]
        if "source" in shard.arrays:
            file, frame = (int(value) for value in shard.arrays["source"][row])
            if 0 <= file < len(sources) and frame >= 0:
                unit = self.manifest["settings"].get("unit", "frame")
                place = place_of_row(sources[file], frame) if unit == "row" else f"{unit} {frame}"
                return f"{sources[file]}, {place}"
        return f"sample {operator.index(index)} of {self.path}"

    def lengths(self, field: str) -> IntArray:
        """Return the number of rows of a ragged field in every sample, [n], without reading data.

        Raises StoreError if there is no such ragged field or the lengths of a shard are damaged.
        """
        spec = self._field(field)
        if not spec.ragged:
            raise StoreError(f"{self.path}: the field '{field}' has a fixed shape, no lengths")
        result = np.empty(len(self), dtype=np.int64)
        start = 0
        for number in range(len(self._entries)):
            shard = self._shards[number] or self._opened(number, (spec,))
            shard.verify_column(f"{field}/offsets")
            offsets = shard.offsets[field]
            np.subtract(offsets[1:], offsets[:-1], out=result[start : start + shard.num_samples])
            start += shard.num_samples
        return result

    def flat(self, field: str) -> Iterator[tuple[Array, IntArray]]:
        """Iterate over a field shard by shard as flat arrays, for vectorised statistics.

        Raises StoreError if there is no such field or a shard's column is damaged.

        Yields
        ------
        flat, offsets
            All rows of the samples of a shard and their offsets, int64 [n + 1]; for a field of
            fixed shape one row per sample. Verified, read-only.
        """
        spec = self._field(field)
        for number in range(len(self._entries)):
            shard = self._shards[number] or self._opened(number, (spec,))
            shard.verify_column(field)
            if spec.ragged:
                shard.verify_column(f"{field}/offsets")
                yield shard.arrays[field], shard.offsets[field]
            else:
                yield shard.arrays[field], np.arange(shard.num_samples + 1, dtype=np.int64)
            self._bound_pages()

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (self.path.resolve(), self.manifest["fingerprint"], self._resident_limit)

    def __repr__(self) -> str:
        return f"Store({str(self.path)!r}, {len(self)} samples)"

    def _locate(self, index: SupportsIndex) -> tuple[int, int]:
        place = operator.index(index)
        if place < 0:
            place += self._num_samples
        if not 0 <= place < self._num_samples:
            raise IndexError(f"{self.path} holds {self._num_samples} samples")
        return divmod(place, self._samples_per_shard)

    def _field(self, name: str) -> Field:
        if name not in self._by_name:
            known = ", ".join(self._by_name)
            raise StoreError(f"{self.path}: there is no field '{name}', only {known}")
        return self._by_name[name]

    def _open_shard(self, number: int) -> Shard:
        shard = self._shards[number] = self._opened(number, self.fields)
        return shard

    def _opened(self, number: int, fields: Sequence[Field]) -> Shard:
        """Map a shard for some fields; only what samples are read from is kept."""
        entry = self._entries[number]
        shard = Shard.open(self.path / entry["name"], entry["size"], fields)
        if shard.num_samples != entry["samples"]:
            raise StoreError(
                f"{shard.path}: the shard holds {shard.num_samples} samples where the manifest "
                f"says {entry['samples']}; {REBUILD}"
            )
        return shard

    def _bound_pages(self) -> None:
        """Release mapped pages above the limit, so that resident memory stays bounded."""
        self._until_page_count = self._between_page_counts
        if self._resident_limit is None:
            return
        pages = _file_pages()
        self._pages_before = min(self._pages_before, pages)
        if (pages - self._pages_before) * _PAGE_SIZE > self._resident_limit:
            for shard in self._shards:
                if shard is not None:
                    shard.release_pages()
            self._pages_before = _file_pages()


_PAGE_SIZE = os.sysconf("SC_PAGE_SIZE")


def _file_pages() -> int:
    """Return the number of resident file-backed pages (0 where the system does not report it)."""
    try:
        with open("/proc/self/statm", "rb", buffering=0) as file:  # noqa: PTH123  called often
            return int(file.read().split()[2])
    except OSError:
        return 0


def _reopen(path: Path, fingerprint: str, resident_limit: int | None) -> Store:
    store = Store(path, resident_limit=resident_limit)
    if store.manifest["fingerprint"] != fingerprint:
        raise StoreError(f"{path}: the store was replaced by one with other settings")
    return store


def read_manifest(path: Path) -> dict[str, Any]:
    """Read the manifest of a finished store.

    Raises StoreError if ``path`` is missing, not a store, or not finished.
    """
    manifest = path / MANIFEST
    try:
        values = json.loads(manifest.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise StoreError(_why_no_manifest(path)) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise StoreError(f"{manifest}: cannot be read ({reason})") from None
    if not isinstance(values, Mapping) or values.get("kind") != STORE_KIND:
        raise StoreError(f"{manifest}: not the manifest of a bevatron store")
    if values.get("format") != STORE_FORMAT:
        raise StoreError(
            f"{manifest}: the store has format {values.get('format')}, this version of bevatron "
            f"reads format {STORE_FORMAT}; prepare it again"
        )
    described = {key: value for key, value in values.items() if key != "checksum"}
    # Stores of bevatron 0.1 have none.
    if "checksum" in values and values["checksum"] != manifest_checksum(described):
        raise StoreError(f"{manifest}: is damaged, its checksum does not match; prepare it again")
    return described


def manifest_checksum(values: Mapping[str, Any]) -> str:
    """Hash a manifest as it was read, without its checksum."""
    return checksum(json.dumps(values, sort_keys=True).encode())


def _why_no_manifest(path: Path) -> str:
    if not path.exists():
        return f"{path}: there is no such store; make it with `bevatron prepare`"
    if (path / PREPARATION).exists():
        return (
            f"{path}: its preparation did not finish; run the same `bevatron prepare` again, "
            "which continues where it stopped"
        )
    if path.is_file():
        return f"{path}: is a file, not a store; `bevatron prepare` makes stores of files"
    return f"{path}: not a store, it has no {MANIFEST}; make one with `bevatron prepare`"


def fields_to_plain(fields: tuple[Field, ...]) -> list[dict[str, Any]]:
    """Fields as plain values for a manifest."""
    return [
        {
            "name": spec.name,
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "ragged": spec.ragged,
            "meaning": spec.meaning,
        }
        | ({"in_parts": True} if spec.in_parts else {})
        for spec in fields
    ]


def fields_from_plain(values: list[dict[str, Any]]) -> tuple[Field, ...]:
    """Inverse of `fields_to_plain`."""
    return tuple(Field(**{**value, "shape": tuple(value["shape"])}) for value in values)
