"""Slices of one tensor: results of layers on the same rows, and their gradients."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bevatron.kernels.shared.custom_op import is_watched, unwatched
from bevatron.kernels.shared.rows import indexable_by_32_bits


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
    shape, strides, dtype = first.shape, first.stride(), first.dtype
    place, size = first.data_ptr(), width * first.element_size()
    for part in parts:
        if part.data_ptr() != place or part.dtype != dtype:
            return None
        if part.shape != shape or part.stride() != strides:
            return None
        place += size
    return _within_storage(first, (*rows, width * count), steps)


def _within_storage(first: Tensor, shape: Sequence[int], strides: Sequence[int]) -> Tensor | None:
    """View what lies from a tensor on; None if that exceeds the storage of the tensor.

    Addresses within one storage are of that storage alone, so nothing else must be compared.
    """
    reach = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + 1
    end = (first.storage_offset() + reach) * first.element_size()
    if end > first.untyped_storage().nbytes():
        return None
    return first.as_strided(shape, strides)


def split(joint: Tensor, sizes: Sequence[int], head_width: int | None = None) -> tuple[Tensor, ...]:
    """Split the last axis; gradients that already are slices of one tensor are not copied.

    With ``head_width`` D each part is [..., heads, D].

    Examples
    --------
    >>> x = torch.ones(2, 4, requires_grad=True)
    >>> a, b = split(x, [1, 3])
    >>> torch.autograd.grad(a.sum() + 2 * b.sum(), x)[0][0]
    tensor([1., 2., 2., 2.])
    """
    if is_watched((joint,)) or not (torch.is_grad_enabled() and joint.requires_grad):
        return _parts(joint, sizes, head_width)
    found: tuple[Tensor, ...] = unwatched(_Split)(joint, sizes, head_width)
    return found


def _parts(joint: Tensor, sizes: Sequence[int], head_width: int | None) -> tuple[Tensor, ...]:
    if head_width is None:
        return joint.split_with_sizes(list(sizes), dim=-1)
    heads = joint.view(*joint.shape[:-1], joint.shape[-1] // head_width, head_width)
    return heads.split_with_sizes([size // head_width for size in sizes], dim=-2)


class _Split(torch.autograd.Function):
    """`torch.split` along the last axis, whose gradient may be a view."""

    @staticmethod
    def forward(
        ctx: Any, joint: Tensor, sizes: Sequence[int], head_width: int | None
    ) -> tuple[Tensor, ...]:
        ctx.axes = 1 if head_width is None else 2
        return _parts(joint, sizes, head_width)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.axes == 2:
            grads = tuple(_flat(grad) for grad in grads)
        joint = None if torch.is_grad_enabled() else _joined(grads)
        return torch.cat(grads, -1) if joint is None else joint, None, None


def _flat(part: Tensor) -> Tensor:
    """Fold heads into channels."""
    return part.flatten(-2)


def _joined(parts: Sequence[Tensor]) -> Tensor | None:
    """Return the tensor that consists of these parts of the last axis, or None.

    Rows too far apart for cuBLAS, which reads them next, are copied.
    """
    first = parts[0]
    rows, strides, dtype = first.shape[:-1], first.stride(), first.dtype
    place, size, width = first.data_ptr(), first.element_size(), 0
    for part in parts:
        if part.data_ptr() != place + width * size or part.dtype != dtype:
            return None
        *others, last = part.shape
        if part.stride() != strides or tuple(others) != rows:
            return None
        width += last
    if first.numel() == 0 or strides[-1] != 1 or any(step < width for step in strides[:-1]):
        return None  # rows are expanded or overlap
    joint = _within_storage(first, (*rows, width), strides)
    return None if joint is None else indexable_by_32_bits(joint)
