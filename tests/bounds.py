"""Interpreted kernels raise where they touch memory beyond the tensors of their launch.

The interpreter itself reads and writes whatever is there, as a GPU does most of the time.
"""

import numpy as np
import torch
from triton.runtime import interpreter

FROM_TABLES = {"_adam"}
"""Kernels that find their tensors in tables of addresses."""
_launch = interpreter.GridExecutor.__call__


class OutOfBoundsError(Exception):
    """A kernel touches memory that is of none of its tensors."""


class _Memory:
    """The interpreter's loads and stores, checked.

    Attributes
    ----------
    kernel : name of the function that runs
    first, last : addresses at which the memory of its tensors begins, in order, and ends; None:
        unknown
    """

    def __init__(self, unchecked):
        self._unchecked = unchecked
        self.kernel, self.first, self.last = "", None, None

    def __getattr__(self, name):
        return getattr(self._unchecked, name)

    def load(self, addresses, mask, other, kind):
        self._check(addresses, mask, np.dtype(kind).itemsize)
        return self._unchecked.load(addresses, mask, other, kind)

    def store(self, addresses, values, mask):
        self._check(addresses, mask, values.dtype.itemsize)
        return self._unchecked.store(addresses, values, mask)

    def atomic_rmw(self, operation, addresses, values, mask, order):
        self._check(addresses, mask, values.dtype.itemsize)
        return self._unchecked.atomic_rmw(operation, addresses, values, mask, order)

    def _check(self, addresses, mask, size):
        if self.first is None:
            return
        wanted = addresses[np.broadcast_to(mask, addresses.shape).astype(bool)]
        place = np.searchsorted(self.first, wanted, side="right") - 1
        outside = (place < 0) | (wanted + np.uint64(size) > self.last[place])
        if outside.any():
            raise OutOfBoundsError(
                f"{self.kernel} touches {outside.sum()} elements beyond its tensors"
            )


def install():
    """Check all later launches; an interpreter that is built otherwise stays as it is."""
    if hasattr(interpreter, "_interpreter") and not isinstance(interpreter._interpreter, _Memory):
        interpreter._interpreter = _Memory(interpreter._interpreter)
        interpreter.GridExecutor.__call__ = _checked_launch


def _checked_launch(self, *arguments, **options):
    memory, name = interpreter._interpreter, self.fn.__name__
    before = memory.kernel, memory.first, memory.last
    memory.kernel, memory.first, memory.last = name, None, None
    if name not in FROM_TABLES:
        memory.first, memory.last = _memory_of([*arguments, *options.values()])
    try:
        return _launch(self, *arguments, **options)
    finally:
        memory.kernel, memory.first, memory.last = before


def _memory_of(arguments):
    """Return where the memory of all tensors begins and ends, by ascending addresses."""
    joined = []
    for first, last in sorted(filter(None, map(_extent, arguments))):
        if joined and first <= joined[-1][1]:
            joined[-1][1] = max(last, joined[-1][1])
        else:
            joined.append([first, last])
    first, last = np.array(joined or [[0, 0]], dtype=np.uint64).T
    return np.ascontiguousarray(first), last


def _extent(argument):
    """Return the addresses of the first byte of a tensor and behind its last; None for others."""
    tensor = getattr(argument, "base", argument)  # of a descriptor
    if not isinstance(tensor, torch.Tensor) or tensor.numel() == 0:
        return None
    reach = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return tensor.data_ptr(), tensor.data_ptr() + reach * tensor.element_size()
