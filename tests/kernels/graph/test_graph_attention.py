"""References of attention and aggregation on graphs, blocks of a larger matrix, refusals."""

import os

import pytest
import torch
from torch.nn import functional as F

from bevatron import kernels
from bevatron.kernels import Csr, dot_attention, graph_attention, graph_attention_v2, spmm
from bevatron.kernels.graph.csr import sums
from bevatron.kernels.graph.dot_attention import inverse_norm
from bevatron.kernels.graph.dot_attention import partial as dot_partial
from bevatron.kernels.graph.graph_attention import partial as gat_partial

pytestmark = pytest.mark.usefixtures("float64")


@pytest.fixture(params=["reference", "triton"])
def implementation(request):
    if request.param == "triton":
        pytest.importorskip("triton")
        if os.environ.get("TRITON_INTERPRET") != "1":
            pytest.skip("float64 on a CPU needs the interpreter")
    with kernels.use(request.param):
        yield


def graph(rows=8, columns=8, values=True, seed=0):
    generator = torch.Generator().manual_seed(seed)
    pattern = torch.rand(rows, columns, generator=generator) < 0.4
    pattern[3] = pattern[:, 2] = False
    pattern[4] = True
    dense = torch.where(pattern, torch.rand(rows, columns, generator=generator), 0.0)
    row, col = pattern.nonzero().unbind(1)
    return pattern, dense, Csr.from_coo(row, col, (rows, columns), dense[row, col])


def leaves(*shapes):
    return [torch.randn(*shape).requires_grad_() for shape in shapes]


def softmax_over(pattern, logits):
    return logits.masked_fill(~pattern[..., None], -torch.inf).softmax(1).nan_to_num()


def agree(found, want, inputs):
    along = torch.randn_like(want)
    torch.testing.assert_close(found, want, rtol=1e-12, atol=1e-12)
    gradients = torch.autograd.grad(found, inputs, along)
    expected = torch.autograd.grad(want, inputs, along)
    torch.testing.assert_close(gradients, expected, rtol=1e-11, atol=1e-12)


def test_gat_is_a_masked_dense_softmax():
    pattern, dense, csr = graph()
    x, row_score, col_score = leaves((8, 2, 3), (8, 2), (8, 2))
    logits = F.leaky_relu(row_score[:, None] + col_score[None], 0.1)
    weights = softmax_over(pattern, logits) * dense[..., None]
    want = torch.einsum("ijh,jhc->ihc", weights, x)
    found = graph_attention(csr, x, row_score, col_score, 0.1)
    agree(found, want, (x, row_score, col_score))


def test_gatv2_is_a_masked_dense_softmax():
    pattern, dense, csr = graph()
    x, query, weight = leaves((8, 2, 3), (8, 2, 3), (2, 3))
    logits = (F.leaky_relu(query[:, None] + x[None], 0.2) * weight).sum(-1)
    want = torch.einsum("ijh,jhc->ihc", softmax_over(pattern, logits) * dense[..., None], x)
    agree(graph_attention_v2(csr, x, query, weight), want, (x, query, weight))


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("softmax", [False, True])
def test_forms_of_dot_product_attention(normalize, softmax):
    pattern, dense, csr = graph()
    x, beta = leaves((8, 2, 3), (1,))
    unit = F.normalize(x, dim=-1, eps=1e-12) if normalize else x
    scores = beta * torch.einsum("ihc,jhc->ijh", unit, unit)
    weights = softmax_over(pattern, scores) if softmax else scores * pattern[..., None]
    want = torch.einsum("ijh,jhc->ihc", weights * dense[..., None], x)
    found = dot_attention(csr, x, normalize=normalize, softmax=softmax, scale=beta)
    agree(found, want, (x, beta))


def test_zero_vectors_have_no_direction_and_no_gradient():
    _, _, csr = graph()
    x = torch.randn(8, 1, 3)
    x[1] = 0.0
    x.requires_grad_()
    inverse_norm(x).sum().backward()
    assert x.grad[1].eq(0).all()
    z = dot_attention(csr, x, normalize=True)
    (gradient,) = torch.autograd.grad(z.square().sum(), x)
    assert z.isfinite().all()
    assert gradient.isfinite().all()


