"""Weights rounded to the type of products, all of them in a few launches."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from bevatron.kernels.shared.standing_weights import once, storage_of

GPUS = ("cuda",)
"""Kinds of devices where a launch costs more than it does."""

_copies: dict[int, Tensor] = {}
"""Copies by the storage of the parameter."""


@contextmanager
def rounded_together(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Round parameters to autocast's type at once, for `linear` within a ``with`` block.

    A large model has hundreds of weights, and rounding each where it is used is a launch of its
    own. Without autocast, or not on a GPU, nothing happens. The copies are those of the moment:
    weights must not change within.

    Parameters
    ----------
    parameters
        All on one device. Also parts of them (views) are found.

    Examples
    --------
    >>> layer = torch.nn.Linear(2, 2)
    >>> with rounded_together(layer.parameters()):
    ...     pass
    """
    if torch.compiler.is_compiling():
        yield  # the compiler places conversions itself
        return
    found = [p.detach() for p in parameters if p.dtype == torch.float32 and p.numel()]
    found = [p for p in found if _alone(p)]
    kind = found[0].device.type if found else "cpu"
    if kind not in GPUS or not torch.is_autocast_enabled(kind):
        yield
        return
    with round_all(found, torch.get_autocast_dtype(kind)):
        yield


@contextmanager
def round_all(parameters: list[Tensor], dtype: torch.dtype) -> Iterator[None]:
    """Round contiguous parameters to a type; nested blocks see the inner one's."""
    places = [storage_of(p) for p in parameters]
    before = {place: _copies[place] for place in places if place in _copies}
    sizes = [-(-p.numel() // 8) * 8 for p in parameters]  # every copy begins at 16 bytes
    flat = parameters[0].new_empty(sum(sizes), dtype=dtype)
    parts = [part[: p.numel()].view(p.shape) for part, p in zip(flat.split(sizes), parameters)]  # noqa: B905
    torch._foreach_copy_(parts, parameters)
    _copies.update(zip(places, parts, strict=True))
    try:
        yield
    finally:
        for place in places:  # another thread may have those of another model there
            _copies.pop(place, None)
        _copies.update(before)


def rounded(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a weight, or a part of one, in a type: from the copies if there is one."""
    copy = _copies.get(storage_of(weight)) if _copies else None
    if copy is None or copy.dtype != dtype or weight.dtype != torch.float32:
        return once(lambda: weight.to(dtype), weight, to=dtype)
    start = copy.storage_offset() + weight.storage_offset()
    return copy.as_strided(weight.shape, weight.stride(), start)


def _alone(tensor: Tensor) -> bool:
    """Whether a tensor has memory to itself, so that its storage names it."""
    size = tensor.untyped_storage().nbytes()
    return tensor.is_contiguous() and size == tensor.numel() * tensor.element_size()
