"""Times of graph attention on one graph: the measurements of Besta et al. (SC 2023), repeated.

As there, a time is that of the whole model, forward or forward and backward, without an optimiser;
layers are as wide as the features, followed by a ReLU. Written are the median and a bootstrapped
95 % interval, and the entries that are really stored (duplicates of random graphs merged).

    python -m benchmarks.paper.graph_benchmark --model VA AGNN GAT --vertices 4096 --edges 65536
    torchrun --nproc-per-node 4 -m benchmarks.paper.graph_benchmark --sweep weak --out weak.csv
"""

import csv
import io
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from benchmarks.paper.graph_benchmark_plots import plot_times
from torch import Tensor, distributed, nn
from torch.nn import functional as F

from bevatron.arguments import call
from bevatron.cli import one_sentence
from bevatron.data.graphs import EdgeSource, GraphOptions, read_graph, read_in_pieces
from bevatron.data.graphs.generators import Kronecker, Uniform, block_entries
from bevatron.errors import ConfigError, DataError
from bevatron.files import write_text_atomically
from bevatron.kernels.graph.csr import Csr
from bevatron.models.graph_attention.matrix import Matrix, dot_attention, graph_attention
from bevatron.output import say
from bevatron.parallel.graph_partition import DistributedGraph
from bevatron.parallel.mesh import Mesh, open_mesh, ranks_from_environment

Model = Literal["VA", "AGNN", "GAT"]
Dataset = Literal["kronecker", "uniform", "file"]
Precision = Literal["float32", "float64", "bfloat16"]
Scheme = Literal["auto", "two_dimensional", "feature_parallel", "rows", "one_and_half_d"]
Sweep = Literal["strong", "weak"]
Row = dict[str, Any]

MODELS: tuple[Model, ...] = ("VA", "AGNN", "GAT")
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
RESAMPLES = 10_000
SLOPE = 0.2
"""Of the LeakyReLU in GAT's scores."""


