"""Fast kernels against their references: right first, then how fast and how far from the floor.

    python -m benchmarks.kernels.run --op channelwise_tensor_product radial_tensor_product
    python -m benchmarks.kernels.run --op triangle_multiply pair_attention --peers

Operators on pairs and rows are those of `pair_cases`; what follows is of those of potentials.
Every case is checked at its very shape, type and device against the float64 reference before it is
timed, features component after component as in MACE (``ir_mul``). Times are of CUDA-graph replays,
with eager calls beside. "forward" is the operator alone,
"backward" adds the gradients by all inputs, "training" adds the gradients of those: what a step on
forces does. The floor is the larger of bytes over the copy rate and operations over the rate of
float32 arithmetic, both measured in the same run.
"""

import argparse
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from benchmarks.common import report
from benchmarks.kernels import cases_pair as pair_cases
from benchmarks.kernels import run_pair as pair_timing
from torch import Tensor

from bevatron import kernels
from bevatron.kernels.equivariant.channelwise_tensor_product import EdgeOrder, paths
from bevatron.kernels.equivariant.element_order import ElementOrder
from bevatron.kernels.equivariant.symmetric_contraction.polynomial import polynomial_of
from bevatron.maths.irreps import Irreps
from bevatron.maths.radial import bessel_parameters
from bevatron.maths.symmetric_product import symmetric_coefficients
from bevatron.testing import assert_close, derivatives

ATOMS, EDGES, CELL = 3072, 118_980, 256
DEVICE = "cuda"
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
    inner
        Inputs by which "training" takes the first derivatives, as forces are taken: all if none.
    """

    op: str
    name: str
    call: Callable[..., Tensor]
    inputs: Mapping[str, Any]
    bytes: Mapping[str, float]
    operations: Mapping[str, float] = field(default_factory=dict)
    tolerance: tuple[float, float] = (1e-6, 1e-5)
    inner: tuple[str, ...] = ()


Maker = Callable[[torch.dtype], list[Case]]
CASES: dict[str, Maker] = {}
"""Operator -> its cases on the GPU in a type."""


def cases(op: str) -> Callable[[Maker], Maker]:
    """Add the cases of one operator."""

    def add(make: Maker) -> Maker:
        CASES[op] = make
        return make

    return add


def crystal_edges() -> Tensor:
    """Draw edges within cells of 256 atoms, sorted by receiver."""
    generator = torch.Generator().manual_seed(0)
    receivers = torch.randint(0, ATOMS, (EDGES,), generator=generator).sort().values
    senders = torch.randint(0, CELL, (EDGES,), generator=generator) + receivers // CELL * CELL
    return torch.stack([senders, receivers]).to(DEVICE)


HARMONICS = "0e+1o+2e+3o"
LAYERS = {
    "from 0e": "128x0e",
    "from 0e+1o": "128x0e+128x1o",
    "from 0e+1o+2e": "128x0e+128x1o+128x2e",
}


def _draw(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, dtype=dtype, device=DEVICE)


@cases("channelwise_tensor_product")
def channelwise_cases(dtype: torch.dtype) -> list[Case]:
    """Return both layers of the paper's MACE: 128 channels, harmonics up to l = 3."""
    edges = EdgeOrder(crystal_edges(), ATOMS, by_receiver=True)
    found = []
    for name, irreps in list(LAYERS.items())[:2]:
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
    """Return these and one of a large model with the last radial layer, from 64 hidden numbers."""
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
            layout="ir_mul",
        )
        return result

    return Case(op, name, call, inputs, moved)


def _elements(present: int, known: int = 89) -> ElementOrder:
    """Draw the atoms' elements from some of those that a foundation model knows."""
    generator = torch.Generator().manual_seed(0)
    chosen = torch.randperm(known, generator=generator)[:present]
    drawn = chosen[torch.randint(0, present, (ATOMS,), generator=generator)].to(DEVICE)
    order = ElementOrder(drawn, known)
    order.counts  # noqa: B018  the reference asks the device for it, once per batch
    return order


def _all_of(moved: Mapping[str, float]) -> dict[str, float]:
    """Bytes of each pass: inputs, weights and the result, again for gradients, and again."""
    x, w, y = moved["x"], moved["w"], moved["y"]
    forward = x + w + y
    backward = forward + x + w + y + x + w
    training = backward + (x + w) + (x + w + y) + (x + w + y)
    return {"forward": forward, "backward": backward, "training": training}


