"""What operators on rows of channels share: strides, shapes, gradients."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bevatron.kernels.shared.autograd import empty_gradients, of_given

FARTHEST = 2**31
"""Elements from the first to the last that 32 bits count."""
MOST_AXES = 3
"""Axes of rows that a kernel steps through; a transposed pair of a batch has so many."""


@dataclass(frozen=True)
class Rows:
    """Several tensors of one shape [..., C], seen as [n0, n1, n2, C].

    Attributes
    ----------
    tensors
        As given, or copied where the axes in front do not fold into three.
    count
        Rows of each, n0 n1 n2.
    sizes
        n1 and n2.
    strides
        Of every tensor, those of its three axes of rows and of its channels.
    axes
        How many of the three axes are longer than one, at least 1: the last ones.
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
        Of one shape with at least one axis. Axes that are broadcast (stride 0) stay so.
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


def near(matrix: Tensor) -> Tensor:
    """Return rows that a library's matmul can address: a copy if the last begins too far behind.

    cuBLASLt counts elements with 32 bits within a view whose rows leave gaps. Without gaps it
    takes any size.
    """
    reach = 1 + sum((n - 1) * s for n, s in zip(matrix.shape, matrix.stride(), strict=True))
    if reach < FARTHEST or reach <= matrix.numel() or matrix.numel() == 0:
        return matrix
    return matrix.contiguous()


def check_shapes(
    op: str, wanted: Mapping[str, tuple[Tensor | None, tuple[int, ...]]], beside: str
) -> None:
    """Compare tensors with the shapes that they must have.

    Parameters
    ----------
    op
        What was called.
    wanted
        Tensor and shape by the name of the argument; None is any shape.
    beside
        What the shapes follow from, for the message.

    Raises
    ------
    ValueError
        If one has another shape; it names the argument.
    """
    for name, (tensor, shape) in wanted.items():
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ValueError(
                f"{op}: {name} has shape {tuple(tensor.shape)}, expected {shape} to go with "
                f"{beside}"
            )


def register_gradients(
    forward: Any, backward: Any, tensors: int, *, keeps_result: bool = False
) -> None:
    """Make one custom operator the gradient of another that works on rows.

    Parameters
    ----------
    forward
        Takes so many tensors, each may be None, and eps; returns the result and the statistics of
        rows, which nobody outside sees.
    backward
        Takes the result's gradient, the same tensors, the statistics and eps; returns the gradients
        of all tensors, without elements for those that are not given.
    tensors
        How many.
    keeps_result
        The result is kept too, and handed to ``backward`` before the statistics.
    """

    def fake(dy: Tensor, *given: Any) -> tuple[Tensor, ...]:
        return tuple(empty_gradients(dy, *given[:tensors]))

    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(*inputs[:tensors], *output[0 if keeps_result else 1 :])
        ctx.eps = inputs[tensors]
        ctx.set_materialize_grads(False)

    def gradients(ctx: Any, dy: Tensor | None, *_statistics: Any) -> tuple[Tensor | None, ...]:
        if dy is None:
            return (None,) * (tensors + 1)
        found = backward(dy, *ctx.saved_tensors, ctx.eps)
        return *of_given(ctx.saved_tensors[:tensors], found), None

    backward.register_fake(fake)
    forward.register_autograd(gradients, setup_context=save)


def processors(device: torch.device) -> int:
    """Return how many programs a device runs side by side at least."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


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
