"""Known layers: what their names promise, on directed graphs with empty rows and edge values."""

import itertools
import sys

import pytest
import torch
from torch import nn

from bevatron.errors import ConfigError
from bevatron.kernels.graph.csr import Csr
from bevatron.kernels.graph.dot_attention import dot_attention
from bevatron.kernels.graph.graph_attention import graph_attention
from bevatron.models.graph_attention import (
    GraphAttentionConfig,
    Layer,
    NodeClassifier,
    agnn,
    agnn_paper,
    gat,
    gatv2,
    gcn,
    gin,
    va,
)
from bevatron.models.graph_attention.formula.expression import A, Expression, H

N, WIDTH = 8, 4


def graph(weighted=True):
    """A directed graph with an empty row and an empty column; and the same as a dense matrix."""
    edges = torch.rand(N, N) < 0.4
    edges[3], edges[:, 5], edges[6, 0] = False, False, True
    row, col = edges.nonzero(as_tuple=True)
    values = torch.rand(len(row), dtype=torch.float64) + 0.5 if weighted else None
    dense = torch.zeros(N, N, dtype=torch.float64)
    dense[row, col] = 1.0 if values is None else values
    return Csr.from_coo(row, col, (N, N), values), dense


def softmax(scores, dense):
    """Softmax over the edges, times their values."""
    scores = scores.masked_fill(dense == 0, -torch.inf)
    return scores.softmax(1).nan_to_num(0.0) * dense


def expected(name, h, dense):
    products = h @ h.T
    lengths = h.norm(dim=1)
    degree = (dense != 0).double().sum(1, keepdim=True).clamp(min=1.0)
    scale = torch.where(dense.sum(1) > 0, dense.sum(1), torch.inf) ** -0.5
    return {
        "va": dense * products,
        "va scaled": dense * products / degree / WIDTH,
        "va softmax": softmax(products / WIDTH**0.5, dense),
        "agnn of the paper": dense * products / torch.outer(lengths, lengths),
        "agnn": softmax(1.5 * products / torch.outer(lengths, lengths), dense),
        "gcn": dense * torch.outer(scale, scale),
    }[name]


MAKERS = {
    "va": lambda: va(WIDTH, WIDTH),
    "va scaled": lambda: va(WIDTH, WIDTH, form="scaled"),
    "va softmax": lambda: va(WIDTH, WIDTH, form="softmax"),
    "agnn of the paper": lambda: agnn_paper(WIDTH, WIDTH),
    "agnn": lambda: agnn(WIDTH, beta=1.5),
    "gcn": lambda: gcn(WIDTH, WIDTH, bias=False),
}


NAMED = {
    "gat": lambda: gat(WIDTH, 3, heads=2, attention_dropout=0.3, value_dropout=0.4),
    "gat of the authors": lambda: gat(
        WIDTH, 3, heads=2, combine="mean", input_dropout=0.2, own_glorot=True, slope=0.1
    ),
    "gatv2": lambda: gatv2(WIDTH, 3, heads=2, attention_dropout=0.3, activation=torch.relu),
    "gatv2, biases": lambda: gatv2(WIDTH, 3, heads=2, inner_bias=True, combine="mean"),
    "gatv2, shared": lambda: gatv2(WIDTH, 3, inner_bias=True, share_weights=True, bias=False),
    "agnn": lambda: agnn(WIDTH, beta=0.7),
    "agnn of the paper": lambda: agnn_paper(WIDTH, 3, bias=True, activation=torch.tanh),
    "va": lambda: va(WIDTH, 3),
    "va scaled": lambda: va(WIDTH, 3, form="scaled"),
    "va softmax": lambda: va(WIDTH, 3, form="softmax", bias=True),
}


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("name", NAMED)
def test_a_named_layer_is_its_formula_to_the_last_bit(name, training):
    """The formula is what named layers were before they called their kernels themselves."""
    layer = NAMED[name]().train(training)
    formula = layer.formula()
    assert formula.state_dict().keys() == layer.state_dict().keys()
    for weighted, sparse, dtype, autocast in itertools.product(
        (False, True), (False, True), (torch.float64, torch.float32), (False, True)
    ):
        layer.to(dtype)
        csr = graph(weighted)[0]
        csr = csr.with_values(csr.values.to(dtype).requires_grad_()) if weighted else csr
        h = torch.randn(N, WIDTH, dtype=dtype)
        h[2] = 0.0
        leaf = (h.flatten() if sparse else h).requires_grad_()
        place = torch.ones(N, WIDTH).nonzero().T
        features = Csr.from_coo(*place, (N, WIDTH), leaf) if sparse else leaf
        inputs = [leaf, *layer.parameters(), *([csr.values] if weighted else [])]
        results = []
        for compute in (layer, formula):
            torch.manual_seed(1)
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                result = compute(csr, features)
            probe = torch.linspace(-1.0, 1.0, result.numel()).reshape(result.shape)
            loss = (result * probe.to(result.dtype)).sum()
            gradients = torch.autograd.grad(loss, inputs, retain_graph=True)
            results.append((result, *gradients, torch.get_rng_state()))
        for ours, theirs in zip(*results, strict=True):
            assert ours.dtype == theirs.dtype
            assert torch.equal(ours, theirs), (weighted, sparse, dtype, autocast)


