"""Sizes of the fused kernels' blocks: rows, and hidden channels as columns."""

from bevatron.kernels.shared.tiles import Tiles, TileTable

TILES = TileTable(
    forward=Tiles(64, 32, 4, 3, registers=168),
    input=Tiles(64, 32, 4, 3),
    weight=Tiles(16, 64, 4, 6, per_sm=2),
)
