"""Operators of potentials at the sizes of MACE's published configuration.

Features are component after component as in MACE (``ir_mul``). "forward" is the operator alone,
"backward" adds the gradients of all inputs, "training" adds the gradients of those, like a step on
forces.
"""

from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from benchmarks.kernels.cases import Case, Family, Inputs, Row, Setup, Work, cases
from benchmarks.kernels.checks import against_reference
from torch import Tensor

from bevatron import kernels
from bevatron.kernels.equivariant.channelwise_tensor_product import EdgeOrder, paths
from bevatron.kernels.equivariant.element_order import ElementOrder
from bevatron.kernels.equivariant.symmetric_contraction.polynomial import polynomial_of
from bevatron.maths.irreps import Irreps
from bevatron.maths.radial import bessel_parameters
from bevatron.maths.symmetric_product import symmetric_coefficients

PASSES = ("forward", "backward", "training")


def table(rows: list[Row]) -> list[Row]:
    """Put the times of the reference into the row of the operator."""
    found: dict[tuple[str, ...], Row] = {}
    for row in rows:
        one = found.setdefault((row["op"], row["case"], row.get("type", ""), row["pass"]), {})
        if row["who"] == "reference":
            one |= {"reference ms": row["eager ms"], "reference MiB": row["MiB"]}
        else:
            one |= {("peak MiB" if k == "MiB" else k): v for k, v in row.items() if k != "who"}
    return list(found.values())


EQUIVARIANT = Family(
    "equivariant",
    "kernels/mace",
    "{dtype}, checked against the float64 reference at these shapes. ms: CUDA-graph replays; "
    "training: forward, backward and double backward. Floor: the larger of bytes over the copy "
    "rate ({copy:.2f} TB/s) and operations over the rate of an 8192^3 float32 matmul "
    "({matmul:.1f} TFLOP/s, TF32 off), measured in this run.",
    reference=True,
    table=table,
)


class Crystals(NamedTuple):
    """Numbers of atoms and edges of a batch of crystals, and atoms of each."""

    atoms: int
    edges: int
    cell: int


def crystals(setup: Setup) -> Crystals:
    """Return the sizes of the batch."""
    return Crystals(24, 130, 8) if setup.tiny else Crystals(3072, 118_980, 256)


def given(inputs: Inputs, _seed: int) -> Inputs:
    """Return inputs that ignore the seed."""
    return {name: value.detach() for name, value in inputs.items()}


def case_of(
    op: str,
    name: str,
    call: Callable[..., Tensor],
    inputs: Inputs,
    moved: Mapping[str, float],
    operations: Mapping[str, float] | None = None,
    **options: Any,
) -> Case:
    """Make a case of the bytes and operations of each pass."""
    counts = operations or {}
    least = {which: Work(float(moved[which]), counts.get(which, 0.0)) for which in PASSES}
    return Case(op, name, partial(given, inputs), call, least, against_reference, **options)


def crystal_edges(setup: Setup) -> Tensor:
    """Draw edges within cells of 256 atoms, sorted by receiver."""
    crystal = crystals(setup)
    generator = torch.Generator().manual_seed(0)
    receivers = torch.randint(0, crystal.atoms, (crystal.edges,), generator=generator).sort().values
    senders = (
        torch.randint(0, crystal.cell, (crystal.edges,), generator=generator)
        + receivers // crystal.cell * crystal.cell
    )
    return torch.stack([senders, receivers]).to(setup.device)


HARMONICS = "0e+1o+2e+3o"
LAYERS = {
    "from 0e": "128x0e",
    "from 0e+1o": "128x0e+128x1o",
    "from 0e+1o+2e": "128x0e+128x1o+128x2e",
}


def _draw(setup: Setup, *shape: int) -> Tensor:
    return torch.randn(shape, dtype=setup.dtype, device=setup.device)


def _of_product(read: int, out: int) -> dict[str, float]:
    """Return the bytes that a product over edges moves in each pass, of its inputs' and its own."""
    forward, backward = read + out, 2 * read + out
    return {
        "forward": forward,
        "backward": forward + backward,
        "training": forward + backward + 3 * read + 2 * out,
    }


@cases("channelwise_tensor_product", EQUIVARIANT)
def channelwise_cases(setup: Setup) -> list[Case]:
    """Return both layers of the paper's MACE: 128 channels, harmonics up to l = 3."""
    crystal = crystals(setup)
    edges = EdgeOrder(crystal_edges(setup), crystal.atoms, by_receiver=True)
    found = []
    for name, irreps in list(LAYERS.items())[:2]:
        table = paths(irreps, HARMONICS, HARMONICS)
        inputs = {
            "x": _draw(setup, crystal.atoms, Irreps.parse(irreps).dim),
            "harmonics": _draw(setup, crystal.edges, 16),
            "weights": _draw(setup, crystal.edges, table.num_weights),
        }
        out = crystal.atoms * table.irreps_mid.dim * setup.dtype.itemsize
        moved = _of_product(sum(tensor.nbytes for tensor in inputs.values()), out)
        found.append(_edge_case("channelwise_tensor_product", name, inputs, edges, irreps, moved))
    return found


