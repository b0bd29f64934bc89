"""The distinct rows of alignments in memory, with the interface of a stored alignment."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bevatron.data.readers.proteins.alignments import Alignment
from bevatron.data.readers.proteins.alphabet import CLASSES
from bevatron.errors import DataError
from bevatron.typing import IntArray


@dataclass(frozen=True)
class RowsInMemory:
    """R distinct rows, the query first, and L columns.

    Attributes
    ----------
    rows : int8 [R, L]
        Classes of the alphabet.
    deletions : uint8 [R, L]
        Deletions before each column, at most 255.
    """

    rows: npt.NDArray[np.int8]
    deletions: npt.NDArray[np.uint8]

    @property
    def num_rows(self) -> int:
        """R."""
        return len(self.rows)

    @property
    def num_columns(self) -> int:
        """L."""
        return int(self.rows.shape[1])

    @property
    def profile(self) -> npt.NDArray[np.float32]:
        """Share of each class in all rows, [L, 32]."""
        counts = [(self.rows == number).sum(axis=0) for number in range(len(CLASSES))]
        return (np.stack(counts, axis=1) / self.num_rows).astype(np.float32)

    def read(
        self, rows: IntArray | slice, columns: IntArray
    ) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.uint8]]:
        """Return residues and deletions of some rows and columns, in any order."""
        return self.rows[rows][:, columns], self.deletions[rows][:, columns]

    def stream(
        self, rows_at_once: int = 64
    ) -> Iterator[tuple[npt.NDArray[np.int8], npt.NDArray[np.uint8]]]:
        """Yield all rows with all columns."""
        for start in range(0, self.num_rows, rows_at_once):
            part = slice(start, start + rows_at_once)
            yield self.rows[part], self.deletions[part]


def rows_in_memory(alignments: Sequence[Alignment]) -> RowsInMemory:
    """Join alignments of one query and leave out rows that equal an earlier one.

    Raises DataError if their queries differ.
    """
    query = alignments[0].rows[0]
    for alignment in alignments[1:]:
        if not np.array_equal(alignment.rows[0], query):
            raise DataError(
                f"alignments of {alignments[0].names[0]} and {alignment.names[0]} were given for "
                "one chain; their first rows differ"
            )
    rows = np.concatenate([alignment.rows for alignment in alignments])
    deletions = np.concatenate([alignment.deletions for alignment in alignments])
    first = {row.tobytes(): place for place, row in reversed(list(enumerate(rows)))}
    kept = np.sort(np.array(list(first.values())))
    return RowsInMemory(rows[kept], np.minimum(deletions[kept], 255).astype(np.uint8))
