"""The events of torch's profiler, sorted by what they say about a step."""

from dataclasses import dataclass, field
from typing import Any

from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import profile

from bevatron.train.profiling.timeline import Span

WINDOW, DATA = "bevatron: profiled steps", "bevatron: waiting for a batch"
"""Names of the trainer's profiler ranges: the steps that count, and waiting for data."""

_LAUNCHES = ("cudaLaunch", "cuLaunch", "cudaGraphLaunch", "cudaMemcpy", "cudaMemset")


@dataclass
class Trace:
    """Times in nanoseconds.

    Attributes
    ----------
    window : beginning and end of the steps that count
    device, operators : work of the device by stream, and operators of the host by thread
    data, ranks : waiting for batches, and work of gloo, through which ranks wait for each other
    launches : when the host launched work
    """

    window: tuple[int, int] = (0, 0)
    device: list[Span] = field(default_factory=list)
    operators: list[Span] = field(default_factory=list)
    data: list[Span] = field(default_factory=list)
    ranks: list[Span] = field(default_factory=list)
    launches: list[int] = field(default_factory=list)


def read_trace(profiler: profile) -> Trace:
    """Sort a profiler's events; its own tables take minutes for as many as these are."""
    found = Trace()
    results: Any = profiler.profiler.kineto_results  # type: ignore[union-attr]
    for event in results.events():
        name, start = event.name(), event.start_ns()
        if event.device_type() != DeviceType.CPU:
            if not event.is_user_annotation():
                stream = event.device_resource_id()
                found.device.append(Span(name, start, event.duration_ns(), stream))
            continue
        span = Span(name, start, event.duration_ns(), event.start_thread_id())
        if name == WINDOW:
            found.window = (span.start, span.end)
        elif name == DATA:
            found.data.append(span)
        elif name.startswith("gloo:"):
            found.ranks.append(span)
            found.operators.append(Span(name, start, span.duration, -1))
        elif name.startswith(_LAUNCHES):
            found.launches.append(start)
        elif "::" in name and not event.is_user_annotation():
            found.operators.append(span)
    return found
