"""Graphs come from every usual kind of file, and what must not be trained on is refused by name."""

import gzip
import re
from dataclasses import replace

import numpy as np
import pytest
import scipy.sparse
import torch

from bevatron.data.graphs import GraphOptions, SparseFeatures, read_graph
from bevatron.data.graphs.edge_list import edge_list_pieces
from bevatron.data.samples.graphs import WholeGraph, check_graph
from bevatron.errors import ConfigError, DataError, OutOfMemoryError, TrustError

SRC = np.array([0, 1, 3, 0, 4, 4])
DST = np.array([1, 0, 0, 2, 4, 1])
DENSE = np.zeros((5, 5), dtype=np.float32)
DENSE[DST, SRC] = 1
"""Row i attends to the columns stored in it."""


def base(**changes):
    values = {
        "edge_src": SRC, "edge_dst": DST, "num_nodes": np.array(5),
        "x": np.arange(10, dtype=np.float32).reshape(5, 2), "y": np.array([0, 1, 0, -1, 1]),
        "train": np.array([0, 1]), "val": np.array([2]), "test": np.array([4]),
    }  # fmt: skip
    values |= changes
    return {name: value for name, value in values.items() if value is not None}


def saved(folder, **changes):
    np.savez_compressed(folder / "g.npz", **base(**changes))
    return folder / "g.npz"


def matrix(graph):
    values = np.ones(graph.num_edges) if graph.edges.weights is None else graph.edges.weights
    out = np.zeros((graph.num_nodes, graph.num_nodes))
    out[graph.edges.rows, graph.edges.cols] = values
    return out


def test_npz_of_edges_features_labels_and_splits(tmp_path):
    graph = read_graph(saved(tmp_path))
    assert (matrix(graph) == DENSE).all()
    assert graph.edges.rows.dtype == np.int32
    assert (np.diff(graph.edges.rows * 5 + graph.edges.cols) > 0).all()
    assert graph.labels.tolist() == [0, 1, 0, -1, 1]
    assert graph.num_classes == 2
    assert [graph.mask(r).nonzero()[0].tolist() for r in ("train", "valid", "test")] == [
        [0, 1], [2], [4],
    ]  # fmt: skip
    assert graph.report()[0].endswith("5 vertices, 6 stored entries")
    assert "2 classes (2, 2), 1 without a label; 2 train, 1 valid, 1 test" in graph.report()[2]


@pytest.mark.parametrize("kind", ["csr", "csc", "coo"])
@pytest.mark.parametrize("compressed", [True, False])
def test_sparse_matrices_of_scipy(kind, compressed, tmp_path):
    sparse = getattr(scipy.sparse, f"{kind}_matrix")(DENSE * np.arange(1, 6)[:, None])
    scipy.sparse.save_npz(tmp_path / "a.npz", sparse, compressed=compressed)
    graph = read_graph(tmp_path / "a.npz")
    assert (matrix(graph) == sparse.toarray()).all()
    assert graph.labels is None


def test_rectangular_matrix_is_refused(tmp_path):
    scipy.sparse.save_npz(tmp_path / "a.npz", scipy.sparse.csr_matrix(np.ones((2, 3))))
    with pytest.raises(DataError, match=r"a\.npz: the matrix is 2 x 3; a graph's is square"):
        read_graph(tmp_path / "a.npz")


