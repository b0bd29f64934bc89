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
    registers
        Of a thread at most, so that more programs fit side by side; 0 for no limit.
    """

    rows: int
    hidden: int
    warps: int = 8
    stages: int = 2
    per_processor: int = 1
    registers: int = 0


MEASURED: Mapping[str, Tiles] = {
    "forward": Tiles(64, 32, 4, 3, registers=168),
    "input": Tiles(64, 32, 4, 3),
    "weight": Tiles(16, 64, 4, 6, per_processor=2),
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
