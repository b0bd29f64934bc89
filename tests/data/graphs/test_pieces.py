"""Reading in pieces gives the same entries as reading the whole, whatever the size of a piece."""

import gzip

import numpy as np
import pytest
import scipy.sparse
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bevatron.data.graphs import EdgePolicy, GraphOptions, read_graph, read_in_pieces
from bevatron.errors import ConfigError, DataError

RNG = np.random.default_rng(0)
MATRIX = scipy.sparse.random(40, 40, 0.1, rng=RNG, data_rvs=np.ones)
ROW, COL = MATRIX.tocoo().row, MATRIX.tocoo().col


def files(folder):
    np.savez_compressed(folder / "packed.npz", edge_src=COL, edge_dst=ROW, num_nodes=np.array(40))
    np.savez(folder / "mapped.npz", edge_src=COL, edge_dst=ROW, num_nodes=np.array(40))
    index = np.stack([COL, ROW])
    np.savez_compressed(folder / "index.npz", edge_index=index, num_nodes=np.array(40))
    scipy.sparse.save_npz(folder / "csr.npz", MATRIX.tocsr())
    scipy.sparse.save_npz(folder / "csc.npz", MATRIX.tocsc())
    text = "# edges\n" + "".join(f"{c} {r}\n" for c, r in zip(COL, ROW, strict=True))
    (folder / "list.txt").write_text(text)
    with gzip.open(folder / "list.txt.gz", "wt") as file:
        file.write(text)
    raw = folder / "ogbn_tiny" / "raw"
    raw.mkdir(parents=True)
    np.savez(raw / "data.npz", edge_index=index, num_nodes_list=np.array([40]))
    return [*(p for p in folder.iterdir())]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pieces")
    files(folder)
    return folder


NAMES = ("packed.npz", "mapped.npz", "index.npz", "csr.npz", "csc.npz", "list.txt", "list.txt.gz",
         "ogbn_tiny")  # fmt: skip


def entries(source, piece):
    parts = [torch.stack(part) for part in source.pieces(piece=piece)]
    return torch.cat(parts, dim=1).T.tolist(), [part.shape[1] for part in parts]


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=5, deadline=None)
@given(piece=st.integers(1, 200))
def test_pieces_are_the_whole(folder, name, piece):
    source = read_in_pieces(folder / name, GraphOptions(num_nodes=40))
    assert source.num_vertices == 40
    found, lengths = entries(source, piece)
    assert sorted(found) == sorted(map(list, zip(ROW.tolist(), COL.tolist(), strict=True)))
    if name != "list.txt.gz":
        assert max(lengths) <= max(piece, 4 * piece if "txt" in name else piece)
    assert entries(source, piece)[0] == found


def test_vertices_are_counted(folder):
    assert read_in_pieces(folder / "csr.npz").num_vertices == 40
    assert read_in_pieces(folder / "ogbn_tiny").num_vertices == 40
    assert read_in_pieces(folder / "list.txt").num_vertices == max(ROW.max(), COL.max()) + 1


def test_a_number_that_is_known_elsewhere_counts_where_the_file_states_none(folder, tmp_path):
    assert read_in_pieces(folder / "list.txt", num_vertices=77).num_vertices == 77
    assert read_in_pieces(folder / "csr.npz", num_vertices=77).num_vertices == 40
    options = GraphOptions(num_nodes=2**40)
    with pytest.raises(DataError, match=r"list\.txt: 1,099,511,627,776 vertices are asked for"):
        read_in_pieces(folder / "list.txt", options)


def test_pairs_in_rows_are_read_too(tmp_path):
    pairs = np.stack([COL, ROW], axis=1)
    for name in ("edges", "edge_index"):
        np.savez(tmp_path / f"{name}.npz", **{name: pairs}, num_nodes=np.array(40))
        found, _ = entries(read_in_pieces(tmp_path / f"{name}.npz"), 11)
        whole = read_graph(tmp_path / f"{name}.npz").edges
        assert sorted(found) == sorted(
            map(list, zip(whole.rows.tolist(), whole.cols.tolist(), strict=True))
        )


