"""The products over edges in Triton, interpreted on a CPU or compiled on a GPU."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bevatron import kernels
from bevatron.errors import ConfigError, KernelError
from bevatron.kernels import channelwise_tensor_product, radial_tensor_product
from bevatron.kernels.equivariant.channelwise_tensor_product import EdgeOrder, paths
from bevatron.maths.irreps import Irreps, as_layout
from bevatron.testing import AwkwardGraph, Tolerance, assert_close, awkward_graphs, check_op
from replayed import check_replay

pytest.importorskip("triton", reason="the kernels need the package triton")

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
DTYPES = [torch.float64, torch.float32]
SMALL = ("3x0e+2x1o", "0e+1o", "0e+1o")
MACE = ("5x0e+5x1o", "0e+1o+2e+3o", "0e+1o+2e+3o")
NEQUIP = ("3x0e+2x0o+1x1o+4x1e", "0e+1o+2e", "0e+0o+1o+1e+2e+2o")
HIGH = ("2x3o+1x2e", "0e+2e+4e", "1o+2e+3o")
# Interpreted, a kernel takes a tenth of a second.
GRAPHS = awkward_graphs() if GPU else awkward_graphs(hub=9)[:6]
PAIR = AwkwardGraph("three edges into one node", 2, torch.tensor([[0, 1, 0], [1, 1, 1]]))
TINY = AwkwardGraph("five edges", 3, torch.tensor([[2, 0, 2, 1, 2], [0, 0, 0, 2, 2]]))


def make(irreps, graph, dtype=torch.float64, hidden=0):
    """Random tensors for one set of irreps and one graph."""
    num_edges, num_weights = graph.edges.shape[1], paths(*irreps).num_weights
    shapes = {
        "x": (graph.num_nodes, Irreps.parse(irreps[0]).dim),
        "harmonics": (num_edges, Irreps.parse(irreps[1]).dim),
    }
    if hidden:
        shapes |= {"hidden": (num_edges, hidden), "last_weight": (hidden, num_weights)}
    else:
        shapes |= {"weights": (num_edges, num_weights)}
    inputs = {name: torch.randn(shape, dtype=dtype) for name, shape in shapes.items()}
    return {name: value.to(DEVICE) for name, value in {**inputs, "edges": graph.edges}.items()}


def product(irreps, inputs):
    """The operator that these inputs belong to."""
    operator = radial_tensor_product if "hidden" in inputs else channelwise_tensor_product

    def call(**tensors):
        return operator(
            **tensors, irreps_in=irreps[0], irreps_harmonics=irreps[1], irreps_out=irreps[2]
        )

    return call, (operator.__name__, "triton")


def check(irreps, inputs, **options):
    """Compare with the reference: result, first and second derivatives of every pair of inputs."""
    call, ran = product(irreps, inputs)
    check_op(call, call, inputs, ran=ran, **options)


def module(name):
    """Where constants of the implementation can be changed."""
    return importlib.import_module(f"bevatron.kernels.equivariant.{name}")


@pytest.fixture
def small_chunks(monkeypatch):
    """Cut even small graphs, in the midst of a receiver's edges."""
    monkeypatch.setattr(module("radial_tensor_product.triton"), "chunk_size", lambda *_: 4)


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Write kernels as they are written for a GPU: few channels, one edge after another."""
    launch = module("channelwise_tensor_product.triton_launch")
    for name, value in (("INTERPRETED", False), ("EDGES", 1), ("BLOCK", 4)):
        monkeypatch.setattr(launch, name, value)


@pytest.mark.parametrize("graph", GRAPHS, ids=lambda graph: graph.name)
@pytest.mark.parametrize("dtype", DTYPES)
def test_result_and_derivatives_are_right_on_awkward_graphs(graph, dtype):
    check(SMALL, make(SMALL, graph, dtype))


@pytest.mark.parametrize("graph", GRAPHS[:1] + GRAPHS[4:], ids=lambda graph: graph.name)
@pytest.mark.parametrize(
    ("dtype", "kept"),
    [
        pytest.param(DTYPES[0], 0, id="none kept"),
        pytest.param(DTYPES[1], 4, id="one chunk kept"),
        pytest.param(DTYPES[0], 8, id="two kept"),
    ],
)
def test_weights_computed_in_chunks_give_the_same(graph, dtype, kept, small_chunks, monkeypatch):
    radial = module("radial_tensor_product.triton")
    monkeypatch.setattr(radial, "kept_edges", lambda num_edges, *_: min(kept, num_edges))
    check(SMALL, make(SMALL, graph, dtype, hidden=5))


def test_a_hub_with_thousands_of_edges(monkeypatch):
    monkeypatch.setattr(module("radial_tensor_product.triton"), "chunk_size", lambda *_: 700)
    irreps = ("2x0e", "0e+1o", "0e+1o")
    check(irreps, make(irreps, awkward_graphs(hub=2000)[5], hidden=3))


@pytest.mark.parametrize(("kept", "made"), [(0, 6), (4, 4), (5, 2)])
def test_kept_weights_are_not_recomputed(kept, made, small_chunks, monkeypatch):
    """Five edges are two chunks: made for the result, its gradient and that gradient's."""
    inputs = make(SMALL, TINY, hidden=3)
    radial = module("radial_tensor_product.triton")
    monkeypatch.setattr(radial, "kept_edges", lambda *_: kept)
    expanded, expand = [], radial.Layer.expand
    monkeypatch.setattr(
        radial.Layer, "expand", lambda *given, **how: expanded.append(how) or expand(*given, **how)
    )
    call, _ = product(SMALL, inputs)
    tensors = {k: v.requires_grad_() if k != "edges" else v for k, v in inputs.items()}
    with kernels.use("triton"):
        (by_x,) = torch.autograd.grad(call(**tensors).sum(), tensors["x"], create_graph=True)
        torch.autograd.grad(by_x.square().sum(), tensors["harmonics"])
        with torch.no_grad():
            call(**tensors)
    assert len(expanded) == made + 2  # without gradients nothing is kept


