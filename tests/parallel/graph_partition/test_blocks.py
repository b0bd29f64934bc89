"""A rank's block of a graph, from a source walked through in pieces."""

import numpy as np
import pytest
import torch

from bevatron.data.graphs import EdgePolicy, GraphOptions, read_graph
from bevatron.data.graphs.generators import Kronecker, Uniform
from bevatron.data.graphs.generators_randomness import RandomOrder
from bevatron.data.graphs.pieces import read_in_pieces
from bevatron.errors import DataError
from bevatron.parallel.graph_partition import EdgeList, blocks
from bevatron.parallel.graph_partition.blocks import Numbering, collect_entries
from bevatron.parallel.graph_partition.grid import Grid, Split

CPU = torch.device("cpu")


def original_keys(entries, numbering, n):
    """Entries in the vertices' original numbers."""
    padded = numbering.split.padded

    def back(places, pieces):
        piece = torch.tensor(pieces)[places // padded]
        start = torch.tensor([numbering.split.start(q) for q in range(numbering.split.pieces)])
        return numbering.order.inverse(start[piece] + places % padded)

    row = back(entries.row, numbering.row_pieces)
    return row * n + back(entries.col, numbering.col_pieces)


def all_blocks(source, grid):
    n = source.num_vertices
    split, order = Split(n, grid.size), RandomOrder(n, 9)
    for i in range(grid.px):
        for j in range(grid.py):
            numbering = Numbering(split, grid.row_group(i), grid.column_group(j), order)
            entries = collect_entries(source, numbering, CPU)
            yield entries, original_keys(entries, numbering, n)


@pytest.mark.parametrize("grid", [Grid(1, 1), Grid(2, 3), Grid(5, 1)])
@pytest.mark.parametrize("source", [Kronecker(256, 3000), Uniform(101, 700)])
def test_blocks_of_a_generated_graph_are_the_graph(source, grid):
    n = source.num_vertices
    keys = torch.cat([keys for _, keys in all_blocks(source, grid)])
    (whole,) = [keys for _, keys in all_blocks(source, Grid(1, 1))]
    assert torch.equal(keys.sort().values, whole.sort().values)
    assert len(keys.unique()) == len(keys)
    assert bool((torch.bincount(keys // n, minlength=n) > 0).all())


def test_weights_go_with_their_entries_and_duplicates_add_up():
    row, col = torch.tensor([3, 0, 3, 6]), torch.tensor([1, 2, 1, 0])
    values = torch.tensor([1.0, 2.0, 4.0, 8.0])
    source = EdgeList(row, col, 7, values, policy=EdgePolicy(duplicates="sum"))
    found = {}
    for entries, keys in all_blocks(source, Grid(2, 2)):
        found |= dict(zip(keys.tolist(), entries.values.tolist(), strict=True))
    assert found == {22: 5.0, 2: 2.0, 42: 8.0}


def edges_of(path, policy, grid):
    """Entries of all blocks, by key, and what they weigh."""
    options = GraphOptions(policy.self_loops, policy.symmetrise, policy.duplicates)
    found = {}
    for entries, keys in all_blocks(read_in_pieces(path, options), grid):
        values = torch.ones(len(keys)) if entries.values is None else entries.values
        here = dict(zip(keys.tolist(), values.tolist(), strict=True))
        assert len(here) == len(keys), "no entry is there twice"
        assert not here.keys() & found.keys(), "no entry is in two blocks"
        found |= here
    return found


POLICIES = [
    EdgePolicy(loops, symmetrise, duplicates)
    for loops in ("keep", "add", "remove", "reset")
    for symmetrise in (False, True)
    for duplicates in ("merge", "sum", "refuse")
]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("grid", [Grid(1, 1), Grid(2, 3)])
@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: f"{p.self_loops}-{p.duplicates}")
def test_blocks_do_with_edges_what_is_done_with_a_whole_graph(policy, grid, weighted, tmp_path):
    """Self loops, reverse edges and duplicates, with all their weights; or the same refusal."""
    generator = np.random.default_rng(5)
    pair, weight = generator.integers(0, 30, (2, 400)), generator.integers(2, 99, 400) / 8
    values = {"edge_weight": weight} if weighted else {}
    np.savez(tmp_path / "w.npz", edge_index=pair, num_nodes=np.array(30), **values)
    options = GraphOptions(policy.self_loops, policy.symmetrise, policy.duplicates)
    if policy.duplicates == "refuse":
        sentence = "w.npz: the edge from .* to .* occurs more than once.*; set duplicates='merge'"
        with pytest.raises(DataError, match=sentence):
            read_graph(tmp_path / "w.npz", options)
        with pytest.raises(DataError, match=sentence):
            edges_of(tmp_path / "w.npz", policy, grid)
        keys = np.unique(pair[0] * 30 + pair[1], return_index=True)[1]
        values = {"edge_weight": weight[keys]} if weighted else {}
        np.savez(tmp_path / "w.npz", edge_index=pair[:, keys], num_nodes=np.array(30), **values)
    whole = read_graph(tmp_path / "w.npz", options).edges
    keys = (whole.rows.astype(np.int64) * 30 + whole.cols).tolist()
    weights = np.ones(len(keys)) if whole.weights is None else whole.weights
    expected = dict(zip(keys, weights.tolist(), strict=True))
    assert edges_of(tmp_path / "w.npz", policy, grid) == expected


def test_an_entry_that_is_there_twice_is_refused_in_the_files_own_numbers():
    row, col = torch.tensor([3, 0, 3, 6]), torch.tensor([1, 2, 1, 0])
    for values in (None, torch.ones(4)):
        with pytest.raises(DataError, match="edge from 1 to 3 occurs more than once"):
            list(all_blocks(EdgeList(row, col, 7, values), Grid(2, 2)))


class Recorded:
    """A source that notes the most entries it gave at once."""

    def __init__(self, source, piece):
        self.source, self.piece, self.largest, self.seen = source, piece, 0, 0
        self.num_vertices, self.fill_empty_rows = source.num_vertices, source.fill_empty_rows
        self.policy, self.name, self.fill_empty_row = source.policy, "g", source.fill_empty_row

    def pieces(self, device):
        for row, col in self.source.pieces(device, self.piece):
            self.largest = max(self.largest, len(row))
            self.seen += len(row)
            yield row, col


@pytest.mark.parametrize("suffix", ["txt", "npz"])
def test_a_file_is_read_in_pieces_and_never_held_whole(tmp_path, suffix):
    generator = np.random.default_rng(0)
    edges = np.unique(generator.integers(0, 200, (4000, 2)), axis=0)
    path = tmp_path / f"graph.{suffix}"
    if suffix == "txt":
        np.savetxt(path, edges, fmt="%d")
    else:
        np.savez(path, edge_index=edges.T)
    source = Recorded(read_in_pieces(path), piece=100)
    assert source.num_vertices == 200
    kept = [len(entries.row) for entries, _ in all_blocks(source, Grid(2, 2))]
    assert source.seen == 4 * len(edges)
    assert source.largest <= 200 < len(edges) / 10
    assert sum(kept) == len(edges)
    assert max(kept) < 0.35 * len(edges)


def test_keys_are_merged_alike_in_one_and_in_many_ranges(monkeypatch):
    source, grid = Kronecker(128, 4000), Grid(2, 1)
    once = [keys.tolist() for _, keys in all_blocks(source, grid)]
    monkeypatch.setattr(blocks, "SORTED_AT_ONCE", 300)
    assert [keys.tolist() for _, keys in all_blocks(source, grid)] == once


@pytest.mark.parametrize("count", [1, 5, 12, 13])
@pytest.mark.parametrize("pieces", [1, 4, 7])
def test_pieces_cover_all_numbers_once(count, pieces):
    split = Split(count, pieces)
    piece, place = split.locate(torch.arange(count))
    found = [(int(p), int(t)) for p, t in zip(piece, place, strict=True)]
    assert found == [(p, t) for p in range(pieces) for t in range(split.length(p))]
    assert all(split.start(p) + t == v for v, (p, t) in enumerate(found))


def test_bad_edges_are_refused_by_name():
    good, bad = torch.tensor([0, 1]), torch.tensor([0, 2])
    with pytest.raises(DataError, match=r"edge list, col, entry 1: vertex 2 is outside 0 \.\.\. 1"):
        EdgeList(good, bad, 2)
    with pytest.raises(DataError, match="found 2 edges and 1 values"):
        EdgeList(good, good, 2, torch.ones(1))
    with pytest.raises(DataError, match="expected whole numbers"):
        EdgeList(good.double(), good, 2)
