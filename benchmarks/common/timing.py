"""How benchmarks take times, peak memory and the rates of a GPU."""

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

MIB = 2**20
CYCLES = 10**6
"""For which a GPU is kept busy while the host launches, and to read its clock: half a ms."""
Call = Callable[[], Any]


def median_ms(
    call: Call,
    repeats: int = 15,
    *,
    warm_up: int = 2,
    flush: bool = False,
    before: Call | None = None,
    together: int = 1,
) -> float:
    """Median time of a call by CUDA events, in ms.

    Parameters
    ----------
    call : what is timed
    repeats, warm_up : number of calls that count, and of those before them
    flush : overwrite the L2 cache before each call
    before : called before each call, outside the time
    together : number of calls that are launched together, as in training: the host may run ahead
    """
    cache = torch.empty(2**27 if flush else 0, dtype=torch.uint8, device="cuda")
    times = []
    for _ in range(warm_up + repeats):
        if before is not None:
            before()
            torch.cuda.synchronize()
        cache.zero_() if flush else None
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(together):
            call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / together)
    return statistics.median(times[warm_up:])


def in_turn(
    calls: Sequence[Call], repeats: int = 20, *, warm_up: int = 2, flush: bool = False
) -> list[tuple[float, float]]:
    """Median times of several calls that take turns, in ms, and the clock of the SMs after each.

    Every other round has the reverse order: whatever a call leaves behind, heat or a lower clock,
    meets all of them. The GPU is busy for half a ms while the host launches, which does not count.
    Some µs before a kernel starts count as its cycles: 1.98 GHz reads as 1.96.

    Parameters
    ----------
    calls, repeats, warm_up : what is timed, and rounds that count, and those before them
    flush
        Overwrite the L2 cache before each call. Otherwise each also runs once, untimed, right
        before: what the cache holds is its own, whoever had the turn before.

    Returns
    -------
    list
        For each call ms and GHz.
    """
    cache = torch.empty(2**27, dtype=torch.uint8, device="cuda") if flush else None
    times: list[list[float]] = [[] for _ in calls]
    clocks: list[list[float]] = [[] for _ in calls]
    for number in range(warm_up + repeats):
        places = range(len(calls))
        for place in places if number % 2 == 0 else reversed(places):
            start, end, counted = (torch.cuda.Event(enable_timing=True) for _ in range(3))
            spin()
            calls[place]() if cache is None else cache.zero_()
            start.record()
            calls[place]()
            end.record()
            spin()
            counted.record()
            counted.synchronize()
            times[place].append(start.elapsed_time(end))
            clocks[place].append(CYCLES / end.elapsed_time(counted) / 1e6)
    return [
        (statistics.median(ms[warm_up:]), statistics.median(clock[warm_up:]))
        for ms, clock in zip(times, clocks, strict=True)
    ]


def spin() -> None:
    """Keep the GPU busy for `CYCLES`."""
    torch.cuda._sleep(CYCLES)  # noqa: SLF001  torch has no other kernel that counts cycles


def host_ms(call: Call, before: Call) -> float:
    """Median time until a call returns, the device idle before, in ms."""
    times = []
    for _ in range(10):
        before()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times)


class Replay(NamedTuple):
    """A captured call, and what holds the tensors that its graph reads."""

    run: Call
    holder: Any

    def __call__(self) -> Any:
        """Replay the graph."""
        return self.run()


def captured(call: Call, rehearsals: int = 3) -> Replay:
    """Capture a call as a CUDA graph and return its replay, after rehearsals in a side stream."""
    if rehearsals:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(rehearsals):
                call()
        torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = call()

    def replay() -> Any:
        graph.replay()
        return kept

    return Replay(replay, call)


def peak_mib(call: Call) -> float:
    """Peak memory of a call above what was allocated before, in MiB."""
    call()
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / MIB


def memory_with_graphs(allocated: int) -> int:
    """Return the bytes in use, as given, with those held for captured graphs."""
    held = sum(
        segment["total_size"] - segment["allocated_size"]
        for segment in torch.cuda.memory_snapshot()
        if segment["segment_pool_id"] != (0, 0)
    )
    return int(allocated + held)


def copy_rate() -> float:
    """Bytes per second of a large copy, read and written."""
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / median_ms(lambda: target.copy_(source), together=10) * 1e3


def matmul_rate(dtype: torch.dtype, repeats: int = 15) -> float:
    """Operations per second of an 8192^3 matmul."""
    matrix = torch.randn(8192, 8192, device="cuda", dtype=dtype)
    return 2 * 8192**3 / median_ms(lambda: matrix @ matrix, repeats) * 1e3
