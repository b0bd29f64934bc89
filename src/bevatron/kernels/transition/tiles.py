"""Sizes of the fused kernels' blocks: a table measured by hand, so a cold start is fast."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Tiles:
    """How one kernel is cut.

    Attributes
    ----------
    rows, hidden
        Rows and hidden channels of a block.
    warps, stages
        Of a program: its warps, and how many blocks its loads run ahead.
    per_processor
        Programs side by side on a processor, where the number of programs is free.
    """

    rows: int
    hidden: int
    warps: int = 8
    stages: int = 2
    per_processor: int = 1


MEASURED: Mapping[str, Tiles] = {
    "forward": Tiles(128, 64, 8, 3),
    "input": Tiles(128, 64, 8, 2),
    "weight": Tiles(64, 64, 8, 3),
}

_replaced: dict[str, Tiles] = {}


def choose(kernel: str) -> Tiles:
    """Look up the tiles of ``forward``, ``input`` or ``weight``."""
    return _replaced.get(kernel, MEASURED[kernel])


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
