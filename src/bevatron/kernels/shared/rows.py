"""Rows of channels with any strides, as three axes that a kernel steps through."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

FARTHEST = 2**31
"""Largest offset of an element that 32 bits hold."""

MOST_AXES = 3
"""Axes of rows that a kernel steps through; a batch of transposed pairs has three."""


@dataclass(frozen=True)
class Rows:
    """Several tensors of one shape [..., C], seen as [n0, n1, n2, C].

    Attributes
    ----------
    tensors : as given, or contiguous if their leading axes do not fold into three
    in_place : whether they are as given; strides and axes are those of ``tensors``
    count : number of rows, n0 n1 n2
    sizes : n1 and n2
    strides : of every tensor, along the three axes of rows and along channels
    axes : number of axes in use, at least 1; they are the last of the three
    """

    tensors: tuple[Tensor, ...]
    in_place: bool
    count: int
    sizes: tuple[int, int]
    strides: tuple[tuple[int, int, int, int], ...]
    axes: int


def as_rows(*tensors: Tensor) -> Rows:
    """Fold all axes but the last, as far as the strides of all tensors allow.

    Parameters
    ----------
    tensors
        Tensors of one shape with at least one axis. Broadcast axes (stride 0) stay broadcast.
    """
    shape = tensors[0].shape
    axes = _fold(shape[:-1], [tensor.stride() for tensor in tensors])
    in_place = len(axes) <= MOST_AXES
    if not in_place:
        tensors = tuple(tensor.contiguous() for tensor in tensors)
        axes = _fold(shape[:-1], [tensor.stride() for tensor in tensors])
    longer = [(1, (0,) * len(tensors))] * (MOST_AXES - len(axes)) + axes
    strides = tuple(
        (longer[0][1][i], longer[1][1][i], longer[2][1][i], tensor.stride(-1))
        for i, tensor in enumerate(tensors)
    )
    count = longer[0][0] * longer[1][0] * longer[2][0]
    sizes = longer[1][0], longer[2][0]
    return Rows(tuple(tensors), in_place, count, sizes, strides, max(len(axes), 1))


def indexable_by_32_bits(matrix: Tensor) -> Tensor:
    """Return rows that cuBLAS can address: a copy if the offset of the last is too large.

    cuBLASLt computes offsets in 32 bits if there are gaps between rows; without gaps any size
    works.
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
