"""Rows of the blocks of the kernels with a linear layer."""

from bevatron.kernels.shared.tiles import Tiles, TileTable

TILES = TileTable(
    forward=Tiles(64, 0, 4),
    backward=Tiles(64, 0, 8, 3),
)
