"""Times training steps of GPS++ on one GPU, compared with plain PyTorch and PyTorch Geometric.

    python -m benchmarks.gpspp.molecules pcqm4mv2-2k.csv molecules.npz      (once, needs rdkit)
    python -m benchmarks.gpspp.step molecules.npz [--models gpspp-16 gpspp-16-mpnn]
                                    [--molecules 2048] [--profile]
                                    [--peers compiled eager pyg pyg-compiled]
    python -m benchmarks.gpspp.step --collect rows      (joins what several calls left in --out)

A step is corruption of the inputs, forward, backward, clipping of every gradient and Adam, with all
dropouts and losses of the published training, matmuls in bfloat16. "captured" is what
`bevatron train` runs: padded on the host, copied, replayed as CUDA graphs. Before anything is timed
loss and gradients are compared with those of the reference operators in float32 from the same
random numbers.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.common import trace
from benchmarks.common.arguments import read_all, script_parser
from benchmarks.common.report import write_result
from benchmarks.common.timing import median_ms, memory_with_graphs
from benchmarks.gpspp.molecules import load

from bevatron import kernels
from bevatron.data.padding import pad_molecules
from bevatron.data.padding.size_buckets import choose_shapes
from bevatron.data.samples import MoleculeBatch, collate_molecules
from bevatron.models.gpspp import GPSPlusPlusTask, build
from bevatron.parallel.mesh import Mesh
from bevatron.train.capture.step import CapturedStep
from bevatron.train.loop import begin_state
from bevatron.train.run import Run
from bevatron.train.settings import OptimConfig, Settings, TrainConfig
from bevatron.train.step import LaunchedStep, train_step

OPTIM = OptimConfig(
    algorithm="adam", lr=4e-4, weight_decay=0.0, clip=5.0, clip_norm="tensor", ema=None
)
TRAIN = TrainConfig(dtype="float32", device="cuda", autocast="bfloat16", explode_factor=None)
GFLOP_PER_MOLECULE = 4.2
"""Of a step of the hybrid without the savings of split layers (see the specification)."""
CLASSES = {
    "attention": ("molecule_attention",),
    "matmuls": ("gemm", "cutlass", "nvjet", "xmma", "splitK", "cublas"),
    "norms": ("norm_gelu", "residual_norm", "add_shares"),
    "sums": ("neighbour_sums", "segment_"),
    "adam": ("adam", "square", "verdict"),
    "reductions": ("reduce",),
    "copies": ("copy", "memcpy", "memset", "fill", "cat", "Memcpy", "Memset"),
}
"""Parts of kernels' names; what fits nowhere is pointwise."""


def draw_batch(path: Path, count: int) -> tuple[MoleculeBatch, Any]:
    """Collate a number of molecules, drawn with repeats; also return a shape that holds them."""
    samples = load(path)
    picked = np.random.default_rng(0).permutation(np.arange(count) % len(samples))
    batch = collate_molecules([samples[i] for i in picked], picked, [1.0] * count)
    rule = batch.padding
    return batch, choose_shapes(rule, np.array([rule.size_of(batch.sizes)])).shapes[0]


def compare(name: str, batch: MoleculeBatch, shape: Any) -> dict[str, float]:
    """Compare loss and gradients with those of the reference in float32, dropout included."""
    torch.manual_seed(0)
    model = build(name).cuda()
    task = GPSPlusPlusTask(model.config)
    moved = pad_molecules(batch, shape).to("cuda", torch.float32)
    normalisers = {k: v.cuda() for k, v in task.normalisers(batch).items()}
    parameters = [p for p in model.parameters() if p.requires_grad]

    def run(implementation: str, *, narrow: bool) -> tuple[float, torch.Tensor]:
        torch.manual_seed(1)
        with kernels.use(implementation), torch.autocast("cuda", torch.bfloat16, narrow):
            loss = task.loss(model, moved, normalisers).total
        found = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
        return float(loss.detach()), torch.cat([g.flatten() for g in found])

    exact, gradient = run("reference", narrow=False)
    result = {}
    for label, implementation, narrow in (
        ("fp32 kernels", "triton", False),
        ("bf16 reference", "reference", True),
        ("bf16 kernels", "triton", True),
    ):
        loss, found = run(implementation, narrow=narrow)
        result[f"loss, {label}"] = abs(loss - exact) / abs(exact)
        result[f"gradient, {label}"] = float((found - gradient).norm() / gradient.norm())
    return result


def our_step(name: str, batch: MoleculeBatch, mode: str) -> Callable[[], object]:
    """Return what launches one step as the trainer does: captured, eager or by the reference."""
    torch.manual_seed(0)
    model = build(name)
    ones = {"graphs": np.array([1])}
    sizes = {k: np.array([v]) for k, v in batch.sizes.items() if k != "graphs"} | ones
    task = GPSPlusPlusTask(model.config)
    settings = Settings(optim=OPTIM, train=TRAIN)
    run = Run(model, task, [], sizes, Path("unused"), settings)  # type: ignore[arg-type]
    mesh = Mesh(device=torch.device("cuda"))
    state = begin_state(run, mesh, None)
    implementation = "reference" if mode == "reference" else "triton"
    if mode != "captured":
        moved = batch.to("cuda", torch.float32)

        def eager() -> object:
            with kernels.use(implementation):
                return train_step(run, state, state.model, [moved], lr=1e-4, mesh=mesh)

        return eager
    captured = CapturedStep(run, state, mesh)
    waiting: list[LaunchedStep] = []

    def launch() -> object:
        with kernels.use(implementation):
            waiting.append(captured([batch], lr=1e-4))
        return waiting.pop(0).result() if len(waiting) > 1 else None

    return launch


