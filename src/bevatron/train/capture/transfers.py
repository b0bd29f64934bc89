"""Asynchronous copies between host and device through buffers at fixed addresses."""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from bevatron.data.padding import BatchShape, Paddable, StaticBatch


class Moment:
    """A point in the device's work that the host can wait for; on a CPU it is always reached."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event() if device.type == "cuda" else None

    def mark(self) -> None:
        """Set it after everything launched so far."""
        if self._event is not None:
            self._event.record()

    def wait(self) -> None:
        """Wait until the device has reached it."""
        if self._event is not None:
            self._event.synchronize()


class Reading:
    """Copies a tensor to the host in two steps: launch the copy, and later wait for it.

    Parameters
    ----------
    source : what is copied; its address is fixed
    """

    def __init__(self, source: Tensor) -> None:
        self._source = source
        on_gpu = source.device.type == "cuda"
        self._host = torch.zeros(source.shape, dtype=source.dtype, pin_memory=on_gpu)
        self._arrived = Moment(source.device)

    def launch(self) -> Callable[[], Tensor]:
        """Copy the current values; return what waits for them, to be called before the next."""
        self._host.copy_(self._source, non_blocking=True)
        self._arrived.mark()

        def read() -> Tensor:
            self._arrived.wait()
            return self._host.clone()

        return read


class NumberFeed:
    """A few float64 numbers on the device that change from step to step.

    Attributes
    ----------
    values : on the device
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self.values = torch.zeros(size, dtype=torch.float64, device=device)
        on_gpu = device.type == "cuda"
        self._hosts = [
            (torch.zeros(size, dtype=torch.float64, pin_memory=on_gpu), Moment(device))
            for _ in range(2)
        ]

    def send(self, values: Tensor) -> None:
        """Replace the numbers for all work launched from now on."""
        host, copied = self._hosts[0]
        self._hosts.reverse()
        copied.wait()
        host.copy_(values)
        self.values.copy_(host, non_blocking=True)
        copied.mark()


class Feed(Protocol):
    """What a captured graph reads, at a fixed address, and how it is replaced."""

    batch: Any

    def send(self, batch: Any) -> None:
        """Replace the batch for all work launched from now on."""


class StandingFeed:
    """A batch that is the same in every step and stays on the device.

    Attributes
    ----------
    batch : on the device
    """

    def __init__(self, batch: Any, dtype: torch.dtype, device: torch.device) -> None:
        self.batch: Any = batch.to(device, dtype)

    def send(self, batch: Any) -> None:
        """Leave it as it is."""
        del batch


class BatchFeed:
    """The padded batch that a captured graph reads, filled from the host while the device works.

    Two batches on the host take turns. On a GPU the copy goes to a second buffer, on a stream of
    its own, while the last step still reads the batch; only a copy within the device comes between
    two steps.

    Parameters
    ----------
    shape, dtype, device, like : as in `StaticBatch`

    Attributes
    ----------
    batch : on the device
    """

    def __init__(
        self,
        shape: BatchShape,
        dtype: torch.dtype,
        device: torch.device,
        like: Paddable,
    ) -> None:
        self._static = StaticBatch(shape, dtype, device, like=like)
        self.batch: Any = self._static.batch
        on_gpu = device.type == "cuda"
        self._hosts = [
            (StaticBatch(shape, dtype, pin=on_gpu, like=like), Moment(device)) for _ in range(2)
        ]
        self._staging = StaticBatch(shape, dtype, device, like=like) if on_gpu else None
        self._stream = torch.cuda.Stream(device) if on_gpu else None
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(device))  # zeroes what it writes to

    def send(self, batch: Paddable) -> None:
        """Replace the batch for all work launched from now on."""
        host, copied = self._hosts[0]
        self._hosts.reverse()
        copied.wait()
        host.fill(batch)
        if self._staging is None or self._stream is None:
            self._static.copy_from(host)
            return
        present = torch.cuda.current_stream()
        with torch.cuda.stream(self._stream):
            self._staging.copy_from(host)
            copied.mark()
        present.wait_stream(self._stream)
        self._static.copy_from(self._staging)
        taken = torch.cuda.Event()
        taken.record(present)
        self._stream.wait_event(taken)
