"""Graphs in npz files: edge lists with labels, scipy's sparse matrices, and common mixtures."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bevatron.data.graphs.graph import SparseFeatures
from bevatron.data.graphs.raw import RawGraph
from bevatron.data.graphs.vertices import SPLIT_NAMES
from bevatron.data.graphs.zipped import NpzFile
from bevatron.errors import DataError
from bevatron.typing import Array

PAIRS = (("edge_src", "edge_dst"), ("src", "dst"), ("col", "row"))
"""(source, destination); a matrix's row attends to the columns stored in it."""

WEIGHTS = ("edge_weight", "edge_weights", "weights", "weight")
EDGE_FEATURES = ("edge_attr", "edge_feat", "edge_features")
"""Refused, unless it is a weight per edge."""
FEATURES = ("features", "feat", "x", "node_features", "node_feat")
LABELS = ("labels", "label", "y", "node_labels", "node_label")
COUNTS = ("num_nodes", "num_vertices", "n")


def read_npz(path: Path) -> RawGraph:
    """Read a graph from an npz file.

    Edges are two arrays (``edge_src`` and ``edge_dst``; ``row`` and ``col``), one ``edge_index``
    [2, E] of sources and destinations, ``edges`` [E, 2], or a sparse matrix as scipy's ``save_npz``
    writes it (CSR, CSC or COO), also with the prefix ``adj_``. Features are ``x``, ``features``,
    ... or CSR arrays with the prefix ``feat_`` or ``attr_``; labels ``y``, ``labels``, ...; splits
    masks or numbers of vertices under ``train``, ``val_mask``, ...; a weight per edge
    ``edge_weight``, or ``edge_attr`` of one column. Raises DataError if it is not an npz file, or
    has no edges or features of edges.
    """
    with NpzFile(path) as file:
        rows, cols, weights, size = _edges(file)
        return RawGraph(
            name=str(path),
            rows=rows,
            cols=cols,
            weights=weights,
            num_nodes=_count(file, size),
            **npz_vertices(file),
        )


def npz_vertices(file: NpzFile) -> dict[str, Any]:
    """Read features, labels and splits."""
    return {
        "features": _features(file),
        "labels": _first(file, LABELS),
        "splits": read_splits(file),
    }


def read_splits(file: NpzFile) -> dict[str, Array]:
    """Read arrays named like splits."""
    names = [name for names in SPLIT_NAMES.values() for name in names]
    return {name: file.read(name) for name in names if name in file}


def sparse_format(file: NpzFile, prefix: str = "") -> str | None:
    """Return which of scipy's formats the arrays with a prefix are: csr, csc, coo; None if none."""
    if f"{prefix}indptr" in file and f"{prefix}indices" in file:
        return _stated_format(file, prefix) or "csr"
    if not prefix and "format" in file and "row" in file:
        return _stated_format(file, prefix)
    return None


def _stated_format(file: NpzFile, prefix: str) -> str | None:
    if f"{prefix}format" not in file:
        return None
    stated = file.read(f"{prefix}format").reshape(-1)[0]
    text = stated.decode() if isinstance(stated, bytes) else str(stated)
    if text not in {"csr", "csc", "coo"}:
        raise DataError(
            f"{file.path}: is a sparse matrix of scipy's format '{text}', expected csr, csc or coo"
        )
    return text


def _edges(file: NpzFile) -> tuple[Array, Array, Array | None, int | None]:
    """Find (rows, cols, weights, vertices if the file says)."""
    for prefix in ("", "adj_"):
        if sparse_format(file, prefix) in {"csr", "csc"}:
            return _compressed(file, prefix)
    weights = _weights(file)
    for source, destination in PAIRS:
        if source in file and destination in file:
            if sparse_format(file) == "coo":
                weights = file.optional("data")
            size = _square(file, "shape")
            return file.read(destination), file.read(source), weights, size
    for name in ("edge_index", "edges"):
        if name in file:
            both = file.read(name)
            if both.ndim != 2 or 2 not in both.shape:
                raise DataError(f"{file.path}: '{name}' has shape {both.shape}, expected [2, E]")
            sources, destinations = both if (len(both) == 2 and name == "edge_index") else both.T
            return destinations, sources, weights, None
    known = ", ".join(file.names)
    raise DataError(
        f"{file.path}: holds no edges; expected edge_src and edge_dst, edge_index, or a sparse "
        f"matrix (found: {known})"
    )


