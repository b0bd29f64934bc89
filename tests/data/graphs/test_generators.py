"""Random graphs made in pieces."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bevatron.data.graphs.generators import (
    QUADRANTS,
    Kronecker,
    Uniform,
    block_entries,
)
from bevatron.data.graphs.generators_randomness import RandomOrder, random_below, random_words


def expected_entries(levels: int, drawn: int) -> float:
    """Distinct entries among ``drawn`` independent ones: the sum over cells of 1 - (1 - p)^m."""
    a, b, _, d = QUADRANTS
    total = 0.0
    for i in range(levels + 1):
        for j in range(levels - i + 1):
            cells = math.comb(levels, i) * math.comb(levels - i, j) * 2**j
            p = a**i * b**j * d ** (levels - i - j)
            total += cells * -math.expm1(drawn * math.log1p(-p))
    return total


GRAPHS = [
    Kronecker(128, 3000, seed=3),
    Kronecker(300, 2000, seed=4, round_down=False),
    Uniform(97, 800, seed=5),
]


@pytest.mark.parametrize("graph", GRAPHS, ids=lambda graph: type(graph).__name__)
@pytest.mark.parametrize("mesh", [(1, 3), (2, 2), (5, 1)])
def test_blocks_put_together_are_the_graph(graph, mesh):
    n = graph.num_vertices
    whole = torch.stack(block_entries(graph))
    cuts = [[round(k * n / parts) for k in range(parts + 1)] for parts in mesh]
    found = [
        torch.stack(block_entries(graph, range(r0, r1), range(c0, c1), piece=57 + r0))
        for r0, r1 in zip(cuts[0], cuts[0][1:], strict=False)
        for c0, c1 in zip(cuts[1], cuts[1][1:], strict=False)
    ]
    joined = torch.cat(found, dim=1)
    order = (joined[0] * n + joined[1]).argsort()
    assert torch.equal(joined[:, order], whole)


@pytest.mark.parametrize("graph", GRAPHS, ids=lambda graph: type(graph).__name__)
def test_no_entry_twice_and_no_row_empty(graph):
    row, col = block_entries(graph)
    n = graph.num_vertices
    key = row * n + col
    assert bool((key[1:] > key[:-1]).all())
    assert bool((torch.bincount(row, minlength=n) > 0).all())
    assert int(col.min()) >= 0
    assert int(col.max()) < n


def test_rows_that_were_empty_get_one_entry_off_the_diagonal():
    graph = Kronecker(512, 600, seed=1)
    drawn = torch.cat([row for row, _ in graph.pieces()])
    empty = torch.bincount(drawn, minlength=512) == 0
    row, col = block_entries(graph)
    filled = empty[row]
    assert int(filled.sum()) == int(empty.sum()) > 50
    assert not bool((row[filled] == col[filled]).any())
    assert bool((row == col).any()), "self loops stay"


def test_no_empty_row_would_get_its_own_column():
    for seed in range(30):
        graph, rows = Kronecker(8, 8, seed=seed), torch.arange(8)
        col = graph.fill_empty_row(rows)
        assert not bool((col == rows).any())
        assert int(col.min()) >= 0
        assert int(col.max()) < 8


def test_degrees_are_those_of_graph500():
    """At 2^13 vertices, density 0.1 and 1 %: entries, empty rows, heaviest row."""
    for drawn, tolerance in ((67_000, 0.006), (670_000, 0.004)):
        graph = Kronecker(8192, drawn, seed=11)
        row, _ = block_entries(graph)
        degree = torch.bincount(row, minlength=8192)
        seen = torch.zeros(8192, dtype=torch.bool)
        for piece, _ in graph.pieces():
            seen[piece] = True
        filled = int((~seen).sum())
        expected = expected_entries(13, graph.num_drawn)
        assert len(row) - filled == pytest.approx(expected, rel=tolerance)
        # A row with k zero bits is drawn with probability 0.76^k 0.24^(13-k).
        missing = sum(
            math.comb(13, k) * math.exp(-graph.num_drawn * 0.76**k * 0.24 ** (13 - k))
            for k in range(14)
        )
        assert filled == pytest.approx(missing, rel=0.05, abs=10)
        # The heaviest row has no set bit; its columns are drawn by 0.75 and 0.25.
        top = sum(
            math.comb(13, k)
            * -math.expm1(graph.num_drawn * math.log1p(-(0.57**k) * 0.19 ** (13 - k)))
            for k in range(14)
        )
        assert int(degree.max()) == pytest.approx(top, rel=0.05)


def test_another_seed_is_another_graph():
    for kind in (Kronecker, Uniform):
        one, other = block_entries(kind(64, 500, seed=1)), block_entries(kind(64, 500))
        assert not torch.equal(one[1][:100], other[1][:100])


def test_vertices_that_are_no_power_of_two_keep_the_number_of_edges():
    graph = Kronecker(3000, 30_000, seed=2, round_down=False)
    drawn = sum(len(row) for row, _ in graph.pieces())
    assert drawn == pytest.approx(30_000, rel=0.1)
    assert Kronecker(3000, 30_000).num_vertices == 2048


def test_rows_of_a_uniform_graph_are_drawn_alone():
    graph = Uniform(50, 333, seed=9)
    row, col = (torch.cat(parts) for parts in zip(*graph.row_pieces(7, 20, piece=11), strict=True))
    whole = [torch.cat(parts) for parts in zip(*graph.pieces(), strict=True)]
    mine = (whole[0] >= 7) & (whole[0] < 20)
    assert torch.equal(row, whole[0][mine])
    assert torch.equal(col, whole[1][mine])


@given(st.integers(1, 300), st.integers(0, 2**63))
@settings(max_examples=50, deadline=None)
def test_a_random_order_is_a_permutation_with_its_inverse(count, seed):
    order, ids = RandomOrder(count, seed), torch.arange(count)
    assert torch.equal(order(ids).sort().values, ids)
    assert torch.equal(order.inverse(order(ids)), ids)


def test_a_random_order_spreads_neighbours():
    moved = RandomOrder(1 << 16, 5)(torch.arange(1 << 16)).double()
    correlation = torch.corrcoef(torch.stack([moved[1:], moved[:-1]]))[0, 1]
    assert abs(float(correlation)) < 0.02


def test_words_are_fixed_for_all_time():
    """Another value on any machine or release is another graph under the same name."""
    assert random_words(torch.tensor([0, 1, 2**40]), 7).tolist() == WORDS
    assert random_below(torch.arange(6), 10, 7).tolist() == [4, 7, 6, 5, 6, 3]


WORDS = [8409816773569330625, -5137267319001854395, -5039900152298554009]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_makes_the_same_graph():
    for graph in GRAPHS:
        on_cpu, on_gpu = block_entries(graph), block_entries(graph, device="cuda")
        assert all(torch.equal(a, b.cpu()) for a, b in zip(on_cpu, on_gpu, strict=True))
