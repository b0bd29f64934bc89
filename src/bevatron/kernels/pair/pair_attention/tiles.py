"""Sizes of the kernels' blocks: queries as rows, keys as columns.

With four warps, 96, 128 and 168 registers per thread let 5, 4 and 3 programs run on an NVIDIA SM,
which hides the latency of loads and matmuls.
"""

from collections.abc import Mapping
from dataclasses import replace

from bevatron.kernels.shared.tiles import Tiles, TileTable

SMALLEST = 16
"""Smallest dimension of any block: a tensor core tile."""


LARGEST_BIAS_FIRST = 64
"""Largest padded head size; dk and dv of larger heads would need more registers than exist."""

SMALL_HEADS: Mapping[str, Tiles] = {
    "forward": Tiles(128, 64, 4, 3, registers=168),
    "dq": Tiles(64, 32, 4, 3, registers=128),
    "dkv": Tiles(32, 64, 4, 3, registers=96),
    "dkv_bias_first": Tiles(64, 64, 4, 4, registers=168),
    "dbias": Tiles(64, 64, 4, 4, registers=168),
}
"""16-bit types, heads up to 32."""

MEDIUM_HEADS: Mapping[str, Tiles] = {
    "forward": Tiles(64, 64, 4, 3, registers=128),
    "dq": Tiles(64, 32, 4, 3, registers=168),
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
"""float32: matmuls without tensor cores."""

_replacing: TileTable[Tiles] = TileTable()
replaced = _replacing.replaced


def choose(kernel: str, head: int, itemsize: int, num_queries: int, num_keys: int) -> Tiles:
    """Look up a kernel's tiles and cut them down to the problem.

    Parameters
    ----------
    kernel
        ``forward``, ``dq``, ``dkv``, ``dbias``, or ``dkv_bias_first``: ``dkv`` that reads the
        bias before its first matmul (16-bit types, heads up to `LARGEST_BIAS_FIRST`).
    head : padded head size
    itemsize : bytes of an element of q
    num_queries, num_keys : per row
    """
    tiles = _replacing.get(kernel) or _table(head, itemsize)[kernel]
    if tiles.rows > 64 and 0 < num_queries % tiles.rows <= tiles.rows // 2:
        tiles = replace(tiles, rows=tiles.rows // 2)  # the last would be half empty
    return replace(
        tiles,
        rows=min(tiles.rows, padded(num_queries)),
        columns=min(tiles.columns, padded(num_keys)),
    )


def _table(head: int, itemsize: int) -> Mapping[str, Tiles]:
    if itemsize > 2:
        return SINGLE
    if head <= 32:
        return SMALL_HEADS
    return MEDIUM_HEADS if head <= 64 else LARGE_HEADS


def padded(count: int) -> int:
    """Round up to a power of two that a block supports."""
    return max(SMALLEST, 1 << max(count - 1, 0).bit_length())
