"""Counts launches and idle time of a GPU in a profiler trace."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch", "cudaMemcpyAsync",
            "cudaMemsetAsync", "cudaLaunchKernelExC", "cuLaunchKernelEx")  # fmt: skip

KernelRow = dict[str, str | float]


def trace(step: Callable[[], Any], steps: int = 10) -> tuple[dict[str, float], list[KernelRow]]:
    """Profile some steps. See `summary` and `by_kernel`."""
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    return summary(profiler, steps), by_kernel(profiler, steps)


def summary(profiler: profile, steps: int) -> dict[str, float]:
    """Summarise a trace of some steps.

    Returns
    -------
    dict
        ``launches`` by the host, ``kernels`` (and copies) on the device, ``busy ms`` per step, and
        ``idle %``: 1 - union of the device's intervals over the wall time between the first begin
        and the last end.
    """
    events = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    on_device = torch.autograd.DeviceType.CUDA
    intervals = sorted(
        (event.start_ns(), event.start_ns() + event.duration_ns())
        for event in events
        if event.device_type() == on_device
        and event.duration_ns() > 0
        and not event.is_user_annotation()
    )
    launches = sum(event.name().startswith(LAUNCHES) for event in events)
    busy, end = 0, intervals[0][0]
    for begin, stop in intervals:
        busy += max(stop - max(begin, end), 0)
        end = max(end, stop)
    wall = end - intervals[0][0]
    return {
        "launches": launches / steps,
        "kernels": len(intervals) / steps,
        "busy ms": round(busy / steps / 1e6, 3),
        "idle %": round(100 * (1 - busy / wall), 1),
    }


def by_kernel(profiler: profile, steps: int) -> list[KernelRow]:
    """List ms and launches per step of every kernel and copy, the longest first."""
    spent: Counter[str] = Counter()
    count: Counter[str] = Counter()
    for event in profiler.profiler.kineto_results.events():  # type: ignore[union-attr]
        on_device = event.device_type() == torch.autograd.DeviceType.CUDA
        if on_device and not event.is_user_annotation():
            spent[event.name()] += event.duration_ns()
            count[event.name()] += 1
    return [
        {"kernel": name[:160], "ms": round(time / steps / 1e6, 4), "launches": count[name] / steps}
        for name, time in spent.most_common()
    ]
