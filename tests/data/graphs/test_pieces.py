"""Reading in pieces gives the same entries as reading the whole, whatever the size of a piece."""

import gzip

import numpy as np
import pytest
import scipy.sparse
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bevatron.data.graphs import GraphOptions, read_graph, read_in_pieces
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


@pytest.mark.parametrize("name", NAMES)
def test_options_give_what_the_whole_graph_has(folder, name):
    for loops in ("keep", "add", "remove"):
        options = GraphOptions(self_loops=loops, symmetrise=True, num_nodes=40)
        found, _ = entries(read_in_pieces(folder / name, options), 7)
        whole = read_graph(folder / name, options)
        assert {tuple(e) for e in found} == set(
            zip(whole.edges.rows.tolist(), whole.edges.cols.tolist(), strict=True)
        )
        assert read_in_pieces(folder / name, options).merge_duplicates


def test_vertices_are_counted(folder):
    assert read_in_pieces(folder / "csr.npz").num_vertices == 40
    assert read_in_pieces(folder / "ogbn_tiny").num_vertices == 40
    assert read_in_pieces(folder / "list.txt").num_vertices == max(ROW.max(), COL.max()) + 1


def test_what_needs_the_whole_list_is_refused(folder, tmp_path):
    with pytest.raises(ConfigError, match="renumber: needs the whole edge list"):
        read_in_pieces(folder / "list.txt", GraphOptions(renumber=True))
    with pytest.raises(ConfigError, match="duplicates: 'sum' needs the whole edge list"):
        read_in_pieces(folder / "list.txt", GraphOptions(duplicates="sum"))
    np.savez(tmp_path / "w.npz", edge_src=COL, edge_dst=ROW, edge_weight=ROW * 0.5)
    with pytest.raises(DataError, match="'edge_weight', but weights and features of edges"):
        read_in_pieces(tmp_path / "w.npz")
    scipy.sparse.save_npz(tmp_path / "v.npz", MATRIX.tocsr() * 2)
    with pytest.raises(DataError, match="'data' has weights, which are not read in pieces"):
        list(read_in_pieces(tmp_path / "v.npz").pieces())
    (tmp_path / "w.txt").write_text("0 1 0.5\n")
    with pytest.raises(DataError, match="has edge weights, which are not read in pieces"):
        list(read_in_pieces(tmp_path / "w.txt").pieces())
    with pytest.raises(DataError, match="there is no such file"):
        read_in_pieces(tmp_path / "none.npz")
    with pytest.raises(DataError, match="is a folder without OGB's"):
        read_in_pieces(tmp_path)


def test_bad_index_names_its_place_in_the_file(tmp_path):
    np.savez(tmp_path / "b.npz", edge_src=np.array([0, 1, 9]), edge_dst=np.zeros(3, int),
             num_nodes=np.array(3))  # fmt: skip
    with pytest.raises(DataError, match="edge 2: its source 9 is outside of its 3 vertices"):
        list(read_in_pieces(tmp_path / "b.npz").pieces(piece=2))
