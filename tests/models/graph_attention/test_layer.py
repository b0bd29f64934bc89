"""The programmable layer against dense n x n evaluation, with gradients."""

import pytest
import torch
from torch import nn
from torch.autograd import gradcheck

from bevatron.errors import ConfigError
from bevatron.kernels.graph.csr import Csr
from bevatron.kernels.graph.graph_blocks import piece_elements
from bevatron.models.graph_attention.formula.expression import (
    A,
    H,
    X,
    dropout,
    exp,
    joint,
    leaky_relu,
    norm,
    normalize,
    outer,
    relu,
    replicate,
    row_sum,
    scalar,
    scale_rows,
    sigmoid,
    softmax,
    sqrt,
    tanh,
    weight,
)
from bevatron.models.graph_attention.formula.layer import Layer

N, IN, OUT = 7, 3, 2
a, b = weight("a", "out"), weight("b", "out")
square = norm(H) ** 2
distance = replicate(square) + replicate(square).T - 2.0 * (H @ H.T)
degree = row_sum(A.pattern)
shared = exp(A * tanh(H @ H.T))

KNOWN = {
    "VA": (A * (H @ H.T), "dot_attention"),
    "VA, scaled": (A * (H @ H.T) / replicate(degree * 3.0), "dot_attention"),
    "VA, softmax": (softmax(A.pattern * (H @ H.T) / 1.7), "dot_attention"),
    "AGNN of the paper": (A * (H @ H.T) / outer(norm(H), norm(H)), "dot_attention"),
    "AGNN": (
        softmax(scalar("beta", 0.7) * A.pattern * (normalize(H) @ normalize(H).T)),
        "dot_attention",
    ),
    "AGNN of X": (softmax(A.pattern * (normalize(X) @ normalize(X).T)), "dot_attention"),
    "transformer": (
        A * softmax(A.pattern * (H @ weight("q", "in", 4) @ (H @ weight("k", "in", 4)).T) / 2.0),
        "dot_attention",
    ),
    "GAT": (
        softmax(A.pattern * leaky_relu(replicate(X @ a) + replicate(X @ b).T)),
        "graph_attention",
    ),
    "GAT, order of terms": (
        A * softmax(A.pattern * relu(replicate(X @ b).T + replicate(X @ a))),
        "graph_attention",
    ),
    "GAT without X": (
        softmax(A.pattern * (replicate(H @ weight("a", "in")) + replicate(degree).T)),
        "graph_attention",
    ),
    "GATv2": (
        softmax(A.pattern * joint(H @ weight("left", "in", "out") + weight("bias", "out"), X, a)),
        "graph_attention_v2",
    ),
    "aggregated features": (
        A * (scale_rows(sigmoid(H @ weight("c", "in")), A @ H) @ (A.T @ H).T),
        "dot_attention",
    ),
    "Gram matrix": (A * (H @ (H.T @ X) @ X.T), "dot_attention"),
    "GCN": (A / outer(sqrt(row_sum(A) + 0.5), sqrt(row_sum(A) + 0.5)), "spmm"),
    "random walk": (A.pattern / replicate(degree), "spmm"),
    "sum": (A.pattern, "spmm"),
    "twice A": (2 * A, "spmm"),
    "a tenth of A": (0.1 * A / 3.0, "spmm"),
    "squares of A": (A * A, "spmm"),
}
UNKNOWN = {
    "Gaussian of distances": softmax(A * exp(-0.3 * distance)),
    "sigmoid gates": A * sigmoid(X @ X.T + replicate(X @ a)) * scalar("scale", 1.3),
    "product of two products": A * (H @ H.T) * (X @ X.T) / (1.0 + (H @ H.T) ** 2),
    "own normalisation": shared / replicate(row_sum(shared)),
    "transposed": A * tanh(H @ weight("m", "in", "in") @ H.T).T,
    "outer of learned": A * exp(outer(tanh(X @ a), X @ b)),
    "weighted scores": softmax(A * leaky_relu(replicate(X @ a) + replicate(X @ b).T)),
    "learned number alone": scalar("beta", 0.5) * A.pattern,
    "sum of two sparse": softmax(A * (H @ H.T)) + 0.5 * A,
}