@pytest.mark.parametrize("hidden", [0, 3])
def test_kernels_generated_for_a_gpu_are_right(as_on_a_gpu, small_chunks, hidden):
    irreps = ("5x0e+3x1o", "0e+1o", "0e+1o")
    check(irreps, make(irreps, TINY, hidden=hidden))


@pytest.mark.parametrize("harmonics", ["1o", "0e+2e", "0e+1o+2e"])
def test_lanes_sum_any_number_of_harmonics(harmonics, as_on_a_gpu):
    irreps = ("5x0e", harmonics, harmonics)
    check(irreps, make(irreps, TINY))


def test_chunks_are_equal_and_within_their_memory():
    chunk_size = module("radial_tensor_product.triton").chunk_size
    assert chunk_size(119_372, 5120) == 23_875  # a fifth: 122 MB
    assert chunk_size(7, 5120) == 7
    assert chunk_size(0, 5120) == 0


@pytest.mark.parametrize(
    ("edges", "kept"), [(119_372, 3 / 5), (1_193_720, 34 / 46), (20_000, 1), (0, 1)]
)
def test_kept_weights_are_proportional_to_the_edges(edges, kept):
    radial, last_weight = module("radial_tensor_product.triton"), torch.empty(64, 1280)
    size = radial.chunk_size(edges, 5120)
    found = radial.kept_edges(edges, size, last_weight)
    assert found == min(round(kept * -(-edges // max(size, 1))) * size, edges)
    narrow = torch.empty(64, 512)  # 2 KiB an edge: all of them
    assert radial.kept_edges(edges, radial.chunk_size(edges, 2048), narrow) == edges


@pytest.mark.parametrize("irreps", [MACE, NEQUIP, HIGH], ids=["mace", "nequip", "high degrees"])
@pytest.mark.parametrize("dtype", DTYPES if GPU else DTYPES[:1])
def test_kernels_for_any_irreps_are_right(irreps, dtype):
    check(irreps, make(irreps, GRAPHS[-1] if GPU else PAIR, dtype))


irreps_texts = st.lists(
    st.tuples(st.integers(1, 3), st.integers(0, 3), st.sampled_from("eo")), min_size=1, max_size=2
).map(lambda blocks: "+".join(f"{mul}x{degree}{parity}" for mul, degree, parity in blocks))


@settings(max_examples=3, deadline=None)
@given(irreps_texts, st.integers(0, 4), irreps_texts, st.sampled_from([0, 3]))
def test_kernels_for_random_irreps_are_right(irreps_in, l_max, irreps_out, hidden):
    irreps = (irreps_in, str(Irreps.harmonics(l_max)), irreps_out)
    if paths(*irreps).paths:
        check(irreps, make(irreps, PAIR, torch.float32, hidden))


@pytest.mark.parametrize("hidden", [0, 3])
def test_a_double_backward_in_two_kernels_gives_the_same(hidden, small_chunks, monkeypatch):
    monkeypatch.setattr(module("channelwise_tensor_product.triton_launch"), "MOST_SUMS", 0)
    check(SMALL, make(SMALL, TINY, hidden=hidden))


@pytest.mark.parametrize("hidden", [0, 3])
def test_edges_in_any_order_and_strided_inputs(hidden, small_chunks):
    inputs = make(SMALL, TINY, hidden=hidden)
    order = torch.tensor([3, 0, 4, 2, 1], device=DEVICE)
    for name in ("harmonics", "weights", "hidden"):
        if name in inputs:
            inputs[name] = inputs[name][order]
    inputs["edges"] = inputs["edges"][:, order]
    check(SMALL, inputs, strided=True)


@pytest.mark.parametrize("hidden", [0, 3])
def test_a_precomputed_order_gives_the_same_bits(hidden):
    inputs = make(SMALL, TINY, torch.float32, hidden=hidden)
    call, _ = product(SMALL, inputs)
    order = EdgeOrder(inputs["edges"], TINY.num_nodes, by_receiver=True)
    with kernels.use("triton"):
        assert torch.equal(call(**inputs), call(**{**inputs, "edges": order}))


@pytest.mark.skipif(GPU, reason="on a GPU the check stops the process")
def test_unsorted_edges_declared_sorted_are_refused():
    order = EdgeOrder(torch.tensor([[0, 0], [1, 0]]), 2, by_receiver=True)
    with pytest.raises(RuntimeError, match="not sorted by receiver"):
        order.senders  # noqa: B018


def test_a_gradient_that_is_not_requested_is_not_computed():
    inputs = make(SMALL, TINY, hidden=3)
    call, _ = product(SMALL, inputs)
    tensors = {k: v.requires_grad_() if k != "edges" else v for k, v in inputs.items()}
    # Leaves are always wanted; a weight behind another node is not.
    scaled = {**tensors, "last_weight": tensors["last_weight"] * 2.0, "x": tensors["x"] * 2.0}
    asked = []
    radial = module("radial_tensor_product.triton")
    launch, run = module("channelwise_tensor_product.triton_launch"), radial.run

    def watched(product, kind, given, into, index, chunk):
        asked.append(sorted(into))
        run(product, kind, given, into, index, chunk)

    assert launch.run is run
    radial.run = watched
    try:
        with kernels.use("triton"):
            result = call(**scaled).sum()
            torch.autograd.grad(result, [tensors["harmonics"], tensors["hidden"]])
    finally:
        radial.run = run
    assert asked == [["out"], ["gw", "gy"]]


def test_half_precision_is_refused_by_name():
    inputs = {k: v.half() if k != "edges" else v for k, v in make(SMALL, TINY).items()}
    call, _ = product(SMALL, inputs)
    with (
        kernels.use("triton"),
        pytest.raises(KernelError, match="float32 or float64, not in float16"),
    ):
        call(**inputs)


@pytest.mark.parametrize("shape", [(7, 5, 9), (300, 3, 70)] + ([(20_000, 64, 1280)] if GPU else []))
def test_matmuls_of_the_last_layer(shape):
    """Against float64; the interpreter rounds nothing to TF32, a GPU does."""
    matmul = module("radial_tensor_product.triton_matmul")
    num_rows, num_hidden, width = shape
    rows, weight = torch.randn(num_rows, num_hidden), torch.randn(num_hidden, width)
    rows, weight = rows.to(DEVICE), weight.to(DEVICE)
    layer, limit = matmul.Layer(weight), Tolerance.of(torch.float32).forward
    expanded = torch.full((num_rows, width), 2.0, device=DEVICE)
    layer.expand(rows, expanded, add=True)
    assert_close(expanded, rows.double() @ weight.double() + 2.0, limit)
    contracted = torch.full((num_rows, num_hidden), float("nan"), device=DEVICE)
    layer.contract(expanded, contracted)
    assert_close(contracted, expanded.double() @ weight.double().mT, limit)
    outer = matmul.OuterSum(torch.zeros(num_hidden, width, device=DEVICE))
    for _ in range(2):
        outer.add(rows, expanded)
    outer.finish()
    assert_close(outer.out, 2.0 * rows.double().mT @ expanded.double(), limit)


def test_layers_too_wide_for_shared_memory_go_to_cublas(monkeypatch):
    matmul = module("radial_tensor_product.triton_matmul")
    for kernel in ("_expand", "_contract", "_outer"):
        monkeypatch.setattr(matmul, kernel, None)  # never launched
    check(SMALL, make(SMALL, PAIR, torch.float32, hidden=129))


def test_edge_weights_fit_the_shared_memory_of_other_gpus():
    script = Path(__file__).with_name("compiled_sizes.py")
    compiling = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, script], env=compiling, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    for line in run.stdout.splitlines():
        *what, taken, room = line.split()
        assert int(taken) <= int(room), what


@pytest.mark.parametrize("hidden", [0, 3])
def test_operators_pass_opcheck(hidden):
    inputs = make(SMALL, PAIR, hidden=hidden)
    edges = EdgeOrder(inputs.pop("edges"), PAIR.num_nodes, by_receiver=True)
    launch = module("channelwise_tensor_product.triton_launch")
    irreps = " ".join([*SMALL[:2], str(paths(*SMALL).irreps_mid), "mul_ir"])
    tensors = [value.requires_grad_() for value in inputs.values()]
    index = launch.Index.of(edges, 4)
    if hidden:
        operators, index = module("radial_tensor_product.triton"), (*index[:2], *index[3:])
        given, arguments = (*tensors, *index), (*tensors, *index, irreps, 4, 0)
        later = (*given, inputs["hidden"].new_empty(0, inputs["last_weight"].shape[1]), irreps, 4)
    else:
        operators = module("channelwise_tensor_product.triton")
        arguments = later = (*tensors, *index, irreps)
    result = operators._forward(*arguments)
    gradient = torch.randn_like(result[0] if hidden else result).requires_grad_()
    torch.library.opcheck(operators._forward.op, arguments)
    torch.library.opcheck(operators._backward.op, (gradient, *later, [True] * len(tensors)))


@pytest.mark.skipif(not GPU, reason="needs a GPU")
@pytest.mark.parametrize("hidden", [0, 16])
def test_a_captured_step_follows_new_edges(hidden):
    """The order of the edges is found inside the graph: nothing of the first batch remains."""
    first, second = (make(MACE, awkward_graphs(seed=s)[5], torch.float32, hidden) for s in (0, 1))
    call, _ = product(MACE, first)
    static = {k: v.clone() for k, v in first.items()}

    def step():
        tensors = {k: v.detach().requires_grad_() for k, v in static.items() if k != "edges"}
        order = EdgeOrder(static["edges"], 5, by_receiver=True)
        out = call(**tensors, edges=order)
        grads = torch.autograd.grad(out.square().sum(), list(tensors.values()), create_graph=True)
        last = torch.autograd.grad(sum(g.square().sum() for g in grads), list(tensors.values()))
        return [out, *grads, *last]

    with kernels.use("triton"):
        check_replay(step, lambda: [static[name].copy_(value) for name, value in second.items()])


def swapped(x, irreps, before):
    """Exchange channels and components of every block."""
    blocks = x.split([block.size for block in irreps], dim=1)
    shapes = [(b.mul, b.dim) if before == "mul_ir" else (b.dim, b.mul) for b in irreps]
    parts = [b.unflatten(1, s).mT.flatten(1) for b, s in zip(blocks, shapes, strict=True)]
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize("implementation", ["reference", "triton"])
@pytest.mark.parametrize("hidden", [0, 3])
def test_both_layouts_hold_the_same_values(hidden, implementation, small_chunks):
    inputs = make(SMALL, TINY, hidden=hidden)
    call, (name, _) = product(SMALL, inputs)
    irreps_mid = paths(*SMALL).irreps_mid

    def other_layout(x, **others):
        return call(x=x, **others, layout="ir_mul")

    def by_swapping(x, **others):
        usual = call(x=swapped(x, Irreps.parse(SMALL[0]), "ir_mul"), **others)
        return swapped(usual, irreps_mid, "mul_ir")

    check_op(other_layout, by_swapping, inputs, ran=(name, implementation))


def test_an_unknown_layout_is_refused():
    with pytest.raises(ConfigError, match="there is no 'channels'"):
        as_layout("channels")
