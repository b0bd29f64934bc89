"""Operators refuse what does not fit in one sentence; autocast changes no kernel."""

import re
import sys

import pytest
import torch

from bevatron import kernels
from bevatron.errors import KernelError
from bevatron.kernels import pair as pair_operators
from bevatron.kernels.equivariant.channelwise_tensor_product import paths
from bevatron.kernels.equivariant.edge_order import EdgeOrder
from bevatron.maths.symmetric_product import symmetric_coefficients

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ELSEWHERE = "cpu" if DEVICE == "cuda" else "meta"
C = 16
IRREPS = ("3x0e+2x1o", "0e+1o", "0e+1o")
NUM_PATHS = [symmetric_coefficients(1, 0, nu).num_paths for nu in (1, 2)]


def ones(*shape):
    return torch.ones(shape, device=DEVICE)


def whole(*numbers):
    return torch.tensor(numbers, device=DEVICE)


def many(shape, *names):
    return {name: ones(*shape) for name in names}


CSR = kernels.Csr.from_coo(whole(0, 0, 1, 2), whole(0, 1, 2, 1), (3, 3))
EDGES = whole([2, 0, 2, 1, 2], [0, 0, 0, 2, 2])
PRODUCT = dict(zip(("irreps_in", "irreps_harmonics", "irreps_out"), IRREPS, strict=True))
RADIAL = {"prefactor": ones(), "r_max": ones(), "order": 5}

