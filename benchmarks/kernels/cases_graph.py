"""Attention over one huge graph, a layer at a time, beside PyTorch Geometric and cuSPARSE.

    python -m benchmarks.kernels.run --peers
    python -m benchmarks.kernels.run --cases 17-88M --ops gat --sizes 512,1024
    python -m benchmarks.kernels.run --paper --parallel

Kronecker graphs are made on the device. Every operator is first compared with its float64 reference
on a smaller graph of the same kind, forward and backward, and two runs must give the same bits.
Times are medians of CUDA-graph replays where a call takes under 5 ms, and of eager calls otherwise;
"eager" is called from Python. The floor of a forward pass is the smaller of one cuSPARSE product of
the same width and the bytes that all entries fetch over the rate of a bare gather, measured first
(sums over a uniform graph of the same size). ``--paper`` runs the configurations of the paper's
Figure 6, three layers each.
"""

import argparse
import functools
import gc
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from benchmarks.common import report
from benchmarks.graph.kronecker import kronecker
from benchmarks.kernels import peers_graph as graph_peers
from torch import Tensor

from bevatron import kernels
from bevatron.kernels import Csr, dot_attention, graph_attention, graph_attention_v2, spmm
from bevatron.kernels.graph.csr.launch import Tile

CASES = {
    "17-13M": (17, 17_180_000),
    "17-88M": (17, 171_798_692),
    "20-32M": (20, 33_554_432),
}
TO_REACH = {
    ("17-13M", 16): (0.45, 1.1),
    ("17-88M", 16): (2.4, 5.6),
    ("17-88M", 128): (8.8, 20.0),
    ("20-32M", 16): (1.1, 2.6),
    ("20-32M", 128): (4.6, 10.5),
}
PAPER = {
    "6a": (17, 171_798_692, 16), "6b": (18, 687_194_767, 16),
    "6c": (20, 109_951_163, 16), "6d": (21, 439_804_651, 16),
    "6e": (17, 171_798_692, 128), "6f": (18, 687_194_767, 128),
    "6g": (20, 109_951_163, 128), "6h": (21, 439_804_651, 128),
}  # fmt: skip
STORED = {"a": 88, "e": 88, "c": 97, "g": 97, "b": 328, "f": 328, "d": 375, "h": 375}
"""Millions of distinct entries of Figure 6's graphs."""
Row = dict[str, Any]
NOTES = (
    "fp32. ms: medians of CUDA-graph replays where an eager call takes under 5 ms; 'eager' is "
    "called from Python. Floor: the smaller of one cuSPARSE product of the same width and 4k+8 "
    "bytes an entry over the rate of the row 'gather'. Peak: above the graph and inputs."
)

PAPER_NOTES = (
    "Three layers k -> k with ReLU, fp32, one head, on one GPU; training is forward and backward "
    "pass without an optimiser, gradients of all weights, called from Python. Medians. nnz: "
    "distinct entries (the paper counts the edges that are drawn). VA and AGNN divide scores by "
    "the mean degree, without which three layers of VA end in infinities. Peak: of training, above "
    "graph and inputs; graph: both orders of its entries, int32."
)


def operators(csr: Csr, k: int, dtype: torch.dtype) -> dict[str, tuple[Any, list[Tensor]]]:
    """Return what is timed: function and the tensors that it takes gradients by."""
    generator = torch.Generator(device=csr.device).manual_seed(0)

    def draw(*shape: int) -> Tensor:
        drawn = torch.randn(*shape, generator=generator, device=csr.device)
        return drawn.to(dtype).requires_grad_()

    n, m = csr.shape
    x, row_score, col_score = draw(m, 1, k), draw(n, 1), draw(m, 1)
    query, vector = draw(n, 1, k), draw(1, k)
    scores = [x, row_score, col_score]
    seed = torch.tensor([7], device=csr.device)
    return {
        "gat": (functools.partial(graph_attention, csr), scores),
        "gat dropout": (
            functools.partial(graph_attention, csr, dropout=0.6, seed=seed),
            scores,
        ),
        "va": (functools.partial(dot_attention, csr), [x]),
        "va softmax": (functools.partial(dot_attention, csr, softmax=True, scale=k**-0.5), [x]),
        "agnn": (functools.partial(dot_attention, csr, normalize=True), [x]),
        "agnn softmax": (
            functools.partial(dot_attention, csr, normalize=True, softmax=True),
            [x],
        ),
        "gatv2": (functools.partial(graph_attention_v2, csr), [x, query, vector]),
        "sum": (functools.partial(spmm, csr), [x]),
        "mean": (functools.partial(spmm, csr, reduce="mean"), [x]),
        "max": (functools.partial(spmm, csr, reduce="max"), [x]),
    }


