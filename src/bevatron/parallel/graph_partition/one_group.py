"""Differentiable collectives for schemes that attend to whole rows on one rank.

The gradient of sending rows is sending the gradients back.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from bevatron.parallel.groups import Group


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return group.all_gather(part).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.group.reduce_scatter(grads[0]).wait(), None


class _SendRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, group: Group, send: Sequence[int], receive: Sequence[int]
    ) -> Tensor:
        ctx.group, ctx.send, ctx.receive = group, send, receive
        return group.all_to_all(rows, send, receive).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.group.all_to_all(grads[0], ctx.receive, ctx.send).wait(), None, None, None


class _SumOfShares(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, share: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return group.all_reduce(share.clone()).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        # Each rank's part of the loss depends on the sum.
        return ctx.group.all_reduce(grads[0].clone()).wait(), None


def sum_of_shares(share: Tensor, group: Group) -> Tensor:
    """Sum a term of every rank."""
    found: Tensor = _SumOfShares.apply(share, group)
    return found


def gather_rows(part: Tensor, group: Group) -> Tensor:
    """Concatenate the parts of all ranks."""
    found: Tensor = _GatherRows.apply(part, group)
    return found


def send_rows(rows: Tensor, group: Group, send: Sequence[int], receive: Sequence[int]) -> Tensor:
    """Send the given numbers of rows to each rank; see `Group.all_to_all`."""
    found: Tensor = _SendRows.apply(rows, group, tuple(send), tuple(receive))
    return found