ARGUMENTS = [
    ("add_dropped", {**many((2, 3, C), "x", "update"), "mask": ones(3, C)}),
    (
        "add_dropped",
        {"x": ones(2, 3, C), "update": ones(2, 3, 8), "weight": ones(C, 8), "bias": ones(C)},
    ),
    (
        "conditioned_transition",
        {
            "x": ones(5, C),
            "s": ones(5, 8),
            "norm_weight": ones(8),
            "scale_weight": ones(C, 8),
            "scale_bias": ones(C),
            "shift_weight": ones(C, 8),
            **many((32, C), "gate_weight", "up_weight"),
            "down_weight": ones(C, 32),
            "out_weight": ones(C, 8),
            "out_bias": ones(C),
        },
    ),
    (
        "global_attention",
        {
            "m": ones(3, 4, C),
            "mask": ones(3, 4),
            **many((C,), "norm_weight", "norm_bias", "gate_bias", "out_bias"),
            **many((C, C), "q_weight", "gate_weight", "out_weight"),
            **many((8, C), "k_weight", "v_weight"),
        },
    ),
    (
        "invariant_point_attention",
        {
            **many((4, 2, 8), "q", "k", "v"),
            **many((4, 3, 2, 4), "q_points", "k_points", "v_points"),
            "bias": ones(2, 4, 4),
            "z": ones(4, 4, C),
            "head_weights": ones(2),
        },
    ),
    ("layer_norm", {"x": ones(3, C), **many((C,), "weight", "bias")}),
    ("layer_norm", many((3, C), "x", "scale", "shift")),
    ("add_norm", many((3, C), "x", "update", "gate", "scale", "shift")),
    (
        "layer_norm_linear",
        {
            "x": ones(3, C),
            **many((C,), "norm_weight", "norm_bias"),
            "weight": ones(8, C),
            "bias": ones(8),
        },
    ),
    (
        "outer_product_mean",
        {
            "m": ones(2, 3, C),
            "mask": ones(2, 3),
            **many((C,), "norm_weight", "norm_bias"),
            **many((4, C), "a_weight", "b_weight"),
            "out_weight": ones(8, 16),
            **many((4,), "a_bias", "b_bias"),
            "out_bias": ones(8),
        },
    ),
    (
        "pair_attention",
        {
            **many((1, 2, 1, 16, 8), "q", "k", "v", "gate"),
            "bias": ones(1, 1, 1, 16, 16),
            "mask": ones(1, 2, 16) > 0,
        },
    ),
    ("pair_weighted_averaging", {**many((3, 4, C), "v", "gate"), "weights": ones(2, 4, 4)}),
    (
        "qkvg",
        {
            "x": ones(4, C),
            **many((C, C), "q_weight", "k_weight", "v_weight", "gate_weight", "bias_weight"),
            **many((C,), "gate_bias", "q_bias"),
            "norm": (ones(C), ones(C)),
        },
    ),
    ("smooth_lddt", {"predicted": ones(1, 2, 8, 3), "truth": ones(1, 8, 3), "radius": ones(1, 8)}),
    ("swiglu", many((3, C), "gate", "value")),
    (
        "transition",
        {
            "x": ones(5, C),
            **many((C,), "norm_weight", "norm_bias", "down_bias"),
            **many((32, C), "up_weight", "gate_weight"),
            "down_weight": ones(C, 32),
            "up_bias": ones(32),
        },
    ),
    (
        "triangle_multiply",
        {
            "z": ones(4, 4, C),
            "mask": ones(4, 4),
            "drop": ones(4, C),
            **many((C,), "norm_in_weight", "norm_in_bias", "norm_out_weight", "norm_out_bias"),
            **many((C, C), "a_weight", "a_gate_weight", "b_weight", "b_gate_weight"),
            **many((C, C), "out_weight", "out_gate_weight"),
            **many((C,), "a_bias", "out_bias"),
        },
    ),
    (
        "window_attention",
        {
            **many((1, 2, 20, 1, 16), "q", "k", "v", "gate"),
            "bias": ones(1, 2, 1, 16, 32),
            "mask": ones(1, 20) > 0,
        },
    ),
    ("dot_attention", {"csr": CSR, **many((3, 2, 8), "x", "query", "value"), "scale": ones(2)}),
    ("graph_attention", {"csr": CSR, "x": ones(3, 2, 8), **many((3, 2), "row_score", "col_score")}),
    ("graph_attention_v2", {"csr": CSR, **many((3, 2, 8), "x", "query"), "weight": ones(2, 8)}),
    ("spmm", {"csr": CSR, "x": ones(3, 8)}),
    ("sddmm", {"csr": CSR, **many((3, 8), "x", "y")}),
    ("spmmm", {"csr": CSR, "x": ones(3, 8), "weight": ones(8, 4)}),
    ("mspmm", {"x": ones(3, 8), "csr": CSR, "y": ones(3, 4)}),
    ("row_sum", {"csr": CSR, "values": ones(4, 2)}),
    ("column_sum", {"csr": CSR, "values": ones(4, 2)}),
    ("graph_softmax", {"csr": CSR, "scores": ones(4, 2)}),
    ("replicate", {"csr": CSR, "vector": ones(3, 2)}),
    (
        "channelwise_tensor_product",
        {
            "x": ones(3, 9),
            "harmonics": ones(5, 4),
            "edges": EDGES,
            "weights": ones(5, paths(*IRREPS).num_weights),
            **PRODUCT,
        },
    ),
    (
        "radial_tensor_product",
        {
            "x": ones(3, 9),
            "harmonics": ones(5, 4),
            "hidden": ones(5, 4),
            "edges": EDGES,
            "last_weight": ones(4, paths(*IRREPS).num_weights),
            **PRODUCT,
        },
    ),
    (
        "edge_vectors",
        {
            "positions": ones(3, 3),
            "edges": EDGES,
            "shifts": ones(5, 3),
            "cells": ones(1, 3, 3),
            "structures": whole(0, 0, 0),
        },
    ),
    ("equivariant_linear", {"x": ones(3, 8), "weights": [ones(2, 2), ones(2, 2)]}),
    (
        "indexed_linear",
        {"x": ones(4, 2, 3), "weights": ones(3, 2, 2), "elements": whole(2, 0, 2, 1)},
    ),
    ("radial_basis", {"lengths": ones(5), "frequencies": ones(3), **RADIAL}),
    (
        "radial_network",
        {
            "lengths": ones(5),
            "frequencies": ones(3),
            **RADIAL,
            "weights": [ones(3, 4), ones(4, 4)],
        },
    ),
    ("scatter_sum", {"values": ones(5, 2), "index": EDGES[1], "num_segments": 3}),
    ("silu_linear", {"x": ones(5, 4), "weight": ones(4, 3)}),
    ("spherical_harmonics", {"l_max": 2, "vectors": ones(5, 3)}),
    (
        "symmetric_contraction",
        {
            "a": ones(4, 2, 4),
            "elements": whole(2, 0, 2, 1),
            "irreps_out": "2x0e",
            "weights": {0: [ones(3, number, 2) for number in NUM_PATHS]},
            "correlation": 2,
        },
    ),
]
ANY_AXES = {("layer_norm", "scale"), ("layer_norm", "shift"), ("dot_attention", "scale")}
ANY_AXES |= {("add_norm", name) for name in ("gate", "scale", "shift")}
"""These are broadcast."""
ANY_TYPE = {"mask", "scale"}
WITH_MATRIX = [(name, given) for name, given in ARGUMENTS if "csr" in given]
READ_BEFORE_THE_CHECKS = {
    ("pair_attention", "bias"),
    ("channelwise_tensor_product", "x"),
    ("radial_tensor_product", "x"),
}
WITHOUT_KERNEL = {
    *("row_sum", "column_sum", "graph_softmax", "replicate"),
    *("sddmm", "spmmm", "mspmm"),
}


