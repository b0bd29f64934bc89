"""Chooses the partitioning scheme: words sent, messages and memory of each scheme on each grid.

Words are those that one rank sends per layer, forward and backward, with ring algorithms: n
vertices, k = heads x channels, h heads, p = Px Py ranks. `traffic` counts the actual ones.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from bevatron.errors import ConfigError
from bevatron.parallel.graph_partition.grid import Grid, grids

SCHEMES = ("two_dimensional", "feature_parallel", "rows", "one_and_half_d")
ATTENDS = {
    "two_dimensional": ("gat", "dot"),
    "feature_parallel": ("gat",),
    "rows": ("gat", "dot", "rows"),
    "one_and_half_d": ("gat", "dot"),
}
"""Layers that each scheme supports: GAT's attention, dot products, any formula on whole rows."""
CHOSEN_FROM = ("two_dimensional", "feature_parallel", "rows")
"""Schemes that ``auto`` considers; the paper's scheme serves for comparison."""


@dataclass(frozen=True)
class Workload:
    """Workload of a layer.

    Attributes
    ----------
    vertices, entries : sizes of the graph
    heads, channels : sizes of the features
    attention
        gat (scores of a row and of a column), dot (dot products) or rows (another formula).
    softmax : for dot: whether rows are normalised
    layers : number of layers whose saved tensors must fit
    word_bytes : 4 for float32
    """

    vertices: int
    entries: int
    heads: int = 1
    channels: int = 64
    attention: str = "gat"
    softmax: bool = False
    layers: int = 3
    word_bytes: int = 4

    @property
    def width(self) -> int:
        """Features of a vertex."""
        return self.heads * self.channels


@dataclass(frozen=True)
class Machine:
    """The rates of the machine.

    Attributes
    ----------
    bandwidth : bytes per second that one rank sends while all do
    latency : seconds before a collective moves its first byte
    memory : bytes of one device; None = unlimited
    fetching : bytes per second at which kernels gather features by entry, caches included
    copying : bytes per second at which features are copied into the order in which they are sent
    hiding
        Fraction of the overlapped communication that costs no time; the rest slows both down.
    launching
        Seconds of overhead per extra chunk of channels apart from its messages, forward or
        backward: some twenty more kernel launches.

    Rates are those of H200s of one host: 375 million entries, 128 channels, 2 and 4 GPUs.
    """

    bandwidth: float = 230e9
    latency: float = 2e-5
    memory: float | None = None
    fetching: float = 6e12
    copying: float = 3e12
    hiding: float = 0.1
    launching: float = 1.5e-4


@dataclass(frozen=True)
class Choice:
    """One scheme on one grid, and its cost per rank and layer, forward and backward."""

    scheme: str
    grid: Grid
    words: float
    messages: int
    seconds: float
    memory: float
    fits: bool

    def line(self, word_bytes: int) -> str:
        """Describe the choice."""
        fits = "" if self.fits else ", does not fit"
        return (
            f"{self.scheme} {self.grid.px}x{self.grid.py}: {self.words * word_bytes / 1e6:.3g} MB "
            f"in {self.messages} messages, {self.seconds * 1e3:.3g} ms, "
            f"{self.memory / 1e9:.3g} GB{fits}"
        )


@dataclass(frozen=True)
class Plan:
    """The cheapest choice and the others.

    Attributes
    ----------
    chosen : the choice
    considered : all candidates, cheapest first
    workload : the workload planned for
    """

    chosen: Choice
    considered: tuple[Choice, ...]
    workload: Workload

    def explain(self) -> list[str]:
        """Describe the choice and the cost of the alternatives, one line each."""
        size = self.workload.word_bytes
        lines = [f"per rank and layer, forward and backward: {self.chosen.line(size)}"]
        return lines + [f"  instead of {c.line(size)}" for c in self.considered if c != self.chosen]