def test_falling_row_pointers_are_refused(tmp_path):
    np.savez(tmp_path / "a.npz", indptr=np.array([0, 2, 1, 3]), indices=np.array([0, 1, 2]))
    with pytest.raises(DataError, match="'indptr' decreases at index 2, it must increase"):
        read_graph(tmp_path / "a.npz")
    np.savez(tmp_path / "a.npz", indptr=np.array([0, 2, 4]), indices=np.array([0, 1, 2]))
    with pytest.raises(DataError, match="'indptr' must begin with 0 and end with 3"):
        read_graph(tmp_path / "a.npz")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("plain.txt", "0 1\n1 0\n3 0\n0 2\n4 4\n4 1"),
        ("snap.txt", "# FromNodeId\tToNodeId\n0\t1\n1\t0\n# more\n3\t0\n\n0\t2\n4\t4\n4\t1\n"),
        ("head.csv", "source,target\n0,1\n1,0\n3,0\n0,2\n4,4\n4,1\n"),
        ("weights.tsv", "0\t1\t1.0\n1\t0\t1\n3\t0\t1\n0\t2\t1\n4\t4\t1e0\n4\t1\t1\n"),
        ("marked.csv", "\ufeff0,1\n1,0\n3,0\n0,2\n4,4\n4,1\n"),
        ("both.csv", '\ufeff"Source","Target"\r\n0,1\r\n1,0\r\n3,0\r\n0,2\r\n4,4\r\n4,1\r\n'),
        ("spaced.tsv", "source id\ttarget id\n0\t1\n1\t0\n3\t0\n0\t2\n4\t4\n4\t1\n"),
        ("packed.csv.gz", "0,1\n1,0\n3,0\n0,2\n4,4\n4,1\n"),
    ],
)
def test_edge_lists(name, text, tmp_path):
    write = gzip.open if name.endswith(".gz") else open
    with write(tmp_path / name, "wt", encoding="utf-8", newline="") as file:
        file.write(text)
    assert (matrix(read_graph(tmp_path / name)) == DENSE).all()


@pytest.mark.parametrize(
    "text",
    [
        ",source,target\n0,5,7\n",
        ",u,v\n0,5,7\n",
        "weight,source,target\n1,5,7\n",
        "target;source\n5;7\n",
        "u v\n0 5 7\n",
        "index,u,v\n0,5,7\n",
    ],
)
def test_names_of_other_columns_than_source_and_destination_are_refused(text, tmp_path):
    (tmp_path / "table.csv").write_text(text)
    names = re.escape(text.split("\n", 1)[0])
    with pytest.raises(DataError, match=rf"table\.csv: .* called '{names}'; expected a source"):
        list(edge_list_pieces(tmp_path / "table.csv", block_bytes=4))


def test_weights_of_an_edge_list_are_kept(tmp_path):
    for names in ("", "u,v,w\n", "id,neighbour,edge_weight\n"):
        (tmp_path / "w.txt").write_text(f"{names}0 1 0.5\n1 2 -2\n")
        assert read_graph(tmp_path / "w.txt").edges.weights.tolist() == [0.5, -2.0]


