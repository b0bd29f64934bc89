"""The channelwise tensor product: against e3nn, its derivatives, its symmetry, awkward graphs."""

import inspect

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bevatron.errors import ConfigError
from bevatron.kernels import channelwise_tensor_product
from bevatron.kernels.equivariant.channelwise_tensor_product import paths
from bevatron.maths.irreps import Irreps
from bevatron.maths.so3 import wigner_3j
from bevatron.testing import (
    assert_close,
    awkward_graphs,
    check_equivariant,
    check_op,
    check_permutation,
)

MACE = ("4x0e+4x1o", "0e+1o+2e+3o", "0e+1o+2e+3o")
NEQUIP = ("3x0e+2x0o+1x1o+4x1e", "0e+1o+2e", "0e+0o+1o+1e+2e+2o")
GRAPH = awkward_graphs(hub=8)[5]


def make(irreps, graph=GRAPH, dtype=torch.float64):
    """Random tensors for one set of irreps and one graph."""
    num_edges = graph.edges.shape[1]
    return {
        "x": torch.randn(graph.num_nodes, Irreps.parse(irreps[0]).dim, dtype=dtype),
        "harmonics": torch.randn(num_edges, Irreps.parse(irreps[1]).dim, dtype=dtype),
        "weights": torch.randn(num_edges, paths(*irreps).num_weights, dtype=dtype),
        "edges": graph.edges,
    }


def product(irreps):
    return lambda **inputs: channelwise_tensor_product(
        **inputs, irreps_in=irreps[0], irreps_harmonics=irreps[1], irreps_out=irreps[2]
    )


def equation(irreps):
    """The sum of the docstring, written down without any thought of speed."""
    irreps_in, irreps_harmonics = Irreps.parse(irreps[0]), Irreps.parse(irreps[1])
    table = paths(*irreps)

    def evaluate(x, harmonics, weights, edges):
        results = []
        for path in table.paths:
            c = wigner_3j(path.l1, path.l2, path.out.l).to(x) * path.out.dim**0.5
            block = x[:, irreps_in.slices[path.x]].reshape(len(x), path.out.mul, 2 * path.l1 + 1)
            y = harmonics[:, irreps_harmonics.slices[path.harmonics]]
            w = weights[:, path.weights]
            message = torch.einsum("abc,eka,eb,ek->ekc", c, block[edges[0]], y, w)
            one_hot = torch.nn.functional.one_hot(edges[1].long(), len(x)).to(x)
            results.append(torch.einsum("en,ekc->nkc", one_hot, message).flatten(1))
        return torch.cat(results, 1)

    return evaluate


@pytest.mark.parametrize("irreps", [("4x0e", *MACE[1:]), MACE, NEQUIP, ("2x2e+3x0e", *MACE[1:])])
def test_equals_the_tensor_product_of_e3nn(irreps, float64):
    o3 = pytest.importorskip("e3nn.o3", reason="e3nn is the oracle for the tensor product")
    table = paths(*irreps)
    theirs = o3.TensorProduct(
        o3.Irreps(irreps[0]),
        o3.Irreps(irreps[1]),
        o3.Irreps(str(table.irreps_mid)),
        [(path.x, path.harmonics, i, "uvu", True) for i, path in enumerate(table.paths)],
        shared_weights=False,
        internal_weights=False,
    )
    inputs = make(irreps)
    senders, receivers = inputs["edges"]
    messages = theirs(inputs["x"][senders], inputs["harmonics"], inputs["weights"])
    expected = torch.zeros(GRAPH.num_nodes, messages.shape[1]).index_add(0, receivers, messages)
    assert theirs.weight_numel == table.num_weights
    assert_close(product(irreps)(**inputs), expected, 1e-13)


def test_paths_are_those_of_mace_in_its_order():
    table = paths("8x0e+8x1o", "0e+1o+2e+3o", "8x0e+8x1o+8x2e+8x3o")
    assert [(path.l1, path.l2, path.out.l) for path in table.paths] == [
        *((0, 0, 0), (1, 1, 0)),
        *((0, 1, 1), (1, 0, 1), (1, 2, 1)),
        *((0, 2, 2), (1, 1, 2), (1, 3, 2)),
        *((0, 3, 3), (1, 2, 3)),
    ]
    assert str(table.irreps_mid.simplify()) == "16x0e+24x1o+24x2e+16x3o"
    assert table.num_weights == 80
    assert len(paths("128x0e", "0e+1o+2e+3o", "0e+1o+2e+3o").paths) == 4