def graph(weighted):
    """Directed: an empty row, a full row, a self loop; the dense matrix has NaN without an edge."""
    dense_edges = torch.rand(N, N) < 0.35
    dense_edges[2], dense_edges[4], dense_edges[0, 0] = False, True, True
    row, col = dense_edges.nonzero(as_tuple=True)
    values = torch.rand(len(row), dtype=torch.float64) + 0.5
    csr = Csr.from_coo(row, col, (N, N), values if weighted else None)
    adjacency = torch.full((N, N), torch.nan, dtype=torch.float64)
    adjacency[row, col] = values if weighted else 1.0
    return csr, adjacency


def check(layer, weighted):
    """Compare result and all gradients with dense evaluation."""
    from dense import dense_layer

    layer = layer.double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    csr, adjacency = graph(weighted)
    hidden = torch.randn(N, IN, dtype=torch.float64, requires_grad=True)
    parameters = list(layer.parameters())
    ours, theirs = layer(csr, hidden), dense_layer(layer, adjacency, hidden)
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)
    probe = torch.randn_like(ours)
    got = torch.autograd.grad((ours * probe).sum(), [hidden, *parameters])
    want = torch.autograd.grad((theirs * probe).sum(), [hidden, *parameters])
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-9)
    return csr, hidden


@pytest.fixture(autouse=True)
def _module_path(monkeypatch):
    from pathlib import Path

    monkeypatch.syspath_prepend(str(Path(__file__).parent))


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("name", KNOWN)
def test_formulas_of_kernels(name, heads, weighted):
    psi, kernel = KNOWN[name]
    layer = Layer(IN, OUT, psi=psi, heads=heads)
    assert layer.plan(weighted=weighted).kernel == kernel
    check(layer, weighted)


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("name", UNKNOWN)
def test_formulas_that_no_kernel_knows(name, heads, weighted):
    layer = Layer(IN, OUT, psi=UNKNOWN[name], heads=heads, combine="mean")
    assert layer.plan(weighted=True).kernel == "composed"
    with piece_elements(5):
        check(layer, weighted)


def test_the_composed_form_by_finite_differences():
    layer = Layer(IN, OUT, psi=UNKNOWN["Gaussian of distances"]).double()
    csr, _ = graph(weighted=True)
    hidden = torch.randn(N, IN, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda h: layer(csr, h), (hidden,))


@pytest.mark.parametrize("order", ["project", "aggregate"])
@pytest.mark.parametrize("name", ["VA", "AGNN", "GAT", "GCN", "GAT without X"])
@pytest.mark.parametrize("heads", [1, 2])
def test_phi_may_come_before_or_after_a_sum(name, heads, order):
    layer = Layer(IN, OUT, psi=KNOWN[name][0], order=order, heads=heads)
    assert layer.plan(weighted=False).order == order
    check(layer, weighted=True)


@pytest.mark.parametrize("aggregate", ["mean", "max", "min"])
@pytest.mark.parametrize("name", ["attention", "graph alone"])
def test_other_semirings(name, aggregate):
    psi = softmax(A.pattern * (H @ H.T)) if name == "attention" else A.pattern
    layer = Layer(IN, OUT, psi=psi, aggregate=aggregate, bias=False).double()
    csr, adjacency = graph(weighted=False)
    hidden = torch.randn(N, IN, dtype=torch.float64)
    scores = (hidden @ hidden.T).masked_fill(adjacency.isnan(), -torch.inf)
    values = scores.softmax(1) if name == "attention" else torch.zeros(N, N, dtype=torch.float64)
    if aggregate == "mean":
        ones = (~adjacency.isnan()).double()
        weights = values.nan_to_num(0.0) if name == "attention" else ones
        expected = (weights @ hidden) / weights.sum(1, keepdim=True)
    else:
        sign = 1.0 if aggregate == "max" else -1.0
        pairs = sign * (values.nan_to_num(0.0)[..., None] + hidden[None])
        pairs = pairs.masked_fill(adjacency.isnan()[..., None], -torch.inf)
        expected = sign * pairs.amax(1)
    expected[2] = 0.0
    torch.testing.assert_close(layer(csr, hidden), expected @ layer.weight[0])