def test_ids_with_gaps_are_renumbered(tmp_path):
    (tmp_path / "gaps.txt").write_text("100 7\n7 2000000000000\n")
    graph = read_graph(tmp_path / "gaps.txt", GraphOptions(renumber=True))
    assert graph.num_nodes == 3
    assert graph.ids.tolist() == [7, 100, 2000000000000]
    assert matrix(graph).nonzero()[0].tolist() == [0, 2]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0 1\n1 2 3\n", "line 2: expected 2 columns as in the lines before, has 3 ('1 2 3')"),
        ("0 1\n1 x\n", "line 2: '1 x' is not an edge; expected numbers of a source"),
        ("# a\n0 1 2 3\n", "line 2: has 4 columns, expected a source, a destination"),
        ("%%MatrixMarket matrix\n", "is a Matrix Market file; scipy.sparse.save_npz"),
        ("0 1\n-2 1\n", "edge 1: its source -2 is negative (vertices are numbered from 0)"),
        ("0 1\n0 1.5\n", "line 2: '0 1.5' is not an edge"),
        ("# nothing\n", "holds no edges"),
        ("source,target\n", "holds no edges"),
        ("", "holds no edges"),
    ],
)
def test_bad_lines_are_refused_by_number(text, message, tmp_path):
    (tmp_path / "bad.txt").write_text(text)
    with pytest.raises(DataError, match=re.escape(message)) as caught:
        read_graph(tmp_path / "bad.txt")
    assert str(caught.value).startswith(str(tmp_path / "bad.txt"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"edge_src": np.array([0, 1, 3, 0, 4, 9])},
         "edge 5: its source 9 is outside of its 5 vertices"),
        ({"edge_dst": np.array([0, 1, -3, 0, 4, 2])}, "edge 2: its destination -3 is negative"),
        ({"edge_dst": DST[:3]}, "holds 6 sources but 3 destinations"),
        ({"edge_dst": DST * 1.0}, "destinations of edges have type float64 and shape (6,)"),
        ({"x": np.ones((4, 2), np.float32)},
         "holds features of 4 vertices, the graph has 5"),
        ({"y": np.zeros(6, np.int64)}, "holds labels of 6 vertices, the graph has 5"),
        ({"y": np.array([0.0, 0.5, 1, 1, 1])}, "the label of vertex 1 is 0.5, expected a class"),
        ({"y": np.array([0, -2, 1, 1, 1])}, "the label of vertex 1 is -2, expected a class"),
        ({"y": np.array([[0, 1], [1, 1], [1, 2], [0, 0], [1, 1]])},
         "answer 1 of vertex 2 is 2, expected 0 or 1"),
        ({"y": np.array(list("abcde"))}, "labels are <U1 of shape (5,)"),
        ({"x": np.array([[0], [1], [np.nan], [1], [1]], np.float32)},
         "a feature of vertex 2 is nan, expected a number"),
        ({"x": np.array([[0, 1], [1, 1], [1, 1], [1, -1e300], [1, 1]])},
         "a feature of vertex 3 is -1e+300, expected a number that float32 holds"),
        ({"val": np.array([1, 2])}, "vertex 1 is in the splits 'train' and 'valid'"),
        ({"test": np.array([5])}, "split 'test': there is no vertex 5, the graph has 5"),
        ({"test": np.array([3])}, "split 'test' holds vertex 3, which has no label"),
        ({"test": np.ones(4, bool)}, "split 'test': the mask has 4 entries, the graph has 5"),
        ({"test": np.array([0, 1, 0, 1])}, "split 'test': the mask has 4 entries, the graph has 5"),
        ({"num_nodes": np.array(2**40), "x": None, "y": None, "train": None, "val": None},
         "1,099,511,627,776 vertices are asked for, expected at most 3,037,000,499"),
        ({"num_nodes": np.array("five")}, "'num_nodes' is not a number of vertices"),
        ({"num_nodes": np.array(np.nan)}, "'num_nodes' is not a number of vertices"),
        ({"num_nodes": np.array([])}, "'num_nodes' is not a number of vertices"),
        ({"num_nodes": np.array(2**30)}, "vertices, the graph has 1,073,741,824"),
        ({"test": np.array([0.5])}, "split 'test': expected a mask or numbers of vertices"),
        ({"edge_weight": np.array([1, 2, np.inf, 1, 1, 1])},
         "edge 2: its weight is inf, expected a number"),
        ({"edge_weight": np.array([1, 2, 1, 1e39, 1, 1])},
         "edge 3: its weight is 1e+39, expected a number that float32 holds"),
        ({"edge_weight": np.ones((6, 2))}, "edge features of several columns are not supported"),
        ({"edge_attr": np.ones((6, 2))},
         "'edge_attr' has shape (6, 2); features of edges are not supported"),
        ({"num_nodes": None, "x": np.ones((4, 2), np.float32)},
         "holds features of 4 vertices but there are labels of 5"),
        ({"edge_src": np.r_[SRC, 4], "edge_dst": np.r_[DST, 1]},
         "the edge from 4 to 1 occurs more than once (1 such entries in all)"),
        ({"edge_src": None}, "holds no edges; expected edge_src and edge_dst, edge_index"),
        ({"x": np.array([{}] * 5)}, "the array 'x' holds Python objects"),
    ],
)  # fmt: skip
def test_npz_that_must_not_be_trained_on_is_refused(changes, message, tmp_path):
    with pytest.raises(DataError, match=re.escape(message)) as caught:
        read_graph(saved(tmp_path, **changes))
    assert str(caught.value).startswith(str(tmp_path / "g.npz"))


