"""Slices of one tensor: results of layers on the same rows, and their gradients."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bevatron.kernels.shared.custom_op import is_watched
from bevatron.kernels.shared.rows import indexable_by_32_bits
from bevatron.kernels.shared.standing_weights import storage_of


def parts_of_one(parts: Sequence[Tensor]) -> Tensor | None:
    """Return the tensor that consists of these parts along their trailing axes, or None.

    Parameters
    ----------
    parts
        Tensors of one shape [..., w, ...] whose trailing axes are contiguous; in every row, each
        part follows the one before.

    Returns
    -------
    Tensor or None
        [..., parts w ...], a view without gaps between rows, with the trailing axes as one.

    Examples
    --------
    >>> x = torch.arange(12).view(2, 6)
    >>> parts_of_one(x.split(2, -1)).equal(x), parts_of_one([x, x]) is None
    (True, True)
    """
    first, count = parts[0], len(parts)
    if first.numel() == 0:
        return None
    # The trailing axes: as many as are contiguous and shorter than the distance between rows.
    width, axes = 1, first.ndim
    while axes and (first.stride(axes - 1) == width or first.shape[axes - 1] == 1):
        width, axes = width * first.shape[axes - 1], axes - 1
    rows, steps, step = first.shape[:axes], [1], width * count
    for size, stride in zip(reversed(rows), reversed(first.stride()[:axes]), strict=True):
        if stride != step and size != 1:
            return None
        steps.insert(0, step)
        step *= size
    for place, part in enumerate(parts):
        if (
            part.shape != first.shape
            or part.stride() != first.stride()
            or part.dtype != first.dtype
            or storage_of(part) != storage_of(first)
            or part.storage_offset() != first.storage_offset() + place * width
        ):
            return None
    return first.as_strided((*rows, width * count), steps)


def split(joint: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """Split the last axis; gradients that already are slices of one tensor are not copied.

    Examples
    --------
    >>> x = torch.ones(2, 4, requires_grad=True)
    >>> a, b = split(x, [1, 3])
    >>> torch.autograd.grad(a.sum() + 2 * b.sum(), x)[0][0]
    tensor([1., 2., 2., 2.])
    """
    if is_watched((joint,)) or not (torch.is_grad_enabled() and joint.requires_grad):
        return joint.split_with_sizes(list(sizes), dim=-1)
    found: tuple[Tensor, ...] = _Split.apply(joint, *sizes)
    return found


class _Split(torch.autograd.Function):
    """`torch.split` along the last axis, whose gradient may be a view."""

    @staticmethod
    def forward(ctx: Any, joint: Tensor, *sizes: int) -> tuple[Tensor, ...]:
        ctx.count = len(sizes)
        return joint.split_with_sizes(list(sizes), dim=-1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        joint = None if torch.is_grad_enabled() else _joined(grads)
        joint = torch.cat(grads, -1) if joint is None else joint
        return joint, *[None] * ctx.count


def _joined(parts: Sequence[Tensor]) -> Tensor | None:
    """Return the tensor that consists of these parts of the last axis, or None.

    Rows too far apart for cuBLAS, which reads them next, are copied.
    """
    first = parts[0]
    place = first.storage_offset()
    for part in parts:
        alike = part.shape[:-1] == first.shape[:-1] and part.stride()[:-1] == first.stride()[:-1]
        in_one = storage_of(part) == storage_of(first) and part.dtype == first.dtype
        if not (alike and in_one and part.storage_offset() == place and part.stride(-1) == 1):
            return None
        place += part.shape[-1]
    width = place - first.storage_offset()
    if first.numel() == 0 or any(step < width for step in first.stride()[:-1]):
        return None  # rows are expanded or overlap
    return indexable_by_32_bits(first.as_strided((*first.shape[:-1], width), first.stride()))
