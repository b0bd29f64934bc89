"""Building blocks of attention on graphs, against dense n x n formulas."""

import inspect

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from bevatron.kernels import registry
from bevatron.kernels.graph.csr import Csr
from bevatron.kernels.graph.graph_blocks import (
    column_sum,
    graph_softmax,
    mspmm,
    piece_elements,
    replicate,
    row_sum,
    sampled,
    sddmm,
    spmmm,
    weighted_sum,
)
from bevatron.kernels.graph.graph_blocks import pieces as parts
from bevatron.kernels.graph.graph_blocks.products import by_head

N, M, K, HEADS = 6, 5, 3, 2


def rectangle(weighted=False):
    """A 6 x 5 matrix with an empty and a full row, an empty column and a lone entry."""
    dense = torch.zeros(N, M, dtype=torch.bool)
    dense[0, :4] = True
    dense[0, 3] = dense[2, 1] = dense[2, 3] = dense[4, 0] = dense[5, 2] = dense[5, 1] = True
    row, col = dense.nonzero(as_tuple=True)
    values = torch.rand(len(row), dtype=torch.float64) + 0.5 if weighted else None
    order = torch.randperm(len(row))
    shuffled = None if values is None else values[order]
    return Csr.from_coo(row[order], col[order], (N, M), shuffled), dense


