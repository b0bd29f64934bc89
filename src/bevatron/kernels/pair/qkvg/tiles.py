"""Sizes of the kernel's blocks: rows, and channels of the joint layer in each step."""

from bevatron.kernels.shared.tiles import Tiles, TileTable

TILES = TileTable(input=Tiles(64, 0, 4, 3, depth=64, per_sm=3, registers=168))
