"""Values that depend only on the layout of tensors, computed once per layout."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor

from bevatron.kernels.shared.launch import device_of

MOST_LAYOUTS = 1024
"""Layouts cached per function; beyond that, its cache is cleared."""

T = TypeVar("T")
_found: list[dict[Any, Any]] = []


def per_layout(function: Callable[..., T]) -> Callable[..., T]:
    """Call a function once for all tensors of the same shapes, strides, types and device.

    Its first argument is a tensor. It must not keep tensors, nor read their values, addresses or
    anything else that may change. Other arguments are compared by value.

    Examples
    --------
    >>> import torch
    >>> @per_layout
    ... def rows(x, times):
    ...     print("computed")
    ...     return times * x.shape[0]
    >>> rows(torch.ones(3, 2), 2), rows(torch.zeros(3, 2), 2)
    computed
    (6, 6)
    """
    found: dict[Any, T] = {}
    _found.append(found)

    @functools.wraps(function)
    def look_up(*arguments: Any) -> T:
        key = (
            device_of(arguments[0]),
            *[
                (each.shape, each.stride(), each.dtype) if isinstance(each, Tensor) else each
                for each in arguments
            ],
        )
        try:
            return found[key]
        except KeyError:
            if len(found) >= MOST_LAYOUTS:
                found.clear()
            result = found[key] = function(*arguments)
            return result

    return look_up


def forget() -> None:
    """Clear all caches, after a change to something else that results depend on."""
    for found in _found:
        found.clear()
