"""Numbers the vertices by (i, j, t): piece t of rank (i, j) on a grid of Px x Py processes.

Row block i of the matrix is all pieces (i, *), column block j all pieces (*, j). So a rank's own
piece is a part of both its row block and its column block: a layer's output is placed where
the next layer reads its input, and nothing is ever transposed between ranks, on any Px x Py.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Int64
from torch import Tensor


@dataclass(frozen=True)
class Split:
    """Numbers 0..n-1 in pieces of nearly equal size, each padded to the largest.

    Attributes
    ----------
    count : n
    pieces : number of pieces; the first n mod pieces have one more number

    Examples
    --------
    >>> split = Split(10, 4)
    >>> [split.length(q) for q in range(4)], split.padded
    ([3, 3, 2, 2], 3)
    >>> piece, place = split.locate(torch.tensor([0, 3, 6, 9]))
    >>> piece.tolist(), place.tolist()
    ([0, 1, 2, 3], [0, 0, 0, 1])
    """

    count: int
    pieces: int

    @property
    def padded(self) -> int:
        """Length of every piece with its padding, at least 1."""
        return max(-(-self.count // self.pieces), 1)

    def length(self, piece: int) -> int:
        """Length of a piece without padding."""
        return self.count // self.pieces + (piece < self.count % self.pieces)

    def start(self, piece: int) -> int:
        """Return the first number of a piece."""
        return piece * (self.count // self.pieces) + min(piece, self.count % self.pieces)

    def locate(self, ids: Int64[Tensor, "E"]) -> tuple[Int64[Tensor, "E"], Int64[Tensor, "E"]]:
        """Return the piece of each number and its position there."""
        small, large = self.count // self.pieces, self.count % self.pieces
        bound = large * (small + 1)
        piece = torch.where(ids < bound, ids // (small + 1), large + (ids - bound) // max(small, 1))
        return piece, ids - piece * small - piece.clamp(max=large)


@dataclass(frozen=True)
class Grid:
    """Px x Py processes; rank i * Py + j is at (i, j).

    Examples
    --------
    >>> grid = Grid(2, 3)
    >>> grid.position(4), grid.row_group(1), grid.column_group(1)
    ((1, 1), [3, 4, 5], [1, 4])
    """

    px: int
    py: int

    @property
    def size(self) -> int:
        """Number of processes."""
        return self.px * self.py

    def position(self, rank: int) -> tuple[int, int]:
        """Return (i, j) of a rank."""
        return divmod(rank, self.py)

    def row_group(self, i: int) -> list[int]:
        """Ranks (i, *): they share the rows of block i."""
        return [i * self.py + j for j in range(self.py)]

    def column_group(self, j: int) -> list[int]:
        """Ranks (*, j): they share the columns of block j."""
        return [i * self.py + j for i in range(self.px)]


def grids(world: int) -> list[Grid]:
    """All grids of a number of processes.

    Examples
    --------
    >>> [(grid.px, grid.py) for grid in grids(6)]
    [(1, 6), (2, 3), (3, 2), (6, 1)]
    """
    return [Grid(px, world // px) for px in range(1, world + 1) if world % px == 0]