def _weights(file: NpzFile) -> Array | None:
    """Read a weight per edge; refuse features of edges, which no model here would see."""
    found = _first(file, WEIGHTS)
    for key in EDGE_FEATURES:
        if key not in file:
            continue
        values = file.read(key)
        if values.ndim != 1 and values.shape[1:] != (1,):
            raise DataError(
                f"{file.path}: '{key}' has shape {values.shape}; features of edges are not "
                "supported, a weight per edge is: leave it out or reduce it to one column"
            )
        found = values.reshape(-1) if found is None else found
    return found


def _compressed(file: NpzFile, prefix: str) -> tuple[Array, Array, Array | None, int | None]:
    indptr, indices = file.read(f"{prefix}indptr"), file.read(f"{prefix}indices")
    check_indptr(indptr, len(indices), str(file.path), f"{prefix}indptr")
    size = _square(file, f"{prefix}shape")
    if size is not None and len(indptr) != size + 1:
        raise DataError(
            f"{file.path}: '{prefix}indptr' has {len(indptr):,} entries, expected {size + 1:,}"
        )
    counts = np.diff(indptr)
    owner = np.repeat(np.arange(len(counts), dtype=indices.dtype), counts)
    weights = file.optional(f"{prefix}data")
    by_row = sparse_format(file, prefix) == "csr"
    rows, cols = (owner, indices) if by_row else (indices, owner)
    return rows, cols, weights, len(counts)


def check_indptr(indptr: npt.NDArray[Any], num_entries: int, name: str, key: str) -> None:
    """Refuse row pointers that do not increase from 0 to the number of entries.

    Raises DataError naming the first wrong entry.
    """
    if not len(indptr) or indptr[0] != 0 or indptr[-1] != num_entries:
        raise DataError(f"{name}: '{key}' must begin with 0 and end with {num_entries:,}")
    decreasing = np.flatnonzero(indptr[1:] < indptr[:-1])
    if len(decreasing):
        raise DataError(f"{name}: '{key}' decreases at index {decreasing[0] + 1}, it must increase")


def _square(file: NpzFile, key: str) -> int | None:
    shape = file.optional(key)
    if shape is None:
        return None
    rows, cols = (int(size) for size in shape.reshape(-1)[:2])
    if rows != cols:
        raise DataError(
            f"{file.path}: the matrix is {rows:,} x {cols:,}; a graph's is square, both of its "
            "sides count the same vertices"
        )
    return rows


def _count(file: NpzFile, size: int | None) -> int | None:
    told = _first(file, COUNTS)
    return size if told is None else int(told.reshape(-1)[0])


def _features(file: NpzFile) -> Array | SparseFeatures | None:
    for prefix in ("feat_", "attr_"):
        if f"{prefix}indptr" in file:
            indptr, indices = file.read(f"{prefix}indptr"), file.read(f"{prefix}indices")
            check_indptr(indptr, len(indices), str(file.path), f"{prefix}indptr")
            width = int(file.read(f"{prefix}shape").reshape(-1)[1])
            values = file.optional(f"{prefix}data")
            if values is not None:
                if len(values) != len(indices):
                    raise DataError(
                        f"{file.path}: '{prefix}data' holds {len(values):,} numbers for "
                        f"{len(indices):,} entries"
                    )
                if values.dtype != np.float64:
                    values = values.astype(np.float32)
            return SparseFeatures(indptr.astype(np.int64), indices, values, width)  # type: ignore[arg-type]
    return _first(file, FEATURES)


def _first(file: NpzFile, names: Sequence[str]) -> Array | None:
    return next((file.read(name) for name in names if name in file), None)
