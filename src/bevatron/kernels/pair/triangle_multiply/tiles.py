"""Sizes of the kernels' blocks: a table measured by hand, so a cold start is fast."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Tiles:
    """How one kernel is cut.

    Attributes
    ----------
    rows, channels
        Rows of the pair and channels of a projection in a block.
    warps, stages
        Of a program: its warps, and how many blocks its loads run ahead.
    per_processor
        Programs side by side on a processor, where the number of programs is free.
    hold
        Keep rows that enter many products in registers.
    registers
        Of a thread at most, so that more programs fit side by side; 0 for no limit.
    """

    rows: int
    channels: int
    warps: int = 4
    stages: int = 2
    per_processor: int = 1
    hold: bool = False
    registers: int = 0


MEASURED: Mapping[str, Tiles] = {
    "project": Tiles(64, 32, 4, 2),
    "project_input": Tiles(64, 32, 4, 3),
    "output": Tiles(64, 64, 4, 1),
    "output_input": Tiles(64, 32, 4, 3),
    "weight": Tiles(64, 128, 4, 3, per_processor=2),
}
"""For 16-bit types and up to `NARROW` channels."""
NARROW = 128
WIDE = Tiles(32, 16, 8, 1, per_processor=2)
"""For all else: float32 numbers fill registers and shared memory twice as fast."""

_replaced: dict[str, Tiles] = {}


def choose(kernel: str, width: int, item_size: int) -> Tiles:
    """Look up the tiles of a kernel for padded channels of so many bytes each."""
    if kernel in _replaced:
        return _replaced[kernel]
    return MEASURED[kernel] if item_size == 2 and width <= NARROW else WIDE


@contextmanager
def replaced(**tiles: Tiles) -> Iterator[None]:
    """Use other tiles within, by kernel: to measure them, and to test small blocks."""
    before = dict(_replaced)
    _replaced.update(tiles)
    try:
        yield
    finally:
        _replaced.clear()
        _replaced.update(before)
