"""GAT on one graph over several ranks: words sent, scaling, and graphs of billions of edges.

On a CPU, anywhere::

    python -m benchmarks.graph.scaling --table words

On GPUs, one command for each number of ranks, results side by side in a folder (the academic graph
has 111 million vertices and 3.2 billion edges on eight, and for k = 16 on four; else the ranks'
share of it)::

    for p in 1 2 4 8; do
        torchrun --nproc-per-node $p -m benchmarks.graph.scaling --scaling --out results
    done
    torchrun --nproc-per-node 8 -m benchmarks.graph.scaling --academic --out results
    python -m benchmarks.graph.scaling --huge --out results
    python -m benchmarks.graph.scaling --report --out results

Times are those of the slowest rank, of a whole stack of layers with its projections: forward, or
forward, backward and the sum of the gradients. ``--shrink 256`` divides all sizes, to try it out.
"""

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from bevatron.data.graphs.generators import Kronecker, Uniform, block_entries
from bevatron.kernels.graph.csr import Csr
from bevatron.kernels.graph.graph_attention import graph_attention
from bevatron.parallel import collectives
from bevatron.parallel.graph_partition import DistributedGraph, Grid, Workload, count_traffic
from bevatron.parallel.graph_partition.planner import best_chunks
from bevatron.parallel.graph_partition.two_dimensional import TwoDimensional
from bevatron.parallel.graph_partition.wire import Wire
from bevatron.parallel.mesh import Mesh, open_mesh

STRONG = (2**21, 439_804_651)
"""The paper's Figure 6h: vertices and edges asked for; about 375 million are stored."""
WEAK = (2**18, 210 * 2**18)
"""For each rank; on eight it is the strong case."""
ACADEMIC = (111_000_000, 3_200_000_000)
"""On eight ranks; on fewer the same share of it for each."""
HUGE = (2**22, 2_250_000_000)
"""A uniform graph of more than 2^31 entries on one rank."""


@dataclass(frozen=True)
class ScalingCase:
    """One graph, cut in one way."""

    name: str
    source: Kronecker | Uniform
    scheme: str
    k: int
    grid: Grid | None = None
    chunks: int | None = None
    bfloat16: bool = False
    regather: bool = False

    @property
    def shared(self) -> tuple[object, ...]:
        """What decides how the graph is cut, apart from how it is used then."""
        return self.source, self.scheme, self.grid

    def use(self, graph: DistributedGraph) -> None:
        """Set the options of a graph that was cut for another case."""
        if isinstance(graph.scheme, TwoDimensional):
            grid = Grid(graph.scheme.column_group.size, graph.scheme.row_group.size)
            work = Workload(self.source.num_vertices, self.source.num_drawn, channels=self.k)
            graph.scheme.chunks = self.chunks or best_chunks(grid, work)
            graph.scheme.wire = Wire(self.bfloat16)
            graph.scheme.regather = self.regather

    def cut(self, mesh: Mesh, source: Kronecker | Uniform) -> DistributedGraph:
        """Cut a graph as this case does."""
        return DistributedGraph.build(
            *(source, mesh),
            scheme=self.scheme,
            grid=self.grid,
            channels=self.k,
            chunks=self.chunks,
            bfloat16_wire=self.bfloat16,
            regather=self.regather,
        )

    @property
    def options(self) -> str:
        """What differs from the defaults, as text."""
        found = [f"chunks {self.chunks}"] if self.chunks else []
        found += ["bf16 wire"] * self.bfloat16 + ["regather"] * self.regather
        return ", ".join(found)


