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
    registers
        Of a thread, at most, where the bias needs no mask and all is aligned; 0 leaves it to the
        compiler.
        Programs that run at once on a processor are what hides how long its loads and products
        take: 96, 128 and 168 let 5, 4 and 3 of four warps fit on one of NVIDIA's.
    """

    block_q: int
    block_k: int
    warps: int = 4
    stages: int = 2
    registers: int = 0


LARGEST_BIAS_FIRST = 64
"""Heads, as padded: with larger ones dk and dv would need more registers than there are."""

SMALL_HEADS: Mapping[str, Tiles] = {
    "forward": Tiles(128, 64, 4, 3, registers=168),
    "dq": Tiles(64, 64, 4, 3, registers=128),
    "dkv": Tiles(32, 64, 4, 3, registers=96),
    "dkv_bias_first": Tiles(64, 64, 4, 4, registers=168),
    "dbias": Tiles(64, 64, 4, 4, registers=168),
}
"""16-bit types, heads up to 32."""

MEDIUM_HEADS: Mapping[str, Tiles] = {
    "forward": Tiles(64, 64, 4, 3, registers=128),
    "dq": Tiles(64, 64, 4, 2, registers=128),
    "dkv": Tiles(32, 64, 4, 3),
    "dkv_bias_first": Tiles(32, 64, 4, 3, registers=168),
    "dbias": Tiles(64, 64, 4, 3, registers=168),
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


def choose(kernel: str, head: int, itemsize: int, num_queries: int, num_keys: int) -> Tiles:
    """Look up a kernel's tiles and cut them down to the problem.

    Parameters
    ----------
    kernel
        ``forward``, ``dq``, ``dkv``, ``dbias``, or ``dkv_bias_first``: ``dkv`` where it reads the
        bias before its first product (16-bit types, heads up to `LARGEST_BIAS_FIRST`).
    head
        Head size, as padded.
    itemsize
        Bytes of an element of q.
    num_queries, num_keys
        Of a row.
    """
    tiles = _replaced.get(kernel) or _table(head, itemsize)[kernel]
    if tiles.block_q > 64 and 0 < num_queries % tiles.block_q <= tiles.block_q // 2:
        tiles = replace(tiles, block_q=tiles.block_q // 2)  # the last would be half empty
    return replace(
        tiles,
        block_q=min(tiles.block_q, padded(num_queries)),
        block_k=min(tiles.block_k, padded(num_keys)),
    )


def _table(head: int, itemsize: int) -> Mapping[str, Tiles]:
    if itemsize > 2:
        return SINGLE
    if head <= 32:
        return SMALL_HEADS
    return MEDIUM_HEADS if head <= 64 else LARGE_HEADS


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