@cases("symmetric_contraction")
def contraction_cases(dtype: torch.dtype) -> list[Case]:
    """Return the products of the paper's configuration and of MP-0 small, medium and large."""
    found = []
    for name, irreps, correlation, present in (
        ("corr 2, 0e+1o, 3 of 89 elements", "128x0e+128x1o", 2, 3),
        ("corr 3, 0e, 3 of 89 elements", "128x0e", 3, 3),
        ("corr 3, 0e+1o, 3 of 89 elements", "128x0e+128x1o", 3, 3),
        ("corr 3, 0e+1o, 40 of 89 elements", "128x0e+128x1o", 3, 40),
        ("corr 3, 0e+1o+2e, 3 of 89 elements", "128x0e+128x1o+128x2e", 3, 3),
    ):
        elements, orders = _elements(present), range(1, correlation + 1)
        couplings = [
            [symmetric_coefficients(3, block.l, nu) for nu in orders]
            for block in Irreps.parse(irreps)
        ]
        # As MACE makes them: in memory the channels are neighbours.
        inputs = {"a": _draw(dtype, ATOMS, 16, 128).transpose(1, 2)}
        for degree, of_degree in enumerate(couplings):
            for nu, coupling in zip(orders, of_degree, strict=True):
                inputs[f"w{degree}{nu}"] = _draw(dtype, 89, coupling.num_paths, 128)

        def call(a: Tensor, _case: Any = (irreps, correlation, elements), **w: Tensor) -> Tensor:
            irreps, correlation, elements = _case
            weights: dict[int, list[Tensor]] = {}
            for place, weight in w.items():
                weights.setdefault(int(place[1]), []).append(weight)
            return kernels.symmetric_contraction(
                a, weights, elements, irreps, correlation, layout="ir_mul"
            )

        x = inputs["a"].nbytes
        w = sum(value.nbytes for value in inputs.values()) - x
        moved = _all_of({"x": x, "w": w, "y": ATOMS * Irreps.parse(irreps).dim * dtype.itemsize})
        # A coefficient is multiplied and added once; with g and by three factors of the product;
        # and about twice that for the derivative along a direction.
        terms = polynomial_of(tuple(tuple(orders) for orders in couplings)).terms
        once = 2.0 * ATOMS * 128 * len(terms)
        counts = {"forward": once, "backward": 6 * once, "training": 16 * once}
        found.append(Case("symmetric_contraction", name, call, inputs, moved, counts))
    return found


@cases("indexed_linear")
def indexed_cases(dtype: torch.dtype) -> list[Case]:
    """Return the skip of one degree."""
    found = []
    for components, present in ((1, 3), (3, 3), (1, 40), (3, 40), (7, 3)):
        inputs = {
            "x": _draw(dtype, ATOMS, 128, components),
            "weights": _draw(dtype, 89, 128, 128),
        }
        call = partial(kernels.indexed_linear, elements=_elements(present), scale=128**-0.5)
        x = inputs["x"].nbytes
        moved = _all_of({"x": x, "w": inputs["weights"].nbytes * present / 89, "y": x})
        once = 2.0 * ATOMS * components * 128 * 128
        counts = {"forward": once, "backward": 3 * once, "training": 7 * once}
        name = f"{components} components, {present} of 89 elements"
        found.append(Case("indexed_linear", name, call, inputs, moved, counts))
    return found


@cases("equivariant_linear")
def linear_cases(dtype: torch.dtype) -> list[Case]:
    """Return the maps of a second layer: of its messages, and of features of two degrees."""
    found = []
    for name, blocks in (("messages from 0e+1o", (2, 3, 3, 2)), ("0e+1o", (1, 1))):
        width = sum((2 * degree + 1) * 128 * number for degree, number in enumerate(blocks))
        inputs = {"x": _draw(dtype, ATOMS, width)}
        inputs |= {f"w{i}": _draw(dtype, n * 128, 128) for i, n in enumerate(blocks)}

        def call(x: Tensor, _blocks: Any = blocks, **w: Tensor) -> Tensor:
            return kernels.equivariant_linear(x, list(w.values()), _blocks)

        x, *w = (value.nbytes for value in inputs.values())
        y = ATOMS * 128 * len(blocks) ** 2 * dtype.itemsize
        once = 2.0 * ATOMS * 128 * width
        counts = {"forward": once, "backward": 3 * once, "training": 7 * once}
        moved = _all_of({"x": x, "w": sum(w), "y": y})
        found.append(Case("equivariant_linear", name, call, inputs, moved, counts))
    return found


@cases("silu_linear")
def hidden_cases(dtype: torch.dtype) -> list[Case]:
    """Return a hidden layer of the radial network."""
    inputs = {"x": _draw(dtype, EDGES, 64), "weight": _draw(dtype, 64, 64) / 8}
    x, w = (value.nbytes for value in inputs.values())
    once = 2.0 * EDGES * 64 * 64
    counts = {"forward": once, "backward": 3 * once, "training": 8 * once}
    moved = _all_of({"x": x, "w": w, "y": x})
    return [Case("silu_linear", "64 to 64", kernels.silu_linear, inputs, moved, counts)]


