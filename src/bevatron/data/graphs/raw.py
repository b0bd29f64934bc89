"""The last step of all readers: the content of a file becomes a checked graph."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bevatron.data.graphs.graph import Edges, GraphArrays, SparseFeatures
from bevatron.data.graphs.normalise import normalise_edges
from bevatron.data.graphs.options import GraphOptions
from bevatron.data.graphs.vertices import (
    check_rows,
    checked_features,
    checked_labels,
    checked_roles,
)
from bevatron.errors import DataError
from bevatron.typing import Array, IntArray


@dataclass(frozen=True, eq=False)
class RawGraph:
    """The unchecked content of a graph file.

    Attributes
    ----------
    rows, cols : [E] destination and source of every edge
    weights : [E]; None = all 1
    num_nodes : as given in the file, or None
    features, labels : those of the vertices; None = none
    splits : masks or indices of vertices under any of the usual names
    separate_files : other files that hold ``features``, ``labels`` or ``splits``
    """

    name: str
    rows: Array
    cols: Array
    weights: Array | None = None
    num_nodes: int | None = None
    features: Array | SparseFeatures | None = None
    labels: Array | None = None
    splits: Mapping[str, Array] = field(default_factory=dict)
    separate_files: Mapping[str, str] = field(default_factory=dict)

    def holder(self, what: str) -> str:
        """Name the file that holds features, labels or splits, for messages."""
        return self.separate_files.get(what, self.name)


def finish(raw: RawGraph, options: GraphOptions) -> GraphArrays:
    """Check everything and sort the edges.

    Raises DataError for anything that must not be trained on; the message names the file and the
    place.
    """
    edges = raw_edges(raw.name, raw.rows, raw.cols, raw.weights)
    ids: IntArray | None = None
    if options.renumber:
        ids, edges = renumbered(edges, raw.name)
        num_nodes = len(ids)
    else:
        num_nodes = checked_count(count_vertices(raw, options, edges), raw.name)
    for what, values in (("features", raw.features), ("labels", raw.labels)):
        if values is not None and len(values.shape):
            check_rows(int(values.shape[0]), num_nodes, what, raw.holder(what))
    final, found = normalise_edges(edges, num_nodes, options, raw.name)
    labels = checked_labels(raw.labels, num_nodes, raw.holder("labels"))
    return GraphArrays(
        name=raw.name,
        num_nodes=num_nodes,
        edges=final,
        features=checked_features(raw.features, num_nodes, options, raw.holder("features")),
        labels=labels,
        roles=checked_roles(raw.splits, labels, num_nodes, options, raw.holder("splits")),
        found=found,
        ids=ids,
    )


def raw_edges(name: str, rows: Array, cols: Array, weights: Array | None) -> Edges:
    """Check types and lengths of an edge list; weights that are all 1 are dropped.

    Raises DataError for arrays that are not an edge list.
    """
    for what, values in (("destinations", rows), ("sources", cols)):
        if values.ndim != 1 or values.dtype.kind not in "iu":
            raise DataError(
                f"{name}: {what} of edges have type {values.dtype} and shape {values.shape}, "
                "expected whole numbers, one per edge"
            )
    if len(rows) != len(cols):
        raise DataError(f"{name}: holds {len(cols):,} sources but {len(rows):,} destinations")
    if weights is not None:
        if weights.dtype.kind not in "fiub" or weights.shape != rows.shape:
            raise DataError(
                f"{name}: edge weights have type {weights.dtype} and shape {weights.shape}, "
                f"expected one number for each of {len(rows):,} edges (edge features of several "
                "columns are not supported)"
            )
        if weights.dtype != np.float64:
            weights = weights.astype(np.float32, copy=False)
        if (weights == 1).all():
            weights = None
    return Edges(_signed(rows), _signed(cols), weights)  # type: ignore[arg-type]


def _signed(values: Array) -> Any:
    """Convert integers of any type to int32 or int64."""
    if values.dtype in {np.dtype(np.int32), np.dtype(np.int64)}:
        return values
    small = values.dtype.kind == "i" or values.dtype.itemsize < 4
    return values.astype(np.int32 if small else np.int64)


MOST_VERTICES = 3_037_000_499
"""Rows x columns of the matrix must be a number of 64 bits."""


def checked_count(count: int, name: str) -> int:
    """Refuse a number of vertices that no matrix here can have.

    Raises DataError naming the file and the number.
    """
    if not 0 <= count <= MOST_VERTICES:
        raise DataError(
            f"{name}: {count:,} vertices are asked for, expected at most {MOST_VERTICES:,}; check "
            "num_nodes and the largest id, or set renumber where ids have gaps"
        )
    return count


def count_vertices(raw: RawGraph, options: GraphOptions, edges: Edges) -> int:
    """Find the number of vertices: from the options, from the file, or the largest id + 1.

    Raises DataError if there is neither an edge nor a number, or features and labels contradict
    each other.
    """
    for given in (options.num_nodes, raw.num_nodes):
        if given is not None:
            return given
    known = [int(values.shape[0]) for values in (raw.features, raw.labels) if values is not None]
    if len(set(known)) == 2:
        labels_file = raw.separate_files.get("labels")
        labels_in = f" in {labels_file}" if labels_file else ""
        raise DataError(
            f"{raw.holder('features')}: holds features of {known[0]:,} vertices but there are "
            f"labels of {known[1]:,}{labels_in}"
        )
    if known:
        return known[0]
    if not len(edges):
        raise DataError(f"{raw.name}: holds no edges and no number of vertices")
    return max(int(edges.rows.max()), int(edges.cols.max())) + 1


def renumbered(edges: Edges, name: str) -> tuple[IntArray, Edges]:
    """Renumber the vertices of the edges 0, 1, ... in the order of their ids.

    Raises DataError for a negative id.
    """
    ids, place = np.unique(np.concatenate([edges.rows, edges.cols]), return_inverse=True)
    if len(ids) and ids[0] < 0:
        raise DataError(f"{name}: the id {ids[0]} is negative")
    rows, cols = np.split(place.reshape(-1), 2)
    return ids.astype(np.int64), Edges(rows, cols, edges.weights)
