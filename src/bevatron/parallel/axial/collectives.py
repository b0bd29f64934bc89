"""Differentiable exchanges along any axis, of parts whose lengths may differ by one.

A backward pass is the exact transpose of its forward pass; see `bevatron.parallel.axial`.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from bevatron.kernels.shared.dtypes import wide_type
from bevatron.parallel.groups import Group, Pending

Exchange = Callable[[Tensor], Pending]


def lengths(total: int, parts: int) -> list[int]:
    """Divide rows into parts that differ by at most one, longer ones first.

    Examples
    --------
    >>> lengths(8, 3)
    [3, 3, 2]
    """
    return [total // parts + (part < total % parts) for part in range(parts)]


def bounds(total: int, group: Group) -> tuple[int, int]:
    """Return the start and the length of this process's part."""
    each = lengths(total, group.size)
    return [0, *accumulate(each)][group.index], each[group.index]


class Coming:
    """The result of an exchange, complete after ``wait``; the same holds for its transpose.

    Work that is launched between the start and ``wait`` overlaps with the exchange, in the backward
    pass too.

    Parameters
    ----------
    given : what this process has
    there, back : the exchange and its transpose; None if ``given`` is all there is
    """

    def __init__(
        self, given: Tensor, there: Exchange | None = None, back: Exchange | None = None
    ) -> None:
        self._flight = None if there is None or back is None else _Flight(there, back)
        self._given = given if self._flight is None else _Begin.apply(given, self._flight)

    def wait(self) -> Tensor:
        """Return the received tensor."""
        if self._flight is None:
            return self._given
        whole: Tensor = _End.apply(self._given, self._flight)
        return whole


class _Flight:
    """An exchange in flight, first forward and then backward."""

    def __init__(self, there: Exchange, back: Exchange) -> None:
        self.there, self.back = there, back
        self.pending: Pending | None = None

    def land(self) -> Tensor:
        """Wait for it."""
        pending, self.pending = self.pending, None
        assert pending is not None
        return pending.wait()


class _Begin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: Tensor, flight: _Flight) -> Tensor:
        ctx.flight = flight
        flight.pending = flight.there(given)
        return given.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return ctx.flight.land(), None


class _End(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, _: Tensor, flight: _Flight) -> Tensor:
        ctx.flight = flight
        return flight.land()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.flight.pending = ctx.flight.back(grad)
        return grad.new_empty(0), None


def gather(part: Tensor, dim: int, total: int, group: Group) -> Coming:
    """Concatenate the parts of all processes along an axis of ``total`` rows.

    Gradients of 16-bit types are summed in float32, in the order of ranks.
    """
    return Coming(part, partial(_gather, dim, total, group), partial(_sum_to_own, dim, group))


def transpose(rows: Tensor, total: int, group: Group) -> Coming:
    """Exchange own rows [..., R, K, C] of ``total`` for own rows [..., K', total, C] of columns."""
    back = partial(_transpose, rows.shape[-2], group)
    return Coming(rows, partial(_transpose, total, group), back)


def _gather(dim: int, total: int, group: Group, part: Tensor) -> Pending:
    front, each = part.movedim(dim, 0), lengths(total, group.size)
    longest = each[0]
    if longest > front.shape[0]:  # both backends gather equal parts
        front = F.pad(front, [0, 0] * (front.ndim - 1) + [0, longest - front.shape[0]])

    def cut(whole: Tensor) -> Tensor:
        if each[-1] < longest:
            parts = whole.split(longest)
            whole = torch.cat([one[:length] for one, length in zip(parts, each, strict=True)])
        return whole.movedim(0, dim)

    return group.all_gather(front).then(cut)


def _sum_to_own(dim: int, group: Group, whole: Tensor) -> Pending:
    parts = whole.split(lengths(whole.shape[dim], group.size), dim)

    def add_up(found: list[Tensor]) -> Tensor:
        if len(found) == 2:
            return found[0] + found[1]  # rounded once here too
        return torch.stack(found).sum(0, dtype=wide_type(whole)).to(whole.dtype)

    return _exchange(parts, [parts[group.index].shape] * group.size, group, add_up)


def _transpose(total: int, group: Group, rows: Tensor) -> Pending:
    each = lengths(total, group.size)
    columns = rows.transpose(-2, -3).split(lengths(rows.shape[-2], group.size), -3)
    batch, own, width = rows.shape[:-3], columns[group.index].shape[-3], rows.shape[-1]

    def lay_out(found: list[Tensor]) -> Tensor:
        whole = rows.new_empty(*batch, own, total, width)
        for place, block in zip(whole.split(each, -2), found, strict=True):
            into, given = _in_words(place, block)
            into.copy_(given)
        return whole

    return _exchange(columns, [(*batch, own, r, width) for r in each], group, lay_out)


def _exchange(
    parts: Sequence[Tensor],
    shapes: Sequence[Sequence[int]],
    group: Group,
    finish: Callable[[list[Tensor]], Tensor],
) -> Pending:
    """Send every process its part; finish with the received parts and the own one."""
    sent = [0 if k == group.index else part.numel() for k, part in enumerate(parts)]
    received = [0 if k == group.index else prod(shape) for k, shape in enumerate(shapes)]
    others = [part for k, part in enumerate(parts) if k != group.index]
    words = [part.contiguous().flatten() for part in _in_words(*others)]
    flat = (words[0] if len(words) == 1 else torch.cat(words)).view(parts[0].dtype)

    def unpack(found: Tensor) -> Tensor:
        blocks = zip(parts, found.split(received), shapes, strict=True)
        return finish(
            [
                part if k == group.index else block.view(shape)
                for k, (part, block, shape) in enumerate(blocks)
            ]
        )

    return group.all_to_all(flat, sent, received).then(unpack)


def _in_words(*tensors: Tensor) -> list[Tensor]:
    """View channels as 8-byte words if possible: strided copies take the same time per element."""

    def fits(x: Tensor) -> bool:
        counts = (x.shape[-1], x.storage_offset(), *x.stride()[:-1])
        return x.stride(-1) == 1 and not any(n * x.element_size() % 8 for n in counts)

    return [x.view(torch.int64) for x in tensors] if all(map(fits, tensors)) else [*tensors]
