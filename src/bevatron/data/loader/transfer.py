"""Sending a batch between processes through anonymous shared memory.

The worker pickles the batch with its tensors and arrays out of band and writes everything into
one anonymous memory file (memfd); only its descriptor goes through the socket. The receiver maps
it: tensors are views, nothing is copied. The memory has no name, so it cannot outlive the
processes that hold it, however they die, and it takes no space in /dev/shm.
"""

import io
import mmap
import os
import pickle
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any

import torch
from torch import Tensor

Extents = Sequence[tuple[int, int]]
"""Start and length of the header and of each buffer in a memory file, bytes."""

_ALIGNMENT = 64
_POPULATE_READ = 22
"""MADV_POPULATE_READ of Linux 5.14, for which Python has no name."""


def send(connection: Connection, key: Any, batch: Any) -> None:
    """Send a batch under a key."""
    with written(batch) as (file, extents):
        send_file(connection, key, extents, file)


@contextmanager
def written(batch: Any) -> Iterator[tuple[int, Extents]]:
    """Write a batch to a memory file, which lasts as long as somebody has it open or mapped."""
    header, buffers = _dump(batch)
    views = [memoryview(header), *(buffer.raw() for buffer in buffers)]
    descriptor = _anonymous_file()
    try:
        yield descriptor, _write(descriptor, views)
    finally:
        os.close(descriptor)


def send_file(connection: Connection, key: Any, extents: Extents, file: int) -> None:
    """Send a memory file in which a batch is written already."""
    connection.send((key, extents))
    send_handle(connection, file, None)


@contextmanager
def received_file(connection: Connection) -> Iterator[int]:
    """Receive a memory file after its ``(key, extents)`` was read from the connection."""
    descriptor = recv_handle(connection)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def load(file: int, extents: Extents) -> Any:
    """Map a memory file and return its batch; others that map it do not see what is changed."""
    mapped = mmap.mmap(file, max(sum(extents[-1]), 1), flags=mmap.MAP_PRIVATE)
    with suppress(OSError, AttributeError):  # otherwise whoever reads it first is held up
        mapped.madvise(_POPULATE_READ)
    memory = memoryview(mapped)
    header, *buffers = (memory[start : start + length] for start, length in extents)
    return pickle.loads(header, buffers=buffers)  # noqa: S301  from our own worker process


class _BatchPickler(pickle.Pickler):
    """Pickles the memory of tensors out of band, instead of through torch's files."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor) and value.device.type == "cpu" and not value.is_sparse:
            # Strides of an axis of length 1 may be anything, and `view` asks for 1 in the last.
            flat = value.detach().contiguous().as_strided((value.numel(),), (1,))
            raw: Any = flat.view(torch.uint8).numpy()
            return _tensor, (pickle.PickleBuffer(raw), value.dtype, tuple(value.shape))
        return NotImplemented


def _tensor(raw: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if not memoryview(raw).nbytes:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(raw, dtype=dtype).reshape(shape)


def _dump(batch: Any) -> tuple[bytes, list[pickle.PickleBuffer]]:
    buffers: list[pickle.PickleBuffer] = []
    file = io.BytesIO()
    keep: Callable[[pickle.PickleBuffer], None] = buffers.append
    _BatchPickler(file, protocol=5, buffer_callback=keep).dump(batch)
    return file.getvalue(), buffers


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("bevatron-batch", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _write(descriptor: int, views: Sequence[memoryview]) -> Extents:
    """Write aligned views; return the start and length of each."""
    extents = []
    start = 0
    for view in views:
        extents.append((start, view.nbytes))
        start += -(-view.nbytes // _ALIGNMENT) * _ALIGNMENT
    os.ftruncate(descriptor, max(start, 1))
    for (begin, length), view in zip(extents, views, strict=True):
        done = 0
        while done < length:
            done += os.pwrite(descriptor, view[done:], begin + done)
    return extents
