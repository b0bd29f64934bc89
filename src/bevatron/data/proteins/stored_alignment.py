"""The rows of an alignment as stored: three residues in 16 bits, deletions where there are any.

Rows are cut into blocks of up to `BLOCK` columns. Each row of a block has a checksum of its own,
and so have the deletions of `GROUP` rows of it. A sample therefore reads and verifies only the rows
and columns that it draws, and a stream of all rows needs no more memory than the rows it yields at
once.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from bevatron.data.ragged import members
from bevatron.data.readers.proteins.alphabet import CLASSES
from bevatron.data.samples import Field
from bevatron.data.store.shards import REBUILD
from bevatron.errors import StoreError
from bevatron.typing import Array, Arrays, IntArray

Integers: TypeAlias = npt.NDArray[np.integer[Any]]
Residues: TypeAlias = npt.NDArray[np.int8]
Deletions: TypeAlias = npt.NDArray[np.uint8]

_BITS, _PER_WORD = 5, 3
"""Bits of a class of the alphabet, and classes in 16 bits."""

BLOCK = 170 * _PER_WORD
"""Columns of a block."""

GROUP = 256
"""Number of rows whose deletions share a checksum; few columns have any."""

MAX_DELETIONS = np.iinfo(np.uint8).max
"""Maximum stored number of deletions before a column."""

ROW_FIELDS = (
    Field("residues", "uint16", (), True, "blocks by rows by words, three columns each", True),
    Field("residue_checksums", "uint32", (), True, "xxh3_64 of each row of a block", True),
    Field(
        "deletion_ptr", "uint32", (), True, "first deletion of each row of a block, last end", True
    ),
    Field("deletion_column", "uint16", (), True, "column in the block", True),
    Field("deletion_count", "uint8", (), True, "deletions before it, at least 1", True),
    Field(
        "deletion_checksums", "uint32", (), True, "of the three for groups of rows of a block", True
    ),
)
"""Fields of the rows of an alignment in a store."""


def pack_rows(rows: Residues, deletions: Array) -> Arrays:
    """Return rows as stored.

    Parameters
    ----------
    rows : int8 [R, L]
        Classes of the alphabet.
    deletions : [R, L]
        Number of deletions before each column.

    Returns
    -------
    Arrays
        With `ROW_FIELDS`.
    """
    parts: dict[str, list[Array]] = {field.name: [] for field in ROW_FIELDS}
    ptr = np.zeros(1, dtype=np.uint32)
    parts["deletion_ptr"].append(ptr)
    for start in range(0, rows.shape[1], BLOCK):
        words = _pack(rows[:, start : start + BLOCK])
        row, place = np.nonzero(deletions[:, start : start + BLOCK])
        count = np.minimum(deletions[row, start + place], MAX_DELETIONS).astype(np.uint8)
        column = place.astype(np.uint16)
        ptr = ptr[-1] + np.searchsorted(row, np.arange(len(rows) + 1)).astype(np.uint32)
        first = int(ptr[0])
        parts["residues"].append(words.ravel())
        parts["residue_checksums"].append(_row_checksums(words))
        parts["deletion_ptr"].append(ptr[1:])
        parts["deletion_column"].append(column)
        parts["deletion_count"].append(count)
        groups = [ptr[at : at + GROUP + 1] for at in range(0, len(rows), GROUP)]
        found = [_checksum(of, column, count, first) for of in groups]
        parts["deletion_checksums"].append(np.array(found, dtype=np.uint32))
    return {
        field.name: np.concatenate(parts[field.name]).astype(field.dtype, copy=False)
        for field in ROW_FIELDS
    }


def _pack(rows: Residues) -> npt.NDArray[np.uint16]:
    """Put three columns into a word, [R, L] to [R, ceil(L / 3)]; missing ones are 0."""
    width = rows.shape[1]
    words = np.zeros((len(rows), _words(width)), dtype=np.uint16)
    for place in range(_PER_WORD):
        part = rows[:, place::_PER_WORD].astype(np.uint16)
        words[:, : part.shape[1]] |= part << (_BITS * place)
    return words


def _unpack(words: npt.NDArray[np.uint16], width: int) -> Residues:
    residues = np.empty((*words.shape, _PER_WORD), dtype=np.int8)
    mask = np.uint16(len(CLASSES) - 1)
    for place in range(_PER_WORD):
        part = words >> np.uint16(_BITS * place)
        np.bitwise_and(part, mask, out=residues[..., place], casting="unsafe")
    return residues.reshape(len(words), words.shape[1] * _PER_WORD)[:, :width]


def _span(index: Integers) -> Integers | slice:
    """Return consecutive numbers as a slice, which numpy copies several times as fast."""
    return slice(int(index[0]), int(index[-1]) + 1) if (np.diff(index) == 1).all() else index


def _words(num_columns: int) -> int:
    return -(-num_columns // _PER_WORD)


def _row_checksums(words: npt.NDArray[np.uint16]) -> npt.NDArray[np.uint32]:
    wide = np.fromiter(map(xxh3_64_intdigest, words), dtype=np.uint64, count=len(words))
    return wide.astype(np.uint32)


def _checksum(
    ptr: npt.NDArray[np.uint32],
    columns: npt.NDArray[np.uint16],
    counts: npt.NDArray[np.uint8],
    first: int = 0,
) -> int:
    """Return the checksum of the deletions of some rows; ``first`` is the number of columns[0]."""
    inside = slice(int(ptr[0]) - first, int(ptr[-1]) - first)
    found = 0
    for part in (ptr.data, columns[inside].data, counts[inside].data):
        found = xxh3_64_intdigest(part, found)
    return found & 0xFFFFFFFF


@dataclass(frozen=True)
class StoredAlignment:
    """One alignment in a store: R rows, the query first, and L columns.

    Attributes
    ----------
    name : where it is, for messages
    num_rows : R
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
    residues: npt.NDArray[np.uint16]
    residue_checksums: npt.NDArray[np.uint32]
    deletion_ptr: npt.NDArray[np.uint32]
    deletion_column: npt.NDArray[np.uint16]
    deletion_count: npt.NDArray[np.uint8]
    deletion_checksums: npt.NDArray[np.uint32]

    @classmethod
    def of(cls, stored: Arrays, name: str) -> "StoredAlignment":
        """Create an alignment from a sample of a store."""
        values: dict[str, Any] = {key: stored[key] for key in cls.__annotations__ if key in stored}
        return cls(**values | {"name": name, "num_rows": int(stored["num_rows"])})

    @property
    def num_columns(self) -> int:
        """L."""
        return len(self.profile)

    def read(self, rows: Integers | slice, columns: Integers) -> tuple[Residues, Deletions]:
        """Read and verify rows at columns, both from 0 and in any order.

        Raises StoreError if what is read does not match its checksum; IndexError if there is no
        such row or column.

        Returns
        -------
        residues, deletions
            int8 and uint8, [rows, columns].
        """
        if columns.size and not 0 <= columns.min() <= columns.max() < self.num_columns:
            raise IndexError(f"{self.name}: has {self.num_columns} columns")
        if isinstance(rows, slice):
            index = np.arange(*rows.indices(self.num_rows))
        else:
            index = rows.astype(np.int64, copy=False)
        residues = np.empty((len(index), len(columns)), dtype=np.int8)
        deletions = np.empty((len(index), len(columns)), dtype=np.uint8)
        of_column = columns // BLOCK
        for block in np.unique(of_column).tolist():
            chosen = np.flatnonzero(of_column == block)
            inside, to = _span(columns[chosen] - block * BLOCK), _span(chosen)
            residues[:, to] = self._residues(block, rows, index)[:, inside]
            deletions[:, to] = self._deletions(block, index)[:, inside]
        return residues, deletions

    def stream(self, rows_at_once: int = 64) -> Iterator[tuple[Residues, Deletions]]:
        """Read and verify all rows, ``rows_at_once`` at a time, with all columns."""
        columns = np.arange(self.num_columns)
        for start in range(0, self.num_rows, rows_at_once):
            yield self.read(slice(start, start + rows_at_once), columns)

    def _width(self, block: int) -> int:
        return min(BLOCK, self.num_columns - block * BLOCK)

    def _residues(self, block: int, rows: Integers | slice, index: IntArray) -> Residues:
        """Verify and unpack some rows of a block, [rows, columns of the block]."""
        first, width = self.num_rows * _words(block * BLOCK), self._width(block)
        words = self.residues[first : first + self.num_rows * _words(width)]
        words = words.reshape(self.num_rows, -1)[rows]
        known = self.residue_checksums[block * self.num_rows : (block + 1) * self.num_rows][rows]
        wrong = np.flatnonzero(_row_checksums(words) != known)
        if len(wrong):
            raise self._damaged(block, f"row {index[wrong[0]]} of the alignment is")
        return _unpack(words, width)

    def _deletions(self, block: int, index: IntArray) -> Deletions:
        """Verify and spread the deletions of some rows of a block, as `_residues`."""
        ptr = self.deletion_ptr[block * self.num_rows : (block + 1) * self.num_rows + 1]
        groups = -(-self.num_rows // GROUP)
        for group in np.unique(index // GROUP).tolist():
            of = ptr[group * GROUP : (group + 1) * GROUP + 1]
            known = self.deletion_checksums[block * groups + group]
            if _checksum(of, self.deletion_column, self.deletion_count) != known:
                last = min((group + 1) * GROUP, self.num_rows) - 1
                raise self._damaged(block, f"deletions of rows {group * GROUP} to {last} are")
        place, own = members(ptr, index)
        table = np.zeros((len(index), self._width(block)), dtype=np.uint8)
        row = np.repeat(np.arange(len(index)), np.diff(own))
        table[row, self.deletion_column[place]] = self.deletion_count[place]
        return table

    def _damaged(self, block: int, what: str) -> StoreError:
        start = block * BLOCK
        return StoreError(
            f"{self.name}: {what} damaged at columns {start} to {start + self._width(block) - 1}, "
            f"a checksum does not match; {REBUILD}"
        )
