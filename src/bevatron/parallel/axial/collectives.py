"""Collectives with gradients, along any axis, of parts that may differ in length by one.

A backward pass is the exact transpose of its forward pass; see `bevatron.parallel.axial`.
"""

from collections.abc import Sequence
from itertools import accumulate
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from bevatron.kernels.shared.dtypes import wide_type
from bevatron.parallel.groups import Group


def lengths(total: int, parts: int) -> list[int]:
    """Divide rows into parts that differ by one at most, longer ones first.

    Examples
    --------
    >>> lengths(8, 3)
    [3, 3, 2]
    """
    return [total // parts + (part < total % parts) for part in range(parts)]


def bounds(total: int, group: Group) -> tuple[int, int]:
    """Return where this process's part begins, and its length."""
    each = lengths(total, group.size)
    return [0, *accumulate(each)][group.index], each[group.index]


def gather(part: Tensor, dim: int, total: int, group: Group) -> Tensor:
    """Concatenate the parts of all processes along an axis of ``total`` rows."""
    whole: Tensor = _Gather.apply(part, dim, total, group)
    return whole


def sum_to_own(whole: Tensor, dim: int, group: Group) -> Tensor:
    """Add up tensors over the processes; each gets its own part of an axis.

    16-bit types are added up in float32 and in the order of ranks.
    """
    part: Tensor = _SumToOwn.apply(whole, dim, group)
    return part


def transpose(rows: Tensor, total: int, group: Group) -> Tensor:
    """Exchange own rows [..., R, K, C] of ``total`` for own rows [..., K', total, C] of columns."""
    columns: Tensor = _Transpose.apply(rows, total, group)
    return columns


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, dim: int, total: int, group: Group) -> Tensor:
        ctx.given = dim, group
        return _gathered(part, dim, total, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _summed(grad, *ctx.given), None, None, None


class _SumToOwn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, dim: int, group: Group) -> Tensor:
        ctx.given = dim, whole.shape[dim], group
        return _summed(whole, dim, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _gathered(grad, *ctx.given), None, None


class _Transpose(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, total: int, group: Group) -> Tensor:
        ctx.given = rows.shape[-2], group
        return _transposed(rows, total, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _transposed(grad, *ctx.given), None, None


def _gathered(part: Tensor, dim: int, total: int, group: Group) -> Tensor:
    front, each = part.movedim(dim, 0), lengths(total, group.size)
    longest = each[0]
    if longest > front.shape[0]:  # equal parts are what both backends gather
        front = F.pad(front, [0, 0] * (front.ndim - 1) + [0, longest - front.shape[0]])
    whole = group.all_gather(front).wait()
    if each[-1] < longest:
        parts = whole.split(longest)
        whole = torch.cat([one[:length] for one, length in zip(parts, each, strict=True)])
    return whole.movedim(0, dim)


def _summed(whole: Tensor, dim: int, group: Group) -> Tensor:
    parts = whole.split(lengths(whole.shape[dim], group.size), dim)
    own = parts[group.index]
    found = _exchanged(parts, [own.shape] * group.size, group)
    if len(found) == 2:
        return found[0] + found[1]  # rounded once, too
    return torch.stack(found).sum(0, dtype=wide_type(whole)).to(whole.dtype)


def _transposed(rows: Tensor, total: int, group: Group) -> Tensor:
    each = lengths(total, group.size)
    columns = rows.transpose(-2, -3).split(lengths(rows.shape[-2], group.size), -3)
    batch, own, width = rows.shape[:-3], columns[group.index].shape[-3], rows.shape[-1]
    found = _exchanged(columns, [(*batch, own, r, width) for r in each], group)
    whole = rows.new_empty(*batch, own, total, width)
    for place, block in zip(whole.split(each, -2), found, strict=True):
        into, given = _in_words(place, block)
        into.copy_(given)
    return whole


def _exchanged(
    parts: Sequence[Tensor], shapes: Sequence[Sequence[int]], group: Group
) -> list[Tensor]:
    """Send every process its part; return what it sends, and the own part as it is."""
    sent = [0 if k == group.index else part.numel() for k, part in enumerate(parts)]
    received = [0 if k == group.index else prod(shape) for k, shape in enumerate(shapes)]
    others = [part for k, part in enumerate(parts) if k != group.index]
    words = [part.flatten() for part in _in_words(*others)]
    flat = (words[0] if len(words) == 1 else torch.cat(words)).view(parts[0].dtype)
    found = group.all_to_all(flat, sent, received).wait().split(received)
    return [
        part if k == group.index else block.view(shape)
        for k, (part, block, shape) in enumerate(zip(parts, found, shapes, strict=True))
    ]


def _in_words(*tensors: Tensor) -> list[Tensor]:
    """View channels as words of 8 bytes, if all can be: strided copies take as long for each."""

    def fits(x: Tensor) -> bool:
        counts = (x.shape[-1], x.storage_offset(), *x.stride()[:-1])
        return x.stride(-1) == 1 and not any(n * x.element_size() % 8 for n in counts)

    return [x.view(torch.int64) for x in tensors] if all(map(fits, tensors)) else [*tensors]
