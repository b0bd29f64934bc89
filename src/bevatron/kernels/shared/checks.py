"""Checks of the arguments of operators: one floating-point type, matching shapes."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


def check_one_type(operator: str, tensors: Mapping[str, Tensor | Sequence[Tensor]]) -> None:
    """Refuse tensors of different types, which a kernel would round to the type of the first.

    Under autocast they may differ: torch casts them to one type where they are multiplied.
    Raises ValueError if a type differs from the first, naming both.

    Parameters
    ----------
    tensors : by argument name; the first has the type of the result

    Examples
    --------
    >>> check_one_type("product", {"x": torch.ones(1), "weight": torch.ones(1).double()})
    Traceback (most recent call last):
    ...
    ValueError: product: x is float32, but weight is float64; make them one type
    """
    listed = [
        (name, tensor)
        for name, given in tensors.items()
        for tensor in ([given] if isinstance(given, Tensor) else given)
    ]
    first_name, first = listed[0]
    for name, tensor in listed[1:]:
        if tensor.dtype != first.dtype and not torch.is_autocast_enabled(first.device.type):
            first_type, other = (str(t.dtype).removeprefix("torch.") for t in (first, tensor))
            raise ValueError(
                f"{operator}: {first_name} is {first_type}, but {name} is {other}; make them one "
                "type"
            )


def check_shapes(
    op: str, wanted: Mapping[str, tuple[Tensor | None, tuple[int, ...]]], source: str
) -> None:
    """Check the shapes of tensors.

    Raises ValueError if a shape differs, naming the argument.

    Parameters
    ----------
    wanted : tensor and expected shape by argument name; None accepts any shape
    source : what determines the shapes, for the message
    """
    for name, (tensor, shape) in wanted.items():
        if tensor is not None and tensor.shape != shape:
            raise ValueError(
                f"{op}: {name} has shape {tuple(tensor.shape)}, expected {shape} to go with "
                f"{source}"
            )


def check_vectors(operator: str, x: Tensor, **vectors: Tensor | None) -> None:
    """Refuse vectors that are not as long as a row of ``x``.

    Raises ValueError naming operator, vector and both shapes.
    """
    for name, vector in vectors.items():
        if vector is not None and vector.shape != x.shape[-1:]:
            raise ValueError(
                f"{operator}: {name} has shape {tuple(vector.shape)}, expected ({x.shape[-1]},) "
                f"to go with rows {tuple(x.shape)}"
            )


def check_segment_rows(
    operator: str, x: Tensor, rows: Tensor | None, index: Tensor | None, ptr: Tensor | None
) -> None:
    """Refuse rows per segment that do not fit ``x`` and the segments.

    Raises ValueError if only some of the three are given, or shape or type of ``rows`` is wrong.

    Parameters
    ----------
    operator : for the message
    x : [N, C]
    rows : [S, C] in the type of ``x``, one per segment; None = none
    index : [N], the segment of each row of ``x``
    ptr : [S + 1], offsets of the segments
    """
    if len({rows is None, index is None, ptr is None}) > 1:
        raise ValueError(f"{operator}: rows of segments go with an index and a ptr")
    if rows is None or index is None or ptr is None:
        return
    if rows.shape != (len(ptr) - 1, x.shape[-1]) or rows.dtype != x.dtype:
        raise ValueError(
            f"{operator}: rows of segments are {rows.dtype} {tuple(rows.shape)}, expected "
            f"{x.dtype} ({len(ptr) - 1}, {x.shape[-1]})"
        )
