"""Models of graph attention on a graph that is cut over processes."""

import runpy
import sys
from pathlib import Path

import pytest
import torch
from graph_ranks import fork_ranks, graph_edges, run_ranks
from torch.nn import functional as F

from bevatron.errors import ConfigError
from bevatron.kernels.graph.csr import Csr
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
from bevatron.models.graph_attention.formula.expression import (
    A,
    H,
    X,
    exp,
    inverse,
    norm,
    outer,
    replicate,
    row_sum,
    softmax,
    sqrt,
    weight,
)
from bevatron.models.graph_attention.layers import Sgc
from bevatron.parallel.graph_partition import DistributedGraph, EdgeList

STACKS = {
    "gat": lambda: [gat(5, 3, heads=2, activation=torch.relu), gat(6, 4, heads=2, combine="mean")],
    "agnn": lambda: [agnn(5), agnn(5, beta=0.5)],
    "agnn_paper": lambda: [agnn_paper(5, 6, activation=torch.tanh), agnn_paper(6, 4)],
    "va": lambda: [va(5, 6, form="softmax"), va(6, 4)],
}


SQUARE = norm(H) ** 2
DISTANCE = replicate(SQUARE) + replicate(SQUARE).T - 2 * (H @ H.T)
BY_DEGREE = replicate(X @ weight("r", "out")) + replicate(inverse(sqrt(row_sum(A)))).T
FORMULAS = {
    "gatv2": lambda: [
        gatv2(5, 3, heads=2, inner_bias=True, activation=torch.relu),
        gatv2(6, 4, heads=2, combine="mean", share_weights=True),
    ],
    "gcn": lambda: [gcn(5, 6, activation=torch.relu), gcn(6, 4)],
    "gin": lambda: [gin(torch.nn.Linear(5, 6), 5, 6, activation=torch.tanh),
                    gin(torch.nn.Linear(6, 4), 6, 4, eps=0.3, trained=True)],
    "sgc": lambda: [Sgc(5, 4, hops=3)],
    "va_scaled": lambda: [va(5, 6, form="scaled"), va(6, 4, form="scaled")],
    "kernel of distances": lambda: [Layer(5, 4, psi=softmax(A * exp(-DISTANCE)))],
    "sums over all vertices": lambda: [Layer(5, 4, psi=0.1 * A * ((H @ (H.T @ H)) @ H.T))],
    "degrees of columns": lambda: [
        Layer(5, 4, psi=A * outer(inverse(row_sum(A)), 0.1 * (A.T @ row_sum(A)))),
    ],
    "scores by degree": lambda: [Layer(5, 4, psi=A * softmax(A.pattern * BY_DEGREE), heads=1)],
    "scaled columns": lambda: [
        Layer(5, 4, psi=A * (H @ H.T) * outer(inverse(row_sum(A)), inverse(row_sum(A)))),
    ],
    "mean": lambda: [Layer(5, 4, psi=exp(0.1 * A * (H @ H.T)), aggregate="mean")],
    "max": lambda: [Layer(5, 4, psi=A.pattern, aggregate="max")],
}  # fmt: skip


def losses(name, graph, features, labels, total, reduce):
    """Three steps of gradient descent."""
    torch.manual_seed(4)
    stack = torch.nn.ModuleList({**STACKS, **FORMULAS}[name]()).double()
    optimiser, found = torch.optim.SGD(stack.parameters(), lr=0.1), []
    for _ in range(3):
        optimiser.zero_grad()
        x = features
        for layer in stack:
            x = layer(graph, x)
        loss = F.cross_entropy(x, labels, reduction="sum") / 30
        loss.backward()
        reduce(stack.parameters())
        optimiser.step()
        found.append(float(total(loss.detach())))
    return found


def task(n):
    generator = torch.Generator().manual_seed(2)
    features = torch.randn(n, 5, generator=generator, dtype=torch.float64)
    return features, torch.randint(4, (n,), generator=generator)


def test_layers_train_on_a_cut_graph_as_on_a_matrix(tmp_path):
    """GAT, AGNN and VA layers as the models use them; edge weights after the softmax."""
    kinds = [(name, graph) for name in STACKS for graph in ("plain", "weighted")]

    def work(mesh):
        found = []
        for name, kind in kinds:
            source, _, _ = graph_edges(kind)
            cut = DistributedGraph.build(source, mesh, scheme="two_dimensional")
            rows = [cut.scatter(values) for values in task(source.num_vertices)]
            found.append(losses(name, cut, *rows, cut.sum, cut.sum_gradients))
        return found

    ranks = run_ranks(3, work, tmp_path)
    for number, (name, kind) in enumerate(kinds):
        source, row, col = graph_edges(kind)
        n = source.num_vertices
        csr = Csr.from_coo(row, col, (n, n), source.values)
        expected = losses(name, csr, *task(n), lambda x: x, lambda _: None)
        for found in ranks:
            assert found[number] == pytest.approx(expected, rel=0, abs=1e-10), (name, kind)


