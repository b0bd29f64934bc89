"""Graphs in npz files: edge lists with labels, scipy's sparse matrices, and common mixtures."""

from collections.abc import Iterator, Sequence
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
COUNTS = ("num_nodes", "num_vertices", "n", "num_nodes_list")


def read_npz(path: Path) -> RawGraph:
    """Read the edges, and features, labels and splits where there are any."""
    with NpzFile(path) as file:
        ((rows, cols, weights),) = edge_pieces(file)
        return RawGraph(
            name=str(path),
            rows=rows,
            cols=cols,
            weights=weights,
            num_nodes=stated_count(file),
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


def edge_pieces(
    file: NpzFile, size: int | None = None, *, weighted: bool = True
) -> Iterator[tuple[Array, Array, Array | None]]:
    """Yield destinations, sources and weights of ``size`` edges at a time; None = all at once."""
    name = weights_name(file) if weighted else None
    values = iter(()) if name is None else file.rows(name, size)
    for rows, cols in _pairs(file, size):
        part = None if name is None else next(values, np.zeros(0, dtype=np.float32)).reshape(-1)
        yield rows, cols, part
    left = next(values, None)
    if left is not None:
        raise DataError(f"{file.path}: holds at least {len(left):,} weights more than edges")


def _pairs(file: NpzFile, size: int | None) -> Iterator[tuple[Array, Array]]:
    """Yield destinations and sources; Planetoid's archives in csr form begin with ``adj_``."""
    for prefix in ("", "adj_"):
        if sparse_format(file, prefix) in {"csr", "csc"}:
            yield from _compressed(file, prefix, size)
            return
    for source, destination in PAIRS:
        if source in file and destination in file:
            _square(file, "shape")
            yield from zip(file.rows(destination, size), file.rows(source, size), strict=True)
            return
    for name in ("edge_index", "edges"):
        if name in file:
            shape, _ = file.header(name)
            if len(shape) != 2 or 2 not in shape:
                raise DataError(f"{file.path}: '{name}' has shape {shape}, expected [2, E]")
            if shape[0] != 2 or name == "edges":
                yield from ((part[:, 1], part[:, 0]) for part in file.rows(name, size))
            else:
                m = shape[1]
                sources, destinations = file.flat(name, size, 0, m), file.flat(name, size, m, 2 * m)
                yield from zip(destinations, sources, strict=True)
            return
    known = ", ".join(file.names)
    raise DataError(
        f"{file.path}: holds no edges; expected edge_src and edge_dst, edge_index, or a sparse "
        f"matrix (found: {known})"
    )


def _compressed(file: NpzFile, prefix: str, size: int | None) -> Iterator[tuple[Array, Array]]:
    """Yield the entries of a csr or csc matrix: A[i, j] is the edge j -> i, so rows receive."""
    indptr, key = file.read(f"{prefix}indptr"), f"{prefix}indices"
    check_indptr(indptr, int(file.header(key)[0][0]), str(file.path), f"{prefix}indptr")
    count = _square(file, f"{prefix}shape")
    if count is not None and len(indptr) != count + 1:
        raise DataError(
            f"{file.path}: '{prefix}indptr' has {len(indptr):,} entries, expected {count + 1:,}"
        )
    by_row, start = sparse_format(file, prefix) == "csr", 0
    for part in file.rows(key, size):
        first = int(np.searchsorted(indptr, start, side="right")) - 1
        last = int(np.searchsorted(indptr, start + len(part), side="left"))
        counts: Any = np.diff(np.clip(indptr[first : last + 1], start, start + len(part)))
        owner = np.repeat(np.arange(first, first + len(counts), dtype=part.dtype), counts)
        yield (owner, part) if by_row else (part, owner)
        start += len(part)


def weights_name(file: NpzFile) -> str | None:
    """Name the array of weights, without reading it; DataError for features of edges."""
    for prefix in ("", "adj_"):
        if sparse_format(file, prefix) is not None and f"{prefix}data" in file:
            return f"{prefix}data"
    for name in EDGE_FEATURES:
        if name in file and len(shape := file.header(name)[0]) != 1 and shape[1:] != (1,):
            raise DataError(
                f"{file.path}: '{name}' has shape {shape}; features of edges are not supported, a "
                "weight per edge is: leave it out or reduce it to one column"
            )
    return next((name for name in (*WEIGHTS, *EDGE_FEATURES) if name in file), None)


def stated_count(file: NpzFile) -> int | None:
    """Return the number of vertices that the file states, or that of its matrix.

    Raises DataError if what it states is not a number.
    """
    told = _first(file, COUNTS)
    if told is not None:
        try:
            return int(told.reshape(-1)[0])
        except (ValueError, TypeError, OverflowError, IndexError):
            name = next(each for each in COUNTS if each in file)
            raise DataError(f"{file.path}: '{name}' is not a number of vertices") from None
    for prefix in ("", "adj_"):
        if sparse_format(file, prefix) in {"csr", "csc"}:
            return int(file.header(f"{prefix}indptr")[0][0]) - 1
    return _square(file, "shape") if sparse_format(file) == "coo" else None


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
