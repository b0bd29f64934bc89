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
    NodeClassifier,
    agnn,
    agnn_paper,
    gat,
    gatv2,
    gcn,
    va,
)
from bevatron.parallel.graph_partition import DistributedGraph, EdgeList

STACKS = {
    "gat": lambda: [gat(5, 3, heads=2, activation=torch.relu), gat(6, 4, heads=2, combine="mean")],
    "agnn": lambda: [agnn(5), agnn(5, beta=0.5)],
    "agnn_paper": lambda: [agnn_paper(5, 6, activation=torch.tanh), agnn_paper(6, 4)],
    "va": lambda: [va(5, 6, form="softmax"), va(6, 4)],
}


def losses(name, graph, features, labels, total, reduce):
    """Three steps of gradient descent."""
    torch.manual_seed(4)
    stack = torch.nn.ModuleList(STACKS[name]()).double()
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


def test_layers_that_are_not_attention_of_known_form_are_refused():
    edges = EdgeList(torch.tensor([0, 1]), torch.tensor([1, 0]), 2)
    graph = DistributedGraph.build(edges)
    for layer in (gcn(3, 2), va(3, 2, form="scaled"), gatv2(3, 2)):
        with pytest.raises(ConfigError, match="not computed on a graph that is cut"):
            layer(graph, torch.ones(2, 3))


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
