"""Asynchronous copies between host and device through buffers at fixed addresses."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from bevatron.data.padding import BatchShape, Paddable, StaticBatch
from bevatron.typing import FloatArray

SMALL_BATCH = 2**17
"""Bytes up to which a batch is copied between two steps: the GPU then waits for some microseconds,
while a copy beside a step takes the host ten times as long to order."""


_streams: dict[tuple[int, int], torch.cuda.Stream] = {}


def present_stream() -> torch.cuda.Stream:
    """Return the current stream, cached: a new object takes torch as long as a copy."""
    device = torch._C._cuda_getDevice()  # noqa: SLF001
    key = device, torch._C._cuda_getCurrentRawStream(device)  # noqa: SLF001
    if key not in _streams:
        _streams[key] = torch.cuda.current_stream()
    return _streams[key]


class Moment:
    """An event in the device's work to wait for; on a CPU it has always occurred."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event() if device.type == "cuda" else None

    def mark(self) -> None:
        """Set it after everything launched so far."""
        if self._event is not None:
            self._event.record(present_stream())

    def wait(self) -> None:
        """Wait until the device has reached it."""
        if self._event is not None:
            self._event.synchronize()

    def hold(self, stream: torch.cuda.Stream) -> None:
        """Make all later work of a stream wait for it."""
        if self._event is not None:
            stream.wait_event(self._event)


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

    def send(self, values: Sequence[float] | FloatArray | Tensor) -> None:
        """Replace the numbers for all work launched from now on."""
        host, copied = self._hosts[0]
        self._hosts.reverse()
        copied.wait()
        if type(host) is Tensor:  # else there is no memory, it is only planned
            host.numpy()[:] = values
        self.values.copy_(host, non_blocking=True)
        copied.mark()


class Feed(Protocol):
    """Input of a captured graph, at a fixed address, and its replacement."""

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

    Two batches on the host take turns. On a GPU the copy of a large one goes to a second buffer, on
    a stream of its own, while the last step still reads the batch; only a copy within the device
    comes between two steps.

    Parameters
    ----------
    shape, dtype, device, like : as in `StaticBatch`

    Attributes
    ----------
    batch : on the device
    """

    def __init__(
        self, shape: BatchShape, dtype: torch.dtype, device: torch.device, like: Paddable
    ) -> None:
        self._static = StaticBatch(shape, dtype, device, like=like)
        self.batch: Any = self._static.batch
        on_gpu = device.type == "cuda"
        self._hosts = [
            (StaticBatch(shape, dtype, pin=on_gpu, like=like), Moment(device)) for _ in range(2)
        ]
        beside = on_gpu and self._static.block.numel() > SMALL_BATCH
        self._staging = StaticBatch(shape, dtype, device, like=like) if beside else None
        self._stream = torch.cuda.Stream(device) if beside else None
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(device))  # zeroes what it writes to
        self._taken = Moment(device)

    def send(self, batch: Paddable) -> None:
        """Replace the batch for all work launched from now on."""
        host, copied = self._hosts[0]
        self._hosts.reverse()
        copied.wait()
        host.fill(batch)
        if self._staging is None or self._stream is None:
            self._static.copy_from(host)
            copied.mark()
            return
        self._taken.hold(self._stream)
        with torch.cuda.stream(self._stream):
            self._staging.copy_from(host)
            copied.mark()
        copied.hold(present_stream())
        self._static.copy_from(self._staging)
        self._taken.mark()