def _per_edge(forward: int, backward: int, double: int, dtype: torch.dtype) -> dict[str, float]:
    """Bytes of each pass from the numbers that each kernel reads and writes per edge."""
    size = EDGES * dtype.itemsize
    sums = (forward, forward + backward, forward + backward + double)
    return {which: float(number * size) for which, number in zip(PASSES, sums, strict=True)}


@cases("silu")
def silu_cases(dtype: torch.dtype) -> list[Case]:
    """Return the last hidden layer's activation."""
    moved = _per_edge(2 * 64, 3 * 64, 5 * 64, dtype)
    return [Case("silu", "64", kernels.silu, {"x": _draw(dtype, EDGES, 64)}, moved)]


@cases("spherical_harmonics")
def harmonics_cases(dtype: torch.dtype) -> list[Case]:
    """Return those of degrees up to 3."""
    call = partial(kernels.spherical_harmonics, 3)
    inputs = {"vectors": _draw(dtype, EDGES, 3)}
    moved = _per_edge(3 + 16, 6 + 16, 9 + 2 * 16, dtype)
    return [Case("spherical_harmonics", "l up to 3", call, inputs, moved)]


def _basis_constants(dtype: torch.dtype) -> list[Tensor]:
    """Frequencies, prefactor and r_max of the paper's 8 functions."""
    frequencies, prefactor = bessel_parameters(4.5, 8)
    return [t.to(DEVICE, dtype) for t in (frequencies, prefactor, torch.tensor(4.5))]


def _lengths(dtype: torch.dtype) -> Tensor:
    return 1.5 + 2.9 * torch.rand(EDGES, dtype=dtype, device=DEVICE)


@cases("radial_basis")
def basis_cases(dtype: torch.dtype) -> list[Case]:
    """Return the basis of the paper's configuration; derivatives are by lengths alone."""
    constants = _basis_constants(dtype)

    def call(lengths: Tensor) -> Tensor:
        return kernels.radial_basis(lengths, *(t.to(lengths.dtype) for t in constants), 5)

    inputs = {"lengths": _lengths(dtype)}
    moved = _per_edge(1 + 8, 2 + 8, 3 + 2 * 8, dtype)
    return [Case("radial_basis", "8 functions", call, inputs, moved)]


@cases("radial_network")
def network_cases(dtype: torch.dtype) -> list[Case]:
    """Return all hidden layers of a layer's radial network; "training" is by lengths first."""
    constants, widths = _basis_constants(dtype), (8, 64, 64, 64)

    def call(lengths: Tensor, **weights: Tensor) -> Tensor:
        basis = (t.to(lengths.dtype) for t in constants)
        return kernels.radial_network(lengths, *basis, 5, list(weights.values()))

    inputs = {"lengths": _lengths(dtype)}
    for i, (n, m) in enumerate(pairwise(widths)):
        inputs[f"w{i + 1}"] = _draw(dtype, n, m) * (1.7 / n**0.5)
    # Numbers of an edge. Forward: r, h. Backward: slope h' too; p, h' and what is by r; r, p.
    # Training, in place of the last: u, h', u h'; u, p, q = u p; r, q and what is by r.
    moved = _per_edge(1 + 64, 2 + 4 * 64, 3 + 4 * 64, dtype)
    # Products of [E, 64] with [64, 64], those with the basis an eighth. Forward: 1/8, 1, 1.
    # Backward, as the kernels go: each twice, for h'; both kernels repeat what is below them (4.5);
    # two by each layer and two through the upper ones. Training: 1/8 more for what is by r.
    once = 2.0 * EDGES * 64 * 64
    counts = {"forward": 2.125 * once, "backward": 17 * once, "training": 17.125 * once}
    # The reference in float32 has errors of 9e-7 at so many lengths: phases up to 25 are rounded.
    limits, name = (2e-6, 1e-5), "8, 64, 64, 64"
    return [Case("radial_network", name, call, inputs, moved, counts, limits, inner=("lengths",))]