@dataclass(frozen=True)
class GraphCase:
    """One graph and one model to time.

    Attributes
    ----------
    model : VA, AGNN (both without softmax, as the paper has them) or GAT with one head
    dataset : kronecker, uniform or file
    vertices, edges : asked for; duplicates are merged
    features : width of all layers
    layers : their number
    inference : forward only
    seed : of graph, features and weights
    file : of dataset ``file``
    dtype : of features; weights and sums of bfloat16 are float32
    partition : how the graph is cut over several processes
    exact
        A Kronecker graph has so many vertices as asked for; otherwise they are rounded down to a
        power of two, as in the paper.
    """

    model: Model = "GAT"
    dataset: Dataset = "kronecker"
    vertices: int = 1000
    edges: int = 10000
    features: int = 128
    layers: int = 3
    inference: bool = False
    seed: int = 42
    file: Path | None = None
    dtype: Precision = "float32"
    partition: Scheme = "auto"
    exact: bool = False

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        for name in ("vertices", "features", "layers"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: expected 1 or more, got {getattr(self, name)}")
        if (self.dataset == "file") != (self.file is not None):
            raise ConfigError("file: goes with --dataset file, and that with --file")
        if self.dataset != "file" and self.vertices < 2:
            raise ConfigError(f"vertices: expected 2 or more, got {self.vertices}")


class Stack(nn.Module):
    """Layers of one model, each as wide as the features, each followed by a ReLU."""

    def __init__(self, case: GraphCase) -> None:
        super().__init__()
        k, generator = case.features, torch.Generator().manual_seed(case.seed)
        self.model = case.model

        def drawn(*shape: int) -> nn.Parameter:
            bound = (6.0 / (k + shape[-1])) ** 0.5
            return nn.Parameter((torch.rand(shape, generator=generator) * 2 - 1) * bound)

        self.weights = nn.ParameterList([drawn(k, k) for _ in range(case.layers)])
        vectors = case.layers if case.model == "GAT" else 0
        self.rows = nn.ParameterList([drawn(k, 1) for _ in range(vectors)])
        self.columns = nn.ParameterList([drawn(k, 1) for _ in range(vectors)])

    def forward(self, graph: Matrix, x: Tensor) -> Tensor:
        """Compute the features after the last layer, [N, k]."""
        for number, weight in enumerate(self.weights):
            if self.model == "GAT":
                h = x @ weight.to(x.dtype)
                row, column = (v[number].to(x.dtype) for v in (self.rows, self.columns))
                z = graph_attention(graph, h[:, None], h @ row, h @ column, SLOPE, 0.0)
                x = F.relu(z[:, 0])
            else:
                summed = dot_attention(graph, x[:, None], normalize=self.model == "AGNN")
                x = F.relu(summed[:, 0] @ weight.to(x.dtype))
        return x


def run_cases(
    cases: Sequence[GraphCase],
    *,
    repeat: int = 10,
    warmup: int = 2,
    device: str = "auto",
    out: Path | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> list[Row]:
    """Time cases one after another; under torchrun on all ranks together.

    Parameters
    ----------
    cases : what to time; graphs that follow each other are made once
    repeat, warmup : timed runs, and runs before
    device : auto, cpu, cuda
    out : CSV file to which a row is added for each case
    tell : given lines to show

    Returns
    -------
    A row for each case: its options, ``nnz``, ``median_ms``, ``low_ms`` and ``high_ms`` (95 % of
    bootstrapped medians), ``finite``, or ``error``.

    Raises
    ------
    ConfigError
        For contradicting options.
    DataError
        If a file cannot be read or ``out`` holds another table.
    """
    if repeat < 1 or warmup < 0:
        raise ConfigError(f"repeat: expected 1 or more, got {repeat} (warmup {warmup})")
    if out is not None:
        _existing(out)
    rows: list[Row] = []
    with open_mesh(device) as mesh:
        graph: Matrix | None = None
        made: tuple[Any, ...] = ()
        for case in cases:
            key = _graph_key(case, mesh)
            if key != made:
                graph = None  # the old graph goes before the new one comes
                graph, made = _graph(case, mesh, tell), key
            assert graph is not None
            row = _timed(case, graph, mesh, repeat, warmup)
            rows.append(row)
            if mesh.is_main:
                tell(_line(row))
                if out is not None:
                    append_rows(out, [row])
    return rows


def median_interval(seconds: Sequence[float], seed: int = 0) -> tuple[float, float, float]:
    """Compute the median and a 95 % interval of it, by drawing the values again and again.

    Examples
    --------
    >>> median_interval([2.0, 2.0, 2.0])
    (2.0, 2.0, 2.0)
    """
    values = np.asarray(seconds, dtype=np.float64)
    places = np.random.default_rng(seed).integers(0, len(values), (RESAMPLES, len(values)))
    low, high = np.quantile(np.median(values[places], axis=1), [0.025, 0.975])
    return float(np.median(values)), float(low), float(high)


def append_rows(out: Path, rows: Sequence[Row]) -> None:
    """Add rows to a CSV file, which is made if need be.

    Raises
    ------
    DataError
        If the file holds another table.
    """
    old = _existing(out)
    text = io.StringIO()
    writer = csv.DictWriter(text, FIELDS, lineterminator="\n")
    if not old:
        writer.writeheader()
    writer.writerows({name: row.get(name, "") for name in FIELDS} for row in rows)
    write_text_atomically(out, old + text.getvalue(), DataError)


FIELDS = (
    "model", "dataset", "vertices", "edges", "nnz", "features", "layers", "mode", "dtype",
    "device", "ranks", "scheme", "seed", "repeat", "warmup", "median_ms", "low_ms", "high_ms",
    "peak_mib", "finite", "error", "file",
)  # fmt: skip
"""Columns of the CSV file."""


def _existing(out: Path) -> str:
    if not out.exists():
        return ""
    text = out.read_text()
    if text and text.splitlines()[0] != ",".join(FIELDS):
        raise DataError(f"{out}: holds another table; choose a new file")
    return text


def _graph_key(case: GraphCase, mesh: Mesh) -> tuple[Any, ...]:
    sizes = (case.dataset, case.vertices, case.edges, case.seed, case.file, case.exact)
    if mesh.world == 1:
        return sizes
    return (*sizes, case.partition, case.model == "GAT", case.features)


def _source(case: GraphCase) -> Kronecker | Uniform | EdgeSource:
    if case.dataset == "file":
        assert case.file is not None
        return read_in_pieces(case.file, GraphOptions(duplicates="merge"))
    if case.dataset == "uniform":
        return Uniform(case.vertices, case.edges, case.seed)
    return Kronecker(case.vertices, case.edges, case.seed, round_down=not case.exact)


def _graph(case: GraphCase, mesh: Mesh, tell: Callable[[str], None]) -> Matrix:
    if mesh.world > 1:
        graph = DistributedGraph.build(
            _source(case),
            mesh,
            scheme=case.partition,
            attention="gat" if case.model == "GAT" else "dot",
            channels=case.features,
            seed=case.seed,
        )
        lines = graph.explain()
        if mesh.is_main:
            for line in lines:
                tell(line)
        return graph
    return _local(case, mesh.device)


def _local(case: GraphCase, device: torch.device) -> Csr:
    if case.dataset == "file":
        assert case.file is not None
        graph = read_graph(case.file, GraphOptions(duplicates="merge"))
        row, col = (torch.from_numpy(v).to(device) for v in (graph.edges.rows, graph.edges.cols))
        return Csr.from_coo(row, col, (graph.num_nodes, graph.num_nodes))
    source = _source(case)
    assert not isinstance(source, EdgeSource)
    row, col = block_entries(source, device=device)
    return Csr.from_coo(row, col, (source.num_vertices, source.num_vertices))


def _shape_of(graph: Matrix) -> tuple[int, int, int, str]:
    """Return (all vertices, own vertices, all entries, scheme)."""
    if isinstance(graph, Csr):
        return graph.shape[0], graph.shape[0], graph.nnz, "one device"
    own = torch.tensor([graph.scheme.block.nnz], device=graph.mesh.device)
    counts = graph.everyone.all_gather(own).wait()
    whole = graph.scheme.name == "feature_parallel"
    nnz = int(counts.max() if whole else counts.sum())
    return graph.num_vertices, len(graph.vertices), nnz, graph.scheme.name


def _timed(case: GraphCase, graph: Matrix, mesh: Mesh, repeat: int, warmup: int) -> Row:
    total, own, nnz, scheme = _shape_of(graph)
    row: Row = {
        "model": case.model, "dataset": case.dataset, "vertices": total, "edges": case.edges,
        "nnz": nnz, "features": case.features, "layers": case.layers,
        "mode": "inference" if case.inference else "training", "dtype": case.dtype,
        "device": mesh.device.type, "ranks": mesh.world, "scheme": scheme, "seed": case.seed,
        "repeat": repeat, "warmup": warmup, "file": case.file or "",
    }  # fmt: skip
    if case.dataset == "file":
        row["edges"] = nnz
    generator = torch.Generator(mesh.device).manual_seed(case.seed + mesh.rank)
    cuda = mesh.device.type == "cuda"
    dtype = DTYPES[case.dtype]
    try:
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        width = torch.float64 if case.dtype == "float64" else torch.float32
        model = Stack(case).to(mesh.device, width)
        x = torch.rand(own, case.features, generator=generator, device=mesh.device, dtype=width)
        x = x.to(dtype)
        seconds = []
        for number in range(warmup + repeat):
            taken, result = _once(model, graph, x, mesh, inference=case.inference)
            if number >= warmup:
                seconds.append(taken)
    except torch.OutOfMemoryError:
        if mesh.world > 1:
            raise
        return {**row, "error": "out of memory"}
    median, low, high = (1e3 * value for value in median_interval(seconds))
    row |= {"median_ms": f"{median:.4g}", "low_ms": f"{low:.4g}", "high_ms": f"{high:.4g}"}
    row["finite"] = bool(torch.isfinite(result).all())
    if cuda:
        row["peak_mib"] = torch.cuda.max_memory_allocated() // 2**20
    return row


def _once(
    model: Stack, graph: Matrix, x: Tensor, mesh: Mesh, *, inference: bool
) -> tuple[float, Tensor]:
    """Run once and return the seconds of the slowest rank."""
    model.zero_grad(set_to_none=True)
    if mesh.device.type == "cuda":
        torch.cuda.synchronize(mesh.device)
    if mesh.world > 1:
        distributed.barrier()
    began = time.perf_counter()
    if inference:
        with torch.no_grad():
            result = model(graph, x)
    else:
        result = model(graph, x)
        result.backward(torch.ones_like(result))
        if isinstance(graph, DistributedGraph):
            graph.sum_gradients(model.parameters())
    if mesh.device.type == "cuda":
        torch.cuda.synchronize(mesh.device)
    seconds = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
    if mesh.world > 1:
        distributed.all_reduce(seconds, distributed.ReduceOp.MAX)
    return float(seconds), result.detach()


def _line(row: Row) -> str:
    size = f"{row['dataset']} {row['vertices']:,} vertices, {row['nnz']:,} entries"
    what = f"{row['model']} k={row['features']} {row['layers']} layers {row['mode']}"
    if "error" in row:
        return f"{what}, {size}: {row['error']}"
    wide = f"{row['median_ms']} ms ({row['low_ms']} to {row['high_ms']})"
    return f"{what}, {size}: {wide}{'' if row['finite'] else ', values overflow'}"


PAPER_STRONG = (
    (131_072, 171_798_692), (262_144, 687_194_767),
    (1_048_576, 109_951_163), (2_097_152, 439_804_651),
)  # fmt: skip
"""Vertices and edges asked for of Figures 6a-6d (k = 16) and 6e-6h (k = 128)."""

PAPER_WEAK = (0.01, 0.001, 0.0001)
"""Densities of the weak scaling; 131,072 vertices on one process, the root of p times as many."""


def sweep_cases(kind: Sweep, base: GraphCase, ranks: int, shrink: int = 1) -> Iterator[GraphCase]:
    """Yield the paper's configurations for this number of processes.

    Parameters
    ----------
    kind
        ``strong``: the same graphs whatever the number of processes (Figure 6); ``weak``: entries
        in proportion to it, density the same (Figures 7 and 8). The paper's 4, 16, ... processes
        give powers of two as numbers of vertices; those of others are not rounded to them.
    base : everything that the sweep does not set
    ranks : number of processes
    shrink : divide the vertices by this and the edges by its square, to try a sweep out

    Examples
    --------
    >>> cases = list(sweep_cases("strong", GraphCase(), 1))
    >>> len(cases), cases[0].vertices, cases[0].model
    (48, 131072, 'VA')
    """
    if shrink < 1:
        raise ConfigError(f"shrink: expected 1 or more, got {shrink}")
    if kind == "strong":
        sizes: list[tuple[Dataset, int, int]] = [("kronecker", n, m) for n, m in PAPER_STRONG]
    else:
        n = round(131_072 * ranks**0.5)
        both: tuple[Dataset, ...] = ("kronecker", "uniform")
        sizes = [(d, n, round(n * n * share)) for d in both for share in PAPER_WEAK]
    modes = (True, False)
    for dataset, n, m in sizes:
        for width, model, inference in itertools.product((16, 128), MODELS, modes):
            yield replace(
                base,
                dataset=dataset,
                vertices=max(n // shrink, 2),
                edges=max(m // shrink**2, 1),
                features=width,
                model=model,
                inference=inference,
                exact=kind == "weak",
            )


def time_attention(
    model: tuple[Model, ...] = ("GAT",),
    dataset: Dataset = "kronecker",
    vertices: int = 1000,
    edges: int = 10000,
    features: tuple[int, ...] = (128,),
    layers: tuple[int, ...] = (3,),
    inference: bool = False,
    repeat: int = 10,
    warmup: int = 2,
    seed: int = 42,
    file: Path | None = None,
    type: Precision = "float32",  # noqa: A002  the artifact's name
    sweep: Sweep | None = None,
    shrink: int = 1,
    partition: Scheme = "auto",
    device: str = "auto",
    out: Path | None = None,
    plot: Path | None = None,
) -> int:
    """Time attention on one graph, on this device or over all processes of torchrun.

    Parameters
    ----------
    model
        VA, AGNN, GAT; several are timed one after another.
    dataset
        kronecker, uniform (both random) or file.
    vertices
        Of a random graph.
    edges
        Asked for; of those drawn twice one is stored.
    features
        Width of all layers, or several to try.
    layers
        Number of layers, or several to try.
    inference
        Forward only; otherwise forward and backward.
    repeat
        Timed runs.
    warmup
        Runs before them.
    seed
        Of graph, features and weights.
    file
        A graph: npz, edge list, OGB.
    type
        Of the features.
    sweep
        The configurations of Besta et al. (SC 2023): strong (Figure 6) or weak (7 and 8) scaling,
        for the number of processes at hand; they set model, graph, width, layers and inference.
    shrink
        Divide the vertices of a sweep by this, and the edges by its square.
    partition
        How the graph is cut over several processes.
    device
        auto, cpu, cuda or cuda:N.
    out
        CSV file that rows are added to.
    plot
        Picture of all rows in that file.
    """
    base = GraphCase(
        dataset=dataset,
        vertices=vertices,
        edges=edges,
        seed=seed,
        file=file,
        dtype=type,
        partition=partition,
    )
    if plot is not None and out is None:
        raise ConfigError("plot: draws the rows of a CSV file; name it with --out")
    if sweep is not None and dataset == "file":
        raise ConfigError("sweep: its graphs are random; leave --dataset file out")
    if sweep is not None:
        cases = list(sweep_cases(sweep, base, ranks_from_environment(os.environ)[1], shrink))
    else:
        cases = [
            replace(base, model=m, features=k, layers=count, inference=inference)
            for m, k, count in itertools.product(model, features, layers)
        ]
    run_cases(cases, repeat=repeat, warmup=warmup, device=device, out=out, tell=say)
    if plot is not None and out is not None:
        say(f"picture: {plot_times(out, plot)}")
    return 0


def main(arguments: Sequence[str]) -> int:
    command = "python -m benchmarks.paper.graph_benchmark"
    return one_sentence(lambda: call(time_attention, arguments, command))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
