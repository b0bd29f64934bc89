"""Exchanges through memory that the GPUs of a host read from each other directly.

Every process of a group has a window of the same size. It writes there what it sends, and after a
barrier on the GPUs each process reads its pieces out of the windows of the others, at the rate of
the links: NCCL's own kernels pass pieces on through buffers, at half of it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed import _symmetric_memory as symmetric

from bevatron.parallel import traffic
from bevatron.parallel.groups import Group, Pending, in_words
from bevatron.parallel.mesh import Mesh

WINDOW = 2**27
"""Bytes of a half of a window; what does not fit is sent through NCCL."""
ALIGNED = 16
"""Bytes of which every piece in a window begins at a multiple."""
LARGE = 2**20
"""Bytes from which on the copy engine is used, if other work runs beside it."""
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_handles: dict[Any, Any] = {}
"""Windows of the process groups that have some; None for those whose GPUs cannot read them."""


def opened(group: Group, mesh: Mesh) -> Group:
    """Give a group windows, if all its processes are on one host and their GPUs can read them."""
    hosts = {rank // mesh.local_world for rank in group.ranks}
    if group.size == 1 or mesh.device.type != "cuda" or len(hosts) > 1:
        return group
    if group.process_group not in _handles:
        _handles[group.process_group] = _rendezvous(group, mesh)
    handle = _handles[group.process_group]
    return group if handle is None else WindowGroup(group, handle)


def _rendezvous(group: Group, mesh: Mesh) -> Any:
    """Map the windows of all processes; None if one of them cannot."""
    try:
        memory = symmetric.empty(2 * WINDOW, dtype=torch.uint8, device=mesh.device)
        handle = symmetric.rendezvous(memory, cast("ProcessGroup", group.process_group))
    except RuntimeError:
        handle = None
    found = group.all_reduce(torch.tensor([handle is None], device=mesh.device).float()).wait()
    return None if found.item() else handle


def capturing() -> bool:
    """Whether launches are recorded in a graph. Every capture follows launches of the same work."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def copy(place: Tensor, given: Tensor) -> None:
    """Copy by a kernel that profiles know by its name, whatever the strides are."""
    place, given = in_words(place, given)
    whole = INTEGERS[given.itemsize]
    torch.bitwise_or(given.view(whole), 0, out=place.view(whole))


def fetch(place: Tensor, given: Tensor, urgent: bool) -> None:
    """Copy from the memory of another GPU.

    The copy engine leaves all SMs to other work; in a graph it takes 10 microseconds to begin and
    to end, which a kernel does not.
    """
    if urgent or place.nbytes < LARGE:
        copy(place, given)
    elif place.is_contiguous():
        place.copy_(given)
    else:
        copy(place, torch.empty_like(given).copy_(given))


class WindowGroup(Group):
    """Some processes of a host whose GPUs read each other's memory.

    All of them must make the same calls in the same order.

    Parameters
    ----------
    group : the same processes
    handle : windows of all of them, as torch's symmetric memory gives them
    """

    def __init__(self, group: Group, handle: Any) -> None:
        super().__init__(group.ranks, group.ranks[group.index], group.process_group)
        self._handle = handle
        self._stream = torch.cuda.Stream(priority=-1) if torch.cuda.is_available() else None
        self._others = [k for k in range(self.size) if k != self.index]
        self._half, self._captured = 0, False

    def gather(
        self, part: Tensor, dim: int, each: Sequence[int], *, urgent: bool = False
    ) -> Pending:
        """Concatenate parts of ``each`` length, longest first, along an axis."""
        whole = part.new_empty(
            [sum(each) if k == dim % part.ndim else n for k, n in enumerate(part.shape)]
        )
        places = whole.split(list(each), dim)
        if places[0].nbytes > WINDOW:
            return super().gather(part, dim, each, urgent=urgent)
        traffic.record("all_gather", places[0], self.size)
        own = places[self.index], part
        wanted = [(rank, 0, places[rank]) for rank in self._others]
        return self._swap([(0, part)], whole, wanted, own, urgent=urgent)

    def trade(
        self,
        parts: Sequence[Tensor],
        places: Sequence[Tensor],
        result: Tensor,
        most: int,
        *,
        urgent: bool = False,
    ) -> Pending:
        """Send the k-th part to process k; write what each sends to its place in the result."""
        stride = -(-most // ALIGNED) * ALIGNED
        if self.size * stride > WINDOW:
            return super().trade(parts, places, result, most, urgent=urgent)
        for k in self._others:
            traffic.record("pass_on", parts[k], self.size)
        given = [(k * stride, parts[k]) for k in self._others]
        wanted = [(k, self.index * stride, places[k]) for k in self._others]
        own = places[self.index], parts[self.index]
        return self._swap(given, result, wanted, own, urgent=urgent)

    def pass_on(self, x: Tensor, received: Tensor, most: int, *, urgent: bool = False) -> Pending:
        """Send a tensor to the process before this one; write what that after sends."""
        if most > WINDOW:
            return super().pass_on(x, received, most, urgent=urgent)
        traffic.record("pass_on", x, self.size)
        wanted = [((self.index + 1) % self.size, 0, received)]
        return self._swap([(0, x)], received, wanted, urgent=urgent)

    def _swap(
        self,
        given: Sequence[tuple[int, Tensor]],
        result: Tensor,
        wanted: Sequence[tuple[int, int, Tensor]],
        own: tuple[Tensor, Tensor] | None = None,
        *,
        urgent: bool,
    ) -> Pending:
        """Write tensors at bytes of the own window, and read (rank, byte, place)."""
        with self._beside() as work:
            self._take_turns()
            for at, part in given:
                if part.numel():
                    copy(self._view(self.index, at, part), part)
            self._handle.barrier()
            for rank, at, place in wanted:
                if place.numel():
                    fetch(place, self._view(rank, at, place), urgent)
            if own is not None and not urgent:
                copy(*own)
        if own is not None and urgent:
            copy(*own)  # the current stream would only wait
        return Pending(result, work, kept=[part for _, part in given])

    def _take_turns(self) -> None:
        """Write where nobody reads any more.

        Between two exchanges of a graph that lies another's barrier if halves take turns. What is
        launched before and behind a graph is not known when it is captured.
        """
        captured = capturing()
        if not (captured and self._captured):
            self._handle.barrier()
        self._half, self._captured = 1 - self._half, captured

    def _view(self, rank: int, at: int, like: Tensor) -> Tensor:
        at = (at + self._half * WINDOW) // like.itemsize
        view: Tensor = self._handle.get_buffer(rank, tuple(like.shape), like.dtype, at)
        return view

    @contextmanager
    def _beside(self) -> Iterator["_Done"]:
        """Launch on a stream of its own, behind what the current one has launched."""
        done = _Done()
        if self._stream is None:
            yield done
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield done
            done.event = self._stream.record_event()


class _Done:
    """The end of an exchange, as torch's handles of collectives have it."""

    def __init__(self) -> None:
        self.event: torch.cuda.Event | None = None

    def wait(self) -> None:
        """Let the current stream wait."""
        if self.event is not None:
            torch.cuda.current_stream().wait_event(self.event)
