"""The contractions of triangle multiplications over own rows: at once, or in rings of processes.

Matrices are planes [planes, R, N] of own rows. Outgoing, ``x_ij = sum_k a_ik b_jk``: all rows of b
come to every process, and are saved for the gradient of a. Incoming, ``x_ij = sum_k a_ki b_kj``:
sums go to the owner of row i. The gradient of either takes the path of the other.

In a ring blocks of rows pass from process to process, and while one is in flight the one before is
multiplied; nothing but the saved blocks is whole. With more than two processes a ring of small
blocks waits longer for its messages than for their bytes, so all is exchanged at once.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from bevatron.kernels.pair.triangle_multiply.contraction import Contraction
from bevatron.parallel import windows
from bevatron.parallel.axial.collectives import lengths, sum_to_own
from bevatron.parallel.groups import Group, Pending

Product = Callable[[int], tuple[Tensor, Tensor]]
"""The factors of this process's product for the rows of another."""


def contraction_of(group: Group, whole_bytes: int) -> Contraction | None:
    """Choose how a group contracts factors of so many bytes, of which each process has its rows."""
    if group.size == 1:
        return None
    at_once = group.size > 2 and whole_bytes <= windows.WINDOW
    return AtOnce(group) if at_once else Rings(group)


class AtOnce:
    """The contraction of `bevatron.kernels.triangle_multiply` with one exchange of all rows.

    A factor or the sums of all rows are whole for a moment. Sums are added up in float32.

    Parameters
    ----------
    group : processes that have the rows
    """

    def __init__(self, group: Group) -> None:
        self.group = group

    def contract(self, a: Tensor, b: Tensor, x: Tensor, outgoing: bool) -> Sequence[Tensor]:
        """Write own rows of x; return all rows of b."""
        if not outgoing:
            x.copy_(sum_to_own(-2, self.group.urgent, torch.bmm(a.mT, b)).wait())
            return []
        whole = self._all_rows(b, self.group.urgent).wait()
        torch.bmm(a, whole.mT, out=x)
        return [whole]

    def contract_backward(
        self,
        dx: Tensor,
        a: Tensor,
        b: Tensor,
        kept: Sequence[Tensor],
        da: Tensor,
        db: Tensor,
        outgoing: bool,
        meanwhile: Callable[[], None],
    ) -> None:
        """Write the gradients of own rows of a and b."""
        if outgoing:
            coming = sum_to_own(-2, self.group, torch.bmm(dx.mT, a))
            meanwhile()
            torch.bmm(dx, kept[0], out=da)
            db.copy_(coming.wait())
            return
        coming = self._all_rows(dx, self.group)
        meanwhile()
        whole = coming.wait()
        torch.bmm(b, whole.mT, out=da)
        torch.bmm(a, whole, out=db)

    def _all_rows(self, own: Tensor, group: Group) -> Pending:
        return group.gather(own, -2, lengths(own.shape[-1], group.size))


class Rings:
    """The same contraction with blocks of rows that pass from process to process.

    A circulating sum is rounded once at every process, which adds its own product.

    Parameters
    ----------
    group : processes that have the rows
    """

    def __init__(self, group: Group) -> None:
        self.group = group

    def contract(self, a: Tensor, b: Tensor, x: Tensor, outgoing: bool) -> Sequence[Tensor]:
        """Write own rows of x; return the received blocks of b."""
        if not outgoing:
            columns = self._split(a)
            self._collect(lambda target: (columns[target].mT, b), x)
            return []
        columns, came = self._split(x), []
        for source, block in self._passing(b):
            torch.bmm(a, block.mT, out=columns[source])
            came.append(block)
        return came[1:]

    def contract_backward(
        self,
        dx: Tensor,
        a: Tensor,
        b: Tensor,
        kept: Sequence[Tensor],
        da: Tensor,
        db: Tensor,
        outgoing: bool,
        meanwhile: Callable[[], None],
    ) -> None:
        """Write the gradients of own rows of a and b."""
        if not outgoing:
            columns, found = self._split(a), self._split(da)
            for source, block in self._passing(dx, meanwhile):
                torch.bmm(b, block.mT, out=found[source])
                db.baddbmm_(columns[source], block, beta=float(source != self.group.index))
            return
        columns = self._split(dx)

        def of_a() -> None:
            meanwhile()
            for step, block in enumerate((b, *kept)):
                da.baddbmm_(columns[self._source(step)], block, beta=float(step > 0))

        self._collect(lambda target: (columns[target].mT, a), db, of_a)

    def _split(self, x: Tensor) -> tuple[Tensor, ...]:
        """Divide columns in the way rows are divided among the processes."""
        parts: tuple[Tensor, ...] = x.split(lengths(x.shape[-1], self.group.size), -1)
        return parts

    def _source(self, step: int) -> int:
        """Return whose rows are here after a number of passes."""
        return (self.group.index + step) % self.group.size

    def _passing(
        self, own: Tensor, meanwhile: Callable[[], None] | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield the rows of every process with its rank, own ones first."""
        planes, _, total = own.shape
        each, block = lengths(total, self.group.size), own
        group = self.group.urgent if meanwhile is None else self.group
        for step in range(self.group.size):
            coming: Pending | None = None
            if step < self.group.size - 1:
                following = own.new_empty(planes, each[self._source(step + 1)], total)
                most = planes * each[0] * total * own.itemsize
                coming = group.pass_on(block, following, most)
            if step == 0 and meanwhile is not None:
                meanwhile()
            yield self._source(step), block
            if coming is not None:
                block = coming.wait()

    def _collect(
        self, product: Product, out: Tensor, meanwhile: Callable[[], None] | None = None
    ) -> None:
        """Sum the contributions of all processes to this process's rows; the own one comes last."""
        planes, _, total = out.shape
        each, size = lengths(total, self.group.size), self.group.size
        into = out if out.is_contiguous() else out.new_empty(out.shape)
        group = self.group.urgent if meanwhile is None else self.group
        coming: Pending | None = None
        for step in range(1, size):
            factors = product(self._source(step))
            found = torch.bmm(*factors) if coming is None else coming.wait().baddbmm_(*factors)
            last = step == size - 1
            following = each[self._source(step + 1)]
            received = into if last else out.new_empty(planes, following, total)
            most = planes * each[0] * total * out.itemsize
            coming = group.pass_on(found, received, most)
        if meanwhile is not None:
            meanwhile()
        if coming is not None:
            coming.wait()
        into.baddbmm_(*product(self.group.index), beta=float(coming is not None))
        if into is not out:
            out.copy_(into)
