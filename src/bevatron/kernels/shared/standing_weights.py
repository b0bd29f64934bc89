"""Weights that are rounded and joined once while they do not change, as during sampling.

Operators round weights to the type of the rows and concatenate those on the same rows, and write
masks in the form that kernels read. If the same weights and masks are used repeatedly without
gradients, these are most of the launches.
"""

import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

Made = TypeVar("Made")


class _Kept(threading.local):
    """One cache per thread: weights that one thread holds constant may change in another."""

    made: dict[Hashable, tuple[Any, tuple[Tensor | None, ...]]] | None = None


_kept = _Kept()


@contextmanager
def standing_weights() -> Iterator[None]:
    """Cache what `once` makes until the block ends; no weight or mask may change within it.

    Examples
    --------
    >>> weight = torch.ones(2)
    >>> with standing_weights(), torch.no_grad():
    ...     once(weight.double, weight) is once(weight.double, weight)
    True
    """
    before = _kept.made
    _kept.made = {} if before is None else before
    try:
        yield
    finally:
        _kept.made = before


def once(make: Callable[[], Made], *weights: Tensor | None, to: Hashable = None) -> Made:
    """Return ``make()``; within `standing_weights` and without gradients, call it only once.

    Parameters
    ----------
    make : derives a tensor, or several, from the weights
    weights : everything it depends on; a mask that all layers share is as good as a weight
    to : distinguishes results of one function from the same weights, such as a type
    """
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or _kept.made is None:
        return make()
    kept = _kept.made
    made_by = getattr(make, "__code__", getattr(make, "__qualname__", None))
    key = (made_by, to, *(None if w is None else _name(w) for w in weights))
    if key not in kept:
        # Keep the weights too: freed memory could be reused by others.
        kept[key] = make(), weights
    made: Made = kept[key][0]
    return made


def storage_of(tensor: Tensor) -> int:
    """Identify the storage of a tensor; all tensors without memory have the same address."""
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001


def _name(weight: Tensor) -> tuple[Hashable, ...]:
    place = storage_of(weight), weight.storage_offset()
    return *place, weight.dtype, weight.shape, weight.stride()