def test_nan_in_sparse_features_names_the_vertex(tmp_path):
    sparse = {"feat_indptr": np.array([0, 1, 1, 3, 3, 3]), "feat_indices": np.array([0, 0, 2]),
              "feat_shape": np.array([5, 3]), "feat_data": np.array([1, 2, np.nan])}  # fmt: skip
    with pytest.raises(DataError, match="a feature of vertex 2 is nan"):
        read_graph(saved(tmp_path, x=None, **sparse))
    sparse["feat_data"] = np.array([1, 2, 3.0])
    sparse["feat_indices"] = np.array([0, 0, 3])
    with pytest.raises(DataError, match="sparse features point outside of the 3 columns"):
        read_graph(saved(tmp_path, x=None, **sparse))


def test_damaged_and_missing_files(tmp_path):
    whole = saved(tmp_path).read_bytes()
    (tmp_path / "half.npz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"half\.npz: is not an npz file, or it is damaged"):
        read_graph(tmp_path / "half.npz")
    spoiled = bytearray(whole)
    spoiled[whole.find(b"x.npy") + 30] ^= 0xFF
    (tmp_path / "spoiled.npz").write_bytes(spoiled)
    with pytest.raises(DataError, match=r"spoiled\.npz: the array 'x' is damaged"):
        read_graph(tmp_path / "spoiled.npz")
    with pytest.raises(DataError, match=r"none\.npz: there is no such file"):
        read_graph(tmp_path / "none.npz")
    (tmp_path / "graph.xyz").write_text("0 1")
    with pytest.raises(DataError, match=r"graph\.xyz: is not a known kind of graph file"):
        read_graph(tmp_path / "graph.xyz")
    (tmp_path / "folder").mkdir()
    with pytest.raises(DataError, match="does not have the layout of OGB"):
        read_graph(tmp_path / "folder")


def test_duplicates_loops_and_reverse_edges(tmp_path):
    src, dst = np.r_[SRC, 4, 4], np.r_[DST, 1, 1]
    path = saved(tmp_path, edge_src=src, edge_dst=dst)
    merged = read_graph(path, GraphOptions(duplicates="merge"))
    assert (matrix(merged) == DENSE).all()
    assert merged.found.duplicates == 2
    summed = read_graph(path, GraphOptions(duplicates="sum"))
    assert matrix(summed)[1, 4] == 3
    both = read_graph(path, GraphOptions(duplicates="merge", symmetrise=True))
    assert (matrix(both) == np.maximum(DENSE, DENSE.T)).all()
    assert both.found.reversed == int((np.maximum(DENSE, DENSE.T) - DENSE).sum())
    added = read_graph(path, GraphOptions(duplicates="merge", self_loops="add"))
    assert (matrix(added) == np.maximum(DENSE, np.eye(5))).all()
    assert added.found.added_loops == 4
    removed = read_graph(path, GraphOptions(duplicates="merge", self_loops="remove"))
    assert (matrix(removed) == DENSE * (1 - np.eye(5))).all()
    assert "8 in the file, 2 duplicates merged, 4 self loops added" in added.report()[0]


def test_weights_follow_their_edges(tmp_path):
    weights = np.arange(2.0, 8.0)
    path = saved(tmp_path, edge_weight=weights)
    expected = np.zeros((5, 5))
    expected[DST, SRC] = weights
    assert (matrix(read_graph(path)) == expected).all()
    both = matrix(read_graph(path, GraphOptions(symmetrise=True, self_loops="add")))
    mirrored = np.where(expected == 0, expected.T, expected)
    mirrored[np.diag_indices(5)] = np.where(np.diag(expected) == 0, 1, np.diag(expected))
    assert (both == mirrored).all()


@pytest.mark.parametrize(
    "edges",
    [
        {"edge_index": np.stack([SRC, DST])},
        {"edges": np.stack([SRC, DST], axis=1)},
        {"src": SRC, "dst": DST},
        {"row": DST, "col": SRC},
    ],
    ids=" ".join,
)
def test_names_under_which_edges_stand(edges, tmp_path):
    path = saved(tmp_path, edge_src=None, edge_dst=None, **edges)
    assert (matrix(read_graph(path)) == DENSE).all()


def test_lines_are_counted_over_blocks(tmp_path):
    (tmp_path / "long.txt").write_text("# first\n" + "0 1\n" * 7 + "\n0 x\n1 2\n")
    with pytest.raises(DataError, match=r"line 10: '0 x' is not an edge"):
        list(edge_list_pieces(tmp_path / "long.txt", block_bytes=11))


@pytest.mark.parametrize("kind", ["int8", "uint8", "int16", "uint32", "uint64"])
def test_indices_of_any_width(kind, tmp_path):
    path = saved(tmp_path, edge_src=SRC.astype(kind), edge_dst=DST.astype(kind))
    assert (matrix(read_graph(path)) == DENSE).all()


def test_isolated_vertices_are_counted_without_their_loops(tmp_path):
    path = saved(tmp_path, num_nodes=np.array(7), x=None, y=None, train=None, val=None, test=None)
    assert (
        "2 isolated, 0 empty rows" in read_graph(path, GraphOptions(self_loops="add")).report()[1]
    )


def test_rows_of_features_are_normalised(tmp_path):
    x = np.array([[1, 3], [0, 0], [-1, 1], [2, 0], [0, 4]], dtype=np.float32)
    dense = read_graph(saved(tmp_path, x=x), GraphOptions(features="rows")).dense_features()
    assert np.allclose(dense, [[0.25, 0.75], [0, 0], [-0.5, 0.5], [1, 0], [0, 1]])
    csr = scipy.sparse.csr_matrix(x)
    parts = {"feat_indptr": csr.indptr, "feat_indices": csr.indices, "feat_data": csr.data}
    sparse = read_graph(
        saved(tmp_path, x=None, feat_shape=np.array(x.shape), **parts),
        GraphOptions(features="rows"),
    )
    assert isinstance(sparse.features, SparseFeatures)
    assert np.allclose(sparse.dense_features(), dense)
    assert np.allclose(sparse.features.dense(2, 4), dense[2:4])


def test_one_of_several_splits(tmp_path):
    masks = np.array([[1, 0, 0, 0, 0], [0, 1, 0, 0, 0]], dtype=bool)
    for stored in (masks, masks.T):
        changes = {"train": None, "val": None, "test": None, "train_masks": stored}
        graph = read_graph(saved(tmp_path, **changes), GraphOptions(split=1))
        assert graph.mask("train").nonzero()[0].tolist() == [1]
    with pytest.raises(DataError, match="there is no split 2, the file holds 2"):
        read_graph(saved(tmp_path, **changes), GraphOptions(split=2))


def test_a_split_that_the_file_does_not_hold_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"split 'train': there is no split 3, the file holds 1"):
        read_graph(saved(tmp_path), GraphOptions(split=3))
    blank = saved(tmp_path, train=None, val=None, test=None)
    with pytest.raises(DataError, match=r"g\.npz: holds no splits, so there is no split 3"):
        read_graph(blank, GraphOptions(split=3))


