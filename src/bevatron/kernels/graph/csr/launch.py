"""Arguments and blocks of kernels over a `Csr`.

A launch takes one side of the matrix, rows or columns, as a list of tensors and a list of numbers,
the only form in which custom operators take a structure.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bevatron.kernels.graph.csr import Csr
from bevatron.kernels.graph.csr.dropout import threshold
from bevatron.kernels.graph.csr.work import Work


@dataclass(frozen=True)
class Tile:
    """Block sizes of a program.

    Attributes
    ----------
    numbers : features gathered per step: entries times channels
    channels : most channels of a program; more are split over programs that recompute the scores
    num_warps : warps of a program
    """

    numbers: int = 1024
    channels: int = 128
    num_warps: int = 1


@dataclass(frozen=True)
class Bucket:
    """Parts ``first`` to ``first + count``: ``rows`` of them in a program, ``entries`` a step.

    Dealt: one part per program, whose ``rows`` lanes take its entries in turn. Filled: every part
    has an entry.
    """

    first: int
    count: int
    rows: int
    entries: int
    dealt: bool = False
    filled: bool = False

    @property
    def programs(self) -> int:
        """Number of programs."""
        return self.count if self.dealt else -(-self.count // self.rows)


class Mask(NamedTuple):
    """The random mask of attention, and the slope of its LeakyReLU.

    Attributes
    ----------
    ids : see `ids_of`; if empty, rows and columns are numbered by position
    seed : None without a mask
    """

    ids: list[Tensor]
    seed: Tensor | None
    slope: float = 0.2
    dropout: float = 0.0

    def arguments(self, placeholder: Tensor) -> tuple[Any, ...]:
        """Return the seed, the row and column ids, and the bound of the random words."""
        row_ids, col_ids = self.ids or (placeholder, placeholder)
        seed = placeholder if self.seed is None else self.seed
        return seed, row_ids, col_ids, threshold(self.dropout)

    def options(self) -> dict[str, Any]:
        """Return the compile-time constants."""
        return {
            "DROPOUT": self.seed is not None,
            "HAS_IDS": bool(self.ids),
            "SLOPE": self.slope,
            "INVERSE_KEEP": 1.0 / (1.0 - self.dropout),
        }


RESIDENT = 512
"""Most elements of a program's accumulators; more rows would spill registers."""
WIDEST = 64
"""Most rows of a program; the state of more rows would spill registers too."""
MOST_SCORES = 256
"""Most entries per step, however few channels they have."""
FEW_PARTS = 2048
"""A list this short is one launch."""


def rows_of(csr: Csr) -> tuple[list[Tensor], list[int]]:
    """Return the matrix's rows in the form that launches take."""
    return _side(csr.col, csr.row_work)


def columns_of(csr: Csr) -> tuple[list[Tensor], list[int]]:
    """Return the matrix's columns in the form that launches take."""
    return _side(csr.row_of, csr.col_work)


def ids_of(csr: Csr) -> list[Tensor]:
    """Return the row and column ids of a random mask, or an empty list."""
    if csr.row_ids is None and csr.col_ids is None:
        return []
    ids = (csr.row_ids, csr.col_ids)
    return [
        torch.arange(count, device=csr.device) if given is None else given.to(torch.int64)
        for given, count in zip(ids, csr.shape, strict=True)
    ]


def _side(index: Tensor, work: Work) -> tuple[list[Tensor], list[int]]:
    tensors = [index, work.row, work.start, work.length, work.slot, work.cut_row, work.cut_ptr]
    return tensors, [work.num_slots, len(work.row), *work.lengths]


def buckets(numbers: list[int], channels: int, tile: Tile) -> list[Bucket]:
    """Cut a list of parts, longest first, into launches whose programs have equal work.

    Parameters
    ----------
    numbers : see `rows_of`
    channels : channels of a program, a power of two
    tile : size of a program
    """
    total = numbers[1]
    most = max(4, tile.numbers // channels)
    few, many = (max(1, min(rows, RESIDENT // channels)) for rows in (4, 16))
    if total <= FEW_PARTS:
        return [Bucket(0, total, few, most // few)] if total else []
    shapes = [
        Bucket(0, 0, 1, most),
        Bucket(0, 0, few, most // few),
        Bucket(0, 0, many, max(1, most // many)),
    ]
    return _cut(numbers, most // 2, max(1, most // 8), shapes)


def lane_buckets(numbers: list[int], channels: int, tile: Tile, number_bytes: int) -> list[Bucket]:
    """Cut a list of parts into launches for kernels whose tiles are [entries, rows, channels].

    A long row has a warp to itself, whose lanes take its entries in turn, so that entries fetched
    together often share a cache line. Shorter rows share a warp, as many as fill its lanes at 16
    bytes of channels per lane: no lane waits for more entries, and each row, or lane's part of a
    row, is summed within a lane. Programs of rows with one entry or none have four times as many.
    """
    total = numbers[1]
    most = max(4, min(tile.numbers // channels, MOST_SCORES))
    rows = max(1, min(512 // (channels * number_bytes), most // 4, WIDEST // 2))
    if total <= FEW_PARTS:
        return [Bucket(0, total, rows, most // rows)] if total else []
    many = max(rows, min(4 * rows, RESIDENT // channels, WIDEST))
    shapes = [
        Bucket(0, 0, rows, most // rows, dealt=True, filled=True),
        Bucket(0, 0, rows, most // rows, filled=True),
        Bucket(0, 0, many, max(1, most // many // 2)),
    ]
    return _cut(numbers, 2 * most, 2, shapes)


def _cut(numbers: list[int], long: int, middling: int, shapes: list[Bucket]) -> list[Bucket]:
    """Build buckets of parts with at least ``long`` entries, ``middling`` entries, and the rest."""
    total, at_least = numbers[1], numbers[2:]

    def count(length: int) -> int:
        place = length.bit_length() - 1
        return at_least[place] if place < len(at_least) else 0

    bounds = [0, count(long), count(middling), total]
    return [
        replace(shape, first=first, count=last - first)
        for first, last, shape in zip(bounds[:-1], bounds[1:], shapes, strict=True)
        if last > first
    ]


def slices(channels: int, tile: Tile) -> tuple[int, int]:
    """Return the channels of a program, a power of two, and the number of programs per row."""
    width = min(tile.channels, 1 << (channels - 1).bit_length())
    return width, -(-channels // width)
