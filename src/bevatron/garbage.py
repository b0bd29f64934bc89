"""Python's garbage collection, switched off where it costs time or does harm."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Switch off automatic garbage collection within a ``with`` block.

    Examples
    --------
    >>> with no_garbage_collection():
    ...     gc.isenabled()
    False
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