def measure(step: Callable[[], object], repeats: int, warm_up: int = 3) -> dict[str, float]:
    """Time steps in ms, the median of several runs of five, and the peak memory in MiB."""
    for _ in range(warm_up):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    found = median_ms(step, repeats, warm_up=0, together=5)
    peak = memory_with_graphs(torch.cuda.max_memory_allocated()) / 2**20
    return {"ms": round(found, 2), "peak MiB": round(peak)}


def profile(step: Callable[[], object], steps: int = 3) -> dict[str, Any]:
    """List where the GPU's time goes: ms per step by class and by kernel, launches, idle share."""
    profiler = trace.profiled(step, steps)
    found, listed = trace.summary(profiler, steps), trace.by_kernel(profiler, steps)
    classes: dict[str, float] = defaultdict(float)
    for line in listed:
        name = str(line["kernel"])
        kind = next((k for k, ws in CLASSES.items() if any(w in name for w in ws)), "pointwise")
        classes[kind] += float(line["ms"])
    return {
        "launches": round(found["kernels"]),
        "idle": round(found["idle %"] / 100, 4),
        "classes": {k: round(v, 3) for k, v in sorted(classes.items(), key=lambda i: -i[1])},
        "kernels": [
            {"kernel": str(line["kernel"])[:90], "ms": line["ms"], "times": int(line["launches"])}
            for line in listed[:90]
        ],
    }


def row_of(model: str, what: str, found: Mapping[str, float], molecules: int) -> dict[str, Any]:
    speed = molecules / found["ms"] * 1e3
    return {
        "model": model,
        "what": what,
        "molecules": molecules,
        **found,
        "molecules/s": round(speed),
        "TFLOP/s": round(speed * GFLOP_PER_MOLECULE / 1e3) if model == "gpspp-16" else "",
    }


def peer_row(peer: str, batch: MoleculeBatch, repeats: int) -> dict[str, Any]:
    """Measure one of `gpspp_peers`."""
    from benchmarks.gpspp.peers import peer_step

    torch.compiler.reset()  # else the second size is compiled for any size
    step, label = peer_step(peer, batch)
    row = row_of("peer", label, measure(step, repeats, 5), batch.num_graphs)
    del step
    torch.cuda.empty_cache()
    return row


def collect(folder: Path) -> None:
    """Join the rows of several calls, the fastest first, and write the result."""
    found = read_all(folder, "gpspp/step.json")
    rows = [row for result in found for row in result["rows"]]
    rows.sort(key=lambda row: (row["molecules"], -row["molecules/s"]))
    compiled = {
        row["molecules"]: row["molecules/s"] for row in rows if "torch.compile" in row["what"]
    }
    for row in rows:
        if row["molecules"] in compiled:
            row["times the compiled"] = round(row["molecules/s"] / compiled[row["molecules"]], 2)
    extra = {key: value for result in found for key, value in result.get("extra", {}).items()}
    machine = {key: found[0][key] for key in ("hardware", "versions")}
    write_result("gpspp/step", rows, __doc__ or "", extra=extra, measured_on=machine)


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("data", nargs="?", type=Path)
    parser.add_argument("--models", nargs="*", default=["gpspp-16", "gpspp-16-mpnn"])
    parser.add_argument("--modes", nargs="*", default=["captured", "eager", "reference"])
    parser.add_argument("--molecules", nargs="*", type=int, default=[2048])
    parser.add_argument("--peers", nargs="*", default=[])
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--collect", type=Path)
    arguments = parser.parse_args()
    if arguments.collect:
        collect(arguments.collect)
        return
    rows: list[dict[str, Any]] = []
    extra: dict[str, Any] = {}

    def write() -> None:
        options = {} if arguments.out is None else {"folder": arguments.out}
        write_result("gpspp/step", rows, __doc__ or "", device="cuda", extra=extra, **options)

    small, shape = draw_batch(arguments.data, 256)
    for name in arguments.models:
        extra[f"{name} compared"] = compare(name, small, shape)
        print(name, extra[f"{name} compared"], flush=True)
    for name in arguments.models:
        for count in arguments.molecules:
            batch, _ = draw_batch(arguments.data, count)
            for mode in arguments.modes:
                step = our_step(name, batch, mode)
                rows.append(row_of(name, mode, measure(step, arguments.repeats), count))
                print(rows[-1], flush=True)
                write()
                if arguments.profile and mode == "captured":
                    extra[f"{name} {count} profile"] = found = profile(step)
                    print({k: v for k, v in found.items() if k != "kernels"}, flush=True)
                    for line in found["kernels"]:
                        print(f"{line['ms']:8.3f} {line['times']:5d} {line['kernel']}")
                del step
                torch.cuda.empty_cache()
    for peer in arguments.peers:
        for count in arguments.molecules:
            rows.append(peer_row(peer, draw_batch(arguments.data, count)[0], arguments.repeats))
            print(rows[-1], flush=True)
            write()
    write()


if __name__ == "__main__":
    main()