def both(function: Callable[..., Tensor], leaves: list[Tensor]) -> Callable[[], tuple[Tensor, ...]]:
    """Return forward and backward as one call."""
    with torch.no_grad():
        grad = torch.randn_like(function(*leaves))

    def call() -> tuple[Tensor, ...]:
        return torch.autograd.grad(function(*leaves), leaves, grad)

    return call


def forward(function: Callable[..., Tensor], leaves: list[Tensor]) -> Callable[[], Tensor]:
    """Return the forward pass of inference as a call."""

    def call() -> Tensor:
        with torch.no_grad():
            return function(*leaves)

    return call


def timed(call: Callable[[], Any], repeat: int = 10, warmup: int = 2) -> float:
    """Median of events around single calls, ms."""
    for _ in range(warmup):
        call()
    times = []
    for _ in range(repeat):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def replayed(call: Callable[[], Any]) -> float:
    """Median of replays of a captured call, ms."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = call()
    result = timed(graph.replay)
    del kept
    return result


def measured(call: Callable[[], Any], captured: bool = True) -> tuple[float, float]:
    """Return (the time that counts, the eager time)."""
    eager = timed(call)
    return (replayed(call) if captured and eager < 5.0 else eager), eager


def peak(call: Callable[[], Any]) -> float:
    """Peak of a call above what was allocated before, MiB."""
    call()
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def symmetric(csr: Csr) -> Csr:
    """Return the union of a matrix and its transposed."""
    n = csr.shape[0]
    row, col = csr.row_index.long(), csr.col.long()
    keys = torch.cat([row * n + col, col * n + row]).unique()
    return Csr.from_coo(keys // n, keys % n, csr.shape)


def check(k: int, names: list[str], device: str) -> list[Row]:
    """Compare with the float64 reference on smaller graphs of the same kind."""
    rows = []
    directed = kronecker(12, 2**17, device)
    for kind, csr in (("directed", directed), ("symmetric", symmetric(directed))):
        for name in names:
            function, leaves = operators(csr, k, torch.float32)[name]
            exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
            with kernels.use("reference"):
                want = [function(*exact)]
                grad = torch.randn_like(want[0])
                want += torch.autograd.grad(want[0], exact, grad)
            runs = []
            for _ in range(2):
                with kernels.use("triton"):
                    z = function(*leaves)
                runs.append([z, *torch.autograd.grad(z, leaves, grad.float())])
            with kernels.use("triton"):
                inferred = forward(function, leaves)()
            same = all(map(torch.equal, *runs))
            errors = [
                float((a.double() - b).detach().norm() / b.detach().norm())
                for a, b in zip([inferred, *runs[0]], [want[0], *want], strict=True)
            ]
            if not (same and max(errors) < 1e-5):
                raise SystemExit(f"{kind} {name} k={k}: errors {errors}, repeatable {same}")
            found = {"forward error": max(errors[:2]), "gradients' error": max(errors[2:])}
            rows.append({"op": f"check {name}, {kind}", "k": k, "nnz": csr.nnz, **found})
    return rows


def check_in_processes(args: argparse.Namespace) -> None:
    """Compare every operator in a process of its own, which also fills the cache of kernels."""
    start = time.time()
    jobs = []
    for k in args.k:
        for op in args.ops:
            command = [sys.executable, "-m", __spec__.name, "--cases", "--k", str(k), "--ops", op]
            jobs.append(subprocess.Popen([*command, "--out", "/tmp/checked"]))
    failed = [job.args for job in jobs if job.wait()]
    if failed:
        raise SystemExit(f"these checks failed: {failed}")
    print(f"checked in {time.time() - start:.1f} s", flush=True)


def gather_rate(scale: int, k: int, device: str) -> float:
    """Bytes a second of bare sums over a uniform graph with 64 entries in each row."""
    n = 2**scale
    generator = torch.Generator(device=device).manual_seed(1)
    keys = torch.arange(n, device=device)[:, None] * n
    keys = (keys + torch.randint(0, n, (n, 64), generator=generator, device=device)).flatten()
    keys = keys.unique()
    csr = Csr.from_coo(keys // n, keys % n, (n, n))
    x = torch.randn(n, k, generator=generator, device=device)
    return csr.nnz * (4 * k + 4) / timed(lambda: spmm(csr, x)) * 1e3


def time_case(name: str, csr: Csr, k: int, names: list[str], rate: float, peers: bool) -> list[Row]:
    """Time the operators on one graph."""
    rows: list[Row] = []
    x = torch.randn(csr.shape[1], 1, k, device=csr.device)
    product = timed(graph_peers.prepared_product(csr, x))
    floor = min(product, csr.nnz * (4 * k + 8) / rate * 1e3)
    base = {"graph": name, "nnz": csr.nnz, "k": k}
    rows.append({**base, "op": "cuSPARSE product", "forward ms": product})
    for op in names:
        function, leaves = operators(csr, k, torch.float32)[op]
        fast, eager = measured(forward(function, leaves))
        whole, whole_eager = measured(both(function, leaves))
        rows.append(
            {
                **base,
                "op": op,
                "forward ms": fast,
                "forward+backward ms": whole,
                "eager": f"{eager:.2f} / {whole_eager:.2f}",
                "forward / floor": fast / floor,
                "to reach": TO_REACH.get((name, k), "") if op == "gat" else "",
                "peak MiB": peak(both(function, leaves)),
            }
        )
        print(rows[-1], flush=True)
        del function, leaves
    if peers:
        rows += time_peers(base, csr, k, names)
    return rows


def time_peers(base: Row, csr: Csr, k: int, names: list[str]) -> list[Row]:
    """Time PyTorch Geometric and a composition of cuSPARSE products."""
    edges, row = graph_peers.edge_index(csr), csr.row_index
    all_calls: dict[str, tuple[str, Callable[..., Tensor]]] = {
        "PyG GATConv": ("gat", functools.partial(graph_peers.pyg_gat, edges)),
        "cuSPARSE GAT": ("gat", functools.partial(graph_peers.cusparse_gat, csr, row)),
        "PyG AGNNConv": ("agnn softmax", functools.partial(graph_peers.pyg_agnn, edges)),
        "PyG GATv2Conv": ("gatv2", functools.partial(graph_peers.pyg_gatv2, edges)),
        "PyG VA": ("va", functools.partial(graph_peers.pyg_va, edges)),
    }
    rows = []
    for op, (ours, function) in all_calls.items():
        if ours not in names:
            continue
        tensors = operators(csr, k, torch.float32)[ours][1]
        found: Row = {**base, "op": op}
        try:
            found["forward ms"] = timed(forward(function, tensors), 2, warmup=1)
            call = both(function, tensors)
            found["peak MiB"] = peak(call)
            found["forward+backward ms"] = timed(call, 2, warmup=0)
        except torch.OutOfMemoryError:
            found["eager"] = "out of memory"
        gc.collect()
        torch.cuda.empty_cache()
        print(found, flush=True)
        rows.append(found)
    return rows


def memory(device: str) -> list[Row]:
    """Peak of GAT's forward and backward at nnz and at 4 nnz, above graph and inputs."""
    rows = []
    for asked in (2**22, 2**24):
        csr = kronecker(17, asked, device)
        function, leaves = operators(csr, 64, torch.float32)["gat"]
        peaked = peak(both(function, leaves))
        rows.append({"op": "gat memory", "nnz": csr.nnz, "k": 64, "peak MiB": peaked})
    return rows