class Layers(torch.nn.Module):
    """GAT layers of one head with ReLU, k -> k, as the paper times them."""

    def __init__(self, k: int, layers: int, device: torch.device) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)

        def weights(*shape: int) -> torch.nn.Parameter:
            drawn = torch.randn(*shape, generator=generator) / k**0.5
            return torch.nn.Parameter(drawn.to(device))

        self.project = torch.nn.ParameterList([weights(k, k) for _ in range(layers)])
        self.score = torch.nn.ParameterList([weights(k, 2) for _ in range(layers)])

    def forward(self, x: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        """Attend through the graph in every layer."""
        for project, score in zip(self.project, self.score, strict=True):
            h = x @ project
            row, col = (part.contiguous() for part in (h @ score).split(1, 1))
            x = torch.relu(attend(h[:, None], row, col)[:, 0])
        return x


SMALL = Kronecker(4096, 100_000, seed=3)
"""What every way of cutting is checked on."""


@functools.cache
def exact(k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Features of the small graph, and output and gradient of one process in float64."""
    n = SMALL.num_vertices
    features = torch.randn(n, k, generator=torch.Generator().manual_seed(4))
    row, col = block_entries(SMALL)
    csr = Csr.from_coo(row, col, (n, n))
    leaf = features.double().requires_grad_()
    model = Layers(k, 2, torch.device("cpu")).double()
    out = model(leaf, lambda *args: graph_attention(csr, *args))
    out.sum().backward()
    assert leaf.grad is not None
    return features, out.detach(), leaf.grad


def check(case: ScalingCase, mesh: Mesh) -> float:
    """Compare a small graph, cut the same way, with one process in float64; the worst error."""
    graph = case.cut(mesh, SMALL)
    features, *expected = exact(case.k)
    x = graph.scatter(features).requires_grad_()
    out = Layers(case.k, 2, mesh.device)(x, graph.graph_attention)
    out.sum().backward()
    pairs = zip([graph.gather(out), graph.gather(x.grad)], expected, strict=True)
    return max(float((a.cpu() - b).norm() / b.norm()) for a, b in pairs)


def seconds(work: Callable[[], None], mesh: Mesh, repeat: int, warmup: int) -> list[float]:
    """Time the slowest rank."""
    found = []
    for number in range(warmup + repeat):
        collectives.sum_over_ranks(torch.zeros(1, device=mesh.device), mesh)
        _wait(mesh)
        begin = time.perf_counter()
        work()
        _wait(mesh)
        mine = torch.tensor([time.perf_counter() - begin], dtype=torch.float64)
        if number >= warmup:
            found.append(max(collectives.gather_json(float(mine), mesh)))
    return found


def _wait(mesh: Mesh) -> None:
    if mesh.device.type == "cuda":
        torch.cuda.synchronize()


@dataclass
class Kept:
    """The last graph that was cut, with seconds and peak memory of cutting."""

    shared: tuple[object, ...] = ()
    graph: DistributedGraph | None = None
    seconds: float = 0.0
    peak: int = 0

    def get(self, case: ScalingCase, mesh: Mesh) -> DistributedGraph:
        """Cut the graph unless the last case had the same."""
        if self.graph is None or self.shared != case.shared:
            self.graph, self.shared = None, case.shared
            if mesh.device.type == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            begin = time.perf_counter()
            self.graph = case.cut(mesh, case.source)
            _wait(mesh)
            self.seconds, self.peak = time.perf_counter() - begin, _peak(mesh)
        case.use(self.graph)
        return self.graph


def measure(
    case: ScalingCase, mesh: Mesh, kept: Kept, args: argparse.Namespace
) -> dict[str, object]:
    """Cut, check, time one case; every rank returns the row."""
    if mesh.device.type == "cuda":
        torch.cuda.empty_cache()
    wrong = max(collectives.gather_json(check(case, mesh), mesh))
    if not wrong < (2e-2 if case.bfloat16 else 1e-4):
        raise RuntimeError(f"{case}: differs by {wrong} from one process; nothing is timed")
    graph = kept.get(case, mesh)
    layers, generator = args.layers, torch.Generator(mesh.device).manual_seed(mesh.rank)
    shape = (len(graph.vertices), case.k)
    x = torch.randn(shape, generator=generator, device=mesh.device)
    grad = torch.randn(shape, generator=generator, device=mesh.device)
    model = Layers(case.k, layers, mesh.device)

    def infer() -> None:
        with torch.no_grad():
            model(x, graph.graph_attention)

    def train() -> None:
        model.zero_grad()
        model(x, graph.graph_attention).backward(grad)
        graph.sum_gradients(model.parameters())

    if mesh.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    forward = seconds(infer, mesh, args.repeat, args.warmup)
    step = seconds(train, mesh, args.repeat, args.warmup)
    with count_traffic() as traffic:
        train()
    nnz = collectives.gather_json(graph.scheme.block.nnz, mesh)
    sent = collectives.gather_json(traffic.total, mesh)
    peaks = collectives.gather_json([kept.peak, _peak(mesh)], mesh)
    entries = sum(nnz) // (mesh.world if case.scheme == "feature_parallel" else 1)
    grid = graph.plan.chosen.grid if graph.plan else case.grid
    finite = bool(torch.isfinite(model.project[0].grad).all())
    return {
        "case": case.name,
        "p": mesh.world,
        "scheme": graph.scheme.name,
        "grid": f"{grid.px}x{grid.py}" if grid and case.scheme == "two_dimensional" else "",
        "options": case.options,
        "vertices": graph.num_vertices,
        "entries": entries,
        "k": case.k,
        "layers": layers,
        "forward ms": round(1e3 * statistics.median(forward), 3),
        "training ms": round(1e3 * statistics.median(step), 3),
        "MB sent": round(max(sent) / 1e6, 1),
        "block max/mean": round(max(nnz) * len(nnz) / max(sum(nnz), 1), 3),
        "largest block": max(nnz),
        "cut s": round(max(collectives.gather_json(kept.seconds, mesh)), 1),
        "peak GB cut": round(max(peak[0] for peak in peaks) / 1e9, 1),
        "peak GB": round(max(peak[1] for peak in peaks) / 1e9, 1),
        "error": f"{wrong:.1e}",
        "finite": finite,
        "all ms": [[round(1e3 * t, 3) for t in times] for times in (forward, step)],
    }


def _peak(mesh: Mesh) -> int:
    return torch.cuda.max_memory_allocated() if mesh.device.type == "cuda" else 0


def check_huge(graph: DistributedGraph, k: int) -> dict[str, object]:
    """Compare some rows and columns of one rank's whole graph with sums in float64.

    The last ones lie behind entry 2^31.
    """
    csr, device = graph.scheme.block, graph.device
    generator = torch.Generator(device).manual_seed(9)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).requires_grad_()

    x, row, col = draw(csr.shape[1], 1, k), draw(csr.shape[0], 1), draw(csr.shape[1], 1)
    z = graph_attention(csr, x, row, col)
    grad = torch.randn(z.shape, generator=generator, device=device)
    by_x = torch.autograd.grad(z, x, grad)[0]

    def weights(i: int) -> tuple[Tensor, Tensor]:
        columns = csr.col[int(csr.row_ptr[i]) : int(csr.row_ptr[i + 1])].long()
        logits = torch.nn.functional.leaky_relu((row[i] + col[columns, 0]).double(), 0.2)
        return columns, logits.softmax(0)

    def error(found: Tensor, wanted: Tensor) -> float:
        return float((found - wanted).norm() / wanted.norm())

    rows, columns = [], []
    with torch.no_grad():
        for i in (0, csr.shape[0] // 2, *range(csr.shape[0] - 30, csr.shape[0])):
            found, weight = weights(i)
            rows.append(error(z[i, 0].double(), weight @ x[found, 0].double()))
        for j in (0, csr.shape[1] // 2, *range(csr.shape[1] - 4, csr.shape[1])):
            wanted = torch.zeros(k, dtype=torch.float64, device=device)
            for i in csr.row_of[int(csr.col_ptr[j]) : int(csr.col_ptr[j + 1])].tolist():
                found, weight = weights(i)
                wanted += weight[found == j].sum() * grad[i, 0].double()
            columns.append(error(by_x[j, 0].double(), wanted))
    return {"rows' error": max(rows), "columns' error": max(columns), "entries": csr.nnz}


def scaling_cases(world: int, shrink: int) -> Iterator[ScalingCase]:
    """Yield strong scaling of the paper's 6h and weak scaling, each graph cut in both ways."""
    strong = Kronecker(*(size // shrink for size in STRONG))
    vertices, edges = (size // shrink * world for size in WEAK)
    weak = {"weak uniform": Uniform(vertices, edges), "weak Kronecker": Kronecker(vertices, edges)}
    yield ScalingCase("strong 6h", strong, "feature_parallel", 128)
    yield ScalingCase("strong 6h", strong, "two_dimensional", 128)
    for chunks in (1, 2, 4) if world > 1 else ():
        yield ScalingCase("strong 6h", strong, "two_dimensional", 128, chunks=chunks)
    if world > 1:
        yield ScalingCase("strong 6h", strong, "two_dimensional", 128, chunks=2, bfloat16=True)
    for scheme in ("feature_parallel", "two_dimensional"):
        for name, source in weak.items():
            yield ScalingCase(name, source, scheme, 128)


def academic_cases(world: int, shrink: int) -> Iterator[ScalingCase]:
    """Yield the stand-in of the academic graph: Kronecker, no power of two of vertices."""
    side = 4 if world % 4 == 0 else world
    grid = Grid(side, world // side)
    for k in (16, 64):
        source = academic(k, world, shrink)
        yield ScalingCase("academic", source, "two_dimensional", k, grid, regather=k > 16)
    for k in (64, 16):
        yield ScalingCase("academic", academic(k, world, shrink), "feature_parallel", k)


def academic(k: int, world: int, shrink: int) -> Kronecker:
    """Make the whole graph for k = 16 from four ranks on, where it fits; else the ranks' share."""
    eighths = 8 if k == 16 and world >= 4 else min(world, 8)
    vertices, edges = (size * eighths // 8 // shrink for size in ACADEMIC)
    return Kronecker(vertices, edges, round_down=False)


def huge_cases(world: int, shrink: int) -> Iterator[ScalingCase]:
    """Yield a graph of more than 2^31 entries on every rank."""
    vertices, edges = HUGE
    source = Uniform(vertices // shrink, edges // shrink)
    yield ScalingCase("huge", source, "two_dimensional" if world == 1 else "feature_parallel", 16)


def run(kind: str, mesh: Mesh, args: argparse.Namespace, began: float) -> None:
    """Measure all cases of one kind while there is time; write after each."""
    makers = {"scaling": scaling_cases, "academic": academic_cases, "huge": huge_cases}
    rows, kept = [], Kept()
    for case in makers[kind](mesh.world, args.shrink):
        spent = collectives.broadcast_json(time.perf_counter() - began, mesh)
        left_out = args.brief and case.name.startswith("weak") and case.scheme == "two_dimensional"
        if spent > args.seconds or left_out or (args.only and case.scheme != args.only):
            continue
        try:
            row = measure(case, mesh, kept, args)
        except torch.OutOfMemoryError as error:
            # Blocks are of one size, so all ranks are here.
            kept = Kept()
            row = {"case": case.name, "p": mesh.world, "scheme": case.scheme, "k": case.k}
            row |= {"options": f"out of memory: {str(error).splitlines()[0][:80]}"}
        rows.append(row)
        if kind == "huge" and mesh.world == 1 and kept.graph is not None:
            print(row, flush=True)
            rows.append({"case": "huge, checked", "p": 1, "k": case.k})
            rows[-1] |= check_huge(kept.graph, case.k)
            row = rows[-1]
        if mesh.is_main:
            shown = {key: value for key, value in row.items() if key != "all ms"}
            print(json.dumps(shown), flush=True)
            args.out.mkdir(parents=True, exist_ok=True)
            path = args.out / f"graph-{kind}-p{mesh.world}.json"
            path.write_text(json.dumps(rows, indent=1))


NOTES = """Stacks of GAT layers with their projections, one head, float32, ReLU, no optimiser.
Times are medians of the slowest rank. "forward" is inference; "training" is forward, backward and
the sum of the gradients over the ranks. Speed-ups are against the fastest case of one rank with the
same graph (weak scaling: one rank's time over this one). "MB sent" by the busiest rank in one
training step, counted from the tensors handed over. "error": a graph of 4096 vertices cut the same
way against one process in float64, outputs and gradients, checked before timing. "largest block":
entries stored by one rank. GPUs of one host, torch.distributed over NCCL without NVLink multicast.
"""


def write_report(folder: Path) -> None:
    """Put the results of all numbers of ranks into one table."""
    from benchmarks.common import report

    rows = [row for path in sorted(folder.glob("graph-*-p*.json")) for row in _read(path)]
    for row in rows:
        alike = [r for r in rows if r["p"] == 1 and r["case"] == row["case"] and r["k"] == row["k"]]
        for kind in ("forward", "training"):
            alike = [r for r in alike if f"{kind} ms" in r]
            if alike and f"{kind} ms" in row:
                best = min(r[f"{kind} ms"] for r in alike)
                row[f"{kind} speed-up"] = round(best / row[f"{kind} ms"], 2)
    rows.sort(key=lambda row: (row["case"], row["k"], row["p"], row.get("training ms", 1e9)))
    shown = [{k: v for k, v in row.items() if k not in {"all ms", "finite"}} for row in rows]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    extra = {"times": [row.get("all ms") for row in rows]}
    report.write_result("graph/scaling", shown, NOTES, device=device, extra=extra, folder=folder)


def _read(path: Path) -> list[dict[str, object]]:
    found: list[dict[str, object]] = json.loads(path.read_text())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--table", choices=["words"])
    for kind in ("scaling", "academic", "huge", "report"):
        parser.add_argument(f"--{kind}", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("graph-results"))
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--repeat", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no case after this")
    parser.add_argument("--shrink", type=int, default=1, help="divide all sizes")
    parser.add_argument("--only", help="one scheme alone")
    parser.add_argument("--brief", action="store_true", help="weak scaling in one scheme alone")
    args = parser.parse_args()
    if args.table:
        from benchmarks.graph import words as graph_words

        graph_words.run()
    began = time.perf_counter()
    kinds = [kind for kind in ("scaling", "academic", "huge") if getattr(args, kind)]
    if kinds:
        with open_mesh("auto", timeout_seconds=300) as mesh:
            for kind in kinds:
                run(kind, mesh, args, began)
    if args.report:
        write_report(args.out)


if __name__ == "__main__":
    main()