def test_phi_may_be_an_mlp_which_comes_after_the_sum():
    mlp = nn.Sequential(nn.Linear(IN, 5), nn.Tanh(), nn.Linear(5, OUT))
    layer = Layer(IN, OUT, psi=A * (H @ H.T), phi=mlp).double()
    csr, adjacency = graph(weighted=True)
    hidden = torch.randn(N, IN, dtype=torch.float64)
    psi = adjacency.nan_to_num(0.0) * (hidden @ hidden.T)
    torch.testing.assert_close(layer(csr, hidden), mlp(psi @ hidden))
    assert "an MLP does not commute" in layer.explain()


def test_an_mlp_comes_first_where_psi_needs_its_result():
    mlp = nn.Sequential(nn.Linear(IN, 5), nn.Tanh(), nn.Linear(5, OUT))
    check(Layer(IN, OUT, psi=A * (X @ X.T), phi=mlp), weighted=True)


def test_phi_may_be_a_given_linear_or_nothing():
    linear = nn.Linear(IN, OUT, dtype=torch.float64)
    layer = Layer(psi=A.pattern, phi=linear)
    csr, adjacency = graph(weighted=False)
    hidden = torch.randn(N, IN, dtype=torch.float64)
    expected = (~adjacency.isnan()).double() @ hidden
    torch.testing.assert_close(layer(csr, hidden), linear(expected))
    bare = Layer(IN, psi=A.pattern, phi=None, bias=False)
    torch.testing.assert_close(bare(csr, hidden), expected)


def test_features_may_be_sparse():
    csr, _ = graph(weighted=False)
    hidden = torch.randn(N, IN, dtype=torch.float64) * (torch.rand(N, IN) < 0.5)
    row, col = hidden.nonzero(as_tuple=True)
    features = Csr.from_coo(row, col, (N, IN), hidden[row, col])
    for name in ("GAT", "VA", "GCN"):
        layer = Layer(IN, OUT, psi=KNOWN[name][0]).double()
        torch.testing.assert_close(layer(csr, features), layer(csr, hidden))


def test_attention_dropout_repeats_with_the_seed_and_ends_with_training():
    csr, _ = graph(weighted=False)
    hidden = torch.randn(N, IN)
    for psi in (dropout(KNOWN["GAT"][0], 0.5), dropout(UNKNOWN["Gaussian of distances"], 0.5)):
        layer = Layer(IN, OUT, psi=psi)
        results = []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            results.append(layer(csr, hidden))
        assert torch.equal(results[0], results[1])
        assert not torch.equal(results[0], results[2])
        layer.eval()
        assert torch.equal(layer(csr, hidden), layer(csr, hidden))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "psi",
    [
        KNOWN["AGNN"][0],
        A * exp(H @ H.T / outer(norm(H), norm(H))),
        A * exp(normalize(H) @ normalize(H).T),
    ],
    ids=["AGNN", "composed", "composed of directions"],
)
def test_zero_rows_have_no_direction_and_no_gradient_blows_up(psi, dtype):
    layer = Layer(IN, OUT, psi=psi).to(dtype)
    csr, _ = graph(weighted=False)
    hidden = torch.zeros(N, IN, dtype=dtype, requires_grad=True)
    result = layer(csr, hidden)
    result.sum().backward()
    assert result.isfinite().all()
    assert hidden.grad.isfinite().all()


@pytest.mark.parametrize("name", ["GAT", "AGNN"])
def test_autocast_keeps_scores_exact(name):
    csr, _ = graph(weighted=False)
    layer = Layer(IN, 16, psi=KNOWN[name][0], heads=2)
    hidden = torch.randn(N, IN)
    with torch.autocast("cpu", torch.bfloat16):
        result = layer(csr, hidden)
    result.float().sum().backward()
    torch.testing.assert_close(result.float(), layer(csr, hidden), rtol=0.05, atol=0.05)


def test_contradictions_are_refused():
    with pytest.raises(ConfigError, match="multiply it by A, so that only edges"):
        Layer(IN, OUT, psi=tanh(H @ H.T))
    with pytest.raises(ConfigError, match="inputs and outputs are needed"):
        Layer(psi=A)
    with pytest.raises(ConfigError, match="cannot become 2"):
        Layer(IN, OUT, psi=A, phi=None)
    with pytest.raises(ConfigError, match="a has shapes"):
        Layer(IN, OUT, psi=A * outer(X @ a, H @ weight("a", "in")))
    with pytest.raises(ConfigError, match="uses X"):
        Layer(IN, OUT, psi=A * (X @ X.T), order="aggregate")