@pytest.mark.parametrize("dtype", [np.int64, np.uint8, np.int8])
def test_masks_of_whole_numbers_are_masks(dtype, tmp_path):
    masks = {"train": [1, 1, 0, 0, 0], "val": [0, 0, 1, 0, 0], "test": [0, 0, 0, 0, 1]}
    graph = read_graph(saved(tmp_path, **{k: np.array(v, dtype) for k, v in masks.items()}))
    assert (graph.roles == read_graph(saved(tmp_path)).roles).all()
    # Two numbers may be vertices.
    graph = read_graph(saved(tmp_path, train=np.array([1, 0], dtype)))
    assert graph.mask("train").nonzero()[0].tolist() == [0, 1]


def test_several_graphs_at_once_are_refused(tmp_path):
    one = {"edge_index": torch.tensor([[0, 1], [1, 0]]), "num_nodes": 2}
    for several in ([one, one], (one, one), [one] * 3):
        torch.save(several, tmp_path / "many.pt")
        with pytest.raises(
            DataError, match=r"many\.pt: .*graphs, expected one; save each to a file"
        ):
            read_graph(tmp_path / "many.pt")
        with pytest.raises(DataError, match=r"is a list of \d graphs, expected one"):
            read_graph(several)
    torch.save([one], tmp_path / "one.pt")
    assert read_graph(tmp_path / "one.pt").num_edges == read_graph([one]).num_edges == 2
    torch.save((one, None), tmp_path / "set.pt")
    assert read_graph(tmp_path / "set.pt").num_edges == 2