def numbers(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def spread(csr, values):
    """Numbers on entries as a dense matrix [n, m, heads]."""
    row = csr.row_index.long()
    dense = values.new_zeros(*csr.shape, *values.shape[1:])
    return dense.index_put((row, csr.col.long()), values)


@pytest.fixture(params=[2**22, 7], ids=["one piece", "pieces of a few numbers"], autouse=True)
def _pieces(request):
    with piece_elements(request.param):
        yield


@pytest.mark.parametrize("heads", [(), (HEADS,)], ids=["plain", "heads"])
@pytest.mark.parametrize("weighted", [False, True])
def test_sampled_product(heads, weighted):
    csr, dense = rectangle(weighted)
    x, y = numbers(N, *heads, K), numbers(M, *heads, K)
    values = csr.values if weighted else torch.ones(csr.nnz, dtype=torch.float64)
    expected = torch.einsum("i...k,j...k->ij...", x, y)[dense]
    expected = expected * values.reshape(-1, *[1] * len(heads))
    torch.testing.assert_close(sddmm(csr, x, y), expected)
    assert gradcheck(lambda x, y: sddmm(csr, x, y), (x, y))
    assert gradgradcheck(lambda x, y: sddmm(csr, x, y), (x, y))


@pytest.mark.parametrize("heads", [(), (HEADS,)], ids=["plain", "heads"])
def test_weighted_sum(heads):
    csr, _ = rectangle()
    values, x = numbers(csr.nnz, *heads), numbers(M, *heads, K)
    expected = torch.einsum("ij...,j...k->i...k", spread(csr, values), x)
    torch.testing.assert_close(weighted_sum(csr, values, x), expected)
    ones = torch.ones_like(values)
    torch.testing.assert_close(weighted_sum(csr, None, x), weighted_sum(csr, ones, x))
    assert gradcheck(lambda v, x: weighted_sum(csr, v, x), (values, x))
    assert gradgradcheck(lambda v, x: weighted_sum(csr, v, x), (values, x))


def test_one_set_of_values_serves_all_heads_and_one_set_of_features_too():
    csr, _ = rectangle()
    values, x = numbers(csr.nnz, 1), numbers(M, HEADS, K)
    expected = torch.einsum("ij,jhk->ihk", spread(csr, values)[..., 0], x)
    torch.testing.assert_close(weighted_sum(csr, values, x), expected)
    assert gradcheck(lambda v, x: weighted_sum(csr, v, x), (values, x))
    values, x = numbers(csr.nnz, HEADS), numbers(M, 1, K)
    assert weighted_sum(csr, values, x).shape == (N, HEADS, K)
    assert gradcheck(lambda v, x: weighted_sum(csr, v, x), (values, x))
    x, y = numbers(N, 1, K), numbers(M, HEADS, K)
    assert gradcheck(lambda x, y: sddmm(csr, x, y), (x, y))


@pytest.mark.parametrize(("given", "held"), [(HEADS, HEADS), (1, HEADS), (HEADS, 1), (0, HEADS)])
def test_head_by_head_through_the_fused_product_is_the_same(given, held):
    csr, _ = rectangle()
    values = numbers(csr.nnz, given) if given else None
    x = numbers(M, held, K)
    inputs = [tensor for tensor in (values, x) if tensor is not None]
    ours, theirs = by_head(csr, values, x), weighted_sum(csr, values, x)
    torch.testing.assert_close(ours, theirs)
    probe = torch.randn_like(ours)
    for one, other in zip(
        torch.autograd.grad((ours * probe).sum(), inputs),
        torch.autograd.grad((theirs * probe).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("wide", [2, 4], ids=["narrower after", "wider after"])
@pytest.mark.parametrize("weighted", [False, True])
def test_triple_products(wide, weighted):
    csr, _ = rectangle(weighted)
    values = csr.values if weighted else torch.ones(csr.nnz, dtype=torch.float64)
    matrix = spread(csr, values)
    x, weight = numbers(M, K), numbers(K, wide)
    torch.testing.assert_close(spmmm(csr, x, weight), matrix @ x @ weight)
    assert gradcheck(lambda x, w: spmmm(csr, x, w), (x, weight))
    left, right = numbers(N, K), numbers(M, wide)
    torch.testing.assert_close(mspmm(left, csr, right), left.T @ matrix @ right)
    assert gradcheck(lambda x, y: mspmm(x, csr, y), (left, right))


def test_a_derivative_reaches_trained_edge_values():
    csr, _ = rectangle(weighted=True)
    values = csr.values.clone().requires_grad_()
    x, y, weight = numbers(N, K), numbers(M, K), numbers(K, 2)
    assert gradcheck(lambda v: sddmm(csr.with_values(v), x, y), (values,))
    assert gradcheck(lambda v: spmmm(csr.with_values(v), y, weight), (values,))
    assert gradcheck(lambda v: mspmm(x[:, :1], csr.with_values(v), y), (values,))


@pytest.mark.parametrize("heads", [(), (HEADS,)], ids=["plain", "heads"])
def test_sums_replication_and_softmax(heads):
    csr, dense = rectangle()
    values, u, v = numbers(csr.nnz, *heads), numbers(N, *heads), numbers(M, *heads)
    torch.testing.assert_close(row_sum(csr, values), spread(csr, values).sum(1))
    torch.testing.assert_close(column_sum(csr, values), spread(csr, values).sum(0))
    torch.testing.assert_close(replicate(csr, u), u[csr.row_index])
    torch.testing.assert_close(replicate(csr, v, "column"), v[csr.col])
    scores = spread(csr, values)
    absent = ~dense.reshape(N, M, *[1] * len(heads)).expand_as(scores)
    expected = scores.masked_fill(absent, -torch.inf).softmax(1)[dense]
    torch.testing.assert_close(graph_softmax(csr, values), expected)
    for block, inputs in (
        (row_sum, values),
        (column_sum, values),
        (replicate, u),
        (lambda c, v: replicate(c, v, "column"), v),
        (graph_softmax, values),
    ):
        assert gradcheck(lambda z, block=block: block(csr, z), (inputs,))
        assert gradgradcheck(lambda z, block=block: block(csr, z), (inputs,))


def test_softmax_of_large_scores():
    csr, _ = rectangle()
    scores = torch.randn(csr.nnz, dtype=torch.float64)
    shifted = graph_softmax(csr, scores + replicate(csr, 1e4 * torch.arange(N).double()))
    torch.testing.assert_close(shifted, graph_softmax(csr, scores), rtol=1e-9, atol=1e-9)


def test_a_formula_on_the_edges():
    csr, dense = rectangle(weighted=True)
    x, y = numbers(N, HEADS, K), numbers(M, HEADS, K)
    u, v, edge, s = numbers(N, HEADS), numbers(M, HEADS), numbers(csr.nnz, 1), numbers(HEADS)

    def formula(leaves):
        dot, row, column, values, scale = leaves
        return values * torch.tanh(scale * dot + row * column) + row

    def ours(x, y, u, v, edge, s):
        leaves = [("dot", x, y), ("row", u), ("column", v), ("edge", edge), ("everywhere", s)]
        return sampled(csr, formula, leaves, HEADS)

    dots = torch.einsum("ihk,jhk->ijh", x, y)
    rows, columns = u[:, None].expand(N, M, HEADS), v[None].expand(N, M, HEADS)
    expected = formula([dots[dense], rows[dense], columns[dense], edge, s])
    torch.testing.assert_close(ours(x, y, u, v, edge, s), expected)
    assert gradcheck(ours, (x, y, u, v, edge, s))


@pytest.mark.parametrize("shape", [(), (3,), (2, 4)])
def test_sums_by_parts_are_sums(shape, monkeypatch):
    monkeypatch.setattr(parts, "PART", 4)
    rows = torch.tensor([1] * 3 + [2] * 13 + [5] + [7] * 8)
    values = torch.randn(len(rows), *shape, dtype=torch.float64)
    ptr = torch.searchsorted(rows, torch.arange(10))
    expected = values.new_zeros(9, *shape).index_add(0, rows, values)
    torch.testing.assert_close(parts.sum_by_parts(values, ptr), expected)
    torch.testing.assert_close(parts.segment_sum(values, ptr), expected)
    touched, starts = parts.runs(rows)
    torch.testing.assert_close(parts.sum_by_parts(values, starts), expected[touched])
    assert parts.sum_by_parts(values[:0], torch.zeros(4, dtype=torch.int64)).shape == (3, *shape)


def test_no_entries_at_all():
    nothing = torch.zeros(0, dtype=torch.int64)
    csr = Csr.from_coo(nothing, nothing, (N, M))
    x, y = numbers(N, K), numbers(M, K)
    assert sddmm(csr, x, y).shape == (0,)
    assert weighted_sum(csr, None, y).abs().sum() == 0
    assert graph_softmax(csr, sddmm(csr, x, y)).shape == (0,)


def test_bfloat16_features_give_float32_edge_values():
    csr, dense = rectangle()
    x, y = torch.randn(N, K).bfloat16(), torch.randn(M, K).bfloat16()
    products = sddmm(csr, x, y)
    assert products.dtype == torch.float32
    torch.testing.assert_close(products, (x.float() @ y.float().T)[dense])
    assert weighted_sum(csr, products, y).dtype == torch.bfloat16


def test_the_registry_knows_the_blocks_and_counts_them():
    csr, _ = rectangle()
    registry.reset_launches()
    sddmm(csr, torch.ones(N, K), torch.ones(M, K))
    assert registry.launches() == {("sddmm", "reference"): 1}


def test_rows_that_do_not_match_the_matrix_are_refused():
    csr, _ = rectangle()
    with pytest.raises(ValueError, match="x has 5 rows, expected 6"):
        inspect.unwrap(sddmm)(csr, torch.ones(M, K), torch.ones(M, K))
