"""Fast kernels against their references: right first, then how fast and how far from the floor.

    python benchmarks/kernels.py --op channelwise_tensor_product radial_tensor_product

Every case is checked at its very shape, type and device against the float64 reference before it is
timed. Times are of CUDA-graph replays, with eager calls beside. "forward" is the operator alone,
"backward" adds the gradients by all inputs, "training" adds the gradients of those: what a step on
forces does. The floor is the larger of bytes over the copy rate and operations over the rate of
float32 arithmetic, both measured in the same run.
"""

import argparse
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import report
import torch
from torch import Tensor

from bevatron import kernels
from bevatron.kernels.channelwise_tensor_product import EdgeOrder, paths
from bevatron.maths.irreps import Irreps
from bevatron.testing import assert_close, derivatives

ATOMS, EDGES, CELL = 3072, 118_980, 256
PASSES = ("forward", "backward", "training")


@dataclass(frozen=True)
class Case:
    """One operator at one size.

    Attributes
    ----------
    op, name
        Operator and what is special about this case.
    call
        Takes ``inputs`` by name.
    inputs
        Derivatives are taken by every floating-point tensor.
    bytes, operations
        What each of `PASSES` must at least move and compute.
    tolerance
        Of the check: result, derivatives. A sum over 120 thousand edges in another order differs
        more than one over a few.
    """

    op: str
    name: str
    call: Callable[..., Tensor]
    inputs: Mapping[str, Any]
    bytes: Mapping[str, float]
    operations: Mapping[str, float] = field(default_factory=dict)
    tolerance: tuple[float, float] = (1e-6, 1e-5)


Maker = Callable[[torch.dtype], list[Case]]
CASES: dict[str, Maker] = {}
"""Operator -> its cases on the GPU in a type."""


def cases(op: str) -> Callable[[Maker], Maker]:
    """Add the cases of one operator."""

    def add(make: Maker) -> Maker:
        CASES[op] = make
        return make

    return add


def crystal_edges(atoms: int = ATOMS, edges: int = EDGES) -> Tensor:
    """Draw edges within cells of 256 atoms, sorted by receiver."""
    generator = torch.Generator().manual_seed(0)
    receivers = torch.randint(0, atoms, (edges,), generator=generator).sort().values
    senders = torch.randint(0, CELL, (edges,), generator=generator) + receivers // CELL * CELL
    return torch.stack([senders, receivers]).cuda()


HARMONICS = "0e+1o+2e+3o"
LAYERS = {
    "from 0e": "128x0e",
    "from 0e+1o": "128x0e+128x1o",
    "from 0e+1o+2e": "128x0e+128x1o+128x2e",
}


def _draw(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, dtype=dtype, device="cuda")


@cases("channelwise_tensor_product")
def channelwise_cases(dtype: torch.dtype) -> list[Case]:
    """Return the layers of MACE: 128 channels, harmonics up to l = 3."""
    edges = EdgeOrder(crystal_edges(), ATOMS, by_receiver=True)
    found = []
    for name, irreps in LAYERS.items():
        table = paths(irreps, HARMONICS, HARMONICS)
        inputs = {
            "x": _draw(dtype, ATOMS, Irreps.parse(irreps).dim),
            "harmonics": _draw(dtype, EDGES, 16),
            "weights": _draw(dtype, EDGES, table.num_weights),
        }
        x, y, w = (tensor.nbytes for tensor in inputs.values())
        out = ATOMS * table.irreps_mid.dim * dtype.itemsize
        forward, backward = x + y + w + out, 2 * (x + y + w) + out
        moved = {
            "forward": forward,
            "backward": forward + backward,
            "training": forward + backward + 3 * (x + y + w) + 2 * out,
        }
        found.append(_edge_case("channelwise_tensor_product", name, inputs, edges, irreps, moved))
    return found


@cases("radial_tensor_product")
def radial_cases(dtype: torch.dtype) -> list[Case]:
    """Return the same layers with the last radial layer, from 64 hidden numbers."""
    edges = EdgeOrder(crystal_edges(), ATOMS, by_receiver=True)
    found = []
    for name, irreps in LAYERS.items():
        table = paths(irreps, HARMONICS, HARMONICS)
        inputs = {
            "x": _draw(dtype, ATOMS, Irreps.parse(irreps).dim),
            "harmonics": _draw(dtype, EDGES, 16),
            "hidden": _draw(dtype, EDGES, 64),
            "last_weight": _draw(dtype, 64, table.num_weights) / 8,
        }
        x, y, h, last = (tensor.nbytes for tensor in inputs.values())
        out = ATOMS * table.irreps_mid.dim * dtype.itemsize
        forward, backward = x + y + h + last + out, 2 * (x + y + h + last) + out
        moved = {
            "forward": forward,
            "backward": forward + backward,
            "training": forward + backward + 3 * (x + y + h + last) + 2 * out,
        }
        # Products of [E, 64] with [64, W]: w; again w, gh, gW; again w, aw, dh, dW, gw and aW.
        product = 2.0 * EDGES * 64 * table.num_weights
        counts = {"forward": product, "backward": 4 * product, "training": 12 * product}
        case = _edge_case("radial_tensor_product", name, inputs, edges, irreps, moved)
        found.append(Case(**{**case.__dict__, "operations": counts}))
    return found


