"""Attention over one huge graph, layer by layer, compared with PyTorch Geometric and cuSPARSE.

Kronecker graphs are made on the device. Every operator is first compared with its float64 reference
on a smaller graph of the same kind, forward and backward, and two runs must give the same bits.
The floor of a forward pass is the smaller of one cuSPARSE SpMM of the same width and the bytes
that all entries fetch over the rate of a bare gather, measured first (sums over a uniform graph of
the same size).
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from benchmarks.common.timing import median_ms
from benchmarks.graph.kronecker import kronecker
from benchmarks.kernels import peers_graph
from benchmarks.kernels.cases import Case, Family, Inputs, Row, Setup, Work, cases
from torch import Tensor

from bevatron import kernels
from bevatron.kernels import Csr, dot_attention, graph_attention, graph_attention_v2, spmm
from bevatron.kernels.graph.csr.launch import Tile

GRAPHS = {
    "17-13M": (17, 17_180_000),
    "17-88M": (17, 171_798_692),
    "20-32M": (20, 33_554_432),
    "17-4M": (17, 2**22),
    "17-17M": (17, 2**24),
}
"""Name -> log2 of the number of vertices, and number of edges drawn."""
WIDTHS = (16, 128)
MEMORY = {"17-4M": (64,), "17-17M": (64,)}
"""Widths on graphs that show how peak memory grows with the entries: group "memory"."""
TO_REACH = {
    ("17-13M", 16): (0.45, 1.1),
    ("17-88M", 16): (2.4, 5.6),
    ("17-88M", 128): (8.8, 20.0),
    ("20-32M", 16): (1.1, 2.6),
    ("20-32M", 128): (4.6, 10.5),
}


def table(rows: list[Row]) -> list[Row]:
    """Put forward pass and both passes of an operator or peer into one row."""
    found: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        op = row["op"] if row["who"] == "bevatron" else row["who"]
        key = {"graph": row["graph"], "nnz": row["nnz"], "k": row["k"], "op": op}
        key |= {name: row[name] for name in ("type", "tile") if name in row}
        one = found.setdefault(tuple(key.values()), key)
        which = row["pass"]
        one[f"{which} ms"] = row.get("ms", "")
        one[f"{which} eager ms"] = row.get("eager ms", "")
        if which == "forward" and row.get("floor ms") and "ms" in row:
            one["forward / floor"] = row["ms"] / row["floor ms"]
        else:
            one["peak MiB"] = row.get("MiB", "")
        wanted = ("to reach", "forward error", "gradients' error", "gather TB/s", "note")
        one |= {name: row[name] for name in wanted if row.get(name)}
    return list(found.values())


def tiles(text: str) -> contextlib.ExitStack:
    """Give all graph operators one tile: numbers x channels x warps, such as ``1024x32x1``."""
    from bevatron.kernels.graph.dot_attention import triton_launch as dot
    from bevatron.kernels.graph.graph_attention import triton as gat
    from bevatron.kernels.graph.spmm import triton as sums

    stack = contextlib.ExitStack()
    for module in (dot, gat, sums):
        tile = Tile(*map(int, text.split("x")))
        stack.enter_context(module.TILES.replaced(**dict.fromkeys(module.TILES, tile)))
    return stack


GRAPH = Family(
    "graph",
    "graph/kernels",
    "{dtype}. ms: medians of CUDA-graph replays where an eager call takes under 5 ms; 'eager' is "
    "called from Python. Floor: the smaller of one cuSPARSE SpMM of the same width and 4k+8 "
    "bytes an entry over the rate of a bare gather. Peak: above the graph and inputs. Errors: of "
    "smaller graphs of the same kind, against float64.",
    by_operator=False,
    capture_below_ms=5.0,
    capture_peers=False,
    table=table,
    tiles=tiles,
)
CALLS: dict[str, tuple[Callable[..., Tensor], tuple[str, ...]]] = {
    "gat": (graph_attention, ("x", "row_score", "col_score")),
    "gat dropout": (graph_attention, ("x", "row_score", "col_score")),
    "va": (dot_attention, ("x",)),
    "va softmax": (dot_attention, ("x",)),
    "agnn": (functools.partial(dot_attention, normalize=True), ("x",)),
    "agnn softmax": (functools.partial(dot_attention, normalize=True, softmax=True), ("x",)),
    "gatv2": (graph_attention_v2, ("x", "query", "vector")),
    "sum": (spmm, ("x",)),
    "mean": (functools.partial(spmm, reduce="mean"), ("x",)),
    "max": (functools.partial(spmm, reduce="max"), ("x",)),
}
"""Operator -> function of the graph and its inputs, in their order."""
BY_DEFAULT = {"gat", "va", "va softmax", "agnn", "agnn softmax"}


@functools.lru_cache(maxsize=1)
def graph(name: str, device: str) -> Csr:
    """Make a graph; the last one is kept."""
    return kronecker(*GRAPHS[name], device)


def drawn(csr: Csr, k: int, setup: Setup, names: tuple[str, ...], seed: int) -> Inputs:
    """Draw the inputs of an operator."""
    n, m = csr.shape
    shapes = {
        "x": (m, 1, k),
        "row_score": (n, 1),
        "col_score": (m, 1),
        "query": (n, 1, k),
        "vector": (1, k),
    }
    generator = torch.Generator(device=csr.device).manual_seed(seed)
    return {
        name: torch.randn(*shapes[name], generator=generator, device=csr.device).to(setup.dtype)
        for name in names
    }


def operator(op: str, csr: Csr, k: int) -> Callable[..., Tensor]:
    """Return an operator on one graph."""
    function, names = CALLS[op]
    options: dict[str, Any] = {}
    if op == "gat dropout":
        options = {"dropout": 0.6, "seed": torch.tensor([7], device=csr.device)}
    elif op == "va softmax":
        options = {"softmax": True, "scale": k**-0.5}

    def call(**inputs: Tensor) -> Tensor:
        return function(csr, *(inputs[name] for name in names), **options)

    return call


def symmetric(csr: Csr) -> Csr:
    """Return the union of a matrix and its transpose."""
    n = csr.shape[0]
    row, col = csr.row_index.long(), csr.col.long()
    keys = torch.cat([row * n + col, col * n + row]).unique()
    return Csr.from_coo(keys // n, keys % n, csr.shape)


def check(op: str, k: int, setup: Setup, _case: Case) -> dict[str, float]:
    """Compare with the float64 reference on smaller graphs of the same kind; exit if it is off."""
    worst = {"forward error": 0.0, "gradients' error": 0.0}
    size = (5, 2**7) if setup.tiny else (12, 2**17)
    directed = kronecker(*size, setup.device)
    for kind, csr in (("directed", directed), ("symmetric", symmetric(directed))):
        call = operator(op, csr, k)
        leaves = drawn(csr, k, setup, CALLS[op][1], 0)
        exact = {name: leaf.double().requires_grad_() for name, leaf in leaves.items()}
        with kernels.use("reference"):
            want = [call(**exact)]
            grad = torch.randn_like(want[0])
            want += torch.autograd.grad(want[0], list(exact.values()), grad)
        with torch.no_grad():
            inferred = call(**leaves)
        given = [leaf.requires_grad_() for leaf in leaves.values()]
        runs = []
        for _ in range(2):
            z = call(**leaves)
            runs.append([z, *torch.autograd.grad(z, given, grad.to(setup.dtype))])
        same = all(map(torch.equal, *runs))
        errors = [
            float((a.double() - b).detach().norm() / b.detach().norm())
            for a, b in zip([inferred, *runs[0]], [want[0], *want], strict=True)
        ]
        if not (same and max(errors) < 1e-5):
            raise SystemExit(f"{kind} {op} k={k}: errors {errors}, repeatable {same}")
        worst["forward error"] = max(worst["forward error"], *errors[:2])
        worst["gradients' error"] = max(worst["gradients' error"], *errors[2:])
    return worst


@functools.cache
def gather_rate(scale: int, k: int, device: str) -> float:
    """Bytes per second of bare sums over a uniform graph with 64 entries per row."""
    n = 2**scale
    generator = torch.Generator(device=device).manual_seed(1)
    keys = torch.arange(n, device=device)[:, None] * n
    keys = (keys + torch.randint(0, n, (n, 64), generator=generator, device=device)).flatten()
    keys = keys.unique()
    csr = Csr.from_coo(keys // n, keys % n, (n, n))
    x = torch.randn(n, k, generator=generator, device=device)
    return csr.nnz * (4 * k + 4) / median_ms(lambda: spmm(csr, x), 10) * 1e3


@functools.cache
def floor_ms(name: str, k: int, device: str, which: str) -> float | None:
    """Measure the floor of a forward pass on a graph."""
    if which != "forward":
        return None
    csr, rate = graph(name, device), gather_rate(GRAPHS[name][0], k, device)
    x = torch.randn(csr.shape[1], 1, k, device=device)
    spmm_ms = median_ms(peers_graph.prepared_spmm(csr, x), 10)
    return min(spmm_ms, csr.nnz * (4 * k + 8) / rate * 1e3)


def peers_of(op: str, csr: Csr) -> Mapping[str, Callable[..., Tensor]]:
    """Return the peers of an operator, which take the same inputs."""
    made: dict[str, dict[str, Any]] = {
        "gat": {"PyG GATConv": peers_graph.pyg_gat, "cuSPARSE GAT": peers_graph.cusparse_gat},
        "agnn softmax": {"PyG AGNNConv": peers_graph.pyg_agnn},
        "gatv2": {"PyG GATv2Conv": peers_graph.pyg_gatv2},
        "va": {"PyG VA": peers_graph.pyg_va},
    }

    def call(name: str, peer: Callable[..., Tensor], **inputs: Tensor) -> Tensor:
        graph = (edges(),) if name.startswith("PyG") else (csr, csr.row_index)
        result = peer(*graph, *inputs.values())
        return result.reshape(len(result), *inputs["x"].shape[1:])  # some peers have no heads

    @functools.cache
    def edges() -> Tensor:
        return peers_graph.edge_index(csr)

    return {name: functools.partial(call, name, peer) for name, peer in made.get(op, {}).items()}


def made(op: str, name: str, k: int, setup: Setup) -> Case:
    """Return an operator of one width on one graph."""
    csr = kronecker(5, 2**7, setup.device) if setup.tiny else graph(name, setup.device)
    to_reach = TO_REACH.get((name, k)) if op == "gat" else None
    return Case(
        op,
        f"{name}, k {k}",
        functools.partial(drawn, csr, k, setup, CALLS[op][1]),
        operator(op, csr, k),
        {"forward": Work(), "forward+backward": Work()},
        functools.partial(check, op, k, setup),
        peers=peers_of(op, csr),
        usual=name not in MEMORY,
        groups=(name, f"k {k}", *(["memory"] if name in MEMORY else [])),
        to_reach=str(to_reach or ""),
        labels={"graph": name, "nnz": csr.nnz, "k": k},
        floor=functools.partial(floor_ms, name, k, setup.device),
    )


def cases_of_operator(op: str, setup: Setup) -> Iterator[Case]:
    """Yield the cases of an operator; a graph is made when its first case is asked for."""
    for name in ["17-13M"] if setup.tiny else GRAPHS:
        for k in MEMORY.get(name, WIDTHS):
            yield made(op, name, k, setup)


for _op in CALLS:
    cases(_op, GRAPH, default=_op in BY_DEFAULT)(functools.partial(cases_of_operator, _op))