@pytest.fixture(autouse=True)
def _only_the_checks_of_operators(monkeypatch):
    """Tests check annotations, users do not."""
    if "shape_checks" in sys.modules:
        monkeypatch.setattr(sys.modules["shape_checks"], "checking", False)


def tensors_in(value, change=lambda tensor: tensor):
    """Yield every tensor in an argument, with the argument in which it is changed."""
    if isinstance(value, torch.Tensor):
        yield value, change(value)
    elif isinstance(value, list | tuple):
        for place, each in enumerate(value):
            for tensor, changed in tensors_in(each, change):
                yield tensor, type(value)([*value[:place], changed, *value[place + 1 :]])
    elif isinstance(value, dict):
        for key, each in value.items():
            for tensor, changed in tensors_in(each, change):
                yield tensor, {**value, key: changed}


def changed_arguments(operator, arguments, change):
    """Yield the name, the tensor and all arguments with that tensor changed."""
    for name, value in arguments.items():
        for tensor, changed in tensors_in(value, change):
            yield name, tensor, {**arguments, name: changed}


def sentence(operator, arguments, choice="auto"):
    """Return what an operator says of its arguments."""
    with kernels.use(choice), pytest.raises((ValueError, KernelError)) as caught:
        getattr(kernels, operator)(**arguments)
    said = str(caught.value)
    assert said.startswith(f"{operator}: "), said
    assert "\n" not in said
    return said


def said_of(operator, arguments):
    """Return what an operator says, the same whatever would run."""
    said = sentence(operator, arguments)
    choices = ["reference"] if operator in WITHOUT_KERNEL else ["reference", "triton"]
    for choice in choices:
        if choice == "triton":
            pytest.importorskip("triton")
        assert sentence(operator, arguments, choice) == said
    return said


each_operator = pytest.mark.parametrize(
    ("operator", "arguments"), ARGUMENTS, ids=[name for name, _ in ARGUMENTS]
)


@each_operator
def test_too_few_axes_are_refused(operator, arguments):
    for name, tensor, wrong in changed_arguments(operator, arguments, lambda t: t.new_ones(())):
        if tensor.ndim and (operator, name) not in ANY_AXES:
            said = said_of(operator, wrong)
            assert name in said or "do not go with" in said or "elements for" in said
    for _, tensor, wrong in changed_arguments(
        operator, arguments, lambda t: t.reshape(-1)[: t.shape[-1] if t.ndim else 1]
    ):
        if tensor.ndim > 2:
            said_of(operator, wrong)


@each_operator
def test_tensors_on_several_devices_are_refused(operator, arguments):
    tensors = [t for value in arguments.values() for t, _ in tensors_in(value)]
    if len(tensors) == 1 and "csr" not in arguments:
        pytest.skip("there is one tensor")
    for name, tensor, wrong in changed_arguments(operator, arguments, lambda t: t.to(ELSEWHERE)):
        said = sentence(operator, wrong)
        assert f"on {ELSEWHERE}" in said
        assert "move them to one device" in said
        if tensor is not tensors[0]:
            assert name in said
            assert said_of(operator, wrong) == said


@each_operator
@pytest.mark.parametrize("kind", [torch.int32, torch.complex64])
def test_numbers_that_are_not_floating_point_are_refused(operator, arguments, kind):
    for name, tensor, wrong in changed_arguments(operator, arguments, lambda t: t.to(kind)):
        if tensor.is_floating_point() and name not in ANY_TYPE:
            said = said_of(operator, wrong)
            assert str(kind).removeprefix("torch.") in said


@each_operator
def test_an_index_is_of_whole_numbers(operator, arguments):
    for name, tensor, wrong in changed_arguments(operator, arguments, lambda t: t.double()):
        if tensor.dtype == torch.int64:
            assert f"{name} is float64" in said_of(operator, wrong)