@cases("radial_tensor_product", EQUIVARIANT)
def radial_cases(setup: Setup) -> list[Case]:
    """Return the same with the last radial layer (64 hidden features), and a large model's."""
    crystal = crystals(setup)
    edges = EdgeOrder(crystal_edges(setup), crystal.atoms, by_receiver=True)
    found = []
    for name, irreps in LAYERS.items():
        table = paths(irreps, HARMONICS, HARMONICS)
        inputs = {
            "x": _draw(setup, crystal.atoms, Irreps.parse(irreps).dim),
            "harmonics": _draw(setup, crystal.edges, 16),
            "hidden": _draw(setup, crystal.edges, 64),
            "last_weight": _draw(setup, 64, table.num_weights) / 8,
        }
        out = crystal.atoms * table.irreps_mid.dim * setup.dtype.itemsize
        moved = _of_product(sum(tensor.nbytes for tensor in inputs.values()), out)
        # Matmuls of [E, 64] with [64, W]: w; again w, gh, gW; again w, aw, dh, dW, gw and aW.
        product = 2.0 * crystal.edges * 64 * table.num_weights
        counts = {"forward": product, "backward": 4 * product, "training": 12 * product}
        case = _edge_case("radial_tensor_product", name, inputs, edges, irreps, moved, counts)
        found.append(case)
    return found


