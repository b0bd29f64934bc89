"""What the planner chooses, and why."""

import pytest

from bevatron.errors import ConfigError
from bevatron.parallel.graph_partition import (
    DistributedGraph,
    EdgeList,
    Grid,
    Machine,
    Workload,
    plan,
)
from bevatron.parallel.graph_partition.planner import (
    best_chunks,
    overlapped_seconds,
    words_per_layer,
)

LARGE = {"vertices": 2**20, "entries": 10**8}


def test_gat_on_eight_ranks_is_cut_by_features_unless_the_structure_does_not_fit():
    work = Workload(2**21, 4 * 10**9, heads=8, channels=16)
    assert plan(work, 8, machine=Machine(memory=140e9)).chosen.scheme == "feature_parallel"
    small = plan(work, 8, machine=Machine(memory=20e9)).chosen
    assert small.scheme == "two_dimensional"
    assert small.fits


def test_dot_products_on_eight_ranks_want_four_by_two():
    """1.25 n k on 4 x 2, 1.75 n k on 2 x 4."""
    work = Workload(**LARGE, channels=128, attention="dot")
    assert plan(work, 8).chosen.grid == Grid(4, 2)
    unit = work.vertices * work.width
    assert words_per_layer("two_dimensional", Grid(4, 2), work) / unit == pytest.approx(1.25)
    assert words_per_layer("two_dimensional", Grid(2, 4), work) / unit == pytest.approx(1.75)


def test_a_very_sparse_graph_is_cut_by_rows():
    work = Workload(vertices=2**20, entries=2**17, heads=1, channels=128, attention="dot")
    assert plan(work, 4).chosen.scheme == "rows"


@pytest.mark.parametrize(("p", "large"), [(4, 1.0), (16, 0.75)])
def test_gat_on_a_square_grid_sends_less_than_the_papers_scheme(p, large):
    work, side = Workload(**LARGE, channels=128), int(p**0.5)
    unit = work.vertices * work.width
    ours = words_per_layer("two_dimensional", Grid(side, side), work)
    assert ours / unit == pytest.approx(large, rel=0.05)
    assert ours < 0.61 * words_per_layer("one_and_half_d", Grid(side, side), work)


def test_features_are_sent_in_chunks_only_where_hiding_them_pays():
    large = Workload(2**24, 3_000_000_000, channels=128)
    assert best_chunks(Grid(1, 2), large) > 1
    assert best_chunks(Grid(1, 2), large, Machine(hiding=0.0)) == 1
    shrunk = Workload(2**21 // 256, 375_000_000 // 256, channels=128)
    narrow = Workload(2**21, 375_000_000, channels=16)
    slow = Machine(launching=1.0)
    for work, machine in ((shrunk, None), (narrow, None), (large, slow)):
        assert best_chunks(Grid(1, 2), work, machine) == 1
    assert best_chunks(Grid(1, 1), large) == 1


def test_what_travels_alone_is_one_chunk_each_way():
    work = Workload(2**21, 375_000_000, channels=128)
    free = Machine(latency=0.0, launching=0.0, hiding=1.0)
    whole, halves = (overlapped_seconds(Grid(2, 2), work, c, free) for c in (1, 2))
    travel = 2**21 * 128 * 4 * 0.5 / free.bandwidth
    assert whole - halves == pytest.approx(2 * travel / 2)


SIX_H = Workload(2**21, 375_540_995, channels=128)
MEASURED = {
    (2, "two_dimensional"): 107.9,
    (2, "feature_parallel"): 110.1,
    (4, "feature_parallel"): 58.3,
    (4, "two_dimensional"): 63.3,
}
"""Milliseconds of training steps of three layers on GPUs, 2-D blocks in one chunk; 190.5 on one."""


@pytest.mark.parametrize(("p", "scheme"), [(2, "two_dimensional"), (4, "feature_parallel")])
def test_what_was_fastest_on_gpus_is_chosen(p, scheme):
    """On two ranks blocks send as much as rows and features, and copy nothing before."""
    chosen = plan(SIX_H, p).chosen
    assert chosen.scheme == scheme
    assert best_chunks(Grid(2, p // 2), SIX_H) == 1


@pytest.mark.parametrize(("p", "scheme"), MEASURED)
def test_times_on_gpus_are_those_predicted(p, scheme):
    """A step is its share of one GPU's and what the planner says of three layers' traffic."""
    choice = plan(SIX_H, p, schemes=[scheme]).chosen
    assert 190.5 / p + 3e3 * choice.seconds == pytest.approx(MEASURED[p, scheme], rel=0.04)


def test_a_plan_explains_itself_in_bytes():
    lines = plan(Workload(**LARGE, channels=128), 8).explain()
    assert lines[0].startswith("per rank and layer, forward and backward: ")
    assert " MB in " in lines[0]
    assert any("rows" in line for line in lines[1:])


def test_what_cannot_be_is_refused():
    with pytest.raises(ConfigError, match="square number of ranks, found 6"):
        plan(Workload(**LARGE), 6, schemes=["one_and_half_d"])
    with pytest.raises(ConfigError, match="cannot attend by dot products"):
        plan(Workload(**LARGE, attention="dot"), 4, schemes=["feature_parallel"])
    with pytest.raises(ConfigError, match="scheme 'three_d' is not known"):
        plan(Workload(**LARGE), 4, schemes=["three_d"])


def test_a_graph_refuses_wrong_schemes_grids_and_features():
    import torch

    edges = EdgeList(torch.tensor([0, 1]), torch.tensor([1, 0]), 2)
    with pytest.raises(ConfigError, match="scheme 'columns' is not known"):
        DistributedGraph.build(edges, scheme="columns")
    with pytest.raises(ConfigError, match="a grid of 2 x 2 needs 4 ranks, there are 1"):
        DistributedGraph.build(edges, scheme="two_dimensional", grid=Grid(2, 2))
    graph = DistributedGraph.build(edges, scheme="feature_parallel")
    with pytest.raises(ConfigError, match="has 2 vertices, the tensor to scatter has 3 rows"):
        graph.scatter(torch.zeros(3, 1))
    with pytest.raises(ConfigError, match="no attention by dot products"):
        graph.dot_attention(torch.zeros(2, 1, 4))