@each_operator
def test_arrays_are_no_tensors(operator, arguments):
    for name, tensor, wrong in changed_arguments(operator, arguments, lambda t: t.cpu().numpy()):
        if name == "scale" or (operator, name) in READ_BEFORE_THE_CHECKS:
            continue
        said = sentence(operator, wrong)
        assert "is a numpy.ndarray, expected a tensor (torch.as_tensor makes one)" in said
        if tensor is not next(t for value in arguments.values() for t, _ in tensors_in(value)):
            assert f"{name} is a" in said or name == "norm"


def test_what_is_no_tensor_is_named_as_what_it_is():
    given = dict(ARGUMENTS)["transition"]
    for value, said in (
        ([1.0], "a list, expected a tensor (torch.as_tensor makes one)"),
        (torch.nn.Linear(2, 2), "a torch.nn.modules.linear.Linear, expected a tensor"),
    ):
        found = said_of("transition", {**given, "down_bias": value})
        assert found == f"transition: down_bias is {said}"
    graph = dict(WITH_MATRIX)["graph_attention"]
    for name in ("x", "row_score"):
        assert f"{name} is a list, expected" in said_of("graph_attention", {**graph, name: [1.0]})
    assert "x is None, expected a tensor" in said_of("graph_attention", {**graph, "x": None})


@pytest.mark.parametrize(
    ("operator", "arguments"), WITH_MATRIX, ids=[name for name, _ in WITH_MATRIX]
)
def test_edges_and_sparse_tensors_are_no_matrix(operator, arguments):
    for matrix in (EDGES, torch.eye(3, device=DEVICE).to_sparse(), None):
        kind = "None" if matrix is None else "a torch.Tensor"
        said = f"csr is {kind}, expected a Csr (Csr.from_coo makes one)"
        with pytest.raises(ValueError, match=re.escape(said)):
            getattr(kernels, operator)(**{**arguments, "csr": matrix})


def test_indices_that_are_no_tensors_are_refused_by_name():
    index = torch.tensor([0, 1])
    for row, col, name in ((index, [0, 1], "col is a list"), (None, index, "row is None")):
        with pytest.raises(ValueError, match=f"Csr: {name}, expected a tensor"):
            kernels.Csr.from_coo(row, col, (2, 2))
    with pytest.raises(ValueError, match=r"row is a numpy.ndarray, .*as_tensor makes one"):
        kernels.Csr.from_coo(index.numpy(), index.numpy(), (2, 2))
    with pytest.raises(ValueError, match="row_ptr is a list"):
        kernels.Csr.from_csr([0, 1, 2], index, (2, 2))


def test_a_choice_that_is_none_is_not_taken_for_another():
    given = dict(ARGUMENTS)
    for axis in ("rows", "columns", 0):
        assert f"axis is '{axis}'" in said_of("replicate", {**given["replicate"], "axis": axis})
    for outgoing in ("incoming", None, 1):
        wrong = {**given["triangle_multiply"], "outgoing": outgoing}
        assert f"outgoing is {outgoing!r}" in said_of("triangle_multiply", wrong)


@pytest.mark.parametrize("operator", ["pair_attention", "window_attention"])
def test_a_mask_of_what_is_kept_is_of_bool(operator):
    arguments = dict(ARGUMENTS)[operator]
    for kind in (torch.uint8, torch.float32):
        wrong = {**arguments, "mask": arguments["mask"].to(kind)}
        assert "mask is" in said_of(operator, wrong)


def test_nothing_for_something_is_refused():
    given = dict(ARGUMENTS)
    vectors = {**given["edge_vectors"], "cells": ones(0, 3, 3)}
    assert "3 nodes in no cells" in said_of("edge_vectors", vectors)
    product = {**given["channelwise_tensor_product"], "x": ones(0, 9)}
    assert "5 edges between no nodes" in said_of("channelwise_tensor_product", product)
    linear = {**given["indexed_linear"], "weights": ones(0, 2, 2)}
    assert "no element for 4 atoms" in said_of("indexed_linear", linear)
    basis = {**given["radial_basis"], "frequencies": ones(0)}
    assert "no frequencies" in said_of("radial_basis", basis)
    attention = {**given["global_attention"], **many((0, C), "k_weight", "v_weight")}
    assert "q_weight has shape" in said_of("global_attention", attention)
    heads = {**given["qkvg"], "bias_weight": ones(0, C)}
    assert "bias_weight has shape" in said_of("qkvg", heads)


