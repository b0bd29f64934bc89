"""Analyses a timeline: how long a device computed, communicated or was idle, and why.

Functions of lists of spans (name, start, duration, stream), whatever their source. Times are
whole nanoseconds. On a GPU a span is a kernel or a copy; on a CPU, where operators call each other,
`innermost` first cuts them so that no two overlap.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

Intervals = list[tuple[int, int]]
"""(begin, end), ascending and disjoint."""

MATRIX, FUSED, MEMORY, COPY = "matrix product", "fused kernel", "memory-bound", "copy"
COMMUNICATION, HOST = "communication", "host"

_BOOKKEEPING = (
    r"^(autograd|torch|c10d)::|^(?!.*::)\w+(Backward\d*|#.*)$|^detach$"
    r"|^aten::(_?unsafe_|_?reshape|view|as_strided|t$|transpose|permute|expand|slice$|select$"
    r"|narrow|to$|unsqueeze|squeeze|split|chunk|unbind|detach|alias|empty|resize|resolve_|movedim"
    r"|swapaxes|unflatten|flatten$|numpy_T|lift_fresh|item$|_local_scalar|is_|result_type|set_)"
)
_COPIES = (
    r"^Mem(cpy|set)|direct_copy|CatArray|FillFunctor"
    r"|^aten::(copy_|_to_copy|clone|contiguous|cat$|stack|fill_|zero_|zeros|ones|pin_)"
)
_PRODUCTS = (
    r"gemm|gemv|cutlass|xmma|cublas|nvjet|splitK|dot_kernel|[a-z]mm_kernel|conv(olution|\d)"
    r"|^triton_tem|^aten::(mm|bmm|addmm|baddbmm|matmul|linear|einsum|dot|mv|addmv|addbmm|tensordot"
    r"|bilinear|_trilinear|_addmm)"
)
_PATTERNS = (
    (HOST, _BOOKKEEPING),
    (COMMUNICATION, r"nccl|^gloo:|all_?reduce|all_?gather|reduce_scatter"),
    # Exchanges through windows (`bevatron.parallel.windows`): barriers, and how they are copied.
    (COMMUNICATION, r"symmetric_memory|PtoP|BitwiseOrFunctor<(short|int|long|unsigned char)>"),
    (COPY, _COPIES),
    (MATRIX, _PRODUCTS),
    (MEMORY, r"::|<|^void |^triton_(poi|red|per)_"),
)
_COMPILED = tuple((name, re.compile(pattern)) for name, pattern in _PATTERNS)


@dataclass(frozen=True, slots=True)
class Span:
    """Something that ran without interruption.

    Attributes
    ----------
    name : name of the kernel or operator
    start, duration : nanoseconds
    stream : stream of the GPU, or the thread
    """

    name: str
    start: int
    duration: int
    stream: int = 0

    @property
    def end(self) -> int:
        """When it was over."""
        return self.start + self.duration


def classify(name: str) -> str:
    """Classify a kernel or operator by its name: one of the classes above.

    A kernel whose name is a plain identifier was written in Triton and counts as fused; what only
    changes metadata, such as ``aten::view`` or an autograd node, is work of the host.

    Examples
    --------
    >>> [classify(n) for n in ("sm90_xmma_gemm_f32f32", "Memcpy HtoD (Pinned -> Device)", "_adam")]
    ['matrix product', 'copy', 'fused kernel']
    >>> [classify(n) for n in ("aten::tanh", "aten::view", "gloo:all_reduce")]
    ['memory-bound', 'host', 'communication']
    """
    for found, pattern in _COMPILED:
        if pattern.search(name):
            return found
    return FUSED


def union(spans: Iterable[Span]) -> Intervals:
    """Merge spans into intervals during which at least one of them ran.

    Examples
    --------
    >>> union([Span("a", 5, 5), Span("b", 0, 3), Span("c", 8, 4, stream=1)])
    [(0, 3), (5, 12)]
    """
    found: Intervals = []
    for start, end in sorted((span.start, span.end) for span in spans if span.duration > 0):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def length(intervals: Intervals) -> int:
    """Add up the lengths of intervals."""
    return sum(end - start for start, end in intervals)


def intersection(first: Intervals, second: Intervals) -> Intervals:
    """Find the intervals that are in both.

    Examples
    --------
    >>> intersection([(0, 4), (6, 9)], [(2, 7)])
    [(2, 4), (6, 7)]
    """
    found: Intervals = []
    i = j = 0
    while i < len(first) and j < len(second):
        start, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if start < end:
            found.append((start, end))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return found


def gaps(intervals: Intervals, window: tuple[int, int]) -> Intervals:
    """Find what of a window no interval covers.

    Examples
    --------
    >>> gaps([(2, 4), (6, 20)], (0, 10))
    [(0, 2), (4, 6)]
    """
    found: Intervals = []
    reached = window[0]
    for start, end in intersection(intervals, [window]):
        if start > reached:
            found.append((reached, start))
        reached = end
    if reached < window[1]:
        found.append((reached, window[1]))
    return found


def clipped(spans: Iterable[Span], window: tuple[int, int]) -> list[Span]:
    """Clip spans to a window."""
    found = []
    for span in spans:
        start, end = max(span.start, window[0]), min(span.end, window[1])
        if start < end or (span.duration == 0 and start == end):
            found.append(replace(span, start=start, duration=end - start))
    return found


def innermost(spans: Iterable[Span]) -> list[Span]:
    """Cut spans that call each other so that at any moment of a stream only the innermost is left.

    Examples
    --------
    >>> [(s.name, s.start, s.end) for s in innermost([Span("linear", 0, 9), Span("mm", 2, 5)])]
    [('linear', 0, 2), ('mm', 2, 7), ('linear', 7, 9)]
    """
    found: list[Span] = []
    ordered = sorted(spans, key=lambda span: (span.stream, span.start, -span.duration))
    for stream, group in groupby(ordered, key=lambda span: span.stream):
        calls: list[Span] = []
        reached = 0

        def emit(name: str, until: int, stream: int = stream) -> None:
            nonlocal reached
            if until > reached:
                found.append(Span(name, reached, until - reached, stream))
                reached = until

        for span in group:
            while calls and calls[-1].end <= span.start:
                over = calls.pop()
                emit(over.name, over.end)
            if calls:
                emit(calls[-1].name, span.start)
            calls.append(span)
            reached = max(reached, span.start)
        while calls:
            over = calls.pop()
            emit(over.name, over.end)
    return found


@dataclass(frozen=True)
class Occupation:
    """Use of a device in a time window; the four parts add up to the window.

    Attributes
    ----------
    computing, communicating : only one of both
    overlapped : both at once
    idle : neither: the window less the union of all spans
    """

    computing: int
    communicating: int
    overlapped: int
    idle: int

    @property
    def window(self) -> int:
        """All of it."""
        return self.computing + self.communicating + self.overlapped + self.idle

    def shares(self) -> dict[str, float]:
        """Return the parts of the window by name."""
        whole = max(self.window, 1)
        names = ("computing", "communicating", "overlapped", "idle")
        return {name: getattr(self, name) / whole for name in names}


def occupation(spans: Sequence[Span], window: tuple[int, int]) -> Occupation:
    """Divide a window into computing, communicating, both and idle (Firoz et al. 2025, Figure 13).

    Examples
    --------
    >>> kernels = [Span("gemm", 0, 6), Span("ncclDevKernel_AllReduce", 4, 4, stream=1)]
    >>> occupation(kernels, (0, 10))
    Occupation(computing=4, communicating=2, overlapped=2, idle=2)
    """
    spans = clipped(spans, window)
    sends = [classify(span.name) == COMMUNICATION for span in spans]
    computing = union(span for span, sent in zip(spans, sends, strict=True) if not sent)
    communicating = union(span for span, sent in zip(spans, sends, strict=True) if sent)
    both = length(intersection(computing, communicating))
    alone = length(computing) - both, length(communicating) - both
    return Occupation(*alone, both, window[1] - window[0] - sum(alone) - both)


@dataclass(frozen=True)
class Total:
    """Totals of spans of one kind.

    Attributes
    ----------
    time : nanoseconds
    count : how often it was launched or called
    """

    time: int
    count: int


def by_name(spans: Iterable[Span], calls: Iterable[Span] | None = None) -> dict[str, Total]:
    """Add up times by name, longest first.

    Parameters
    ----------
    spans : whose times count
    calls : what is counted, if ``spans`` are pieces of it
    """
    spans = list(spans)
    times: dict[str, int] = {}
    counts: dict[str, int] = {}
    for span in spans:
        times[span.name] = times.get(span.name, 0) + span.duration
    for span in spans if calls is None else calls:
        counts[span.name] = counts.get(span.name, 0) + 1
    ordered = sorted(times, key=lambda name: (-times[name], name))
    return {name: Total(times[name], counts.get(name, 0)) for name in ordered}


def by_class(totals: Mapping[str, Total]) -> dict[str, Total]:
    """Add up the totals of names by class, longest first."""
    found: dict[str, Total] = {}
    for name, total in totals.items():
        before = found.get(classify(name), Total(0, 0))
        found[classify(name)] = Total(before.time + total.time, before.count + total.count)
    return dict(sorted(found.items(), key=lambda item: -item[1].time))


def waiting_shares(durations: Sequence[Sequence[int]]) -> list[float]:
    """Find for each rank the share of its time in collectives spent waiting for other ranks.

    A collective moves data once the last rank has joined it: the time of that rank, the shortest of
    all, is communication, the rest of the others' time is waiting.

    Parameters
    ----------
    durations : by rank those of its collectives, in the same order

    Examples
    --------
    >>> waiting_shares([[10, 4], [2, 4]])
    [0.5714285714285714, 0.0]
    """
    if len({len(own) for own in durations}) > 1:
        durations = [[sum(own)] for own in durations]
    shortest = [min(each) for each in zip(*durations, strict=True)]
    return [
        sum(took - least for took, least in zip(own, shortest, strict=True)) / max(sum(own), 1)
        for own in durations
    ]


@dataclass(frozen=True)
class Gains:
    """Nanoseconds of a step that would be gained if something cost nothing.

    Attributes
    ----------
    host : launching, Python and everything else that leaves the device idle
    data : batches that are not ready
    ranks : waiting for slower ranks
    communication : moving data between ranks while the device computes nothing
    """

    host: float
    data: float
    ranks: float
    communication: float


def gains(
    spans: Sequence[Span],
    window: tuple[int, int],
    steps: int,
    *,
    step: float | None = None,
    data: Sequence[Span] = (),
    ranks: Sequence[Span] = (),
    waiting_share: float = 0.0,
) -> Gains:
    """Find what the step time would lose without host work, waiting and communication.

    Parameters
    ----------
    spans : spans of the device
    window, steps : the steps that were traced
    step : nanoseconds of a step that is not traced; tracing slows the host, not the device
    data, ranks : when the host waited for a batch, and for other ranks
    waiting_share : see `waiting_shares`

    Examples
    --------
    >>> kernels = [Span("gemm", 0, 60), Span("nccl", 60, 10)]
    >>> gains(kernels, (0, 100), 1, data=[Span("wait", 50, 30)], waiting_share=0.4)
    Gains(host=20.0, data=10.0, ranks=4.0, communication=6.0)
    """
    found = occupation(spans, window)
    busy = found.window - found.idle
    idle = found.idle / steps if step is None else max(step - busy / steps, 0.0)
    still = gaps(union(spans), window)
    for_data = intersection(still, union(data))
    for_ranks = length(intersection(still, union(ranks)))
    for_ranks -= length(intersection(for_data, union(ranks)))
    waited = min(length(for_data) / steps, idle)
    stood = min(for_ranks / steps, idle - waited)
    exposed = found.communicating / steps
    return Gains(
        host=idle - waited - stood,
        data=waited,
        ranks=stood + waiting_share * exposed,
        communication=(1 - waiting_share) * exposed,
    )