def check(scheme: str, attention: str) -> None:
    """Raise ConfigError if a scheme does not support the attention, naming those that do."""
    if scheme not in ATTENDS:
        raise ConfigError(
            f"graph partition: scheme '{scheme}' is not known; choose one of {', '.join(SCHEMES)}"
        )
    if attention not in ATTENDS[scheme]:
        able = ", ".join(name for name, kinds in ATTENDS.items() if attention in kinds)
        what = {"dot": "attend by dot products", "rows": "evaluate formulas of any form"}
        raise ConfigError(
            f"graph partition: scheme '{scheme}' cannot {what.get(attention, attention)}; choose "
            f"one of {able}"
        )


def words_per_layer(scheme: str, grid: Grid, work: Workload) -> float:
    """Words that one rank sends for a layer, forward and backward.

    Raises ConfigError for a scheme that is unknown or does not support the workload.

    Parameters
    ----------
    scheme : one of `SCHEMES`
    grid : px x Py; feature_parallel and rows use its size alone, one_and_half_d needs Px = Py

    Examples
    --------
    >>> work = Workload(vertices=2**20, entries=2**25, heads=1, channels=128)
    >>> round(words_per_layer("feature_parallel", Grid(8, 1), work) / (2**20 * 128), 2)
    0.46
    """
    check(scheme, work.attention)
    n, k, h, p = work.vertices, work.width, work.heads, grid.size
    dot = work.attention == "dot"
    if scheme == "two_dimensional":
        column = n / grid.py * (1 - 1 / grid.px)
        row = n / grid.px * (1 - 1 / grid.py)
        if dot:
            return column * 2 * k + row * (4 * k + (5 * h if work.softmax else 0))
        # Forward l, two for the largest logit, the total; backward delta, L and u.
        return column * 2 * (k + h) + row * (2 * k + 7 * h)
    if scheme == "feature_parallel":
        scores = 4 * n * h * (1 - 1 / p)
        return 4 * n * k / p * (1 - 1 / p) + (scores / p if h % p == 0 else scores)
    if scheme == "rows":
        return 2 * halo(work, p) * (k if dot else k + h)
    return _one_and_half_d(grid, work)


def _one_and_half_d(grid: Grid, work: Workload) -> float:
    if grid.px != grid.py:
        raise ConfigError(
            f"graph partition: one_and_half_d needs a square number of ranks, found {grid.size}"
        )
    s, k, h = grid.px, work.width, work.heads
    tile, reduced = work.vertices / s, 2 * work.vertices / s * (1 - 1 / s)
    if s == 1:
        return 0.0
    if work.attention == "dot":
        return 2 * tile * k + 3 * reduced * k + (2 * reduced * h if work.softmax else 0)
    return 2 * tile * (k + h) + reduced * (2 * k + 4 * h)


def halo(work: Workload, ranks: int) -> float:
    """Remote vertices that a rank's rows refer to, if columns were drawn uniformly.

    Examples
    --------
    >>> halo(Workload(vertices=1000, entries=10**6), 4)
    750.0
    """
    draws = work.entries / ranks / max(work.vertices, 1)
    return work.vertices * (1 - 1 / ranks) * -math.expm1(-draws)


def memory_per_rank(scheme: str, grid: Grid, work: Workload) -> float:
    """Bytes that one rank holds at the peak of training: structure, saved tiles, one layer's rest.

    CSR and CSC take eight bytes for each entry and sixteen for each row and column.
    """
    n, k, p, size = work.vertices, work.width, grid.size, work.word_bytes
    own = n / p * k * size * (2 * work.layers + 4)
    if scheme == "two_dimensional":
        structure = 8 * work.entries / p + 24 * (n / grid.px + n / grid.py)
        saved = size * k * (n / grid.px + n / grid.py)
        return structure + own + saved * (work.layers + 1)
    if scheme == "feature_parallel":
        return 8 * work.entries + 48 * n + own + size * k * n / p * 2 * (work.layers + 1)
    if scheme == "rows":
        structure = 8 * work.entries / p + 24 * n
        return structure + own + size * k * halo(work, p) * (work.layers + 1)
    tiles = size * k * n / grid.px
    return 8 * work.entries / p + 48 * n / grid.px + tiles * (5 * work.layers + 6)


MESSAGES = {"two_dimensional": 11, "feature_parallel": 6, "rows": 2, "one_and_half_d": 8}
"""Collectives per GAT layer, forward and backward."""