def _edge_case(
    op: str,
    name: str,
    inputs: Mapping[str, Tensor],
    edges: EdgeOrder,
    irreps: str,
    moved: Mapping[str, float],
    operations: Mapping[str, float] | None = None,
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

    return case_of(op, name, call, inputs, moved, operations)


def _elements(setup: Setup, present: int, known: int = 89) -> ElementOrder:
    """Draw the atoms' elements from some of those that a foundation model knows."""
    crystal = crystals(setup)
    generator = torch.Generator().manual_seed(0)
    chosen = torch.randperm(known, generator=generator)[:present]
    drawn = chosen[torch.randint(0, present, (crystal.atoms,), generator=generator)].to(
        setup.device
    )
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


@cases("symmetric_contraction", EQUIVARIANT)
def contraction_cases(setup: Setup) -> list[Case]:
    """Return the contractions of the paper's configuration and of MP-0 small, medium and large."""
    crystal = crystals(setup)
    found = []
    for name, irreps, correlation, present in (
        ("corr 2, 0e+1o, 3 of 89 elements", "128x0e+128x1o", 2, 3),
        ("corr 3, 0e, 3 of 89 elements", "128x0e", 3, 3),
        ("corr 3, 0e+1o, 3 of 89 elements", "128x0e+128x1o", 3, 3),
        ("corr 3, 0e+1o, 40 of 89 elements", "128x0e+128x1o", 3, 40),
        ("corr 3, 0e+1o+2e, 3 of 89 elements", "128x0e+128x1o+128x2e", 3, 3),
    ):
        elements, orders = _elements(setup, present), range(1, correlation + 1)
        couplings = [
            [symmetric_coefficients(3, block.l, nu) for nu in orders]
            for block in Irreps.parse(irreps)
        ]
        # As MACE makes them: in memory the channels are neighbours.
        inputs = {"a": _draw(setup, crystal.atoms, 16, 128).transpose(1, 2)}
        for degree, of_degree in enumerate(couplings):
            for nu, coupling in zip(orders, of_degree, strict=True):
                inputs[f"w{degree}{nu}"] = _draw(setup, 89, coupling.num_paths, 128)

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
        moved = _all_of(
            {"x": x, "w": w, "y": crystal.atoms * Irreps.parse(irreps).dim * setup.dtype.itemsize}
        )
        # A coefficient is multiplied and added once; with g and by three factors of the product;
        # and about twice that for the derivative along a direction.
        terms = polynomial_of(tuple(tuple(orders) for orders in couplings)).terms
        once = 2.0 * crystal.atoms * 128 * len(terms)
        counts = {"forward": once, "backward": 6 * once, "training": 16 * once}
        found.append(case_of("symmetric_contraction", name, call, inputs, moved, counts))
    return found


@cases("indexed_linear", EQUIVARIANT)
def indexed_cases(setup: Setup) -> list[Case]:
    """Return the skip of one degree."""
    crystal = crystals(setup)
    found = []
    for components, present in ((1, 3), (3, 3), (1, 40), (3, 40), (7, 3)):
        inputs = {
            "x": _draw(setup, crystal.atoms, 128, components),
            "weights": _draw(setup, 89, 128, 128),
        }
        call = partial(kernels.indexed_linear, elements=_elements(setup, present), scale=128**-0.5)
        x = inputs["x"].nbytes
        moved = _all_of({"x": x, "w": inputs["weights"].nbytes * present / 89, "y": x})
        once = 2.0 * crystal.atoms * components * 128 * 128
        counts = {"forward": once, "backward": 3 * once, "training": 7 * once}
        name = f"{components} components, {present} of 89 elements"
        found.append(case_of("indexed_linear", name, call, inputs, moved, counts))
    return found


@cases("equivariant_linear", EQUIVARIANT)
def linear_cases(setup: Setup) -> list[Case]:
    """Return the maps of a second layer: of its messages, and of features of two degrees."""
    crystal = crystals(setup)
    found = []
    for name, blocks in (("messages from 0e+1o", (2, 3, 3, 2)), ("0e+1o", (1, 1))):
        width = sum((2 * degree + 1) * 128 * number for degree, number in enumerate(blocks))
        inputs = {"x": _draw(setup, crystal.atoms, width)}
        inputs |= {f"w{i}": _draw(setup, n * 128, 128) for i, n in enumerate(blocks)}

        def call(x: Tensor, _blocks: Any = blocks, **w: Tensor) -> Tensor:
            return kernels.equivariant_linear(x, list(w.values()), _blocks)

        x, *w = (value.nbytes for value in inputs.values())
        y = crystal.atoms * 128 * len(blocks) ** 2 * setup.dtype.itemsize
        once = 2.0 * crystal.atoms * 128 * width
        counts = {"forward": once, "backward": 3 * once, "training": 7 * once}
        moved = _all_of({"x": x, "w": sum(w), "y": y})
        found.append(case_of("equivariant_linear", name, call, inputs, moved, counts))
    return found


@cases("silu_linear", EQUIVARIANT)
def hidden_cases(setup: Setup) -> list[Case]:
    """Return a hidden layer of the radial network."""
    crystal = crystals(setup)
    inputs = {"x": _draw(setup, crystal.edges, 64), "weight": _draw(setup, 64, 64) / 8}
    x, w = (value.nbytes for value in inputs.values())
    once = 2.0 * crystal.edges * 64 * 64
    counts = {"forward": once, "backward": 3 * once, "training": 8 * once}
    moved = _all_of({"x": x, "w": w, "y": x})
    return [case_of("silu_linear", "64 to 64", kernels.silu_linear, inputs, moved, counts)]


def _per_edge(forward: int, backward: int, double: int, setup: Setup) -> dict[str, float]:
    """Bytes of each pass from the numbers that each kernel reads and writes per edge."""
    crystal = crystals(setup)
    size = crystal.edges * setup.dtype.itemsize
    sums = (forward, forward + backward, forward + backward + double)
    return {which: float(number * size) for which, number in zip(PASSES, sums, strict=True)}


@cases("silu", EQUIVARIANT)
def silu_cases(setup: Setup) -> list[Case]:
    """Return the last hidden layer's activation."""
    crystal = crystals(setup)
    moved = _per_edge(2 * 64, 3 * 64, 5 * 64, setup)
    return [case_of("silu", "64", kernels.silu, {"x": _draw(setup, crystal.edges, 64)}, moved)]


@cases("spherical_harmonics", EQUIVARIANT)
def harmonics_cases(setup: Setup) -> list[Case]:
    """Return those of degrees up to 3."""
    crystal = crystals(setup)
    call = partial(kernels.spherical_harmonics, 3)
    inputs = {"vectors": _draw(setup, crystal.edges, 3)}
    moved = _per_edge(3 + 16, 6 + 16, 9 + 2 * 16, setup)
    return [case_of("spherical_harmonics", "l up to 3", call, inputs, moved)]


def _basis_constants(setup: Setup) -> list[Tensor]:
    """Frequencies, prefactor and r_max of the paper's 8 functions."""
    frequencies, prefactor = bessel_parameters(4.5, 8)
    return [t.to(setup.device, setup.dtype) for t in (frequencies, prefactor, torch.tensor(4.5))]


def _lengths(setup: Setup) -> Tensor:
    crystal = crystals(setup)
    return 1.5 + 2.9 * torch.rand(crystal.edges, dtype=setup.dtype, device=setup.device)


@cases("radial_basis", EQUIVARIANT)
def basis_cases(setup: Setup) -> list[Case]:
    """Return the basis of the paper's configuration; derivatives are by lengths alone."""
    constants = _basis_constants(setup)

    def call(lengths: Tensor) -> Tensor:
        return kernels.radial_basis(lengths, *(t.to(lengths.dtype) for t in constants), 5)

    inputs = {"lengths": _lengths(setup)}
    moved = _per_edge(1 + 8, 2 + 8, 3 + 2 * 8, setup)
    return [case_of("radial_basis", "8 functions", call, inputs, moved)]


@cases("radial_network", EQUIVARIANT)
def network_cases(setup: Setup) -> list[Case]:
    """Return all hidden layers of a layer's radial network; "training" is by lengths first."""
    crystal = crystals(setup)
    constants, widths = _basis_constants(setup), (8, 64, 64, 64)

    def call(lengths: Tensor, **weights: Tensor) -> Tensor:
        basis = (t.to(lengths.dtype) for t in constants)
        return kernels.radial_network(lengths, *basis, 5, list(weights.values()))

    inputs = {"lengths": _lengths(setup)}
    for i, (n, m) in enumerate(pairwise(widths)):
        inputs[f"w{i + 1}"] = _draw(setup, n, m) * (1.7 / n**0.5)
    # Numbers of an edge. Forward: r, h. Backward: slope h' too; p, h' and what is by r; r, p.
    # Training, in place of the last: u, h', u h'; u, p, q = u p; r, q and what is by r.
    moved = _per_edge(1 + 64, 2 + 4 * 64, 3 + 4 * 64, setup)
    # Matmuls of [E, 64] with [64, 64], those with the basis an eighth. Forward: 1/8, 1, 1.
    # Backward, as the kernels go: each twice, for h'; both kernels repeat what is below them (4.5);
    # two by each layer and two through the upper ones. Training: 1/8 more for what is by r.
    once = 2.0 * crystal.edges * 64 * 64
    counts = {"forward": 2.125 * once, "backward": 17 * once, "training": 17.125 * once}
    # The reference in float32 has errors of 9e-7 at so many lengths: phases up to 25 are rounded.
    limits, name = (2e-6, 1e-5), "8, 64, 64, 64"
    return [
        case_of(
            "radial_network",
            name,
            call,
            inputs,
            moved,
            counts,
            tolerance=limits,
            inner=("lengths",),
        )
    ]


@cases("edge_vectors", EQUIVARIANT)
def vector_cases(setup: Setup) -> list[Case]:
    """Return the vectors of twelve crystals; second derivatives have no shifts."""
    crystal = crystals(setup)
    order = EdgeOrder(crystal_edges(setup), crystal.atoms, by_receiver=True)
    structures = torch.arange(crystal.atoms, device=setup.device) // crystal.cell
    cells = 14 * torch.eye(3, dtype=setup.dtype, device=setup.device).repeat(
        -(-crystal.atoms // crystal.cell), 1, 1
    )
    shifts = torch.randint(-1, 2, (crystal.edges, 3), device=setup.device).to(setup.dtype)

    def call(positions: Tensor) -> Tensor:
        given = (tensor.to(positions) for tensor in (shifts, cells))
        return kernels.edge_vectors(positions, order, *given, structures)

    inputs = {"positions": 4 * _draw(setup, crystal.atoms, 3)}
    # Looked up rows once; indices of 8 bytes: both ends, structures; places by sender, pointers.
    size = setup.dtype.itemsize
    forward = size * (6 * crystal.edges + 3 * crystal.atoms + cells.numel()) + 8 * (
        2 * crystal.edges + crystal.atoms
    )
    sums = size * 3 * (crystal.edges + crystal.atoms) + 8 * (crystal.edges + 2 * crystal.atoms)
    again = size * 3 * (crystal.edges + crystal.atoms) + 8 * 2 * crystal.edges
    moved = {"forward": forward, "backward": forward + sums, "training": forward + sums + again}
    return [case_of("edge_vectors", "12 crystals", call, inputs, moved)]


@cases("scatter_sum", EQUIVARIANT)
def sum_cases(setup: Setup) -> list[Case]:
    """Return energies of atoms into structures, and of edges into atoms in two orders."""
    crystal = crystals(setup)
    receivers = crystal_edges(setup)[1]
    mixed = receivers[torch.randperm(crystal.edges, device=setup.device)]
    structures = torch.arange(crystal.atoms, device=setup.device) // crystal.cell
    found = []
    for name, index, ordered in (
        ("atoms into structures", structures, True),
        ("edges into atoms", receivers, True),
        ("edges into atoms, any order", mixed, False),
    ):
        segments = -(-crystal.atoms // crystal.cell) if index is structures else crystal.atoms
        call = partial(kernels.scatter_sum, index=index, num_segments=segments, ordered=ordered)
        rows = setup.dtype.itemsize * (len(index) + segments)
        forward = rows + 8 * (segments + 1) + (0 if ordered else 8 * len(index))
        backward = forward + rows + 8 * len(index)
        moved = {"forward": forward, "backward": backward, "training": backward + forward}
        inputs = {"values": _draw(setup, len(index))}
        found.append(case_of("scatter_sum", name, call, inputs, moved))
    return found
