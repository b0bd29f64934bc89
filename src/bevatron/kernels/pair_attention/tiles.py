"""Sizes of the blocks that the kernels work on: a table measured by hand, so a cold start is fast.

Nothing is tuned at run time: the first call compiles one configuration of each kernel.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

SMALLEST = 16
"""Of any block: the matrix units take no less."""


@dataclass(frozen=True)
class Tiles:
    """How one kernel is cut.

    Attributes
    ----------
    block_q, block_k
        Queries and keys of a block.
    warps, stages
        Of a program: its warps, and how many blocks its loads run ahead.
    rows
        Rows of a program that share one read of the bias, 1 or 2.
    """

    block_q: int
    block_k: int
    warps: int = 4
    stages: int = 2
    rows: int = 1


SMALL_HEADS: Mapping[str, Tiles] = {
    "forward": Tiles(128, 32, 4, 3),
    "dq": Tiles(64, 64, 4, 3),
    "dkv": Tiles(64, 64, 4, 2),
    "dbias": Tiles(64, 64, 4, 3),
}
"""16-bit types, heads up to 32."""

MEDIUM_HEADS: Mapping[str, Tiles] = {
    "forward": Tiles(64, 32, 4, 3),
    "dq": Tiles(64, 32, 4, 3),
    "dkv": Tiles(32, 64, 4, 3),
    "dbias": Tiles(64, 64, 4, 3),
}
"""16-bit types, heads up to 64."""

LARGE_HEADS: Mapping[str, Tiles] = {
    "forward": Tiles(64, 32, 4, 3),
    "dq": Tiles(64, 32, 4, 2),
    "dkv": Tiles(32, 64, 4, 2),
    "dbias": Tiles(64, 64, 4, 2),
}
"""16-bit types, heads up to 128."""

SINGLE: Mapping[str, Tiles] = {
    "forward": Tiles(32, 32, 4, 1),
    "dq": Tiles(32, 32, 4, 1),
    "dkv": Tiles(32, 32, 4, 1),
    "dbias": Tiles(32, 32, 4, 1),
}
"""float32: products without the matrix units."""

_replaced: dict[str, Tiles] = {}


def choose(
    kernel: str, head: int, itemsize: int, num_queries: int, num_keys: int, shared_by: int
) -> Tiles:
    """Look up a kernel's tiles and cut them down to the problem.

    Parameters
    ----------
    kernel
        ``forward``, ``dq``, ``dkv`` or ``dbias``.
    head
        Head size, as padded.
    itemsize
        Bytes of an element of q.
    num_queries, num_keys
        Of a row.
    shared_by
        How many rows share a bias.
    """
    if itemsize > 2:
        table = SINGLE
    elif head <= 32:
        table = SMALL_HEADS
    elif head <= 64:
        table = MEDIUM_HEADS
    else:
        table = LARGE_HEADS
    tiles = _replaced.get(kernel, table[kernel])
    return replace(
        tiles,
        block_q=min(tiles.block_q, padded(num_queries)),
        block_k=min(tiles.block_k, padded(num_keys)),
        rows=min(tiles.rows, max(shared_by, 1)),
    )


def padded(count: int) -> int:
    """Round up to a power of two that a block may have."""
    return max(SMALLEST, 1 << max(count - 1, 0).bit_length())


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