def test_too_little_memory_is_one_sentence(tmp_path, monkeypatch):
    def full(*_):
        raise MemoryError("Unable to allocate 2.00 TiB")

    monkeypatch.setattr("bevatron.data.graphs.raw.normalise_edges", full)
    with pytest.raises(
        OutOfMemoryError, match=r"g\.npz: this machine has too little memory .*2.00 T"
    ):
        read_graph(saved(tmp_path))


def test_random_split_is_of_labelled_vertices_and_repeats(tmp_path):
    y = np.r_[np.zeros(3, int), np.full(4, -1), np.ones(93, int)]
    path = saved(tmp_path, num_nodes=np.array(100), x=None, y=y, train=None, val=None, test=None)
    options = GraphOptions(random_split=(0.5, 0.25, 0.25), split_seed=3)
    graph = read_graph(path, options)
    assert np.bincount(graph.roles).tolist() == [4, 48, 24, 24]
    assert not graph.roles[3:7].any()
    assert (graph.roles == read_graph(path, options).roles).all()
    assert (graph.roles != read_graph(path, replace(options, split_seed=4)).roles).any()
    with pytest.raises(ConfigError, match="random_split: expected three shares of at most 1"):
        GraphOptions(random_split=(0.9, 0.2, 0.0))


def test_a_vertex_with_an_answer_to_one_question_is_labelled(tmp_path):
    y = np.zeros((100, 2), dtype=np.float32)
    y[:50, 0], y[:10, 1] = np.nan, np.nan
    path = saved(tmp_path, num_nodes=np.array(100), x=None, y=y, train=None, val=None, test=None)
    graph = read_graph(path, GraphOptions(random_split=(1.0, 0.0, 0.0)))
    assert graph.mask("train").tolist() == [False] * 10 + [True] * 90


def test_files_beside_an_edge_list(tmp_path):
    (tmp_path / "e.txt").write_text("0 1\n1 2\n")
    np.save(tmp_path / "x.npy", np.eye(3))
    np.save(tmp_path / "y.npy", np.array([0, 1, 1]))
    np.savez(tmp_path / "s.npz", train_mask=np.array([True, False, False]))
    beside = {"features": "x.npy", "labels": "y.npy", "splits": "s.npz"}
    graph = read_graph(tmp_path / "e.txt", **{k: tmp_path / v for k, v in beside.items()})
    assert graph.num_features == 3
    assert graph.mask("train").tolist() == [True, False, False]
    with pytest.raises(DataError, match=r"x\.npy: is not an npz file"):
        read_graph(tmp_path / "e.txt", splits=tmp_path / "x.npy")
    one = np.array([True, False, False])
    np.savez(tmp_path / "s.npz", train=one, valyd=one, tests=one, test=one, rest=one)
    with pytest.raises(DataError, match=r"s\.npz: holds an array 'valyd'; did you mean 'valid'\?"):
        read_graph(tmp_path / "e.txt", splits=tmp_path / "s.npz")
    np.savez(tmp_path / "s.npz", what=np.zeros(1))
    with pytest.raises(DataError, match="holds no splits, expected arrays train, valid, test"):
        read_graph(tmp_path / "e.txt", splits=tmp_path / "s.npz")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"features": np.ones((4, 2))},
         "x.npy: holds features of 4 vertices but there are labels of 3 in {folder}/y.npy"),
        ({"features": np.array([[1.0], [np.nan], [2.0]])}, "x.npy: a feature of vertex 1 is nan"),
        ({"features": np.array([["a"]] * 3)}, "x.npy: features are of type <U1, expected numbers"),
        ({"labels": np.array([0, 1, 1.5])}, "y.npy: the label of vertex 2 is 1.5, expected a"),
        ({"splits": {"train": [0, 1], "val": [1]}}, "s.npz: vertex 1 is in the splits 'train' and"),
        ({"splits": {"train": [7]}}, "s.npz: split 'train': there is no vertex 7"),
    ],
)  # fmt: skip
def test_what_is_wrong_in_a_file_beside_is_said_of_that_file(changes, message, tmp_path):
    (tmp_path / "e.txt").write_text("0 1\n1 2\n")
    np.save(tmp_path / "x.npy", changes.get("features", np.eye(3)))
    np.save(tmp_path / "y.npy", changes.get("labels", np.array([0, 1, 1])))
    np.savez(tmp_path / "s.npz", **changes.get("splits", {"train": [0]}))
    beside = {"features": "x.npy", "labels": "y.npy", "splits": "s.npz"}
    full = f"{tmp_path}/{message.format(folder=tmp_path)}"
    with pytest.raises(DataError, match=re.escape(full)):
        read_graph(tmp_path / "e.txt", **{k: tmp_path / v for k, v in beside.items()})


