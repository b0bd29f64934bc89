"""A group of processes and its collectives: the same semantics on gloo and NCCL, all counted.

Every collective returns a `Pending`; it runs until ``wait()``, which returns the result. On
one process nothing is sent and the result is available at once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, distributed

from bevatron.parallel import traffic
from bevatron.parallel.mesh import Mesh

# Newer releases of torch have other names for these two and warn about the old ones.
_GATHER, _SCATTER = (
    getattr(distributed, new, None) or getattr(distributed, old)
    for new, old in (
        ("all_gather_single", "all_gather_into_tensor"),
        ("reduce_scatter_single", "reduce_scatter_tensor"),
    )
)


@dataclass
class Pending:
    """The result of a collective that may still be in flight.

    ``kept`` holds the tensors being sent, which must not be freed before the end.
    """

    result: Tensor
    work: Any = None
    finish: Callable[[Tensor], Tensor] | None = None
    kept: Sequence[Tensor] = ()

    def then(self, finish: Callable[[Tensor], Tensor]) -> "Pending":
        """Finish the result once it is there, after earlier finishing functions."""
        before = self.finish
        self.finish = finish if before is None else lambda result: finish(before(result))
        return self

    def wait(self) -> Tensor:
        """Return the result; on a GPU the current stream waits, not the host."""
        if self.work is not None:
            self.work.wait()
            self.work, self.kept = None, ()
        if self.finish is not None:
            self.result, self.finish = self.finish(self.result), None
        return self.result


class Group:
    """Some processes of a run in a fixed order.

    Parameters
    ----------
    ranks : ranks of the processes, including this one
    rank : rank of this process in the run
    process_group : group of torch.distributed; None for all processes, or for one
    """

    def __init__(
        self,
        ranks: Sequence[int],
        rank: int,
        process_group: "distributed.ProcessGroup | None" = None,
    ) -> None:
        self.ranks = tuple(ranks)
        self.size = len(self.ranks)
        self.index = self.ranks.index(rank)
        self.process_group = process_group

    @property
    def urgent(self) -> "Group":
        """The same processes, for exchanges that no other work overlaps."""
        return self

    def all_gather(self, part: Tensor) -> Pending:
        """Concatenate the parts [r, ...] of all processes: [size * r, ...]."""
        if self.size == 1:
            return Pending(part)
        part = part.contiguous()
        whole = part.new_empty((self.size * part.shape[0], *part.shape[1:]))
        traffic.record("all_gather", part, self.size)
        work = _GATHER(whole, part, group=self.process_group, async_op=True)
        return Pending(whole, work, kept=[part])

    def reduce_scatter(self, whole: Tensor) -> Pending:
        """Sum [size * r, ...] over the processes; each gets its own [r, ...]."""
        if self.size == 1:
            return Pending(whole)
        whole = whole.contiguous()
        traffic.record("reduce_scatter", whole, self.size)
        if whole.device.type == "cpu":
            # Not every release has gloo's own; this one adds in a fixed order.
            return self._sum_of_parts(whole, None)
        part = whole.new_empty((whole.shape[0] // self.size, *whole.shape[1:]))
        work = _SCATTER(part, whole, group=self.process_group, async_op=True)
        return Pending(part, work, kept=[whole])

    def reduce_scatter_wire(self, whole: Tensor, unpack: Callable[[Tensor], Tensor]) -> Pending:
        """Send narrow rows [size * r, w] and sum them in the wide type that ``unpack`` returns."""
        if self.size == 1:
            return Pending(unpack(whole))
        whole = whole.contiguous()
        traffic.record("reduce_scatter", whole, self.size)
        return self._sum_of_parts(whole, unpack)

    def _sum_of_parts(self, whole: Tensor, unpack: Callable[[Tensor], Tensor] | None) -> Pending:
        received = torch.empty_like(whole)
        work = distributed.all_to_all_single(
            received, whole, group=self.process_group, async_op=True
        )

        def add_up(parts: Tensor) -> Tensor:
            wide = unpack(parts) if unpack is not None else parts
            return wide.view(self.size, -1, *wide.shape[1:]).sum(0)

        return Pending(received, work, add_up, kept=[whole])

    def all_reduce(self, values: Tensor, operation: str = "sum") -> Pending:
        """Sum a tensor (or take its ``max``) over the processes, in place."""
        if self.size == 1:
            return Pending(values)
        values = values.contiguous()
        traffic.record("all_reduce", values, self.size)
        chosen = distributed.ReduceOp.MAX if operation == "max" else distributed.ReduceOp.SUM
        work = distributed.all_reduce(values, op=chosen, group=self.process_group, async_op=True)
        return Pending(values, work)

    def all_to_all(
        self, rows: Tensor, send: Sequence[int] | None = None, receive: Sequence[int] | None = None
    ) -> Pending:
        """Send the k-th part of the rows to process k; the parts received are in that order.

        Parameters
        ----------
        rows : [r, ...]
        send, receive
            Number of rows sent to and received from each process; equal parts by default.
        """
        if self.size == 1:
            return Pending(rows)
        rows = rows.contiguous()
        send = list(send) if send is not None else [rows.shape[0] // self.size] * self.size
        receive = list(receive) if receive is not None else list(send)
        width = rows[:1].numel() if rows.shape[0] else 0
        traffic.record("all_to_all", rows, self.size, parts=send[self.index] * width)
        received = rows.new_empty((sum(receive), *rows.shape[1:]))
        work = distributed.all_to_all_single(
            received, rows, receive, send, group=self.process_group, async_op=True
        )
        return Pending(received, work, kept=[rows])

    def gather(self, part: Tensor, dim: int, each: Sequence[int]) -> Pending:
        """Concatenate parts of ``each`` length, longest first, along an axis."""
        front, longest = part.movedim(dim, 0), each[0]
        if longest > front.shape[0]:  # equal parts are what both backends gather
            front = F.pad(front, [0, 0] * (front.ndim - 1) + [0, longest - front.shape[0]])

        def cut(whole: Tensor) -> Tensor:
            if each[-1] < longest:
                parts = zip(whole.split(longest), each, strict=True)
                whole = torch.cat([one[:length] for one, length in parts])
            return whole.movedim(0, dim)

        return self.all_gather(front).then(cut)

    def trade(
        self,
        parts: Sequence[Tensor],
        places: Sequence[Tensor],
        result: Tensor,
        most: int,  # noqa: ARG002
    ) -> Pending:
        """Send the k-th part to process k; write what each sends to its place in the result.

        Parameters
        ----------
        parts, places : of any strides
        most : largest number of bytes between any two processes, the same on all
        """
        own = self.index
        others = [part for k, part in enumerate(parts) if k != own]
        words = [part.contiguous().flatten() for part in in_words(*others)]
        flat = (words[0] if len(words) == 1 else torch.cat(words)).view(result.dtype)
        send, receive = (
            [0 if k == own else x.numel() for k, x in enumerate(each)] for each in (parts, places)
        )

        def lay_out(found: Tensor) -> Tensor:
            for k, (place, block) in enumerate(zip(places, found.split(receive), strict=True)):
                copy(place, parts[own] if k == own else block.view(place.shape))
            return result

        return self.all_to_all(flat, send, receive).then(lay_out)

    def pass_on(
        self,
        x: Tensor,
        received: Tensor,
        most: int,  # noqa: ARG002
    ) -> Pending:
        """Send a tensor to the process before this one; write what that after sends.

        ``most``: largest number of bytes that any process passes on.
        """
        if self.size == 1:
            return Pending(x)
        x, send, receive = x.contiguous(), [0] * self.size, [0] * self.size
        send[self.index - 1] = x.numel()
        receive[(self.index + 1) % self.size] = received.numel()
        traffic.record("pass_on", x, self.size)
        work = distributed.all_to_all_single(
            received.view(-1), x.view(-1), receive, send, group=self.process_group, async_op=True
        )
        return Pending(received, work, kept=[x])

    def exchange(self, rows: Tensor, peer: int) -> Pending:
        """Swap equally many rows with one process of the group; with itself nothing is sent."""
        counts = [rows.shape[0] if k == peer else 0 for k in range(self.size)]
        return self.all_to_all(rows, counts, counts)


def in_words(*tensors: Tensor) -> list[Tensor]:
    """View channels as words of 8 bytes where possible: strided copies cost the same for each."""

    def fits(x: Tensor) -> bool:
        counts = (x.shape[-1], x.storage_offset(), *x.stride()[:-1])
        return x.stride(-1) == 1 and not any(n * x.element_size() % 8 for n in counts)

    return [x.view(torch.int64) for x in tensors] if all(map(fits, tensors)) else [*tensors]


def copy(place: Tensor, given: Tensor) -> None:
    """Copy between any strides."""
    place, given = in_words(place, given)
    place.copy_(given)


class Silent(Group):
    """The first of several processes without the others; zeros replace what they would send.

    For memory plans and timings of a process's own work.
    """

    def __init__(self, size: int) -> None:
        super().__init__(range(size), 0)

    def all_gather(self, part: Tensor) -> Pending:
        """Return zeros for the parts of all processes."""
        traffic.record("all_gather", part, self.size)
        return Pending(part.new_zeros((self.size * part.shape[0], *part.shape[1:])))

    def all_to_all(
        self, rows: Tensor, send: Sequence[int] | None = None, receive: Sequence[int] | None = None
    ) -> Pending:
        """Return zeros for the received rows; rows to send are still made contiguous."""
        rows = rows.contiguous()
        send = list(send) if send is not None else [len(rows) // self.size] * self.size
        traffic.record("all_to_all", rows, self.size, parts=send[0] * rows[:1].numel())
        return Pending(rows.new_zeros((sum(receive or send), *rows.shape[1:])))

    def pass_on(
        self,
        x: Tensor,
        received: Tensor,
        most: int,  # noqa: ARG002
    ) -> Pending:
        """Write zeros for what the next would send."""
        traffic.record("pass_on", x, self.size)
        x.contiguous()
        return Pending(received.zero_())


class _Known:
    """Groups by ranks; each holds device buffers, so graphs of one shape share a group."""

    world: ClassVar[Any] = None
    made: ClassVar[dict[tuple[int, ...], Any]] = {}

    @classmethod
    def get(cls, ranks: tuple[int, ...]) -> Any:
        """Return the group of these ranks in the current run; ranks outside get a token."""
        if cls.world is not distributed.group.WORLD:
            cls.world, cls.made = distributed.group.WORLD, {}
        if ranks not in cls.made:
            cls.made[ranks] = distributed.new_group(list(ranks))
        return cls.made[ranks]


def open_groups(partition: Sequence[Sequence[int]], mesh: Mesh, *, apart: bool = False) -> Group:
    """Create a group for each set of ranks and return this process's.

    ``apart``: even a group of all ranks gets its own communicator, so that gradient sums need not
    wait for its exchanges.

    All processes must call it in the same order with the same sets, each rank in exactly one.
    """
    mine: Group | None = None
    for ranks in partition:
        known = len(ranks) == 1 or (len(ranks) == mesh.world and not apart)
        group = None if known else _Known.get(tuple(ranks))
        if mesh.rank in ranks:
            mine = Group(ranks, mesh.rank, group)
    if mine is None:
        raise ValueError(f"partition: rank {mesh.rank} is in no group")
    return mine
