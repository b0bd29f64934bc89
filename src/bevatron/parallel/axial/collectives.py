"""Differentiable exchanges along any axis, of parts whose lengths may differ by one.

A backward pass is the exact transpose of its forward pass; see `bevatron.parallel.axial`.
"""

from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

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


def _parts(own: int, total: int, group: Group) -> list[int]:
    """Return all lengths; raise ValueError if this process's own is another."""
    each = lengths(total, group.size)
    if own != each[group.index]:
        raise ValueError(
            f"process {group.index} of {group.size} has {own} of {total} rows, expected "
            f"{each[group.index]}; give the number of all rows"
        )
    return each


def gather(part: Tensor, dim: int, total: int, group: Group) -> Coming:
    """Concatenate the parts of all processes along an axis of ``total`` rows."""
    if group.size == 1:
        return Coming(part)
    there = partial(group.gather, dim=dim, each=_parts(part.shape[dim], total, group))
    return Coming(part, there, partial(sum_to_own, dim, group))


def transpose(rows: Tensor, total: int, group: Group) -> Coming:
    """Exchange own rows [..., R, K, C] of ``total`` for own rows [..., K', total, C] of columns."""
    if group.size == 1:
        return Coming(rows.transpose(-2, -3))
    _parts(rows.shape[-3], total, group)
    there, back = (partial(_transpose, n, group) for n in (total, rows.shape[-2]))
    return Coming(rows, there, back)


def sum_to_own(dim: int, group: Group, whole: Tensor) -> Pending:
    """Sum an axis of all rows over the processes; each gets its own rows, rounded once.

    Sums of 16-bit types are added up in float32 and in the order of ranks.
    """
    parts: list[Tensor] = list(whole.split(lengths(whole.shape[dim], group.size), dim))
    own, most = parts[group.index], parts[0].nbytes
    found = own.new_empty(group.size, *own.shape)

    def add_up(found: Tensor) -> Tensor:
        if group.size == 2:
            return own + found[1 - group.index]  # rounded once, too
        return found.sum(0)  # accumulates 16-bit types in float32

    places = list(found)
    if group.size == 2:  # the own part is added from where it is
        parts[group.index] = places[group.index] = found[:0]
    return group.trade(parts, places, found, most).then(add_up)


def _transpose(total: int, group: Group, rows: Tensor) -> Pending:
    each = lengths(total, group.size)
    columns = rows.transpose(-2, -3).split(lengths(rows.shape[-2], group.size), -3)
    batch, own, width = rows.shape[:-3], columns[group.index].shape[-3], rows.shape[-1]
    whole = rows.new_empty(*batch, own, total, width)
    most = batch.numel() * each[0] * columns[0].shape[-3] * width * rows.itemsize
    return group.trade(columns, whole.split(each, -2), whole, most)
