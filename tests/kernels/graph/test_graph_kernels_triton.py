"""Attention and aggregation on graphs in Triton: interpreted on a CPU, compiled on a GPU."""

import contextlib
import os

import pytest
import torch
import torch.utils.checkpoint

GPU = torch.cuda.is_available()
if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

from bevatron import kernels  # noqa: E402
from bevatron.kernels import (  # noqa: E402
    Csr,
    dot_attention,
    graph_attention,
    graph_attention_v2,
    spmm,
)
from bevatron.kernels.graph.csr import launch, work  # noqa: E402
from bevatron.kernels.graph.csr.launch import Tile  # noqa: E402
from bevatron.testing import Tolerance, assert_close, check_op  # noqa: E402
from dispatched import Operators  # noqa: E402
from replayed import captured  # noqa: E402

pytest.importorskip("triton")

from bevatron.kernels.graph.csr import triton_merge  # noqa: E402
from bevatron.kernels.graph.dot_attention import triton as dot_operator  # noqa: E402
from bevatron.kernels.graph.dot_attention import triton_launch as dot_launch  # noqa: E402
from bevatron.kernels.graph.graph_attention import triton as gat_operator  # noqa: E402
from bevatron.kernels.graph.spmm import triton as spmm_launch  # noqa: E402
from bevatron.kernels.shared import custom_op  # noqa: E402

pytestmark = pytest.mark.skipif(
    not GPU and os.environ.get("TRITON_INTERPRET") != "1",
    reason="no GPU, and triton was imported without TRITON_INTERPRET=1",
)
DEVICE = "cuda" if GPU else "cpu"
ON_GPU = pytest.mark.skipif(not GPU, reason="needs a CUDA device")
SINGLE = Tolerance(2e-6, 1e-5)


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch):
    if not GPU:
        monkeypatch.setenv("TRITON_INTERPRET", "1")


def pattern(kind):
    generator = torch.Generator().manual_seed(3)
    if kind == "no entries":
        return torch.zeros(3, 2, dtype=torch.bool)
    if kind == "no columns":
        return torch.zeros(3, 0, dtype=torch.bool)
    if kind == "one entry":
        return torch.tensor([[False, True], [False, False]])
    if kind == "a hub, rows of one, an empty row and column":
        matrix = torch.zeros(6, 21, dtype=torch.bool)
        matrix[1] = matrix[:, 5] = True
        matrix[4] = matrix[:, 3] = False
        return matrix
    if kind == "symmetric":
        matrix = torch.rand(9, 9, generator=generator) < 0.3
        return matrix | matrix.T
    return torch.rand(7, 5, generator=generator) < 0.5


KINDS = (
    *("no entries", "no columns", "one entry", "a hub, rows of one, an empty row and column"),
    *("symmetric", "random"),
)


@pytest.fixture(autouse=True)
def _rows_are_cut_and_steps_are_short(monkeypatch):
    """Take several parts for a row of the hub, and several steps for a part."""
    monkeypatch.setattr(work, "SMALLEST_CHUNK", 16)
    monkeypatch.setattr(work, "ROWS_PER_PART", 4.0)
    for module in (dot_launch, gat_operator, triton_merge):
        monkeypatch.setattr(module, "MERGED_AT_ONCE", 1)
    small = Tile(128, 32)
    with contextlib.ExitStack() as stack:
        for module in (dot_launch, gat_operator, spmm_launch):
            stack.enter_context(module.TILES.replaced(**dict.fromkeys(module.TILES, small)))
        yield


def matrix(kind, values, symmetric_values=False):
    """Make the structure; its values are given with each call, so that they get gradients."""
    row, col = pattern(kind).nonzero().unbind(1)
    generator = torch.Generator().manual_seed(5)
    drawn = torch.rand(9, 32, generator=generator)
    if symmetric_values:
        drawn = drawn[:9, :9] + drawn[:9, :9].T
    structure = Csr.from_coo(row.to(DEVICE), col.to(DEVICE), tuple(pattern(kind).shape))
    return structure, (drawn[row, col] if values else None)


