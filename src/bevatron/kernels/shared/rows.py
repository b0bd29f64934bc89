"""Shared by operators on rows of channels: strides, shapes, gradients."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

FARTHEST = 2**31
"""Elements from the first to the last that 32 bits count."""

MOST_AXES = 3
"""Axes of rows that a kernel steps through, as many as a transposed pair of a batch has."""


@dataclass(frozen=True)
class Rows:
    """Several tensors of one shape [..., C], seen as [n0, n1, n2, C].

    Attributes
    ----------
    tensors : as given, or copied where the axes in front do not fold into three
    count : rows of each, n0 n1 n2
    sizes : n1 and n2
    strides : strides of every tensor, those of its three axes of rows and of its channels
    axes : how many of the three axes are longer than one, at least 1: the last ones
    """

    tensors: tuple[Tensor, ...]
    count: int
    sizes: tuple[int, int]
    strides: tuple[tuple[int, int, int, int], ...]
    axes: int


def as_rows(*tensors: Tensor) -> Rows:
    """Fold the axes in front of the last one, as far as the strides of all tensors allow.

    Parameters
    ----------
    tensors
        Tensors of one shape with at least one axis. Axes that are broadcast (stride 0) stay so.
    """
    shape = tensors[0].shape
    axes = _fold(shape[:-1], [tensor.stride() for tensor in tensors])
    if len(axes) > MOST_AXES:
        tensors = tuple(tensor.contiguous() for tensor in tensors)
        axes = _fold(shape[:-1], [tensor.stride() for tensor in tensors])
    longer = [(1, (0,) * len(tensors))] * (MOST_AXES - len(axes)) + axes
    strides = tuple(
        (longer[0][1][i], longer[1][1][i], longer[2][1][i], tensor.stride(-1))
        for i, tensor in enumerate(tensors)
    )
    count = longer[0][0] * longer[1][0] * longer[2][0]
    return Rows(tuple(tensors), count, (longer[1][0], longer[2][0]), strides, max(len(axes), 1))


def indexable_by_32_bits(matrix: Tensor) -> Tensor:
    """Return rows that a library's matmul can address: a copy if the last begins too far behind.

    cuBLASLt counts elements with 32 bits within a view whose rows leave gaps. Without gaps it
    takes any size.
    """
    if matrix.is_contiguous():
        return matrix
    reach = 1 + sum((n - 1) * s for n, s in zip(matrix.shape, matrix.stride(), strict=True))
    if reach < FARTHEST or reach <= matrix.numel() or matrix.numel() == 0:
        return matrix
    return matrix.contiguous()


def _fold(
    sizes: Sequence[int], strides: Sequence[Sequence[int]]
) -> list[tuple[int, tuple[int, ...]]]:
    """List (size, stride in every tensor) of the folded axes, outermost first."""
    folded: list[tuple[int, tuple[int, ...]]] = []
    for axis, size in enumerate(sizes):
        if size == 1:
            continue
        steps = tuple(stride[axis] for stride in strides)
        if folded and all(
            outer == inner * size for outer, inner in zip(folded[-1][1], steps, strict=True)
        ):
            folded[-1] = (folded[-1][0] * size, steps)
        else:
            folded.append((size, steps))
    return folded