REORDERED = {"feature_parallel", "rows"}
"""Schemes whose features are copied before they are sent: read and written once more."""


SHARE = 32
"""Channels per program of GAT's kernels: every program reads structure and scores again."""


def overlapped_seconds(grid: Grid, work: Workload, chunks: int, machine: Machine) -> float:
    """Seconds per GAT layer on a grid, forward and backward, with channels sent in chunks.

    The first chunk arrives and the last one leaves without overlap; of the rest the machine hides a
    fraction. Every chunk has messages and kernels of its own.
    """
    n, k, size = work.vertices, work.width, work.word_bytes
    features = n * k * size * ((1 - 1 / grid.px) / grid.py + (1 - 1 / grid.py) / grid.px)
    travel = features / machine.bandwidth
    shares = chunks * math.ceil(k / chunks / SHARE)
    entry = size * k + 8 * shares
    seconds = 0.0
    for words in (0, 12):  # backward passes fetch three more words of every entry
        compute = work.entries / grid.size * (entry + words * shares) / machine.fetching
        seconds += travel + compute
        seconds -= machine.hiding * min(compute, travel * (1 - 1 / chunks))
        seconds += chunks * (machine.launching + 2 * machine.latency)
    return seconds


def best_chunks(grid: Grid, work: Workload, machine: Machine | None = None) -> int:
    """Choose the number of chunks of channels in which `two_dimensional` sends GAT's features.

    Examples
    --------
    >>> best_chunks(Grid(2, 2), Workload(2**21, 375_000_000, channels=128))
    1
    >>> best_chunks(Grid(2, 2), Workload(2**24, 3_000_000_000, channels=128))
    4
    """
    if grid.size == 1 or work.attention == "dot":
        return 1
    machine = machine or Machine()
    possible = [c for c in CHUNKS if c == 1 or work.channels >= c * SHARE // 2]
    return min(possible, key=lambda chunks: overlapped_seconds(grid, work, chunks, machine))


CHUNKS = (1, 2, 4)
"""Numbers of chunks to consider."""


def plan(
    workload: Workload,
    world: int,
    *,
    schemes: Sequence[str] | None = None,
    machine: Machine | None = None,
) -> Plan:
    """Choose the cheapest scheme and grid that fits the memory.

    Raises ConfigError if no requested scheme supports the workload.

    Parameters
    ----------
    workload : the work of a layer
    world : number of ranks
    schemes : schemes to consider; by default those that suit all graphs
    machine : rates of the machine; one node of GPUs by default

    Examples
    --------
    >>> work = Workload(vertices=2**20, entries=10**8, heads=8, channels=16)
    >>> plan(work, 8).chosen.scheme
    'feature_parallel'
    >>> best = plan(Workload(2**20, 10**8, channels=128, attention="dot"), 8).chosen
    >>> best.scheme, best.grid
    ('two_dimensional', Grid(px=4, py=2))
    """
    machine = machine or Machine()
    found: list[Choice] = []
    refused: list[str] = []
    for scheme in schemes or CHOSEN_FROM:
        shapes = grids(world) if scheme == "two_dimensional" else [Grid(world, 1)]
        if scheme == "one_and_half_d":
            side = math.isqrt(world)
            shapes = [Grid(side, world // side)]
        for grid in shapes:
            try:
                words = words_per_layer(scheme, grid, workload)
            except ConfigError as error:
                refused.append(str(error))
                continue
            messages = MESSAGES[scheme] if world > 1 else 0
            traffic = words * workload.word_bytes
            seconds = traffic / machine.bandwidth + messages * machine.latency
            if scheme in REORDERED:
                seconds += 2 * traffic / machine.copying
            memory = memory_per_rank(scheme, grid, workload)
            fits = machine.memory is None or memory <= machine.memory
            found.append(Choice(scheme, grid, words, messages, seconds, memory, fits))
    if not found:
        raise ConfigError(refused[0])
    # At equal cost prefer less memory.
    found.sort(key=lambda choice: (not choice.fits, choice.seconds, choice.memory))
    return Plan(found[0], tuple(found), workload)