def draw(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def check(function, inputs, name, values, dtype, **options):
    """Compare with the reference; values join the inputs where there are any."""
    if values is not None:
        inputs = {**inputs, "values": values.to(DEVICE, dtype)}
    tolerance = SINGLE if dtype == torch.float32 else None
    check_op(
        function, function, inputs, order=1, tolerance=tolerance, ran=(name, "triton"), **options
    )


def gat(structure, H, C, dtype, values, dropout=0.0, **options):
    n, m = structure.shape

    def function(x, row_score, col_score, values=None):
        csr = structure.with_values(values)
        return graph_attention(csr, x, row_score, col_score, dropout=dropout, seed=2**33 + 7)

    inputs = {
        "x": draw(m, H, C, dtype=dtype),
        "row_score": draw(n, H, dtype=dtype, seed=1),
        "col_score": draw(m, H, dtype=dtype, seed=2),
    }
    check(function, inputs, "graph_attention", values, dtype, **options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("values", [False, True], ids=["no values", "values"])
def test_gat(kind, values):
    gat(*_first(matrix(kind, values), 1, 3, torch.float32), dropout=0.0 if values else 0.4)


def _first(made, *rest):
    structure, values = made
    return (structure, *rest, values)


@pytest.mark.parametrize(("H", "C"), [(3, 1), (2, 8), (1, 37)])
def test_gat_takes_any_channels_and_heads(H, C):
    gat(*_first(matrix("random", values=False), H, C, torch.float32), strided=True)


def test_gat_in_double_precision():
    hub = "a hub, rows of one, an empty row and column"
    gat(*_first(matrix(hub, values=True), 1, 3, torch.float64), dropout=0.3)


def test_gat_splits_channels_over_programs():
    with gat_operator.TILES.replaced(forward=Tile(64, 4), backward=Tile(64, 4), values=Tile(64, 4)):
        gat(*_first(matrix("random", values=True), 2, 10, torch.float32))


@pytest.mark.parametrize("numbers", [16, 32])
def test_gat_in_buckets_of_length(monkeypatch, numbers):
    monkeypatch.setattr(launch, "FEW_PARTS", 0)
    small = Tile(numbers, 4)
    with gat_operator.TILES.replaced(forward=small, backward=small, values=small):
        hub = "a hub, rows of one, an empty row and column"
        gat(*_first(matrix(hub, values=True), 1, 4, torch.float32))


@pytest.mark.parametrize("values", [False, True])
def test_gat_with_the_entries_of_a_row_dealt_to_lanes(monkeypatch, values):
    def dealt(numbers, width, tile, number_bytes):
        del width, tile, number_bytes
        return [launch.Bucket(0, numbers[1], rows=4, entries=2, dealt=True)] if numbers[1] else []

    monkeypatch.setattr(gat_operator, "lane_buckets", dealt)
    hub = "a hub, rows of one, an empty row and column"
    gat(*_first(matrix(hub, values=values), 2, 5, torch.float32))
    gat(*_first(matrix("random", values=values), 1, 4, torch.float64), dropout=0.4)


def test_parts_left_unwritten_by_rows_of_one_sign_are_not_read():
    # New memory is filled with NaN under this setting.
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        hub = "a hub, rows of one, an empty row and column"
        gat(*_first(matrix(hub, values=False), 1, 3, torch.float32))
    finally:
        torch.use_deterministic_algorithms(False)


def test_large_scores_do_not_overflow():
    csr, _ = matrix("random", values=False)
    x = draw(5, 1, 2)
    row_score, col_score = 300.0 * draw(7, 1, seed=1), 300.0 * draw(5, 1, seed=2)
    results = []
    for choice in ("reference", "triton"):
        with kernels.use(choice):
            leaves = [t.clone().requires_grad_() for t in (x, row_score, col_score)]
            z = graph_attention(csr, *leaves)
            z.square().sum().backward()
            results.append([z.detach(), *(leaf.grad for leaf in leaves)])
    for want, got in zip(*results, strict=True):
        assert got.isfinite().all()
        assert torch.allclose(got, want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("place", [0, 700, 1499])
def test_an_infinite_feature_of_a_long_row_stays_in_its_channel(place, trains):
    n = 1500
    row, col = torch.zeros(n, dtype=torch.long), torch.arange(n)
    csr = Csr.from_coo(row, col, (2, n)).to(DEVICE)
    x, row_score, col_score = draw(n, 1, 4), draw(2, 1, seed=1), draw(n, 1, seed=2)
    col_score[3] = 40.0  # the others' attention is small, not nothing
    x[place, 0, 1] = torch.inf
    x.requires_grad_(trains)
    with kernels.use("triton"):
        found = graph_attention(csr, x, row_score, col_score)[:, 0]
    with kernels.use("reference"):
        wanted = graph_attention(csr, x, row_score, col_score)[:, 0]
    assert found[0].isinf().tolist() == [False, True, False, False]
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("trains", [False, True])
def test_unmasked_loads_keep_infinite_features_where_the_reference_has_them(monkeypatch, trains):
    monkeypatch.setattr(launch, "FEW_PARTS", 0)
    full = torch.rand(9, 24, generator=torch.Generator().manual_seed(3)) < 0.4
    full[:, 23] = True  # past a row's end its last entry is fetched again: that one is finite
    full[2], full[5, :23] = False, False
    csr = Csr.from_coo(*full.nonzero().unbind(1), tuple(full.shape)).to(DEVICE)
    x, row_score, col_score = draw(24, 2, 4), draw(9, 2, seed=1), draw(24, 2, seed=2)
    x[int(full[0].nonzero()[0]), 1, 1] = -torch.inf
    x.requires_grad_(trains)
    with gat_operator.TILES.replaced(forward=Tile(16, 4)), kernels.use("triton"):
        found = graph_attention(csr, x, row_score, col_score)
    with kernels.use("reference"):
        wanted = graph_attention(csr, x, row_score, col_score)
    assert wanted.isinf().any()
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "dtype", [torch.float16, pytest.param(torch.bfloat16, marks=ON_GPU)], ids=str
)
def test_16_bit_features_keep_float32_scores(dtype):
    csr, _ = matrix("random", values=False)
    x, row_score, col_score = draw(5, 2, 8, dtype=dtype), draw(7, 2, seed=1), draw(5, 2, seed=2)
    found = []
    for choice, wide in (("reference", torch.float64), ("triton", None)):
        with kernels.use(choice):
            leaves = [t.to(wide or t.dtype).requires_grad_() for t in (x, row_score, col_score)]
            z = graph_attention(csr, *leaves)
            along = draw(7, 2, 8, dtype=dtype, seed=9).to(z.dtype)
            found.append([z.detach(), *torch.autograd.grad(z, leaves, along)])
    assert found[1][1].dtype == dtype
    assert found[1][2].dtype == torch.float32
    for want, got in zip(*found, strict=True):
        assert_close(got, want, 4 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("kind", ["no entries", KINDS[3], "random"])
@pytest.mark.parametrize("values", [False, True], ids=["no values", "values"])
def test_gatv2(kind, values):
    structure, given = matrix(kind, values)
    n, m = structure.shape

    def function(x, query, weight, values=None):
        csr = structure.with_values(values)
        return graph_attention_v2(
            csr, x, query, weight, dropout=0.3 if values is None else 0.0, seed=4
        )

    inputs = {"x": draw(m, 2, 3), "query": draw(n, 2, 3, seed=1), "weight": draw(2, 3, seed=2)}
    check(function, inputs, "graph_attention_v2", given, torch.float32)


FORMS = {
    "VA": {},
    "VA with softmax": {"softmax": True, "scale": 0.6},
    "AGNN of the paper": {"normalize": True},
    "AGNN": {"normalize": True, "softmax": True, "beta": True},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["symmetric", "one directed entry more"])
@pytest.mark.parametrize("values", [False, True], ids=["no values", "values"])
def test_self_attention(form, kind, values):
    found = pattern("symmetric")
    if kind != "symmetric":
        found[2, :] = True
    row, col = found.nonzero().unbind(1)
    weights = torch.rand(9, 9, generator=torch.Generator().manual_seed(1))
    weights = (weights + weights.T)[row, col].to(DEVICE) if values else None
    csr = Csr.from_coo(row.to(DEVICE), col.to(DEVICE), (9, 9), weights)
    assert csr.is_symmetric == (kind == "symmetric")
    options = dict(FORMS[form])
    inputs = {"x": draw(9, 2, 5)}
    if options.pop("beta", False):
        inputs["scale"] = torch.tensor([1.3, 0.7], device=DEVICE)

    def function(x, **given):
        return dot_attention(csr, x, **options, **given)

    check_op(function, function, inputs, order=1, tolerance=SINGLE, ran=("dot_attention", "triton"))


@pytest.mark.parametrize("kind", ["no entries", KINDS[3], "random"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_separate_queries_keys_and_values(kind, dtype):
    structure, values = matrix(kind, values=True)
    n, m = structure.shape

    def function(x, query, value, values):
        csr = structure.with_values(values)
        return dot_attention(csr, x, query=query, value=value, softmax=True, scale=0.4)

    inputs = {
        "x": draw(m, 2, 3, dtype=dtype),
        "query": draw(n, 2, 3, dtype=dtype, seed=1),
        "value": draw(m, 2, 6, dtype=dtype, seed=2),
    }
    check(function, inputs, "dot_attention", values, dtype, strided=True)


@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
@pytest.mark.parametrize("kind", [KINDS[0], KINDS[1], KINDS[3], KINDS[5]])
@pytest.mark.parametrize("values", [False, True], ids=["no values", "values"])
def test_aggregation(reduce, kind, values):
    structure, given = matrix(kind, values)

    def function(x, values=None):
        return spmm(structure.with_values(values), x, reduce)

    check(function, {"x": draw(structure.shape[1], 3)}, "spmm", given, torch.float32)


@pytest.mark.parametrize("reduce", ["max", "min"])
def test_equal_entries_send_the_gradient_to_the_first(reduce):
    csr = Csr.from_coo(torch.zeros(40, dtype=torch.int64), torch.arange(40), (1, 40)).to(DEVICE)
    x = torch.ones(40, 2, device=DEVICE)
    x[:7] = 2.0 if reduce == "min" else 0.0
    x.requires_grad_()
    for choice in ("reference", "triton"):
        with kernels.use(choice):
            (gradient,) = torch.autograd.grad(spmm(csr, x, reduce).sum(), x)
        assert gradient.nonzero()[:, 0].unique().tolist() == [7]


def test_nan_is_not_hidden_by_a_maximum():
    csr = Csr.from_coo(torch.tensor([0, 0, 0, 1]), torch.arange(4), (2, 4)).to(DEVICE)
    x = torch.tensor([[1.0], [float("nan")], [3.0], [4.0]], device=DEVICE)
    with kernels.use("triton"):
        assert spmm(csr, x, "max").isnan().flatten().tolist() == [True, False]


def test_inference_and_training_agree():
    csr, _ = matrix(KINDS[3], values=False)
    x, row_score, col_score = draw(21, 2, 3), draw(6, 2, seed=1), draw(21, 2, seed=2)
    with kernels.use("triton"):
        trained = graph_attention(csr, x.clone().requires_grad_(), row_score, col_score)
        inferred = graph_attention(csr, x, row_score, col_score)
    assert_close(inferred, trained, 1e-6)


@pytest.mark.parametrize("operator", ["gat", "dot", "sum"])
def test_through_the_dispatcher_the_bits_are_the_same(operator, monkeypatch):
    structure, values = matrix("random", values=True)
    values = values.to(DEVICE).requires_grad_()
    leaves = [draw(*shape).requires_grad_() for shape in ((5, 2, 3), (7, 2), (5, 2), (7, 2, 3))]
    x, row_score, col_score, query = leaves

    def run(csr):
        if operator == "gat":
            return graph_attention(csr, x, row_score, col_score, dropout=0.3, seed=5)
        if operator == "dot":
            return dot_attention(csr, x, query=query, softmax=True, scale=row_score[:1])
        return spmm(csr, x)

    found = []
    for traced in (False, True):
        monkeypatch.setattr(custom_op, "is_watched", lambda _, traced=traced: traced)
        with kernels.use("triton"):
            csr = structure.with_values(values)
            z = run(csr)
            with torch.no_grad():
                inferred = run(csr)
        inputs = [*leaves, values]
        gradients = torch.autograd.grad(z.square().sum(), inputs, materialize_grads=True)
        found.append([inferred, z.detach(), *gradients])
    assert all(map(torch.equal, *found))


def test_second_derivatives_of_attention_are_refused_and_those_of_sums_known():
    csr, _ = matrix("random", values=False)
    x, row_score, col_score = (
        draw(*shape).requires_grad_() for shape in ((5, 2, 3), (7, 2), (5, 2))
    )
    with kernels.use("triton"):
        z = graph_attention(csr, x, row_score, col_score)
        (inner,) = torch.autograd.grad(z.square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once"):
            inner.sum().backward()
        (inner,) = torch.autograd.grad(spmm(csr, x).square().sum(), x, create_graph=True)
        (found,) = torch.autograd.grad(inner.sum(), x)
    ones = torch.ones_like(x)
    with kernels.use("reference"):
        expected = 2 * spmm(csr.transpose(), spmm(csr, ones))
    assert_close(found, expected, 1e-6)


def test_second_derivatives_of_sums_by_the_values_of_a_matrix():
    csr, values = matrix("random", values=True)
    values, x = values.to(DEVICE).requires_grad_(), draw(5, 2, 3).requires_grad_()
    found = []
    for implementation in ("reference", "triton"):
        with kernels.use(implementation):
            z = spmm(csr.with_values(values), x)
            (inner,) = torch.autograd.grad(z.square().sum(), x, create_graph=True)
            found.append(torch.autograd.grad(inner.square().sum(), [x, values]))
    for one, other in zip(*found, strict=True):
        assert_close(other, one, 1e-5)


@pytest.mark.parametrize("operator", ["gat", "dot", "sum"])
def test_operators_can_be_recomputed_in_the_backward_pass(operator):
    csr, values = matrix("random", values=True)
    csr = csr.with_values(values.to(DEVICE))
    x, row_score, col_score, query = (
        draw(*shape).requires_grad_() for shape in ((5, 2, 3), (7, 2), (5, 2), (7, 2, 3))
    )

    def run(x):
        if operator == "gat":
            return graph_attention(csr, x, row_score, col_score)
        return (
            dot_attention(csr, x, query=query, softmax=True) if operator == "dot" else spmm(csr, x)
        )

    with kernels.use("triton"):
        (expected,) = torch.autograd.grad(run(x).square().sum(), x)
        again = torch.utils.checkpoint.checkpoint(run, x, use_reentrant=False)
        (found,) = torch.autograd.grad(again.square().sum(), x)
    assert torch.equal(found, expected)


def test_modes_of_the_dispatcher_see_operators():
    csr, _ = matrix("random", values=False)
    with kernels.use("triton"), Operators() as called:
        spmm(csr, draw(5, 2, 3))
    assert "bevatron::spmm_sum" in called.names


def test_opcheck():
    csr, values = matrix("random", values=True)
    csr = csr.with_values(values.to(DEVICE))
    sides = *launch.rows_of(csr), *launch.columns_of(csr)
    x, row_score = (draw(*shape).requires_grad_() for shape in ((5, 2, 3), (7, 2)))
    by_column = csr.values_by_column
    values = csr.values.clone().requires_grad_()
    # Scores of both signs in every row: an output that only other rows have is not written.
    whole = Csr.from_coo(*torch.ones(7, 5).nonzero().T.to(DEVICE), (7, 5))
    signs = torch.tensor([[2.0], [-2.0], [3.0], [-1.0], [1.0]], device=DEVICE).expand(5, 2)
    torch.library.opcheck(
        gat_operator.attend.op,
        (
            *(x, 0 * row_score, signs.clone().requires_grad_(), draw(35).requires_grad_()),
            *(draw(35), *launch.rows_of(whole), *launch.columns_of(whole)),
            *([], None, 7, 0.2, 0.0, 1),
        ),
    )
    query = draw(7, 2, 3).requires_grad_()
    torch.library.opcheck(
        dot_operator.attend.op,
        (
            *(query, x, None, None, None, None, values, by_column, *sides, [], None),
            *(7, 0.2, 0.0, True, False, False),
        ),
    )
    flat = draw(5, 1, 3).requires_grad_()
    torch.library.opcheck(spmm_launch.add.op, (flat, values, by_column, *sides, 7))
    torch.library.opcheck(spmm_launch.extreme.op, (flat, values, *sides, 7, 1))


@ON_GPU
def test_cuda_graph():
    csr, _ = matrix("random", values=False)
    x, row_score, col_score = (
        draw(*shape).requires_grad_() for shape in ((5, 2, 3), (7, 2), (5, 2))
    )
    seed = torch.tensor([3], device=DEVICE)

    def step():
        z = graph_attention(csr, x, row_score, col_score, dropout=0.5, seed=seed)
        return [z, *torch.autograd.grad(z.square().sum(), (x, row_score, col_score))]

    graph, found = captured(step)
    for value in (3, 4):
        seed.fill_(value)
        graph.replay()
        torch.cuda.synchronize()
        for want, got in zip(step(), found, strict=True):
            assert torch.equal(want, got)


@ON_GPU
@pytest.mark.parametrize("operator", ["gat", "gatv2", "dot", "sum", "max"])
def test_features_of_more_than_2_to_the_31_elements(operator):
    """Columns beyond 2^31 numbers give what the same columns give in a small matrix."""
    n, m, channels = 300, 2**24 + 5, 160
    generator = torch.Generator().manual_seed(1)
    used = torch.cat([torch.arange(50), torch.arange(m - 200, m)]).to(DEVICE)
    row, column = torch.rand(n, 250, generator=generator).lt(0.2).nonzero().T.to(DEVICE)
    x = torch.empty(m, 1, channels, dtype=torch.bfloat16, device=DEVICE).fill_(3.0)
    x[used] = draw(250, 1, channels).bfloat16()
    scores = torch.full((m, 1), 3.0, device=DEVICE)
    scores[used] = draw(250, 1, seed=3)
    row_score, query = draw(n, 1, seed=4), draw(n, 1, channels, seed=5).bfloat16()
    grad = draw(n, 1, channels, seed=6).bfloat16()

    def run(csr, x, col_score):
        x.requires_grad_()
        if operator == "gat":
            z = graph_attention(csr, x, row_score, col_score)
        elif operator == "gatv2":
            z = graph_attention_v2(csr, x, query, draw(1, channels))
        elif operator == "dot":
            z = dot_attention(csr, x, query=query, softmax=True)
        else:
            z = spmm(csr, x, operator)
        return z.detach(), torch.autograd.grad(z, x, grad)[0]

    with kernels.use("triton"):
        small = run(Csr.from_coo(row, column, (n, 250)), x[used], scores[used])
        large = run(Csr.from_coo(row, used[column], (n, m)), x, scores)
    assert_close(large[0], small[0], 1e-2)
    assert_close(large[1][used], small[1], 1e-2)
    assert not large[1][50 : m - 200].any()
