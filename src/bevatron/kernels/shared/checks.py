"""Checks of the arguments of operators: axes, shapes, floating-point types, one device."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from bevatron.errors import KernelError

FLOATING_TYPES = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
INDEX_TYPES = (torch.int64, torch.int32)
LARGEST_WIDTH = 8192
"""Channels of the longest rows that kernels hold in registers."""


def check_alike(operator: str, tensors: Mapping[str, Tensor | Sequence[Tensor] | None]) -> None:
    """Refuse tensors of different types, which a kernel would round, or on different devices.

    Under autocast types may differ: torch casts them to one type where they are multiplied.
    Raises ValueError if a tensor differs from the first, naming both.

    Parameters
    ----------
    tensors : by argument name; the first has the type of the result

    Examples
    --------
    >>> check_alike("product", {"x": torch.ones(1), "weight": torch.ones(1).double()})
    Traceback (most recent call last):
    ...
    ValueError: product: x is float32, but weight is float64; make them one type
    """
    first_name, first = "", None
    try:
        for name, given in tensors.items():
            for tensor in (given,) if given is None or isinstance(given, Tensor) else given:
                if first is None:
                    first_name, first = name, tensor
                elif tensor is not None and tensor.device != first.device:
                    each = [(name, part) for part in _parts(given)]
                    raise no_tensor(operator, each) or _elsewhere(
                        operator, first_name, first, name, tensor
                    )
                elif (
                    tensor is not None
                    and tensor.dtype != first.dtype
                    and not torch.is_autocast_enabled(first.device.type)
                ):
                    raise ValueError(
                        f"{operator}: {first_name} is {_type(first)}, but {name} is "
                        f"{_type(tensor)}; make them one type"
                    )
    except (AttributeError, TypeError) as error:
        each = [(name, part) for name, given in tensors.items() for part in _parts(given)]
        raise no_tensor(operator, each) or error from None


def as_one_type(operator: str, **tensors: Tensor | None) -> list[Any]:
    """Return all but the first tensor in its type: they have it, or autocast is on.

    Raises ValueError as `check_alike`.
    """
    check_alike(operator, tensors)
    first, *others = tensors.values()
    assert first is not None
    kind = first.dtype
    return [each if each is None or each.dtype is kind else each.to(kind) for each in others]


def check_float64(operator: str, **tensors: Tensor | None) -> None:
    """Refuse float64 beside narrower types, where 16 bits beside float32 are taken.

    Raises ValueError naming both.
    """
    first_name, first = "", None
    for name, tensor in tensors.items():
        if first is None:
            first_name, first = name, tensor
        elif tensor is not None and (first.dtype is torch.float64) != (
            tensor.dtype is torch.float64
        ):
            check_alike(operator, {first_name: first, name: tensor})


def check_devices(operator: str, **tensors: Tensor | None) -> None:
    """Refuse tensors on different devices: a kernel would read addresses of another one.

    Raises ValueError if a tensor is not where the first is, naming both.
    """
    first_name, first = "", None
    try:
        for name, tensor in tensors.items():
            if first is None:
                first_name, first = name, tensor
            elif tensor is not None and tensor.device != first.device:
                raise _elsewhere(operator, first_name, first, name, tensor)
    except AttributeError as error:
        raise no_tensor(operator, tensors.items()) or error from None


def check_axes(operator: str, layout: str, **tensors: Tensor | None) -> None:
    """Refuse tensors with too few or too many axes: why their sizes could not be taken.

    Called once that has failed, so that valid calls pay nothing.

    Parameters
    ----------
    layout : names of the axes, ``[N, C]``; ``[..., N, C]`` has two or more

    Examples
    --------
    >>> check_axes("product", "[..., N, C]", x=torch.ones(2))
    Traceback (most recent call last):
    ...
    ValueError: product: x has shape (2,), expected [..., N, C]
    """
    wanted = layout.count(",")
    open_ended = layout[1] == "."
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if error := no_tensor(operator, [(name, tensor)]):
            raise error
        axes = tensor.dim()
        if axes < wanted or (axes != wanted + 1 and not open_ended):
            raise ValueError(
                f"{operator}: {name} has shape {tuple(tensor.shape)}, expected {layout}"
            )


def check_shapes(
    operator: str, wanted: Mapping[str, tuple[Tensor | None, tuple[int, ...]]], **given: Tensor
) -> None:
    """Check shapes, and that all tensors are floating-point numbers on one device.

    Raises ValueError if a tensor does not fit, naming the argument.

    Parameters
    ----------
    wanted
        Tensor and expected shape by argument name; None accepts any shape. A ``mask`` may be of any
        type.
    given : what determines the shapes, for the message; the first is where all must be

    Examples
    --------
    >>> check_shapes("product", {"bias": (torch.ones(1), (3,))}, x=torch.ones(2, 3))
    Traceback (most recent call last):
    ...
    ValueError: product: bias has shape (1,), expected (3,) to go with x (2, 3)
    """
    try:
        device = next(iter(given.values())).device
        for name, (tensor, shape) in wanted.items():
            if tensor is not None and (
                tensor.shape != shape
                or tensor.device != device
                or (tensor.dtype not in FLOATING_TYPES and name != "mask")
            ):
                raise _misfit(operator, name, tensor, shape, given)
    except AttributeError as error:
        each = [*given.items(), *((name, tensor) for name, (tensor, _) in wanted.items())]
        raise no_tensor(operator, each) or error from None


def _misfit(
    operator: str, name: str, tensor: Tensor, shape: tuple[int, ...], given: Mapping[str, Tensor]
) -> ValueError:
    if error := no_tensor(operator, [*given.items(), (name, tensor)]):
        return error
    if tensor.shape != shape:
        source = " and ".join(f"{each} {tuple(t.shape)}" for each, t in given.items())
        return ValueError(
            f"{operator}: {name} has shape {tuple(tensor.shape)}, expected {tuple(shape)} to go "
            f"with {source}"
        )
    first_name, first = next(iter(given.items()))
    if tensor.device != first.device:
        return _elsewhere(operator, first_name, first, name, tensor)
    return not_floating_point(operator, name, tensor)


def not_floating_point(operator: str, name: str, tensor: Tensor) -> ValueError:
    """Say that a tensor is of none of `FLOATING_TYPES`."""
    return no_tensor(operator, [(name, tensor)]) or ValueError(
        f"{operator}: {name} is {_type(tensor)}, expected floating-point"
    )


def no_tensor(operator: str, given: Iterable[tuple[str, object]]) -> ValueError | None:
    """Say which argument is no tensor; None if all are.

    Called once a check has failed, so that valid calls pay nothing.

    Examples
    --------
    >>> no_tensor("product", [("x", torch.ones(1)), ("weight", [1.0])])
    ValueError('product: weight is a list, expected a tensor (torch.as_tensor makes one)')
    """
    wrong = [(name, value) for name, value in given if not isinstance(value, Tensor)]
    # None last: it may be an argument that was left out.
    for name, value in sorted(wrong, key=lambda pair: pair[1] is None):
        array = isinstance(value, list | tuple | int | float) or hasattr(value, "__array__")
        hint = " (torch.as_tensor makes one)" if array else ""
        return ValueError(f"{operator}: {name} is {described(value)}, expected a tensor{hint}")
    return None


def described(value: object) -> str:
    """Name what was given where something else was expected.

    Examples
    --------
    >>> described([1.0]), described(torch.float64), described(None)
    ('a list', 'a torch.dtype', 'None')
    """
    kind = type(value)
    name = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
    return "None" if value is None else f"a {name}"


def _parts(given: object) -> Sequence[object]:
    if isinstance(given, list | tuple) and any(hasattr(each, "shape") for each in given):
        return given
    return (given,)


def check_width(operator: str, x: Tensor) -> None:
    """Raise KernelError if rows are too long for the registers of a kernel."""
    if x.shape[-1] > LARGEST_WIDTH:
        raise KernelError(
            f"{operator}: rows of {x.shape[-1]} channels do not fit the registers of the Triton "
            f"kernel, which takes up to {LARGEST_WIDTH}; use('reference') takes any"
        )


def check_index(
    operator: str, name: str, index: Tensor, shape: tuple[int, ...], **like: Tensor
) -> None:
    """Refuse an index of another shape, not of whole numbers, or on another device than ``like``.

    That every index exists is not checked: it would wait for the device.
    """
    try:
        if index.shape != shape:
            raise ValueError(
                f"{operator}: {name} has shape {tuple(index.shape)}, expected {tuple(shape)}"
            )
        if index.dtype not in INDEX_TYPES:
            raise no_tensor(operator, [(name, index)]) or ValueError(
                f"{operator}: {name} is {_type(index)}, expected int64 or int32"
            )
        for first_name, first in like.items():
            if index.device != first.device:
                raise _elsewhere(operator, first_name, first, name, index)
    except AttributeError as error:
        raise no_tensor(operator, [(name, index), *like.items()]) or error from None


def check_keep_mask(operator: str, mask: Tensor | None) -> None:
    """Refuse a mask of another type than bool, which may have another meaning."""
    if mask is not None and mask.dtype != torch.bool:
        raise no_tensor(operator, [("mask", mask)]) or ValueError(
            f"{operator}: mask is {_type(mask)}, expected bool, True = keep"
        )


def _elsewhere(operator: str, first: str, where: Tensor, name: str, tensor: Tensor) -> ValueError:
    return no_tensor(operator, [(first, where), (name, tensor)]) or ValueError(
        f"{operator}: {first} is on {where.device}, but {name} is on {tensor.device}; move them to "
        "one device"
    )


def _type(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def check_vectors(operator: str, x: Tensor, **vectors: Tensor | None) -> None:
    """Refuse vectors that are not as long as a row of ``x``; see `check_shapes`."""
    width = tuple(x.shape[-1:])
    check_shapes(operator, {name: (vector, width) for name, vector in vectors.items()}, rows=x)


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