@cases("edge_vectors")
def vector_cases(dtype: torch.dtype) -> list[Case]:
    """Return the vectors of twelve crystals; second derivatives have no shifts."""
    order = EdgeOrder(crystal_edges(), ATOMS, by_receiver=True)
    structures = torch.arange(ATOMS, device=DEVICE) // CELL
    cells = 14 * torch.eye(3, dtype=dtype, device=DEVICE).repeat(-(-ATOMS // CELL), 1, 1)
    shifts = torch.randint(-1, 2, (EDGES, 3), device=DEVICE).to(dtype)

    def call(positions: Tensor) -> Tensor:
        given = (tensor.to(positions) for tensor in (shifts, cells))
        return kernels.edge_vectors(positions, order, *given, structures)

    inputs = {"positions": 4 * _draw(dtype, ATOMS, 3)}
    # Looked up rows once; indices of 8 bytes: both ends, structures; places by sender, pointers.
    size = dtype.itemsize
    forward = size * (6 * EDGES + 3 * ATOMS + cells.numel()) + 8 * (2 * EDGES + ATOMS)
    sums = size * 3 * (EDGES + ATOMS) + 8 * (EDGES + 2 * ATOMS)
    again = size * 3 * (EDGES + ATOMS) + 8 * 2 * EDGES
    moved = {"forward": forward, "backward": forward + sums, "training": forward + sums + again}
    return [Case("edge_vectors", "12 crystals", call, inputs, moved)]


@cases("scatter_sum")
def sum_cases(dtype: torch.dtype) -> list[Case]:
    """Return energies of atoms into structures, and of edges into atoms in two orders."""
    receivers = crystal_edges()[1]
    mixed = receivers[torch.randperm(EDGES, device=DEVICE)]
    structures = torch.arange(ATOMS, device=DEVICE) // CELL
    found = []
    for name, index, ordered in (
        ("atoms into structures", structures, True),
        ("edges into atoms", receivers, True),
        ("edges into atoms, any order", mixed, False),
    ):
        segments = -(-ATOMS // CELL) if index is structures else ATOMS
        call = partial(kernels.scatter_sum, index=index, num_segments=segments, ordered=ordered)
        rows = dtype.itemsize * (len(index) + segments)
        forward = rows + 8 * (segments + 1) + (0 if ordered else 8 * len(index))
        backward = forward + rows + 8 * len(index)
        moved = {"forward": forward, "backward": backward, "training": backward + forward}
        inputs = {"values": _draw(dtype, len(index))}
        found.append(Case("scatter_sum", name, call, inputs, moved))
    return found


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
    wanted, inner = list(inputs.values()), [inputs[name] for name in case.inner or inputs]
    generator = torch.Generator(device=DEVICE).manual_seed(0)
    with torch.no_grad():
        g = torch.randn_like(case.call(**inputs)).requires_grad_()
    along = [torch.empty_like(v).normal_(generator=generator) for v in inner]

    def forward() -> Any:
        with torch.no_grad():
            return case.call(**inputs)

    def backward() -> Any:
        return torch.autograd.grad(case.call(**inputs), wanted, g)

    def training() -> Any:
        first = torch.autograd.grad(case.call(**inputs), inner, g, create_graph=True)
        # What is linear has no second derivative by its input.
        return torch.autograd.grad(first, [g, *wanted], along, allow_unused=True)

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
    known = sorted({*CASES, *pair_cases.CASES})
    parser.add_argument("--op", nargs="+", choices=known, default=known)
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32", "float64"])
    parser.add_argument("--out", type=Path, default=report.RESULTS, help="folder for the results")
    parser.add_argument("--no-reference", action="store_true", help="do not time the reference")
    parser.add_argument("--peers", nargs="*", help="of pair operators: time all, or those named")
    parser.add_argument("--cases", nargs="+", default=(), help="of pair operators: names, or other")
    options = parser.parse_args()
    torch.manual_seed(0)
    on_pairs = [op for op in options.op if op in pair_cases.CASES]
    if on_pairs:
        dtype = getattr(torch, options.dtype or "bfloat16")
        pair_timing.run(on_pairs, dtype, options.peers, options.cases, options.out)
    of_potentials = [op for op in options.op if op in CASES]
    if of_potentials:
        time_potentials(of_potentials, options)


def time_potentials(ops: list[str], options: argparse.Namespace) -> None:
    """Check and time the operators of potentials; write what there is after each."""
    rates, name = ceilings(), options.dtype or "float32"
    rows: list[dict[str, Any]] = []
    notes = (
        f"{name}, checked against the float64 reference at these shapes. ms: CUDA-graph "
        "replays; training: forward, backward and double backward. Floor: the larger of bytes over "
        f"the copy rate ({rates[0] / 1e12:.2f} TB/s) and operations over the rate of an 8192^3 "
        f"float32 matrix product ({rates[1] / 1e12:.1f} TFLOP/s, TF32 off), measured in this run."
    )
    result = f"kernels/{'-'.join(ops) if set(ops) != set(CASES) else 'mace'}"
    for op in ops:
        for case in CASES[op](getattr(torch, name)):
            check(case)
            rows += measure(case, rates, not options.no_reference)
        report.write_result(result, rows, notes, device="cuda", folder=options.out)


if __name__ == "__main__":
    main()
