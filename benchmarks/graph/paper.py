"""Three layers of VA, AGNN and GAT on the graphs of the paper's Figure 6 (Besta et al., SC 2023).

    python -m benchmarks.graph.paper [6a 6e] [--models GAT] [--parallel]

Inference and training on one GPU, called from Python; times are medians. Kronecker graphs are made
on the device. With ``--parallel`` every model and width is first compiled in a process of its own.
"""

import argparse
import functools
import gc
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from benchmarks.common import report
from benchmarks.common.arguments import add_out
from benchmarks.common.timing import median_ms, peak_mib
from benchmarks.graph.kronecker import kronecker
from torch import Tensor

from bevatron.kernels import Csr, dot_attention, graph_attention

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
    "Three layers k -> k with ReLU, fp32, one head, on one GPU; training is forward and backward "
    "pass without an optimiser, gradients of all weights, called from Python. Medians. nnz: "
    "distinct entries (the paper counts the edges that are drawn). VA and AGNN divide scores by "
    "the mean degree, without which three layers of VA end in infinities. Peak: of training, above "
    "graph and inputs; graph: both orders of its entries, int32."
)


def paper(
    names: list[str], models: list[str], device: str, repeat: int, save: Callable[[list[Row]], Any]
) -> None:
    """Time three layers of VA, AGNN and GAT on the graphs of Figure 6, inference and training.

    The largest graphs come last, and every configuration is saved when done.
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
            tensors = csr.row_ptr, csr.col, csr.col_ptr, csr.row_of
            row = {
                "graph": name,
                "nnz": csr.nnz,
                "k": k,
                "op": model,
                "forward ms": median_ms(infer, repeat),
                "training ms": median_ms(train, repeat),
                "peak GiB": peak_mib(train) / 1024,
                "graph GiB": sum(tensor.nbytes for tensor in tensors) / 2**30,
            }
            print(row, flush=True)
            rows.append(row)
            del infer, train
        save(rows)


def compile_paper(names: list[str], models: list[str]) -> None:
    """Fill the kernel cache, each model and width in a separate process."""
    start = time.time()
    widths = sorted({PAPER[name][2] for name in names})
    command = [sys.executable, "-m", "benchmarks.graph.paper", "--compile"]
    jobs = [subprocess.Popen([*command, model, str(k)]) for model in models for k in widths]
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("graphs", nargs="*", metavar="GRAPH", help=f"of {', '.join(PAPER)}")
    parser.add_argument("--models", nargs="*", default=["VA", "AGNN", "GAT"])
    parser.add_argument("--repeat", type=int, default=10, help="after two warm-ups")
    parser.add_argument("--parallel", action="store_true", help="compile in processes first")
    parser.add_argument("--compile", nargs=2, metavar=("MODEL", "K"), help=argparse.SUPPRESS)
    add_out(parser)
    options = parser.parse_args()
    if unknown := set(options.graphs) - set(PAPER):
        parser.error(f"{', '.join(sorted(unknown))}: expected of {', '.join(PAPER)}")
    if options.compile:
        model, k = options.compile
        for call in paper_model(model, kronecker(13, 2**18, "cuda"), int(k)):
            call()
        torch.cuda.synchronize()
        return
    chosen = options.graphs or list(PAPER)
    if options.parallel:
        compile_paper(chosen, options.models)
    write = functools.partial(
        report.write_result, "graph/paper", notes=NOTES, device="cuda", folder=options.out
    )
    paper(chosen, options.models, "cuda", options.repeat, write)


if __name__ == "__main__":
    main()