def paper(
    names: list[str],
    models: list[str],
    device: str,
    repeat: int,
    save: Callable[[list[Row]], Any],
) -> None:
    """Time three layers of VA, AGNN and GAT on the graphs of Figure 6, inference and training.

    The largest graphs come last, and every configuration is saved as it is done.
    """
    rows: list[Row] = []
    made: tuple[int, int] | None = None
    csr: Csr | None = None
    for name in sorted(names, key=lambda each: STORED[each[1]]):
        scale, asked, k = PAPER[name]
        if made != (scale, asked):
            csr = None
            gc.collect()
            torch.cuda.empty_cache()
            start = time.time()
            csr, made = kronecker(scale, asked, device), (scale, asked)
            torch.cuda.synchronize()
            print(f"{name}: {csr.nnz} entries made in {time.time() - start:.1f} s", flush=True)
        for model in models:
            infer, train = paper_model(model, csr, k)
            row = {
                "graph": name,
                "nnz": csr.nnz,
                "k": k,
                "op": model,
                "forward ms": timed(infer, repeat),
                "training ms": timed(train, repeat),
                "peak GiB": peak(train) / 1024,
                "graph GiB": stored_bytes(csr) / 2**30,
            }
            print(row, flush=True)
            rows.append(row)
            del infer, train
        save(rows)


