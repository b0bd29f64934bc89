"""Gradients of a captured step: added bucket by bucket, each summed over ranks once complete.

The sums are launched beside a graph, not captured in it: ranks may replay graphs of different
shapes, or have none yet, and still call the same sums in the same order. A graph marks the end of
each bucket with an event, for which a stream of sums waits while the backward pass goes on.
"""

from contextlib import ExitStack, nullcontext
from functools import partial

import torch
from torch import Tensor, distributed

from bevatron.parallel.collectives import broadcast_json
from bevatron.parallel.data_parallel import buckets
from bevatron.parallel.mesh import Mesh
from bevatron.train.optim import FusedAdamEMA

WAITING_BYTES = 64 * 2**20
"""Most that gradients take which wait for the rest of their buckets."""


class GradientBuckets:
    """The flat gradient of an optimiser, filled by captured work and summed over ranks.

    Parameters
    ----------
    update : whose gradient
    mesh : all ranks do the same
    """

    def __init__(self, update: FusedAdamEMA, mesh: Mesh) -> None:
        self._parameters, self._gradients, self._mesh = update.parameters, update.gradients, mesh
        counted = iter(range(len(self._parameters)))
        self._buckets = [[next(counted) for _ in bucket] for bucket in buckets(self._parameters)]
        self._place = {i: place for place, bucket in enumerate(self._buckets) for i in bucket}
        self._pieces = [self._piece(update.gradient, bucket) for bucket in self._buckets]
        self._noted = [*range(len(self._buckets))][::-1]
        self._order: list[int] = []
        self._stream: torch.cuda.Stream | None = None
        self._ends: list[torch.cuda.Event] = []
        if mesh.world > 1 and mesh.device.type == "cuda":
            self._stream = torch.cuda.Stream(mesh.device)
            self._ends = [torch.cuda.Event(external=True) for _ in self._buckets]

    def _piece(self, flat: Tensor, bucket: list[int]) -> Tensor:
        first, last = self._gradients[bucket[0]], self._gradients[bucket[-1]]
        return flat[first.storage_offset() : last.storage_offset() + last.numel()]

    def differentiate(self, loss: Tensor) -> None:
        """Add the gradients of a loss, and mark the end of each bucket.

        Gradients are added and freed with their bucket, or when those of all that are incomplete
        take `WAITING_BYTES`: some layers, such as the biases of a stack that are computed in front
        of it, come last and keep every bucket of the stack incomplete.
        """
        missing = [set(bucket) for bucket in self._buckets]
        found: dict[int, Tensor] = {}
        self._noted = []

        def add(some: list[int]) -> None:
            sums = [(self._gradients[i], found.pop(i)) for i in some if i in found]
            # Apart: where one pair differs in strides, torch launches a kernel for each of all.
            alike = [own.stride() == other.stride() for own, other in sums]
            for which in {*alike}:
                chosen = [one for one, same in zip(sums, alike, strict=True) if same == which]
                torch._foreach_add_(*map(list, zip(*chosen, strict=True)))

        def end(place: int) -> None:
            add(self._buckets[place])
            if self._ends:
                self._ends[place].record()
            self._noted.append(place)

        def take(i: int, gradient: Tensor) -> Tensor:
            place = self._place[i]
            found[i] = gradient
            missing[place].discard(i)
            if not missing[place]:
                end(place)
            elif sum(waiting.nbytes for waiting in found.values()) >= WAITING_BYTES:
                add([*found])
            return self._gradients[i]  # of the same shape, so that the other can be freed

        with ExitStack() as hooks:
            for i, parameter in enumerate(self._parameters):
                hooks.callback(parameter.register_hook(partial(take, i)).remove)
            torch.autograd.grad(loss, self._parameters, allow_unused=True)
        with torch.no_grad():
            for place in range(len(self._buckets)):
                if missing[place]:  # some parameter took no part
                    end(place)

    def sum(self) -> None:
        """Sum over ranks what was launched last; all later work on the device waits for it.

        Buckets are summed in the order in which rank 0 completed them in its first step.
        """
        if self._mesh.world == 1:
            return
        self._order = self._order or broadcast_json(self._noted, self._mesh)
        running = []
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            for place in self._order:
                if self._stream is not None:
                    self._stream.wait_event(self._ends[place])
                running.append(
                    distributed.all_reduce(
                        self._pieces[place], group=self._mesh.group, async_op=True
                    )
                )
        for work in running:
            work.wait()
