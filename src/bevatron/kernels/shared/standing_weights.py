"""Weights that are rounded and joined once while they stand still, as between steps of a sampling.

Operators round weights to the type of the rows and concatenate those of the same rows. Where the
same weights are used again and again without gradients that is most of the launches.
"""

import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class _Kept(threading.local):
    """The cache of one thread: weights that are constant in one may change in another."""

    made: dict[Hashable, tuple[Tensor, tuple[Tensor | None, ...]]] | None = None


_kept = _Kept()


@contextmanager
def standing_weights() -> Iterator[None]:
    """Keep what `once` makes until the end; meanwhile no weight may change.

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


def once(make: Callable[[], Tensor], *weights: Tensor | None, to: Hashable = None) -> Tensor:
    """Return what is made of weights; within `standing_weights`, and without gradients, once.

    Parameters
    ----------
    make : makes it
    weights : all that it is made of
    to : tells apart what the same function makes of the same weights, such as a type
    """
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or _kept.made is None:
        return make()
    kept = _kept.made
    made_by = getattr(make, "__code__", getattr(make, "__qualname__", None))
    key = (made_by, to, *(None if w is None else _name(w) for w in weights))
    if key not in kept:
        # With the weights: memory that is freed could become that of others.
        kept[key] = make(), weights
    return kept[key][0]


def storage_of(tensor: Tensor) -> int:
    """Name the storage of a tensor; its address is the same for all tensors without memory."""
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001


def _name(weight: Tensor) -> tuple[Hashable, ...]:
    place = storage_of(weight), weight.storage_offset()
    return *place, weight.dtype, weight.shape, weight.stride()
