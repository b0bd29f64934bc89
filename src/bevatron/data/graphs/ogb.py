"""Folders of the Open Graph Benchmark, node properties: gzipped CSV, or npz for the largest.

``NAME/raw/edge.csv.gz`` (source, destination), ``num-node-list.csv.gz``, ``node-feat.csv.gz``,
``node-label.csv.gz`` and ``NAME/split/KIND/{train,valid,test}.csv.gz``; ogbn-papers100M has
``raw/data.npz`` (``edge_index``, ``node_feat``, ``num_nodes_list``) and ``raw/node-label.npz``.
"""

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bevatron.data.graphs.edge_list import read_edge_list
from bevatron.data.graphs.npz import edge_pieces
from bevatron.data.graphs.raw import RawGraph
from bevatron.data.graphs.zipped import NpzFile
from bevatron.errors import DataError
from bevatron.typing import Array

BLOCK_LINES = 2**16


def is_ogb_folder(path: Path) -> bool:
    """Whether a folder has OGB's layout."""
    return any((path / "raw" / name).is_file() for name in ("edge.csv.gz", "data.npz"))


def read_ogb(folder: Path) -> RawGraph:
    """Read a data set of OGB's node property prediction.

    The arrays of ``data.npz`` are mapped where the file is not compressed; to hold no edge list at
    all see `bevatron.data.graphs.read_in_pieces`. Raises DataError if the folder has another layout
    or a file does not go with the others.
    """
    raw = folder / "raw"
    if (raw / "data.npz").is_file():
        with NpzFile(raw / "data.npz") as file:
            ((rows, cols, _),) = edge_pieces(file, weighted=False)
            return RawGraph(
                name=str(folder),
                rows=rows,
                cols=cols,
                num_nodes=_single_count(file.read("num_nodes_list"), folder),
                **ogb_vertices(folder),
            )
    if not (raw / "edge.csv.gz").is_file():
        raise DataError(
            f"{folder}: does not have the layout of OGB, there is neither raw/edge.csv.gz nor "
            "raw/data.npz"
        )
    edges = read_edge_list(raw / "edge.csv.gz")
    return RawGraph(
        name=str(folder),
        rows=edges.rows,
        cols=edges.cols,
        num_nodes=_single_count(_table(raw / "num-node-list.csv.gz", np.int64), folder),
        **ogb_vertices(folder),
    )


def ogb_vertices(folder: Path) -> dict[str, Any]:
    """Read features (mapped where they are not compressed), labels and splits."""
    table, features = folder / "raw" / "node-feat.csv.gz", None
    if (folder / "raw" / "data.npz").is_file():
        with NpzFile(folder / "raw" / "data.npz") as file:
            features = file.optional("node_feat")
    elif table.is_file():
        features = _table(table, np.float32)
    return {
        "features": features,
        "labels": read_ogb_labels(folder),
        "splits": read_ogb_splits(folder),
    }


def read_ogb_splits(folder: Path) -> dict[str, Array]:
    """Read the numbers of the vertices of each part; none if there is no split.

    Raises DataError if there are several kinds of split.
    """
    kinds = sorted(p for p in (folder / "split").glob("*") if (p / "train.csv.gz").is_file())
    if len(kinds) > 1:
        names = ", ".join(kind.name for kind in kinds)
        raise DataError(f"{folder}: has several splits ({names}); keep the folder of one")
    return {
        role: _table(kind / f"{role}.csv.gz", np.int64)[:, 0]
        for kind in kinds
        for role in ("train", "valid", "test")
        if (kind / f"{role}.csv.gz").is_file()
    }


def read_ogb_labels(folder: Path) -> Array | None:
    """Read ``raw/node-label.npz`` or ``raw/node-label.csv.gz``; None if there is neither."""
    if (folder / "raw" / "node-label.npz").is_file():
        with NpzFile(folder / "raw" / "node-label.npz") as file:
            return file.read("node_label")
    labels = folder / "raw" / "node-label.csv.gz"
    return _table(labels, np.float32) if labels.is_file() else None


def _single_count(counts: Array, folder: Path) -> int:
    if counts.size != 1:
        raise DataError(f"{folder}: holds {counts.size} graphs, expected one with many vertices")
    return int(counts.reshape(-1)[0])


def _table(path: Path, dtype: npt.DTypeLike) -> Array:
    """Read a gzipped table of numbers without a header, a block of lines at a time."""
    parts: list[Array] = []
    try:
        with gzip.open(path, "rt") as file:
            done = 0
            while lines := file.readlines(BLOCK_LINES * 8):
                try:
                    part = np.loadtxt(lines, delimiter=",", dtype=np.float64, ndmin=2)
                except ValueError as error:
                    raise DataError(f"{path}, after line {done}: {error}") from None
                parts.append(part.astype(dtype))
                done += len(lines)
    except (OSError, EOFError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{path}: cannot be read ({reason})") from None
    if not parts:
        raise DataError(f"{path}: is empty")
    if len({part.shape[1] for part in parts}) > 1:
        raise DataError(f"{path}: its lines have different numbers of columns")
    return np.concatenate(parts)