@pytest.mark.parametrize("layer", ["gat", "gatv2", "agnn", "agnn_paper", "va", "va_scaled"])
@pytest.mark.parametrize("stack", ["plain", "residual"])
def test_named_layers_pass_through_no_formula(layer, stack, monkeypatch):
    def never(*_):
        raise AssertionError("a formula was written")

    monkeypatch.setattr(Expression, "__post_init__", never)
    monkeypatch.setattr("bevatron.models.graph_attention.formula.layer.plan", never)
    config = GraphAttentionConfig(layer=layer, stack=stack, hidden=8, heads=2)
    model = NodeClassifier(config.with_data(inputs=WIDTH, outputs=2))
    model.stack(graph(weighted=False)[0], torch.randn(N, WIDTH)).sum().backward()
    with pytest.raises(AssertionError, match="a formula was written"):
        model.explain()


def test_explaining_a_layer_draws_no_random_number():
    layer = gat(WIDTH, 3, heads=2)
    before = torch.get_rng_state()
    assert "kernel: graph_attention" in layer.explain()
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("make", [gat, gatv2])
def test_numbers_that_the_kernels_do_not_take_are_refused(make):
    with pytest.raises(ConfigError, match="slope: expected 0 to 1, got"):
        make(WIDTH, 3, slope=1.5)
    with pytest.raises(ConfigError, match="attention_dropout: expected 0 <= p < 1, got 1"):
        make(WIDTH, 3, attention_dropout=1.0)


@pytest.mark.parametrize("name", ["va", "va softmax", "agnn of the paper", "agnn"])
def test_the_row_fetched_for_a_score_is_the_one_that_is_summed(name, monkeypatch):
    given = []

    def counted(csr, x, *, value=None, **options):
        given.append(value)
        return dot_attention(csr, x, value=value, **options)

    layer = MAKERS[name]()
    monkeypatch.setattr(sys.modules[type(layer).__module__], "dot_attention", counted)
    layer(graph(weighted=False)[0], torch.randn(N, WIDTH))
    assert given == [None]
    assert f"words per edge: {WIDTH + 1} forward" in layer.explain()


def test_dropped_values_count_in_the_scores():
    csr, _ = graph(weighted=False)
    layer = gat(WIDTH, 6, heads=2, value_dropout=0.5, bias=False)
    h = torch.randn(N, WIDTH)
    torch.manual_seed(1)
    found = layer(csr, h)
    x = (h @ layer.weight).permute(1, 0, 2).contiguous()
    row, column = ((x * layer.learned[name]).sum(-1) for name in ("row", "column"))
    torch.manual_seed(1)
    dropped = nn.functional.dropout(x, 0.5)
    torch.testing.assert_close(found, graph_attention(csr, dropped, row, column).flatten(1))
    layer.eval()
    torch.testing.assert_close(layer(csr, h), graph_attention(csr, x, row, column).flatten(1))
    with pytest.raises(ConfigError, match=r"value_dropout: .* sums the very features"):
        Layer(WIDTH, psi=A * (H @ H.T), phi=None, value_dropout=0.1)


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_each_head_drops_other_inputs(sparse):
    n, inputs = 5, 400
    layer = gat(inputs, 1, heads=3, input_dropout=0.5, bias=False)
    with torch.no_grad():
        layer.weight.fill_(1.0)
    loops = torch.arange(n)
    csr = Csr.from_coo(loops, loops, (n, n))  # each attends to itself: the sum of what is left
    features = torch.ones(n, inputs)
    if sparse:
        row, column = torch.ones(n, inputs).nonzero().T
        features = Csr.from_coo(row, column, (n, inputs), torch.ones(n * inputs))
    found = layer(csr, features)
    assert ((found - inputs).abs() < 6 * inputs**0.5).all()
    assert len(set(found.flatten().tolist())) > n  # one mask for all heads: at most n
    torch.testing.assert_close(layer.eval()(csr, features), torch.full((n, 3), float(inputs)))
    with pytest.raises(ConfigError, match="input_dropout: needs"):
        Layer(WIDTH, 4, psi=A * (H @ H.T), input_dropout=0.1)


