"""The demonstration on graphs, shortened, and the graph that it is about."""

from importlib.resources import files

import pytest

from bevatron.data.graphs import read_graph
from bevatron.recipes.graph import demo as graph_demo

SOURCE = files("bevatron.recipes") / "demo_data" / "communities.npz"


def test_bundled_graph_is_small_and_what_its_readme_says():
    assert len(SOURCE.read_bytes()) < 50_000
    graph = read_graph(str(SOURCE))
    assert (graph.num_nodes, graph.num_classes, graph.num_features) == (1500, 5, 80)
    assert [int(graph.mask(r).sum()) for r in ("train", "valid", "test")] == [100, 300, 1100]
    readme = (files("bevatron.recipes") / "demo_data" / "README.md").read_text()
    assert "communities.npz" in readme


@pytest.mark.slow
def test_communities_are_learned(tmp_path):
    graph_demo.run_demo(tmp_path)
    table = graph_demo.evaluate_graphs(tmp_path / "graph", [str(SOURCE)])
    assert table["test"]["accuracy"] > 0.7