def test_an_array_beside_that_is_none_is_refused(tmp_path):
    (tmp_path / "e.txt").write_text("0 1\n1 2\n")
    np.savez(tmp_path / "several.npz", x=np.eye(3))
    np.save(tmp_path / "objects.npy", np.array([{}]), allow_pickle=True)
    (tmp_path / "empty.npy").write_bytes(b"")
    for name, message in (
        ("several.npz", "is an npz of several arrays, expected a .npy file of one"),
        ("nix.npy", "there is no such file"),
        ("objects.npy", "cannot be read as .npy"),
        ("empty.npy", "cannot be read as .npy"),
    ):
        with pytest.raises(DataError, match=re.escape(f"{tmp_path / name}: {message}")):
            read_graph(tmp_path / "e.txt", features=tmp_path / name)


def pyg_data():
    data = pytest.importorskip("torch_geometric.data")
    mask = torch.zeros(5, dtype=torch.bool)
    mask[:2] = True
    return data.Data(
        x=torch.arange(10.0).reshape(5, 2),
        edge_index=torch.tensor(np.stack([SRC, DST])),
        y=torch.tensor([0, 1, 0, -1, 1]),
        train_mask=mask,
    )


def test_data_of_pytorch_geometric_in_memory_and_saved(tmp_path):
    data = pyg_data()
    torch.save(data, tmp_path / "data.pt")
    torch.save(data.to_dict(), tmp_path / "dict.pt")
    torch.save((data.to_dict(), None, dict), tmp_path / "processed.pt")
    torch.save((data, None), tmp_path / "pair.pt")
    for source in (data, tmp_path / "data.pt", tmp_path / "dict.pt", tmp_path / "pair.pt"):
        graph = read_graph(source)
        assert (matrix(graph) == DENSE).all()
        assert graph.labels.tolist() == [0, 1, 0, -1, 1]
        assert graph.mask("train").sum() == 2
        assert graph.num_features == 2


def test_saved_objects_are_not_unpickled(tmp_path):
    class Anything:
        pass

    torch.save(torch.nn.Linear(2, 2), tmp_path / "module.pt")
    with pytest.raises(TrustError, match="could run any code when unpickled"):
        read_graph(tmp_path / "module.pt")
    (tmp_path / "junk.pt").write_bytes(b"junk")
    with pytest.raises((DataError, TrustError), match=r"junk\.pt"):
        read_graph(tmp_path / "junk.pt")
    torch.save({"x": torch.ones(2)}, tmp_path / "empty.pt")
    with pytest.raises(DataError, match="has no edge_index"):
        read_graph(tmp_path / "empty.pt")