@pytest.mark.parametrize("kind", ["plain", "weighted"])
def test_any_formula_trains_on_whole_rows_as_on_a_matrix(tmp_path, kind):
    """The layers and compositions that are no attention of GAT's or of plain dot products."""

    def work(mesh):
        found = {}
        for name in {**FORMULAS, **STACKS}:
            source, _, _ = graph_edges(kind)
            cut = DistributedGraph.build(source, mesh, scheme="rows", attention="rows")
            rows = [cut.scatter(values) for values in task(source.num_vertices)]
            found[name] = losses(name, cut, *rows, cut.sum, cut.sum_gradients)
        return found

    ranks = run_ranks(3, work, tmp_path)
    source, row, col = graph_edges(kind)
    n = source.num_vertices
    csr = Csr.from_coo(row, col, (n, n), source.values)
    for name in {**FORMULAS, **STACKS}:
        expected = losses(name, csr, *task(n), lambda x: x, lambda _: None)
        assert len(set(expected)) == 3, name
        for found in ranks:
            assert found[name] == pytest.approx(expected, rel=0, abs=1e-10), name


LAYERS = [
    "gat",
    "gatv2",
    "agnn",
    "agnn_paper",
    "va",
    "va_scaled",
    "va_softmax",
    "gcn",
    "sgc",
    "gin",
]


def test_what_a_model_needs_of_a_partition_follows_from_its_formulas():
    needs = {"gat": "gat"} | dict.fromkeys(["agnn", "agnn_paper", "va", "va_softmax"], "dot")
    for name in LAYERS:
        model = NodeClassifier(GraphAttentionConfig(layer=name).with_data(inputs=5, outputs=4))
        assert model.attends() == needs.get(name, "rows")
        assert model.attends(weighted=True) == needs.get(name, "rows")
    inside = Layer(5, 4, psi=softmax(A * (H @ H.T)))
    assert inside.attends(weighted=False) == "dot"
    assert inside.attends(weighted=True) == "rows"


@pytest.mark.parametrize("preset", ["gat", "agnn", "residual"])
def test_a_node_classifiers_stack_takes_a_cut_graph(tmp_path, preset):
    config = {
        "gat": GraphAttentionConfig(layer="gat", heads=2, hidden=4, residual=True, norm="layer"),
        "agnn": GraphAttentionConfig(layer="agnn", hidden=6, num_layers=3),
        "residual": GraphAttentionConfig(layer="va_softmax", stack="residual", hidden=6),
    }[preset].with_data(inputs=5, outputs=4)

    def stack():
        torch.manual_seed(6)
        return NodeClassifier(config).double().eval().stack

    def work(mesh):
        source, _, _ = graph_edges("plain")
        cut = DistributedGraph.build(source, mesh, scheme="two_dimensional")
        features = task(source.num_vertices)[0]
        return cut.gather(stack()(cut, cut.scatter(features))).tolist()

    source, row, col = graph_edges("plain")
    n = source.num_vertices
    expected = stack()(Csr.from_coo(row, col, (n, n)), task(n)[0]).detach()
    for found in run_ranks(2, work, tmp_path):
        assert torch.allclose(torch.tensor(found, dtype=torch.float64), expected, rtol=1e-10)


def test_formulas_of_any_form_are_refused_where_rows_are_not_whole():
    edges = EdgeList(torch.tensor([0, 1]), torch.tensor([1, 0]), 2)
    for scheme in ("two_dimensional", "feature_parallel"):
        graph = DistributedGraph.build(edges, scheme=scheme)
        for layer in (gcn(3, 2), va(3, 2, form="scaled"), gatv2(3, 2)):
            with pytest.raises(ConfigError, match=f"scheme '{scheme}' .*; .*choose.* rows"):
                layer(graph, torch.ones(2, 3))
        with pytest.raises(ConfigError, match="cannot evaluate formulas of any form; choose"):
            DistributedGraph.build(edges, scheme=scheme, attention="rows")
    assert DistributedGraph.build(edges, attention="rows").scheme.name == "rows"


def test_the_example_trains(tmp_path, monkeypatch):
    example = Path(__file__).parents[2] / "examples" / "distributed_graph.py"
    monkeypatch.setattr(sys, "argv", [str(example), "--kronecker", "64", "600", "--steps", "4"])

    def work(mesh):
        runpy.run_path(str(example), run_name="__main__")
        return 0

    codes, output = fork_ranks(2, work, tmp_path)
    assert codes == [0, 0], output
    assert "over 2 ranks: 64 vertices" in output
    losses = [float(line.split()[3][:-1]) for line in output.splitlines() if "loss" in line]
    assert losses[3] < losses[0]
