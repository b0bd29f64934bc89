"""Launches, kernels and idle time of a GPU in a profiler trace."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch", "cudaMemcpyAsync",
            "cudaMemsetAsync", "cudaLaunchKernelExC", "cuLaunchKernelEx")  # fmt: skip
SHORT_GAP = 5_000
"""Nanoseconds: longest gap between two kernels of one CUDA graph."""

KernelRow = dict[str, str | float]


def profiled(step: Callable[[], Any], steps: int, *, host: bool = False) -> profile:
    """Profile some steps on the device, and on the host if asked."""
    activities = [ProfilerActivity.CUDA, *([ProfilerActivity.CPU] if host else [])]
    with profile(activities=activities) as profiler:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    return profiler


def trace(step: Callable[[], Any], steps: int = 10) -> tuple[dict[str, float], list[KernelRow]]:
    """Profile some steps. See `summary` and `by_kernel`."""
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    profiler = profiled(step, steps, host=True)
    return summary(profiler, steps), by_kernel(profiler, steps)


def device_events(profiler: profile) -> list[Any]:
    """Return the kernels and copies of a trace."""
    events = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    on_device = torch.autograd.DeviceType.CUDA
    return [e for e in events if e.device_type() == on_device and not e.is_user_annotation()]


def intervals(profiler: profile) -> list[tuple[int, int]]:
    """Return begin and end in nanoseconds of what runs on the device, sorted."""
    events = [event for event in device_events(profiler) if event.duration_ns() > 0]
    return sorted((e.start_ns(), e.start_ns() + e.duration_ns()) for e in events)


def union(spans: list[tuple[int, int]]) -> int:
    """Return the length of the union of sorted intervals."""
    covered, end = 0, spans[0][0]
    for begin, stop in spans:
        covered += max(stop - max(begin, end), 0)
        end = max(end, stop)
    return covered


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
    spans = intervals(profiler)
    busy, wall = union(spans), max(end for _, end in spans) - spans[0][0]
    return {
        "launches": sum(event.name().startswith(LAUNCHES) for event in events) / steps,
        "kernels": len(spans) / steps,
        "busy ms": round(busy / steps / 1e6, 3),
        "idle %": round(100 * (1 - busy / wall), 1),
    }


def gaps(profiler: profile, steps: int) -> dict[str, float]:
    """Add up the time between two kernels, ms per step: short gaps, and longer ones."""
    spans = intervals(profiler)
    ends = np.maximum.accumulate([end for _, end in spans])
    between = np.maximum([begin for begin, _ in spans[1:]] - ends[:-1], 0)
    short = between <= SHORT_GAP
    return {
        "short gaps ms": round(float(between[short].sum()) / steps / 1e6, 3),
        "longer gaps ms": round(float(between[~short].sum()) / steps / 1e6, 3),
        "longer gaps": round(float((~short).sum()) / steps, 1),
    }


def by_kernel(profiler: profile, steps: int) -> list[KernelRow]:
    """List ms and launches per step of every kernel and copy, the longest first."""
    spent: Counter[str] = Counter()
    count: Counter[str] = Counter()
    for event in device_events(profiler):
        spent[event.name()] += event.duration_ns()
        count[event.name()] += 1
    return [
        {"kernel": name[:160], "ms": round(time / steps / 1e6, 4), "launches": count[name] / steps}
        for name, time in spent.most_common()
    ]
