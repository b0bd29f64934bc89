"""Irreps: which representations of O(3) a feature vector consists of, and at which offsets.

A feature of ``128x0e+128x1o`` holds 128 scalars (degree 0, even) and 128 vectors (degree 1, odd).
The layout of a flat feature is e3nn's ``mul_ir``: block after block, within a block channel after
channel, within a channel the 2l+1 components; or ``ir_mul``, where an operator offers it, within a
block component after component.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, cast, get_args, overload

from bevatron.errors import ConfigError

Layout = Literal["mul_ir", "ir_mul"]
"""Memory layout of a block: channel after channel (e3nn), or component after component."""

_BLOCK = re.compile(r"^(?:(\d+)\s*x\s*)?(\d+)\s*([eo])$")


class Irrep(NamedTuple):
    """``mul`` copies of the representation of degree ``l`` and ``parity`` (+1 even, -1 odd)."""

    mul: int
    l: int  # noqa: E741  the field's own letter
    parity: int

    @property
    def dim(self) -> int:
        """Components of one copy, 2l+1."""
        return 2 * self.l + 1

    @property
    def size(self) -> int:
        """Components of all copies, mul * (2l+1)."""
        return self.mul * self.dim

    def __str__(self) -> str:
        return f"{self.mul}x{self.l}{'e' if self.parity == 1 else 'o'}"


@dataclass(frozen=True)
class Irreps(Sequence[Irrep]):
    """A sequence of blocks `Irrep`; immutable and hashable.

    Examples
    --------
    >>> irreps = Irreps.parse("128x0e + 128x1o")
    >>> irreps.dim, irreps.l_max, str(irreps)
    (512, 1, '128x0e+128x1o')
    >>> irreps.slices
    (slice(0, 128, None), slice(128, 512, None))
    """

    blocks: tuple[Irrep, ...]

    @classmethod
    def parse(cls, text: "str | Irreps | Sequence[Irrep]") -> "Irreps":
        """Read e3nn's notation; an `Irreps` or a sequence of (mul, l, parity) is taken too.

        Raises ConfigError if a block is not of the form ``128x1o`` or ``1o``.
        """
        if isinstance(text, Irreps):
            return text
        if not isinstance(text, str):
            return cls(tuple(Irrep(*block) for block in text))
        blocks = []
        for part in text.split("+") if text.strip() else []:
            match = _BLOCK.match(part.strip())
            if match is None:
                raise ConfigError(
                    f"irreps '{text}': '{part.strip()}' is not of the form 128x1o "
                    "(number of copies, x, degree, e or o)"
                )
            mul, degree, parity = match.groups()
            blocks.append(Irrep(int(mul or 1), int(degree), 1 if parity == "e" else -1))
        return cls(tuple(blocks))

    @classmethod
    def harmonics(cls, l_max: int) -> "Irreps":
        """Irreps of the spherical harmonics up to ``l_max``: 1x0e+1x1o+1x2e+..."""
        return cls(tuple(Irrep(1, degree, (-1) ** degree) for degree in range(l_max + 1)))

    @property
    def dim(self) -> int:
        """Length of a flat feature."""
        return sum(block.size for block in self.blocks)

    @property
    def l_max(self) -> int:
        """Highest degree; -1 if there are no blocks."""
        return max((block.l for block in self.blocks), default=-1)

    @property
    def slices(self) -> tuple[slice, ...]:
        """Slice of each block in a flat feature."""
        slices, start = [], 0
        for block in self.blocks:
            slices.append(slice(start, start + block.size))
            start += block.size
        return tuple(slices)

    def simplify(self) -> "Irreps":
        """Merge neighbouring blocks of the same degree and parity; the layout does not change."""
        merged: list[Irrep] = []
        for block in self.blocks:
            if merged and merged[-1][1:] == block[1:]:
                merged[-1] = merged[-1]._replace(mul=merged[-1].mul + block.mul)
            elif block.mul:
                merged.append(block)
        return Irreps(tuple(merged))

    @overload
    def __getitem__(self, index: int) -> Irrep: ...
    @overload
    def __getitem__(self, index: slice) -> "Irreps": ...
    def __getitem__(self, index: int | slice) -> "Irrep | Irreps":
        return Irreps(self.blocks[index]) if isinstance(index, slice) else self.blocks[index]

    def __len__(self) -> int:
        return len(self.blocks)

    def __iter__(self) -> Iterator[Irrep]:
        return iter(self.blocks)

    def __str__(self) -> str:
        return "+".join(str(block) for block in self.blocks)


def as_layout(name: str) -> Layout:
    """Check the name of a layout; ConfigError if there is no such layout."""
    if name not in get_args(Layout):
        raise ConfigError(f"layout: there is no '{name}' (known: {', '.join(get_args(Layout))})")
    return cast("Layout", name)