def test_weights_of_a_head_begin_as_those_of_a_layer_by_itself():
    torch.manual_seed(0)
    for own, together in ((True, 1), (False, 32)):
        layer = gat(50, 4, heads=32, own_glorot=own)
        assert layer.weight.max().item() == pytest.approx(
            (6 / (50 + 4 * together)) ** 0.5, rel=0.02
        )
        row = layer.learned["row"]
        assert row.max().item() == pytest.approx((6 / (4 + together)) ** 0.5, rel=0.1)


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("name", MAKERS)
def test_formulas(name, weighted):
    csr, dense = graph(weighted)
    layer = MAKERS[name]().double()
    with torch.no_grad():
        for parameter in layer.learned.values():
            parameter.fill_(1.5)
    h = torch.randn(N, WIDTH, dtype=torch.float64, requires_grad=True)
    weight = torch.eye(WIDTH).double() if layer.weight is None else layer.weight[0]
    want = expected(name, h, dense) @ h @ weight
    got = layer(csr, h)
    torch.testing.assert_close(got, want)
    probe = torch.randn_like(got)
    ours = torch.autograd.grad((got * probe).sum(), h)[0]
    theirs = torch.autograd.grad((want * probe).sum(), h)[0]
    torch.testing.assert_close(ours, theirs)


def test_plain_va_overflows_within_three_layers_and_the_scaled_form_does_not():
    n, width = 256, 16
    everywhere = torch.ones(n, n).nonzero()
    csr = Csr.from_coo(everywhere[:, 0], everywhere[:, 1], (n, n))
    results = {}
    for form in ("plain", "scaled", "softmax"):
        torch.manual_seed(0)
        h = 100 * (torch.rand(n, width) - 0.5)
        for _ in range(3):
            h = va(width, width, form=form)(csr, h)
        results[form] = h
    assert not results["plain"].isfinite().all()
    assert results["scaled"].isfinite().all()
    assert results["softmax"].isfinite().all()


@pytest.mark.parametrize("make", [gat, gatv2])
def test_edge_values_multiply_the_attention_after_the_softmax(make):
    csr, _ = graph(weighted=True)
    layer = make(WIDTH, 3, heads=2, bias=False).double()
    h = torch.randn(N, WIDTH, dtype=torch.float64)
    doubled = layer(csr.with_values(2 * csr.values), h)
    torch.testing.assert_close(doubled, 2 * layer(csr, h))
    ones = layer(csr.with_values(torch.ones_like(csr.values)), h)
    torch.testing.assert_close(ones, layer(csr.with_values(None), h))


def test_trained_edge_values_get_a_gradient():
    csr, _ = graph(weighted=True)
    h = torch.randn(N, WIDTH, dtype=torch.float64)
    for layer in (gat(WIDTH, 3), gcn(WIDTH, 3), va(WIDTH, 3), agnn(WIDTH)):
        values = csr.values.clone().requires_grad_()
        layer.double()(csr.with_values(values), h).square().sum().backward()
        assert values.grad.abs().sum() > 0


def test_gin_counts_each_vertex_itself():
    csr, dense = graph(weighted=False)
    mlp = nn.Linear(WIDTH, 3).double()
    layer = gin(mlp, WIDTH, 3, eps=0.25).double()
    h = torch.randn(N, WIDTH, dtype=torch.float64)
    torch.testing.assert_close(layer(csr, h), mlp(1.25 * h + dense @ h))
    assert not layer.learned["eps"].requires_grad


def test_activation_and_combination_of_heads():
    csr, _ = graph()
    h = torch.randn(N, WIDTH)
    csr = csr.with_values(None)
    beside = gat(WIDTH, 3, heads=2, bias=False)
    mean = gat(WIDTH, 3, heads=2, combine="mean", bias=False, activation=torch.relu)
    mean.load_state_dict(beside.state_dict())
    expected_mean = beside(csr, h).reshape(N, 2, 3).mean(1).relu()
    torch.testing.assert_close(mean(csr, h), expected_mean)
