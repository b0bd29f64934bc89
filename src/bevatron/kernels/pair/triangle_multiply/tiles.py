"""Sizes of the kernels' blocks: rows of the pair, and channels of a projection as columns."""

from bevatron.kernels.shared.tiles import Tiles, TileTable

MEASURED = TileTable(
    project=Tiles(128, 32, 4, 2, per_sm=3, registers=168),
    half_project=Tiles(64, 32, 4, 2, per_sm=3),
    project_input=Tiles(64, 16, 4, 4, registers=168),
    output=Tiles(64, 64, 4, 1, registers=168, hold=True),
    output_input=Tiles(64, 32, 4, 3, hold=True),
    weight=Tiles(64, 128, 4, 3, per_sm=2),
)
"""For 16-bit types and up to `NARROW` channels."""
NARROW = 128
WIDE = Tiles(32, 16, 8, 1, per_sm=2)
"""For everything else: float32 takes twice the registers and shared memory."""

_replacing: TileTable[Tiles] = TileTable()
replaced = _replacing.replaced


def choose(kernel: str, width: int, item_size: int) -> Tiles:
    """Look up the tiles of a kernel for ``width`` padded channels of ``item_size`` bytes each."""
    if kernel in _replacing:
        return _replacing[kernel]
    return MEASURED[kernel] if item_size == 2 and width <= NARROW else WIDE
