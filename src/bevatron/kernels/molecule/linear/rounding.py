"""Weights rounded to the type of matmuls, all in a few launches."""

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from bevatron.kernels.shared.standing_weights import once, storage_of

GPUS = ("cuda",)
"""Types of devices on which a launch takes longer than the kernel."""


class _Copies(threading.local):
    """Rounded copies by storage of the parameter, those of each thread.

    Another thread may leave its block, or be on another stream, while these are read.
    """

    def __init__(self) -> None:
        self.of: dict[int, Tensor] = {}


_copies = _Copies()


@contextmanager
def rounded_together(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Round parameters to autocast's type at once, for `linear` within a ``with`` block.

    A large model has hundreds of weights, and rounding each at its use is one launch per weight.
    Without autocast, or not on a GPU, nothing happens. Weights must not change within
    the block, because the copies would not follow.

    Parameters
    ----------
    parameters
        All on one device. Views of them are found too.

    Examples
    --------
    >>> layer = torch.nn.Linear(2, 2)
    >>> with rounded_together(layer.parameters()):
    ...     pass
    """
    if torch.compiler.is_compiling():
        yield  # the compiler places casts itself
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
    """Round contiguous parameters to a type; a nested block uses its own copies."""
    places = [storage_of(p) for p in parameters]
    copies = _copies.of
    before = {place: copies[place] for place in places if place in copies}
    sizes = [-(-p.numel() // 8) * 8 for p in parameters]  # every copy is aligned to 16 bytes
    flat = parameters[0].new_empty(sum(sizes), dtype=dtype)
    parts = [part[: p.numel()].view(p.shape) for part, p in zip(flat.split(sizes), parameters)]  # noqa: B905
    torch._foreach_copy_(parts, parameters)
    copies.update(zip(places, parts, strict=True))
    try:
        yield
    finally:
        for place in places:
            copies.pop(place, None)
        copies.update(before)


def rounded(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a weight, or a view of one, in a type, from the copies if possible."""
    copies = _copies.of
    copy = copies.get(storage_of(weight)) if copies else None
    if copy is None or copy.dtype != dtype or weight.dtype != torch.float32:
        return once(lambda: weight.to(dtype), weight, to=dtype)
    start = copy.storage_offset() + weight.storage_offset()
    return copy.as_strided(weight.shape, weight.stride(), start)


def _alone(tensor: Tensor) -> bool:
    """Whether a tensor owns its memory, so that its storage identifies it."""
    size = tensor.untyped_storage().nbytes()
    return tensor.is_contiguous() and size == tensor.numel() * tensor.element_size()