def test_agnn_equals_pytorch_geometric():
    geometric = pytest.importorskip("torch_geometric.nn")
    _, _, csr = graph()
    csr = csr.with_values(None)
    x = torch.randn(8, 4)
    conv = geometric.AGNNConv(add_self_loops=False)
    conv.beta.data.fill_(1.7)
    edges = torch.stack([csr.col.long(), csr.row_index.long()])
    found = dot_attention(csr, x[:, None], normalize=True, softmax=True, scale=conv.beta)
    torch.testing.assert_close(found[:, 0], conv(x, edges), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
def test_aggregation_equals_that_of_the_dense_matrix(reduce):
    pattern, dense, csr = graph()
    (x,) = leaves((8, 5))
    if reduce in {"sum", "mean"}:
        want = dense @ x
        if reduce == "mean":
            want = want / dense.sum(1).masked_fill(~pattern.any(1), 1.0)[:, None]
    else:
        fill = -torch.inf if reduce == "max" else torch.inf
        message = (dense[..., None] + x[None]).masked_fill(~pattern[..., None], fill)
        want = message.amax(1) if reduce == "max" else message.amin(1)
        want = want.masked_fill(~pattern.any(1)[:, None], 0.0)
    agree(spmm(csr, x, reduce), want, (x,))


def test_axes_of_features_are_kept():
    _, _, csr = graph()
    assert spmm(csr, torch.randn(8, 2, 3)).shape == (8, 2, 3)
    assert spmm(csr, torch.randn(8), "max").shape == (8,)
    assert spmm(csr, torch.randn(8, 0)).shape == (8, 0)


def test_gradients_of_values_and_second_derivatives():
    _, _, csr = graph(5, 6)
    values = csr.values.clone().requires_grad_()
    x, row_score, col_score = leaves((6, 1, 2), (5, 1), (6, 1))

    def run(values, x, row_score, col_score):
        return graph_attention(csr.with_values(values), x, row_score, col_score)

    inputs = (values, x, row_score, col_score)
    assert torch.autograd.gradcheck(run, inputs)
    assert torch.autograd.gradgradcheck(run, inputs)


def test_pieces_of_the_entries_give_the_same_sums(monkeypatch):
    _, _, csr = graph()
    (x,) = leaves((8, 2, 3))
    whole = dot_attention(csr, x)
    monkeypatch.setattr(sums, "PIECE", 13)
    assert torch.equal(dot_attention(csr, x), whole)


def test_scores_of_gatv2_by_pieces_have_the_same_derivatives(monkeypatch):
    _, _, csr = graph()
    inputs = leaves((8, 2, 3), (8, 2, 3), (2, 3))

    def attend(*tensors):
        return graph_attention_v2(csr, *tensors)

    whole = torch.autograd.grad(attend(*inputs).sin().sum(), inputs)
    monkeypatch.setattr(sums, "PIECE", 30)
    pieces = torch.autograd.grad(attend(*inputs).sin().sum(), inputs)
    torch.testing.assert_close(pieces, whole, rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradgradcheck(attend, inputs)


def blocks(csr, cuts):
    """Cut a matrix by columns; each block knows the numbers of its columns."""
    ids = torch.arange(csr.shape[1])
    for first, last in cuts:
        inside = (csr.col >= first) & (csr.col < last)
        yield (
            slice(first, last),
            Csr.from_coo(
                csr.row_index[inside],
                csr.col[inside] - first,
                (csr.shape[0], last - first),
                csr.values[inside],
                col_ids=ids[first:last],
            ),
        )


def test_blocks_of_gat_add_up(implementation):
    _, _, csr = graph()
    x, row_score, col_score = leaves((8, 2, 3), (8, 2), (8, 2))
    options = {"negative_slope": 0.3, "dropout": 0.4, "seed": 5}
    with kernels.use("reference"):
        want = graph_attention(csr, x, row_score, col_score, **options)
    grad = torch.randn_like(want)
    expected = torch.autograd.grad(want, (x, row_score, col_score), grad)
    parts = list(blocks(csr, [(0, 3), (3, 3), (3, 8)]))
    found = [gat_partial.forward(b, x[s], row_score, col_score[s], **options) for s, b in parts]
    z, lse = gat_partial.finish(gat_partial.merge(found))
    torch.testing.assert_close(z, want, rtol=1e-12, atol=1e-12)
    bare = [gat_partial.forward(b, x[s], row_score, col_score[s], **options, backward=False)
            for s, b in parts]  # fmt: skip
    assert all(not block.z_positive.numel() and not block.positive.numel() for block in bare)
    torch.testing.assert_close(gat_partial.finish(gat_partial.merge(bare)), (z, lse))
    delta = (grad * z).sum(-1)
    shares = [
        gat_partial.backward(b, x[s], row_score, col_score[s], grad, lse, delta, **options)
        for s, b in parts
    ]
    by_row = sum(gat_partial.row_gradient(f, grad, lse, delta, 0.3) for f in found)
    got = torch.cat([s[0] for s in shares]), by_row, torch.cat([s[1] for s in shares])
    torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-12)


def test_blocks_with_dropout_need_a_seed():
    _, _, csr = graph()
    with pytest.raises(ValueError, match="needs a seed"):
        gat_partial.forward(csr, torch.randn(8, 1, 1), *torch.randn(2, 8, 1), dropout=0.5)


@pytest.mark.parametrize("softmax", [False, True])
@pytest.mark.parametrize("own_value", [False, True])
def test_blocks_of_dot_product_attention_add_up(implementation, softmax, own_value):
    _, _, csr = graph()
    query, key, value, row_scale, col_scale = leaves(
        (8, 2, 3), (8, 2, 3), (8, 2, 4), (8, 2), (8, 2)
    )
    inputs = (query, key, row_scale, col_scale, *([value] if own_value else []))
    with kernels.use("reference"):
        run = kernels.registry.dispatch("dot_attention", key)
        want = run(csr, query, key, value if own_value else key, row_scale, col_scale, softmax)
    grad = torch.randn_like(want)
    expected = torch.autograd.grad(want, inputs, grad)
    parts = [
        (
            b,
            dot_partial.Scores(
                *(query, key[s], value[s] if own_value else None, row_scale, col_scale[s]),
                softmax,
            ),
        )
        for s, b in blocks(csr, [(0, 3), (3, 3), (3, 8)])
    ]
    z, lse = dot_partial.finish(dot_partial.merge([dot_partial.forward(*p) for p in parts]))
    torch.testing.assert_close(z, want, rtol=1e-12, atol=1e-12)
    delta = (grad * z).sum(-1) if softmax else None
    rows = [dot_partial.row_backward(*p, grad, lse, delta) for p in parts]
    columns = [dot_partial.col_backward(*p, grad, lse, delta) for p in parts]
    got = [sum(r[0] for r in rows), torch.cat([c[0] for c in columns]), sum(r[1] for r in rows)]
    got.append(torch.cat([c[2] for c in columns]))
    if own_value:
        got.append(torch.cat([c[1] for c in columns]))
    for found, exact in zip(got, expected, strict=True):
        torch.testing.assert_close(found, exact, rtol=1e-11, atol=1e-12)


def test_mismatched_arguments_are_refused_by_name():
    _, _, csr = graph(5, 6)
    x, row_score, col_score = torch.randn(6, 1, 2), torch.randn(5, 1), torch.randn(6, 1)

    def unchecked(function):
        return getattr(function, "__wrapped__", function)

    gat, dot, product = map(unchecked, (graph_attention, dot_attention, spmm))
    with pytest.raises(ValueError, match="x has shape"):
        gat(csr, x[:5], row_score, col_score)
    with pytest.raises(ValueError, match="row_score has shape"):
        gat(csr, x, col_score, col_score)
    with pytest.raises(ValueError, match="col_score has shape"):
        gat(csr, x, row_score, row_score)
    with pytest.raises(ValueError, match="dropout is 1"):
        gat(csr, x, row_score, col_score, dropout=1.0)
    with pytest.raises(ValueError, match="negative_slope is -1"):
        gat(csr, x, row_score, col_score, -1.0)
    with pytest.raises(ValueError, match="not square and needs a query"):
        dot(csr, x)
    with pytest.raises(ValueError, match="scale has 3 elements"):
        dot(csr, x, query=torch.randn(5, 1, 2), scale=torch.ones(3))
    with pytest.raises(ValueError, match="reduce is 'median'"):
        product(csr, x, "median")
    with pytest.raises(ValueError, match="a row for each of 6 columns"):
        product(csr, x[:5])


def test_a_seed_repeats_the_mask_and_none_draws_one():
    _, _, csr = graph()
    x, scores = torch.randn(8, 1, 2), torch.randn(8, 1)

    def run(seed):
        return graph_attention(csr, x, scores, scores, dropout=0.5, seed=seed)

    assert torch.equal(run(3), run(torch.tensor(3)))
    assert not torch.equal(run(3), run(4))
    assert not torch.equal(run(None), run(None))
