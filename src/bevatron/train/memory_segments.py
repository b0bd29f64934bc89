"""How much GPU memory torch's allocator reserves for a sequence of tensors.

A CUDA graph has a pool of memory of its own and holds all of it between steps, the gaps too. Where
blocks are recomputed, tensors of many sizes alternate: gaps are up to a third of the pool.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from typing import Any

BLOCK_BYTES = 512
"""Sizes of tensors are rounded up to a multiple of it."""

MIB = 2**20
SMALL = MIB
"""Tensors up to it lie in segments of 2 MiB, apart from the others, and leave no rest unused."""

MEDIUM, SHARED_SEGMENT = 10 * MIB, 20 * MIB
"""Tensors below the first, that are not small, lie in segments of the second size; a larger one
takes a segment of its own size, rounded up to 2 MiB, which later ones share."""


@dataclass(eq=False)
class Block:
    """A part of a segment, in use or free; its neighbours are None at the ends of the segment."""

    place: int
    size: int
    small: bool
    free: bool = False
    before: "Block | None" = None
    after: "Block | None" = None


@dataclass
class Segments:
    """The segments of a pool, which are never returned to the device.

    A tensor takes the smallest free block that holds it; what is left of the block stays free, if
    it is more than 1 MiB or the segment is one for small tensors. Free neighbours are joined.

    Attributes
    ----------
    held : bytes of all segments

    Examples
    --------
    >>> pool = Segments()
    >>> first, second = pool.take(12 * MIB), pool.take(14 * MIB)
    >>> pool.give(first), pool.give(second)
    (None, None)
    >>> pool.take(16 * MIB).size // MIB, pool.held // MIB
    (16, 42)
    """

    held: int = 0
    _free: dict[bool, list[tuple[int, int, Block]]] = field(
        default_factory=lambda: {True: [], False: []}
    )

    def take(self, size: int) -> Block:
        """Find a block for a tensor of this many bytes."""
        size = max(-(-size // BLOCK_BYTES), 1) * BLOCK_BYTES
        small = size <= SMALL
        free = self._free[small]
        found = bisect_left(free, (size,))
        block = free.pop(found)[-1] if found < len(free) else self._segment(size, small)
        rest = block.size - size
        if rest >= BLOCK_BYTES if small else rest > SMALL:
            block.size, last = size, block.after
            block.after = Block(block.place + size, rest, small, False, block, last)
            if last is not None:
                last.before = block.after
            self._keep(block.after)
        block.free = False
        return block

    def _segment(self, size: int, small: bool) -> Block:
        rounded = -(-size // (2 * MIB)) * 2 * MIB
        length = SHARED_SEGMENT if SMALL < size < MEDIUM else rounded
        self.held += length
        return Block(self.held - length, length, small)

    def give(self, block: Block) -> None:
        """Free a tensor's block."""
        before, after = block.before, block.after
        if before is not None and before.free:
            block = self._joined(before, before, block)
        if after is not None and after.free:
            block = self._joined(after, block, after)
        self._keep(block)

    def _joined(self, free: Block, first: Block, second: Block) -> Block:
        """Join two neighbours, of which one is free, into one that is kept nowhere."""
        blocks = self._free[free.small]
        blocks.pop(bisect_left(blocks, (free.size, free.place)))
        first.size, first.after = first.size + second.size, second.after
        if first.after is not None:
            first.after.before = first
        return first

    def _keep(self, block: Block) -> None:
        block.free = True
        entry: Any = (block.size, block.place, block)
        insort(self._free[block.small], entry)
