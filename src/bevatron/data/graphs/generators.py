"""Random graphs of any size, generated in pieces: Kronecker as in Graph500, and uniform.

Edge e depends only on (seed, e). So every rank generates, piece by piece, exactly the part of the
graph that it keeps, no rank ever holds the whole list, and the graph is the same on any number of
ranks. Row i of the matrix attends to the columns stored in it.

A source of edges, for partitioning a graph into blocks, has ``num_vertices``, ``policy``,
``pieces(device)`` and, where empty rows get an entry, ``fill_empty_row``.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Int64
from torch import Tensor

from bevatron.data.graphs.generators_randomness import RandomOrder, random_below, random_words
from bevatron.data.graphs.options import EdgePolicy

PIECE = {"cpu": 1 << 18, "cuda": 1 << 26}
"""Edges per piece: a few vectors of this length must fit in memory next to the graph."""

QUADRANTS = (0.57, 0.19, 0.19, 0.05)
"""Graph500's A, B, C, D: (0, 0), (0, 1), (1, 0) and (1, 1) of (row, column) bits."""

BITS = 21
LEVELS_PER_WORD = 3
EDGE_STREAM, ROW_STREAM = 1, 2

Piece = tuple[Int64[Tensor, "E"], Int64[Tensor, "E"]]


def _pieces(count: int, device: torch.device, piece: int | None) -> Iterator[Tensor]:
    """Yield the numbers 0 ... count-1 in ranges that fit the device."""
    step = piece or PIECE.get(device.type, PIECE["cpu"])
    for start in range(0, count, step):
        yield torch.arange(start, min(start + step, count), device=device)