def stored_bytes(csr: Csr) -> int:
    """Bytes of both orders of a matrix, without the lists that share out its rows."""
    tensors = csr.row_ptr, csr.col, csr.col_ptr, csr.row_of
    return sum(tensor.nbytes for tensor in tensors)


def compile_paper(names: list[str], models: list[str]) -> None:
    """Fill the cache of kernels: every model and width in a process of its own."""
    start = time.time()
    widths = sorted({PAPER[name][2] for name in names})
    jobs = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                __spec__.name,
                "--compile-only",
                "--paper-model",
                model,
                "--k",
                str(k),
            ]
        )
        for model in models
        for k in widths
    ]
    failed = [job.args for job in jobs if job.wait()]
    if failed:
        raise SystemExit(f"these failed: {failed}")
    print(f"compiled in {time.time() - start:.1f} s", flush=True)


def paper_model(model: str, csr: Csr, k: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Return three layers' forward pass, and forward and backward pass."""
    generator = torch.Generator(device=csr.device).manual_seed(3)

    def draw(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, device=csr.device) - 0.5

    h = draw(csr.shape[0], k)
    weights = [draw(k, k).requires_grad_() for _ in range(3)]
    vectors = [draw(k, 2).requires_grad_() for _ in range(3)]
    # Three layers of VA without a factor end in infinities.
    scale = csr.shape[0] / csr.nnz

    def run() -> Tensor:
        x = h
        for weight, vector in zip(weights, vectors, strict=True):
            if model == "GAT":
                x = x @ weight
                scores = x @ vector
                x = graph_attention(csr, x[:, None], scores[:, :1], scores[:, 1:])[:, 0]
            else:
                normalize = model == "AGNN"
                x = dot_attention(csr, x[:, None], normalize=normalize, scale=scale)[:, 0] @ weight
            x = x.relu()
        return x

    leaves = weights + (vectors if model == "GAT" else [])
    grad = draw(csr.shape[0], k)

    def infer() -> Tensor:
        with torch.no_grad():
            return run()

    return infer, lambda: torch.autograd.grad(run(), leaves, grad)


def sizes(texts: list[str], args: argparse.Namespace, device: str) -> list[Row]:
    """Time sizes of programs for one operator; processes of their own compile them first."""
    chosen = [Tile(*map(int, text.split("x"))) for text in texts]
    rows: list[Row] = []
    start = time.time()
    if not args.compile_only:
        options = [(text, k, op) for text in texts for k in args.k for op in args.ops]
        jobs = [
            subprocess.Popen(
                [
                    *(sys.executable, "-m", __spec__.name, "--compile-only", "--sizes", text),
                    *("--k", str(k), "--ops", op),
                ]
            )
            for text, k, op in options
        ]
        for job in jobs:
            job.wait()
        print(f"compiled {len(jobs)} in {time.time() - start:.1f} s", flush=True)
    for case in ["tiny"] if args.compile_only else args.cases:
        csr = kronecker(*((13, 2**18) if args.compile_only else CASES[case]), device)
        for k in args.k:
            for op in args.ops:
                for tile in chosen:
                    rows.append({"graph": case, "k": k, "op": op, "tile": str(tile)})
                    with tiled(tile):
                        function, leaves = operators(csr, k, torch.float32)[op]
                        rows[-1]["forward ms"] = timed(forward(function, leaves), 3)
                        rows[-1]["forward+backward ms"] = timed(both(function, leaves), 3)
                    if not args.compile_only:
                        print(rows[-1], flush=True)
    return rows


def tiled(tile: Tile) -> Any:
    """Set the size of all programs."""
    import contextlib

    from bevatron.kernels.graph.dot_attention import triton_launch as dot
    from bevatron.kernels.graph.graph_attention import triton_launch as gat
    from bevatron.kernels.graph.spmm import triton as product

    stack = contextlib.ExitStack()
    for module in (dot, gat, product):
        stack.enter_context(module.tiles(**dict.fromkeys(module.TILES, tile)))
    return stack


def options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="*", default=list(CASES), help="CASE, or CASE:k for one k")
    parser.add_argument("--k", nargs="*", type=int, default=[16, 128])
    ops = ["gat", "va", "va softmax", "agnn", "agnn softmax"]
    parser.add_argument("--ops", nargs="*", default=ops)
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--paper", nargs="*", choices=list(PAPER))
    parser.add_argument("--models", nargs="*", default=["VA", "AGNN", "GAT"], help="of --paper")
    parser.add_argument("--sizes", nargs="*", help="numbers x channels x warps, such as 1024x32x1")
    parser.add_argument("--compile-only", action="store_true")
    parser.add_argument("--paper-model", help="of --compile-only")
    parser.add_argument("--repeat", type=int, default=10, help="of --paper, after two warm-ups")
    parser.add_argument("--memory", action="store_true", help="peaks at nnz and at 4 nnz")
    parser.add_argument("--checked", action="store_true", help="do not compare with the reference")
    parser.add_argument(
        "--parallel", action="store_true", help="compare, and compile, in processes of their own"
    )
    parser.add_argument("--out", default=os.environ.get("OUT"))
    return parser.parse_args()