def _edge_case(
    op: str,
    name: str,
    inputs: Mapping[str, Tensor],
    edges: EdgeOrder,
    irreps: str,
    moved: Mapping[str, float],
) -> Case:
    operator = getattr(kernels, op)

    def call(**tensors: Tensor) -> Tensor:
        result: Tensor = operator(
            **tensors,
            edges=edges,
            irreps_in=irreps,
            irreps_harmonics=HARMONICS,
            irreps_out=HARMONICS,
        )
        return result

    return Case(op, name, call, inputs, moved)


def check(case: Case) -> None:
    """Compare the fast kernels with the reference in float64."""
    exact = {name: value.double().requires_grad_() for name, value in case.inputs.items()}
    with kernels.use("reference"):
        expected = {k: v.detach().cpu() for k, v in derivatives(case.call, exact).items()}
    given = {name: value.detach().requires_grad_() for name, value in case.inputs.items()}
    with kernels.use("triton"):
        actual = derivatives(case.call, given)
    for name, value in expected.items():
        assert_close(actual[name], value, case.tolerance[name != "result"], name)


def work(case: Case, which: str) -> Callable[[], Any]:
    """Return what is timed: one of `PASSES`."""
    inputs = {name: value.detach().requires_grad_() for name, value in case.inputs.items()}
    wanted = list(inputs.values())
    generator = torch.Generator(device="cuda").manual_seed(0)
    with torch.no_grad():
        g = torch.randn_like(case.call(**inputs)).requires_grad_()
    along = [
        torch.randn(v.shape, generator=generator, dtype=v.dtype, device="cuda") for v in wanted
    ]

    def forward() -> Any:
        with torch.no_grad():
            return case.call(**inputs)

    def backward() -> Any:
        return torch.autograd.grad(case.call(**inputs), wanted, g)

    def training() -> Any:
        first = torch.autograd.grad(case.call(**inputs), wanted, g, create_graph=True)
        return torch.autograd.grad(first, [g, *wanted], along)

    return {"forward": forward, "backward": backward, "training": training}[which]


def eager_ms(function: Callable[[], Any], repeats: int = 10) -> float:
    """Median time of a call."""
    times = []
    for _ in range(repeats + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[2:])


def replay_ms(function: Callable[[], Any], repeats: int = 20) -> float:
    """Median time of a replay of the captured call."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()
        function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return eager_ms(graph.replay, repeats)


def peak_mib(function: Callable[[], Any]) -> float:
    """Memory that a call takes on top of what is there."""
    function()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    function()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def ceilings() -> tuple[float, float]:
    """Measure bytes per second of a copy, read and written, and float32 operations per second."""
    source = torch.randn(2**29, device="cuda")
    target = torch.empty_like(source)
    copy = 2 * source.nbytes / replay_ms(lambda: torch.mul(source, 1.5, out=target)) * 1e3
    matrix = torch.randn(8192, 8192, device="cuda")
    return copy, 2 * 8192**3 / replay_ms(lambda: matrix @ matrix, 5) * 1e3


def measure(case: Case, rates: tuple[float, float], reference: bool) -> list[dict[str, Any]]:
    """Time all passes of a case."""
    rows = []
    for which in PASSES:
        with kernels.use("triton"):
            function = work(case, which)
            row = {"op": case.op, "case": case.name, "pass": which}
            row |= {"ms": replay_ms(function), "eager ms": eager_ms(function)}
            row["peak MiB"] = round(peak_mib(function))
        moved, count = case.bytes[which], case.operations.get(which, 0.0)
        floor = 1e3 * max(moved / rates[0], count / rates[1])
        row |= {"GB/s": moved / row["ms"] / 1e6, "floor ms": floor, "ratio": row["ms"] / floor}
        if reference:
            with kernels.use("reference"):
                function = work(case, which)
                row |= {"reference ms": eager_ms(function, 3)}
                row["reference MiB"] = round(peak_mib(function))
        rows.append(row)
        print(row, flush=True)
    return rows


def main() -> None:
    """Check, time and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--op", nargs="+", choices=sorted(CASES), default=sorted(CASES))
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float32")
    parser.add_argument("--out", type=Path, default=report.RESULTS, help="folder for the results")
    parser.add_argument("--no-reference", action="store_true", help="do not time the reference")
    options = parser.parse_args()
    torch.manual_seed(0)
    rates = ceilings()
    rows = []
    for op in options.op:
        for case in CASES[op](getattr(torch, options.dtype)):
            check(case)
            rows += measure(case, rates, not options.no_reference)
    notes = (
        f"{options.dtype}, checked against the float64 reference at these shapes. ms: CUDA-graph "
        "replays; training: forward, backward and double backward. Floor: the larger of bytes over "
        f"the copy rate ({rates[0] / 1e12:.2f} TB/s) and operations over the rate of an 8192^3 "
        f"float32 matrix product ({rates[1] / 1e12:.1f} TFLOP/s, TF32 off), measured in this run."
    )
    report.write_result("kernels", rows, notes, device="cuda", folder=options.out)


if __name__ == "__main__":
    main()