def test_an_order_of_other_edges_is_refused():
    given = dict(ARGUMENTS)["channelwise_tensor_product"]
    wrong = {**given, "edges": EdgeOrder(EDGES, 4)}
    assert "4 nodes, there are 3" in said_of("channelwise_tensor_product", wrong)


def test_float64_beside_narrower_numbers_is_refused():
    given = dict(ARGUMENTS)
    for operator, names in (
        ("graph_attention", "row_score col_score"),
        ("graph_attention_v2", "query weight"),
        ("dot_attention", "query value"),
    ):
        for name in names.split():
            wrong = {**given[operator], name: given[operator][name].double()}
            assert f"x is float32, but {name} is float64" in said_of(operator, wrong)


@each_operator
def test_right_arguments_are_taken(operator, arguments):
    with kernels.use("reference"):
        getattr(kernels, operator)(**arguments)


PAIR = [(name, given) for name, given in ARGUMENTS if name in vars(pair_operators)]
OF_ANY_WIDTH = {("invariant_point_attention", name) for name in ("q_points", "v_points", "z")}
OF_ANY_WIDTH |= {("add_dropped", "weight")}
"""Of these, what is compared with them is named."""

each_operator_on_pairs = pytest.mark.parametrize(
    ("operator", "arguments"), PAIR, ids=[name for name, _ in PAIR]
)


@each_operator_on_pairs
def test_a_tensor_one_column_too_wide_is_refused_by_name(operator, arguments):
    for name, _, wrong in changed_arguments(
        operator, arguments, lambda t: torch.cat([t, t[..., :1]], -1)
    ):
        if (operator, name) not in OF_ANY_WIDTH:
            assert name in said_of(operator, wrong)


@each_operator_on_pairs
def test_autocast_changes_nothing_of_a_kernel(operator, arguments):
    """What is multiplied has the types of its buffers: without autocast, bit for bit."""
    pytest.importorskip("triton")
    torch.manual_seed(0)
    drawn = {
        name: value + 0.1 * torch.randn_like(value)
        if isinstance(value, torch.Tensor) and value.is_floating_point() and name != "mask"
        else value
        for name, value in arguments.items()
    }
    leaves = [
        value.requires_grad_()
        for name, value in drawn.items()
        if isinstance(value, torch.Tensor) and value.is_floating_point() and name != "mask"
    ]

    def run():
        results = getattr(kernels, operator)(**drawn)
        results = results if isinstance(results, tuple) else (results,)
        loss = sum(each.square().sum() for each in results)
        return *results, *torch.autograd.grad(loss, leaves, allow_unused=True)

    with kernels.use("triton"):
        expected = run()
        with torch.autocast(DEVICE, torch.bfloat16):
            found = run()
    if operator == "global_attention" or ("update" in drawn and "weight" in drawn):
        torch.testing.assert_close(found[0].float(), expected[0], rtol=2e-2, atol=2e-2)
        return  # layers of PyTorch
    for one, other in zip(found, expected, strict=True):
        assert (one is None and other is None) or torch.equal(one, other)
        assert one is None or one.dtype == torch.float32


@pytest.mark.parametrize("choice", ["reference", "triton"])
@pytest.mark.parametrize(
    ("operator", "names"),
    [
        ("add_dropped", "x update mask"),
        ("swiglu", "gate value"),
        ("pair_attention", "q k v"),
        ("window_attention", "q k v gate"),
        ("smooth_lddt", "truth predicted radius"),
    ],
)
def test_under_autocast_the_first_of_several_types_is_taken(operator, names, choice):
    if choice == "triton":
        pytest.importorskip("triton")
    first, *others = names.split()
    given = next(given for name, given in ARGUMENTS if name == operator)
    given = {**given, first: given[first].half()}
    alike = {**given, **{name: given[name].half() for name in others}}
    with kernels.use(choice):
        with pytest.raises(ValueError, match="make them one type"):
            getattr(kernels, operator)(**given)
        with torch.autocast(DEVICE, torch.float16):
            # Not bfloat16: torch's own operators refuse float16 there.
            found = getattr(kernels, operator)(**given)
            assert torch.equal(found, getattr(kernels, operator)(**alike))
