"""Exchanges in which the GPUs of a host read each other's memory directly.

Every process of a group has a window of the same size. It writes what it sends into its own window;
after a barrier on the GPUs each process reads its parts from the others' windows. NCCL's send and
receive kernels copy through buffers and reach about half the bandwidth of the links.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed import _symmetric_memory as symmetric

from bevatron.parallel import traffic
from bevatron.parallel.groups import Group, Pending, in_words
from bevatron.parallel.mesh import Mesh

T = TypeVar("T")

WINDOW = 2**27
"""Bytes in half a window; larger exchanges go through NCCL."""
ALIGNED = 16
"""Alignment of parts in a window, bytes."""
LARGE = 2**20
"""Smallest read, in bytes, that uses the copy engine when other work overlaps it."""
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def opened(group: Group, mesh: Mesh) -> Group:
    """Give a group windows if its processes share a host and their GPUs can read them.

    They are freed with the group that is returned. All processes must call it together.
    """
    hosts = {rank // mesh.local_world for rank in group.ranks}
    if group.size == 1 or mesh.device.type != "cuda" or len(hosts) > 1:
        return group
    memory = _on_all(
        group, lambda: symmetric.empty(2 * WINDOW, dtype=torch.uint8, device=mesh.device)
    )
    if memory is None:
        return group
    of_group = cast("ProcessGroup", group.process_group)
    handle = _on_all(group, lambda: symmetric.rendezvous(memory, of_group))
    return group if handle is None else WindowGroup(group, Windows(handle))


def _on_all(group: Group, make: Callable[[], T]) -> T | None:
    """Return what is made, on all processes None if any of them fails: all go on together."""
    made: T | None = None
    with suppress(RuntimeError):
        made = make()
    failed = group.all_reduce(torch.tensor([float(made is None)])).wait()
    return None if failed.item() else made


def capturing() -> bool:
    """Whether the current stream is being captured; every capture follows a launched warm-up."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def copy_by_kernel(place: Tensor, given: Tensor) -> None:
    """Copy tensors of any strides with a kernel that profiles recognise by its name."""
    place, given = in_words(place, given)
    whole = INTEGERS[given.itemsize]
    torch.bitwise_or(given.view(whole), 0, out=place.view(whole))


def copy_by_engine(place: Tensor, given: Tensor) -> None:
    """Copy from the memory of another GPU by its copy engine, if that is worth starting it.

    The copy engine leaves the SMs to other work, but in a graph takes 10 microseconds each to start
    and to finish.
    """
    if place.nbytes < LARGE:
        copy_by_kernel(place, given)
    elif place.is_contiguous():
        place.copy_(given)
    else:
        copy_by_kernel(place, torch.empty_like(given).copy_(given))


class Windows:
    """The windows of a group, each with two halves that take turns.

    Parameters
    ----------
    handle : torch's symmetric memory
    """

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self._stream = torch.cuda.Stream(priority=-1) if torch.cuda.is_available() else None
        self._half, self._captured = 0, False

    def barrier(self) -> None:
        """Let the current stream wait for those of the other processes."""
        self._handle.barrier()

    def take_turns(self) -> None:
        """Choose the half to write, and wait until nobody reads it.

        In a graph the halves alternate, so the barrier of the exchange in between is enough. Its
        first exchange waits: what runs before a graph is unknown when it is captured.
        """
        captured = capturing()
        if not (captured and self._captured):
            self.barrier()
        self._half, self._captured = 1 - self._half, captured

    def view(self, rank: int, at: int, like: Tensor) -> Tensor:
        """View memory from a byte of the current half of a process's window."""
        at = (at + self._half * WINDOW) // like.itemsize
        view: Tensor = self._handle.get_buffer(rank, tuple(like.shape), like.dtype, at)
        return view

    @contextmanager
    def beside(self) -> Iterator["_Done"]:
        """Launch on a separate stream, after the work launched so far."""
        done = _Done()
        if self._stream is None:
            yield done
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield done
            done.event = self._stream.record_event()


class WindowGroup(Group):
    """Processes of one host whose GPUs read each other's memory.

    All of them must call its methods in the same order.

    Parameters
    ----------
    group : the same processes
    windows : theirs
    hidden : whether other work overlaps the exchanges
    """

    def __init__(self, group: Group, windows: Windows, *, hidden: bool = True) -> None:
        super().__init__(group.ranks, group.ranks[group.index], group.process_group)
        self._windows, self._hidden = windows, hidden
        self._others = [k for k in range(self.size) if k != self.index]

    @property
    def urgent(self) -> Group:
        """The same processes, for exchanges that no other work overlaps."""
        return WindowGroup(self, self._windows, hidden=False)

    def gather(self, part: Tensor, dim: int, each: Sequence[int]) -> Pending:
        """Concatenate parts of ``each`` length, longest first, along an axis."""
        shape = [*part.shape]
        shape[dim] = each[0]
        if math.prod(shape) * part.itemsize > WINDOW:
            return super().gather(part, dim, each)
        shape[dim] = sum(each)
        whole = part.new_empty(shape)
        places = whole.split(list(each), dim)
        traffic.record("all_gather", places[0], self.size)  # as if padded, like NCCL's
        own = places[self.index], part
        wanted = [(rank, 0, places[rank]) for rank in self._others]
        return self._swap([(0, part)], whole, wanted, own)

    def trade(
        self, parts: Sequence[Tensor], places: Sequence[Tensor], result: Tensor, most: int
    ) -> Pending:
        """Send the k-th part to process k; write what each sends to its place in the result."""
        stride = -(-most // ALIGNED) * ALIGNED
        if self.size * stride > WINDOW:
            return super().trade(parts, places, result, most)
        for k in self._others:
            traffic.record("pass_on", parts[k], self.size)
        given = [(k * stride, parts[k]) for k in self._others]
        wanted = [(k, self.index * stride, places[k]) for k in self._others]
        own = places[self.index], parts[self.index]
        return self._swap(given, result, wanted, own)

    def pass_on(self, x: Tensor, received: Tensor, most: int) -> Pending:
        """Send a tensor to the process before this one; write what that after sends."""
        if most > WINDOW:
            return super().pass_on(x, received, most)
        traffic.record("pass_on", x, self.size)
        wanted = [((self.index + 1) % self.size, 0, received)]
        return self._swap([(0, x)], received, wanted)

    def _swap(
        self,
        given: Sequence[tuple[int, Tensor]],
        result: Tensor,
        wanted: Sequence[tuple[int, int, Tensor]],
        own: tuple[Tensor, Tensor] | None = None,
    ) -> Pending:
        """Write (byte, tensor) to the own window, then read (rank, byte, place)."""
        windows, fetch = self._windows, copy_by_engine if self._hidden else copy_by_kernel
        with windows.beside() as work:
            windows.take_turns()
            for at, part in given:
                if part.numel():
                    copy_by_kernel(windows.view(self.index, at, part), part)
            windows.barrier()
            for rank, at, place in wanted:
                if place.numel():
                    fetch(place, windows.view(rank, at, place))
            if own is not None and self._hidden:
                copy_by_kernel(*own)
        if own is not None and not self._hidden:
            copy_by_kernel(*own)  # the current stream would only wait
        return Pending(result, work, kept=[part for _, part in given])


class _Done:
    """End of an exchange, with the interface of torch's handles of collectives."""

    def __init__(self) -> None:
        self.event: torch.cuda.Event | None = None

    def wait(self) -> None:
        """Let the current stream wait."""
        if self.event is not None:
            torch.cuda.current_stream().wait_event(self.event)
