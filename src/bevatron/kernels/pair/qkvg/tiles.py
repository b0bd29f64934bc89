"""Sizes of the kernel's blocks: rows, and channels of the joint layer in each step."""

from bevatron.kernels.shared.tiles import Tiles, TileTable

TILES = TileTable(input=Tiles(64, 0, 4, 4, depth=64))
