"""Collectives with gradients, along any axis, of parts that may differ in length by one.

A backward pass is the exact transpose of its forward pass; see `bevatron.parallel.axial`.
"""

from itertools import accumulate
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
    front = whole.movedim(dim, 0)
    each = lengths(len(front), group.size)
    own = each[group.index]
    parts = group.all_to_all(front, each, [own] * group.size).wait()
    total = parts.view(group.size, own, *front.shape[1:]).sum(0, dtype=wide_type(whole))
    return total.to(whole.dtype).movedim(0, dim)


def _transposed(rows: Tensor, total: int, group: Group) -> Tensor:
    columns = rows.movedim(-2, 0)  # [K, ..., R, C]
    batch, width = columns.shape[1:-2], columns.shape[-1]
    own_rows, per_row = columns.shape[-2], batch.numel() * width
    send = [k * own_rows * per_row for k in lengths(len(columns), group.size)]
    own = bounds(len(columns), group)[1]
    each = lengths(total, group.size)
    found = group.all_to_all(columns.reshape(-1), send, [own * r * per_row for r in each]).wait()
    blocks = found.split([own * r * per_row for r in each])
    shaped = [block.view(own, *batch, r, width) for block, r in zip(blocks, each, strict=True)]
    return torch.cat(shaped, -2).movedim(0, -3)