@dataclass(frozen=True)
class Kronecker:
    """The Graph500 Kronecker graph, directed, with vertices in random order.

    ``edges`` positions are drawn by descending log2(n) levels of the 2 x 2 matrix (0.57, 0.19;
    0.19, 0.05) without noise, and the vertices are renumbered at random. Self loops stay,
    duplicates become one entry, and each empty row gets one random entry off the diagonal. So
    fewer entries are stored than were asked for: at n = 2^17 and 172 million about half.

    Parameters
    ----------
    vertices
        At least 2. Rounded down to a power of two, as Graph500's generator needs; with
        ``round_down=False`` the graph is the part on the first ``vertices`` of the next power of
        two, and as many more positions are drawn as fall outside on average.
    edges : asked for; ceil(edges / vertices) are drawn for each vertex

    Examples
    --------
    >>> graph = Kronecker(100, 1000, seed=1)
    >>> graph.num_vertices, graph.num_drawn
    (64, 640)
    """

    vertices: int
    edges: int
    seed: int = 42
    round_down: bool = True

    policy = EdgePolicy(duplicates="merge")
    fill_empty_rows = True

    def __post_init__(self) -> None:
        if self.vertices < 2 or self.edges < 0:
            raise ValueError(
                f"a Kronecker graph has at least 2 vertices and no negative number of edges; "
                f"found {self.vertices} and {self.edges}"
            )

    @property
    def levels(self) -> int:
        """Bits of a vertex's number."""
        exact = self.vertices.bit_length() - 1
        return exact if self.round_down else (self.vertices - 1).bit_length()

    @property
    def num_vertices(self) -> int:
        """Number of vertices."""
        return 1 << self.levels if self.round_down else self.vertices

    @property
    def num_drawn(self) -> int:
        """Number of positions drawn."""
        factor = -(-self.edges // self.vertices)
        if self.round_down:
            return factor * self.num_vertices
        inside = self.num_vertices / (1 << self.levels)
        return math.ceil(factor * self.num_vertices / inside**2)

    def pieces(
        self, device: torch.device | str = "cpu", piece: int | None = None
    ) -> Iterator[Piece]:
        """Yield (row, column) of all positions drawn, duplicates included, a piece at a time."""
        device = torch.device(device)
        order = RandomOrder(1 << self.levels, self.seed)
        for positions in _pieces(self.num_drawn, device, piece):
            row, col = self._draw(positions)
            row, col = order(row), order(col)
            if self.num_vertices < 1 << self.levels:
                inside = (row < self.num_vertices) & (col < self.num_vertices)
                row, col = row[inside], col[inside]
            yield row, col

    def fill_empty_row(self, rows: Int64[Tensor, "R"]) -> Int64[Tensor, "R"]:
        """Choose the column, off the diagonal, that each of these rows gets if it is empty."""
        col = random_below(rows, self.num_vertices - 1, self.seed, ROW_STREAM)
        return col + (col >= rows)

    def _draw(self, positions: Tensor) -> Piece:
        """Descend all levels: of each 64-bit word, 21 bits choose a quadrant."""
        row, col = torch.zeros_like(positions), torch.zeros_like(positions)
        a, b, c, _ = QUADRANTS
        first, second, third = (round(x * (1 << BITS)) for x in (a, a + b, a + b + c))
        for level in range(self.levels):
            place = level % LEVELS_PER_WORD
            if place == 0:
                words = random_words(positions, self.seed, EDGE_STREAM, level)
            draw = words.bitwise_right_shift(BITS * place).bitwise_and_((1 << BITS) - 1)
            lower = draw >= second
            right = (draw >= first) ^ lower ^ (draw >= third)
            row.mul_(2).add_(lower)
            col.mul_(2).add_(right)
        return row, col


@dataclass(frozen=True)
class Uniform:
    """Every row has the same number of random columns; those drawn twice are stored once.

    Parameters
    ----------
    vertices : at least 1
    edges : asked for: ceil(edges / vertices) columns are drawn for each row

    Examples
    --------
    >>> Uniform(10, 25).degree
    3
    """

    vertices: int
    edges: int
    seed: int = 42

    policy = EdgePolicy(duplicates="merge")
    fill_empty_rows = False

    def __post_init__(self) -> None:
        if self.vertices < 1 or self.edges < 0:
            raise ValueError(
                f"a uniform graph has at least 1 vertex and no negative number of edges; "
                f"found {self.vertices} and {self.edges}"
            )

    @property
    def num_vertices(self) -> int:
        """Number of vertices."""
        return self.vertices

    @property
    def degree(self) -> int:
        """Columns drawn for each row."""
        return -(-self.edges // self.vertices)

    @property
    def num_drawn(self) -> int:
        """Number of positions drawn."""
        return self.degree * self.vertices

    def pieces(
        self, device: torch.device | str = "cpu", piece: int | None = None
    ) -> Iterator[Piece]:
        """Yield (row, column) of all positions drawn, duplicates included, a piece at a time."""
        for positions in _pieces(self.num_drawn, torch.device(device), piece):
            yield self._draw(positions)

    def row_pieces(
        self, start: int, stop: int, device: torch.device | str = "cpu", piece: int | None = None
    ) -> Iterator[Piece]:
        """Yield (row, column) of rows ``start`` to ``stop`` alone: nothing else is drawn."""
        first, count = start * self.degree, (stop - start) * self.degree
        for positions in _pieces(count, torch.device(device), piece):
            yield self._draw(positions + first)

    def fill_empty_row(self, rows: Int64[Tensor, "R"]) -> Int64[Tensor, "R"]:
        """Not used: a row is empty only if no edges were asked for."""
        return rows

    def _draw(self, positions: Tensor) -> Piece:
        row = positions // max(self.degree, 1)
        return row, random_below(positions, self.vertices, self.seed, EDGE_STREAM)


def block_entries(
    source: Kronecker | Uniform,
    rows: range | None = None,
    cols: range | None = None,
    *,
    device: torch.device | str = "cpu",
    piece: int | None = None,
) -> Piece:
    """Generate the entries of one block of a random graph, sorted by row, then column.

    Parameters
    ----------
    rows, cols : ranges of vertices with step 1; all by default
    device : where to compute; the result is the same everywhere
    piece : positions drawn at a time; the default depends on the device

    Returns
    -------
    tuple
        Row and column of every entry in the block, without duplicates, as numbers of the whole
        graph. Memory holds the block and one piece.

    Examples
    --------
    >>> graph = Kronecker(16, 64, seed=3)
    >>> whole = block_entries(graph)
    >>> parts = [block_entries(graph, range(0, 16), range(c, c + 4)) for c in range(0, 16, 4)]
    >>> sum(len(row) for row, _ in parts) == len(whole[0])
    True
    """
    device, n = torch.device(device), source.num_vertices
    rows, cols = rows if rows is not None else range(n), cols if cols is not None else range(n)
    width = max(len(cols), 1)
    empty = torch.ones(len(rows), dtype=torch.bool, device=device)
    keys: list[Tensor] = []
    for all_rows, all_cols in source.pieces(device, piece):
        mine = (all_rows >= rows.start) & (all_rows < rows.stop)
        row, col = all_rows[mine] - rows.start, all_cols[mine]
        empty[row] = False
        mine = (col >= cols.start) & (col < cols.stop)
        keys.append((row[mine] * width).add_(col[mine] - cols.start).unique())
    if source.fill_empty_rows:
        row = empty.nonzero().squeeze(1)
        col = source.fill_empty_row(row + rows.start)
        mine = (col >= cols.start) & (col < cols.stop)
        keys.append((row[mine] * width).add_(col[mine] - cols.start))
    key = torch.cat(keys).unique() if keys else empty.new_zeros(0, dtype=torch.int64)
    return key // width + rows.start, key % width + cols.start
