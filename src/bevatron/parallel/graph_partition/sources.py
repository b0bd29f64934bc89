"""Sources of a graph's edges, read piece by piece.

The random graphs of `bevatron.data.graphs.generators` and files opened by
`bevatron.data.graphs.read_in_pieces` are sources.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from bevatron.data.graphs.options import EdgePolicy
from bevatron.errors import DataError

PIECE = 1 << 22
"""Entries read at a time."""


class EdgeSource(Protocol):
    """A graph that can be read in pieces, repeatedly.

    Attributes
    ----------
    num_vertices : rows and columns of the matrix
    name : name of the file or graph, for messages
    policy : treatment of duplicates, reverse edges and self loops
    fill_empty_rows : whether a row without entries gets the one chosen by ``fill_empty_row``
    """

    @property
    def num_vertices(self) -> int:
        """Rows and columns of the matrix."""
        ...

    @property
    def name(self) -> str:
        """Name of the file or graph, for messages."""
        ...

    @property
    def policy(self) -> EdgePolicy:
        """Treatment of duplicates, reverse edges and self loops."""
        ...

    @property
    def fill_empty_rows(self) -> bool:
        """Whether a row without entries gets one."""
        ...

    def pieces(self, device: torch.device) -> Iterator[Sequence[Tensor]]:
        """Yield (row, column) or (row, column, value), int64 and floating, on the device."""
        ...

    def fill_empty_row(self, rows: Tensor) -> Tensor:
        """Choose a column for each of these rows."""
        ...


class EdgeList:
    """A source over a whole edge list in memory; each rank may hold it, or a small graph.

    Raises DataError if an index is outside 0 ... num_vertices - 1 or the lengths differ.

    Parameters
    ----------
    row, col : [E] row i attends to the columns stored in it
    num_vertices : rows and columns of the matrix
    values : [E] edge weights, or None
    policy : what is done with duplicates, reverse edges and self loops
    name : for messages

    Examples
    --------
    >>> source = EdgeList(torch.tensor([0, 1]), torch.tensor([1, 0]), 2)
    >>> [len(piece[0]) for piece in source.pieces(torch.device("cpu"))]
    [2]
    """

    fill_empty_rows = False

    def __init__(
        self,
        row: Shaped[Tensor, "E"],
        col: Shaped[Tensor, "E"],
        num_vertices: int,
        values: Float[Tensor, "_"] | None = None,
        *,
        policy: EdgePolicy | None = None,
        name: str = "edge list",
    ) -> None:
        for axis, ids in (("row", row), ("col", col)):
            check_ids(ids, num_vertices, f"edge list, {axis}")
        if values is not None and len(values) != len(row):
            raise DataError(f"edge list: found {len(row)} edges and {len(values)} values")
        self.row, self.col, self.values = row, col, values
        self.num_vertices, self.policy, self.name = num_vertices, policy or EdgePolicy(), name

    @property
    def weighted(self) -> bool:
        """Whether entries of the matrix have values."""
        return self.values is not None or self.policy.duplicates == "sum"

    def pieces(self, device: torch.device) -> Iterator[Sequence[Tensor]]:
        """Yield (row, column) or (row, column, value)."""
        for start in range(0, len(self.row), PIECE):
            part = slice(start, start + PIECE)
            found = [self.row[part].to(device, torch.int64), self.col[part].to(device, torch.int64)]
            yield found if self.values is None else [*found, self.values[part].to(device)]

    def fill_empty_row(self, rows: Tensor) -> Tensor:
        """Not used: empty rows stay empty."""
        return rows


def check_ids(ids: Tensor, num_vertices: int, where: str, first: int = 0) -> None:
    """Refuse an index outside the graph; DataError naming the place and the number."""
    if ids.is_floating_point() or ids.dtype == torch.bool:
        raise DataError(f"{where}: expected whole numbers, found {ids.dtype}")
    bad = ((ids < 0) | (ids >= num_vertices)).nonzero()
    if len(bad):
        at = int(bad[0])
        raise DataError(
            f"{where}, entry {first + at}: vertex {int(ids[at])} is outside 0 ... "
            f"{num_vertices - 1}"
        )