def layers(args: argparse.Namespace, device: str, save: Callable[[list[Row]], Any]) -> list[Row]:
    """Compare and time single layers; every graph and width is saved as it is done."""
    rows: list[Row] = []
    if args.parallel:
        check_in_processes(args)
    elif not args.checked:
        for k in args.k:
            rows += check(k, args.ops, device)
    if args.memory:
        rows += memory(device)
    for text in args.cases:
        case, _, only = text.partition(":")
        csr = kronecker(*CASES[case], device)
        for k in [int(only)] if only else args.k:
            rate = gather_rate(CASES[case][0], k, device)
            rows.append({"graph": case, "k": k, "op": "gather", "TB/s": rate / 1e12})
            rows += time_case(case, csr, k, args.ops, rate, args.peers)
            save(rows)
        del csr
        gc.collect()
        torch.cuda.empty_cache()
    return rows


def main() -> None:
    """Run what the options say."""
    args = options()
    device = "cuda"
    torch.cuda.init()
    name, rows = "graph/kernels", []
    folder = Path(args.out) if args.out else report.RESULTS
    write = functools.partial(report.write_result, device=device, folder=folder)
    if args.paper_model:
        csr = kronecker(13, 2**18, device)
        for call in paper_model(args.paper_model, csr, args.k[0]):
            call()
        torch.cuda.synchronize()
    elif args.sizes:
        name, rows = "graph/kernels_sizes", sizes(args.sizes, args, device)
    elif args.paper is not None:
        chosen = args.paper or list(PAPER)
        if args.parallel or args.compile_only:
            compile_paper(chosen, args.models)
        if not args.compile_only:
            paper(
                *(chosen, args.models, device, args.repeat),
                lambda rows: write("graph/paper", rows, PAPER_NOTES),
            )
        return
    else:
        rows = layers(args, device, lambda rows: write(name, rows, NOTES))
    if args.compile_only:
        return
    write(name, rows, NOTES)


if __name__ == "__main__":
    main()