def test_odd_comes_before_even_among_results_of_one_degree():
    assert str(paths("1x0e+1x0o", "0e+1o", "0e+0o+1e+1o").irreps_mid) == "1x0o+1x0e+1x1o+1x1e"


@pytest.mark.parametrize("graph", awkward_graphs(), ids=lambda graph: graph.name)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_result_and_derivatives_are_right_on_awkward_graphs(graph, dtype):
    irreps = ("2x0e+2x1o", "0e+1o+2e", "0e+1o+2e")
    inputs = make(irreps, graph, dtype)
    operator = ("channelwise_tensor_product", "reference")
    check_op(product(irreps), equation(irreps), inputs, ran=operator)
    check_op(product(irreps), equation(irreps), inputs, strided=True)


irreps_texts = st.lists(
    st.tuples(st.integers(1, 3), st.integers(0, 3), st.sampled_from("eo")), min_size=1, max_size=3
).map(lambda blocks: "+".join(f"{mul}x{degree}{parity}" for mul, degree, parity in blocks))


@settings(max_examples=15, deadline=None)
@given(irreps_texts, st.integers(0, 3), irreps_texts)
def test_result_and_derivatives_are_right_for_any_irreps(irreps_in, l_max, irreps_out):
    irreps = (irreps_in, str(Irreps.harmonics(l_max)), irreps_out)
    if paths(*irreps).paths:
        check_op(product(irreps), equation(irreps), make(irreps))


def test_derivatives_agree_with_finite_differences():
    irreps = ("2x0e+1x1o", "0e+1o", "0e+1o")
    inputs = {k: v for k, v in make(irreps, awkward_graphs()[3]).items() if k != "edges"}
    edges = awkward_graphs()[3].edges
    tensors = [value.requires_grad_() for value in inputs.values()]

    def call(*values):
        return product(irreps)(**dict(zip(inputs, values, strict=True)), edges=edges)

    assert torch.autograd.gradcheck(call, tensors)
    assert torch.autograd.gradgradcheck(call, tensors)


@pytest.mark.parametrize("irreps", [MACE, NEQUIP])
def test_rotates_and_reflects_with_its_inputs(irreps):
    turns = {"x": irreps[0], "harmonics": irreps[1]}
    check_equivariant(product(irreps), make(irreps), turns, paths(*irreps).irreps_mid)


def test_does_not_depend_on_the_order_of_nodes_or_edges():
    inputs = make(MACE)
    check_permutation(product(MACE), inputs, ["x"], ["edges"])
    order = torch.randperm(inputs["edges"].shape[1])
    shuffled = {
        name: value[:, order] if name == "edges" else value[order]
        for name, value in inputs.items()
        if name != "x"
    }
    assert_close(product(MACE)(x=inputs["x"], **shuffled), product(MACE)(**inputs), 1e-13)


def test_nodes_without_edges_get_zeros_and_no_paths_give_no_columns():
    graph = awkward_graphs()[0]
    assert not product(MACE)(**make(MACE, graph)).any()
    assert product(("2x0e", "0e", "1o"))(**make(("2x0e", "0e", "1o"))).shape == (5, 0)


@pytest.mark.parametrize("name", ["x", "harmonics", "weights", "edges"])
def test_a_wrong_shape_is_named(name):
    inputs = make(MACE)
    inputs[name] = inputs[name][..., :-1] if name != "edges" else inputs[name][:1]
    # What a user meets, who does not check annotations.
    unchecked = inspect.unwrap(channelwise_tensor_product)
    with pytest.raises(ValueError, match=rf"{name} has shape .*, expected"):
        unchecked(*inputs.values(), *MACE)


def test_harmonics_with_several_copies_are_refused():
    with pytest.raises(ConfigError, match="more than one copy"):
        paths("4x0e", "2x0e+1o", "0e")
