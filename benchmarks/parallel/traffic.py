"""What the processes that share a sample send each other in a block, in closed form.

Counted as `bevatron.parallel.traffic` counts. The gradient of a block sends the transposes of its
collectives; a block that is computed again sends its own once more.
"""

from collections.abc import Iterable
from typing import Literal, NamedTuple

from bevatron.parallel.axial.collectives import lengths


class Collective(NamedTuple):
    """One collective on an array [batch, rows, columns, channels], cut by rows before or after it.

    Attributes
    ----------
    kind
        Own rows to all, at once (``gather``) or if only two by passing on (``ring``), a sum to
        own rows (``sum``), or own rows to own columns (``transpose``).
    """

    kind: Literal["gather", "ring", "sum", "transpose"]
    rows: int
    columns: int
    channels: int
    batch: int = 1

    def backward(self) -> "Collective":
        """Return its transpose."""
        if self.kind == "transpose":
            return self._replace(rows=self.columns, columns=self.rows)
        return self._replace(kind="ring" if self.kind == "sum" else "sum")

    def sent(self, index: int, size: int) -> int:
        """Count the numbers that process ``index`` of ``size`` sends."""
        each, own_columns = lengths(self.rows, size), lengths(self.columns, size)[index]
        width = self.batch * self.channels
        if self.kind == "ring" and size == 2:
            return each[index] * self.columns * width
        if self.kind in {"gather", "ring"}:  # shorter parts are filled up
            return (size - 1) * each[0] * self.columns * width
        if self.kind == "sum":
            return (self.rows - each[index]) * self.columns * width
        return each[index] * (self.columns - own_columns) * width


def triangles(
    tokens: int, channels: int, hidden: int, heads: int, batch: int = 1
) -> list[Collective]:
    """List the collectives of both triangle multiplications and both triangle attentions.

    Parameters
    ----------
    tokens, channels
        N and C of the pair.
    hidden, heads
        Channels of the products, heads of the attentions.
    batch
        Pairs, such as templates.
    """
    square = (tokens, tokens)
    bias = Collective("gather", *square, heads, batch)
    pair = Collective("transpose", *square, channels, batch)
    return [
        Collective("ring", *square, hidden, batch),
        Collective("sum", *square, hidden, batch),
        *(bias, pair, bias, pair),
    ]


def pair_bias(tokens: int, heads: int) -> list[Collective]:
    """List that of the bias that a pair gives attention of rows or tokens."""
    return [Collective("gather", tokens, tokens, heads)]


def outer_product(rows: int, tokens: int, hidden: int) -> list[Collective]:
    """List those of an outer product mean over own rows of an alignment."""
    return [Collective(kind, rows, tokens, hidden) for kind in ("transpose", "gather")]


def columns(rows: int, tokens: int, channels: int, hidden: int) -> list[Collective]:
    """List those of what an Evoformer block does by columns of an alignment, there and back.

    Attention, a transition, and an outer product mean of so many hidden channels.
    """
    there = Collective("transpose", rows, tokens, channels)
    return [there, Collective("gather", tokens, rows, hidden), there.backward()]


def step_bytes(
    collectives: Iterable[Collective], index: int, size: int, word_bytes: int = 4
) -> int:
    """Count the bytes that a process sends for these collectives and their gradients."""
    return word_bytes * sum(
        each.sent(index, size) + each.backward().sent(index, size) for each in collectives
    )