def test_edge_features_of_pytorch_geometric_are_refused():
    data = pyg_data()
    data.edge_attr = torch.ones(6, 3)
    with pytest.raises(DataError, match="edge features are not supported, a weight per edge is"):
        read_graph(data)
    data.edge_attr = torch.full((6, 1), 2.0)
    assert read_graph(data).edges.weights.tolist() == [2.0] * 6


def write_gz(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt") as file:
        file.writelines(",".join(map(str, np.atleast_1d(row))) + "\n" for row in rows)


def ogb_folder(folder, binary):
    values = base()
    raw = folder / "raw"
    if binary:
        raw.mkdir(parents=True)
        np.savez_compressed(
            raw / "data.npz", edge_index=np.stack([SRC, DST]), num_nodes_list=np.array([5]),
            num_edges_list=np.array([6]), node_feat=values["x"], node_year=np.zeros((5, 1)),
        )  # fmt: skip
        labels = np.where(values["y"] < 0, np.nan, values["y"])[:, None].astype(np.float32)
        np.savez_compressed(raw / "node-label.npz", node_label=labels)
    else:
        write_gz(raw / "edge.csv.gz", np.stack([SRC, DST], axis=1))
        write_gz(raw / "num-node-list.csv.gz", [5])
        write_gz(raw / "node-feat.csv.gz", values["x"])
        write_gz(raw / "node-label.csv.gz", ["0", "1", "0", "nan", "1"])
    for role, members in (("train", [0, 1]), ("valid", [2]), ("test", [4])):
        write_gz(folder / "split" / "time" / f"{role}.csv.gz", members)
    return folder


@pytest.mark.parametrize("binary", [False, True])
def test_folders_of_ogb(binary, tmp_path):
    graph = read_graph(ogb_folder(tmp_path / "ogbn_tiny", binary))
    assert (matrix(graph) == DENSE).all()
    assert graph.dense_features().tolist() == base()["x"].tolist()
    assert graph.labels.tolist() == [0, 1, 0, -1, 1]
    assert graph.roles.tolist() == [1, 1, 2, 0, 3]


def test_damaged_folders_of_ogb(tmp_path):
    folder = ogb_folder(tmp_path / "ogbn_tiny", binary=False)
    write_gz(folder / "raw" / "num-node-list.csv.gz", [5, 5])
    with pytest.raises(DataError, match="holds 2 graphs, expected one with many vertices"):
        read_graph(folder)
    write_gz(folder / "raw" / "num-node-list.csv.gz", [5])
    write_gz(folder / "raw" / "node-feat.csv.gz", ["1,2", "1", "1,2", "1,2", "1,2"])
    with pytest.raises(DataError, match=r"node-feat\.csv\.gz, after line 0"):
        read_graph(folder)
    write_gz(folder / "split" / "other" / "train.csv.gz", [0])
    with pytest.raises(DataError, match=r"node-feat|several splits"):
        read_graph(folder)


def test_samples_are_what_the_models_take(tmp_path):
    for changes in ({}, {"edge_weight": np.arange(6.0)}, {"y": np.ones((5, 2))}):
        sample = read_graph(saved(tmp_path, **changes)).sample()
        check_graph(sample)
        batch = WholeGraph(sample).part("valid").batch()
        assert batch.mask.tolist() == [False, False, True, False, False]
        assert sorted(zip(*batch.edges.tolist(), strict=True)) == sorted(
            zip(SRC.tolist(), DST.tolist(), strict=True)
        )


@pytest.mark.shared
@pytest.mark.parametrize(
    ("name", "n", "m"), [("cora", 2708, 10556), ("citeseer", 3327, 9104), ("pubmed", 19717, 88648)]
)
def test_planetoid_graphs(shared, name, n, m):
    graph = read_graph(shared / "data" / "graphs" / f"{name}.npz")
    assert (graph.num_nodes, graph.num_edges) == (n, m)
    assert graph.mask("valid").sum() == 500
    assert graph.mask("test").sum() == 1000
    if name == "citeseer":
        assert "48 isolated" in graph.report()[1]
        assert "15 without a label" in graph.report()[2]