def test_what_needs_the_whole_list_is_refused(folder, tmp_path):
    with pytest.raises(ConfigError, match="in pieces, renumber needs the whole edge list"):
        read_in_pieces(folder / "list.txt", GraphOptions(renumber=True))
    with pytest.raises(ConfigError, match=r"g\.pt: cannot be read in pieces, files of PyTorch"):
        read_in_pieces(folder / "g.pt")
    np.savez(tmp_path / "f.npz", edge_src=COL, edge_dst=ROW, edge_attr=np.ones((len(ROW), 3)))
    with pytest.raises(
        DataError, match=r"'edge_attr' has shape .*, 3\); features of edges are not"
    ):
        read_in_pieces(tmp_path / "f.npz")
    with pytest.raises(DataError, match="there is no such file"):
        read_in_pieces(tmp_path / "none.npz")
    with pytest.raises(DataError, match="is a folder without OGB's"):
        read_in_pieces(tmp_path)


WEIGHTS = np.random.default_rng(1).integers(1, 9, len(ROW)) / 4
DOUBLE = np.r_[0 : len(ROW), 0:9]
"""The first edges stand there twice, the second time with other weights."""


def write_weighted(folder, kind, dtype=np.float32):
    """Write the matrix with weights, some edges twice where the kind allows."""
    path, weights = folder / f"{kind}.npz", WEIGHTS.astype(dtype)
    if kind in {"csr", "csc", "coo"}:
        matrix = scipy.sparse.coo_matrix((weights, (ROW, COL)), MATRIX.shape)
        scipy.sparse.save_npz(path, matrix.asformat(kind))
        return path
    row, col = ROW[DOUBLE], COL[DOUBLE]
    weights = np.concatenate([weights, 7 * weights[:9]])
    if kind == "text":
        path = folder / "w.txt"
        lines = zip(col, row, weights, strict=True)
        path.write_text("".join(f"{c} {r} {w}\n" for c, r, w in lines))
    elif kind == "column":
        np.savez(path, edge_index=np.stack([col, row]), edge_attr=weights[:, None])
    else:
        np.savez_compressed(path, edge_src=col, edge_dst=row, edge_weight=weights)
    return path


@pytest.mark.parametrize("kind", ["csr", "csc", "coo", "text", "column", "pairs"])
def test_weights_of_pieces_are_those_of_the_whole(kind, tmp_path):
    """Of an edge that is there twice the first counts."""
    path = write_weighted(tmp_path, kind)
    options = GraphOptions(duplicates="merge", num_nodes=40)
    source = read_in_pieces(path, options)
    assert source.weight_type == torch.float32
    assert source.policy == EdgePolicy(duplicates="merge")
    found = {}
    for row, col, weight in source.pieces(piece=7):
        for r, c, w in zip(row.tolist(), col.tolist(), weight.tolist(), strict=True):
            found.setdefault((r, c), w)
    whole = read_graph(path, options).edges
    expected = zip(whole.rows.tolist(), whole.cols.tolist(), strict=True)
    assert found == dict(zip(expected, whole.weights.tolist(), strict=True))
    assert len(set(found.values())) > 4


def test_weights_of_one_are_none_and_doubles_stay_doubles(tmp_path):
    np.savez(tmp_path / "ones.npz", edge_src=COL, edge_dst=ROW, weights=np.ones(len(ROW)))
    source = read_in_pieces(tmp_path / "ones.npz")
    assert source.weight_type is None
    assert all(len(part) == 2 for part in source.pieces(piece=7))
    source = read_in_pieces(write_weighted(tmp_path, "pairs", np.float64))
    assert all(weight.dtype == torch.float64 for _, _, weight in source.pieces(piece=7))


@pytest.mark.parametrize("change", [-1, 1])
def test_another_number_of_weights_than_edges_is_refused(change, tmp_path):
    weights = np.resize(WEIGHTS, len(ROW) + change)
    np.savez(tmp_path / "w.npz", edge_src=COL, edge_dst=ROW, edge_weight=weights)
    with pytest.raises(DataError, match="weights"):
        list(read_in_pieces(tmp_path / "w.npz").pieces(piece=len(ROW)))


def test_bad_index_names_its_place_in_the_file(tmp_path):
    np.savez(tmp_path / "b.npz", edge_src=np.array([0, 1, 2, 1, 9]), edge_dst=np.zeros(5, int),
             num_nodes=np.array(3))  # fmt: skip
    with pytest.raises(DataError, match="edge 4: its source 9 is outside of its 3 vertices"):
        list(read_in_pieces(tmp_path / "b.npz").pieces(piece=2))
