"""The contractions of the triangle multiplications over own rows, in rings of processes.

Arrays are planes [..., H, R, N] of own rows. Blocks of rows go from process to process, and while
one is on its way the one before is multiplied; no process ever holds two of another. A 16-bit sum
that goes round is rounded once at every process.

Outgoing, ``x_ij = sum_k a_ik b_jk``: blocks of b come by. Incoming, ``x_ij = sum_k a_ki b_kj``:
sums go round and end at those who own row i. The gradient of either takes the other's way too.
"""

import functools
from collections.abc import Callable, Iterable, Iterator

from torch import Tensor, cat

from bevatron.parallel.axial.collectives import lengths
from bevatron.parallel.groups import Group


class Rings:
    """The contraction of `bevatron.kernels.triangle_multiply` over the rows of a group.

    Parameters
    ----------
    group
        Processes that have the rows.
    """

    def __init__(self, group: Group) -> None:
        self.group = group

    def contract(self, a: Tensor, b: Tensor, outgoing: bool) -> Tensor:
        """Return own rows of x."""
        if not outgoing:
            columns = a.split(lengths(a.shape[-1], self.group.size), -1)
            return _collected(lambda target: columns[target].mT @ b, self.group)
        found = {source: a @ block.mT for source, block in _passing(b, self.group)}
        return cat([found[source] for source in range(self.group.size)], -1)

    def contract_backward(
        self, a: Tensor, b: Tensor, dx: Tensor, outgoing: bool
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients of own rows of a and b."""
        each = lengths(a.shape[-1], self.group.size)
        if outgoing:
            columns = dx.split(each, -1)
            db = _collected(lambda target: columns[target].mT @ a, self.group)
            return _sum(columns[source] @ block for source, block in _passing(b, self.group)), db
        columns, da, parts = a.split(each, -1), {}, []
        for source, block in _passing(dx, self.group):
            da[source] = b @ block.mT
            parts.append(columns[source] @ block)
        return cat([da[source] for source in range(self.group.size)], -1), _sum(parts)


def _passing(own: Tensor, group: Group) -> Iterator[tuple[int, Tensor]]:
    """Yield the rows of every process with its number, own ones first."""
    each, block = lengths(own.shape[-1], group.size), own
    for step in range(group.size):
        source = (group.index + step) % group.size
        following = each[(source + 1) % group.size]
        last = step == group.size - 1
        coming = None if last else group.pass_on(block, (*own.shape[:-2], following, own.shape[-1]))
        yield source, block
        if coming is not None:
            block = coming.wait()


def _collected(contribution: Callable[[int], Tensor], group: Group) -> Tensor:
    """Add up what all processes have for this process's rows; own numbers last."""
    coming, size = None, group.size
    for step in range(1, size):
        target = (group.index + step) % size
        found = contribution(target)
        if coming is not None:
            found += coming.wait()
        following = lengths(found.shape[-1], size)[(target + 1) % size]
        coming = group.pass_on(found, (*found.shape[:-2], following, found.shape[-1]))
    found = contribution(group.index)
    return found if coming is None else found + coming.wait()


def _sum(parts: Iterable[Tensor]) -> Tensor:
    return functools.reduce(Tensor.add_, parts)
