"""One graph in memory, as readers return it: plain arrays, edges sorted, everything checked."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from bevatron.data.dataset import ROLES
from bevatron.typing import Array, BoolArray, IntArray

Labels = npt.NDArray[np.int32] | npt.NDArray[np.float32]

Index = npt.NDArray[np.int32] | IntArray


@dataclass(frozen=True, eq=False)
class Edges:
    """Entries of the adjacency matrix: vertex ``rows[e]`` attends to vertex ``cols[e]``.

    Attributes
    ----------
    rows, cols : [E] destination and source, int32 where the numbers of the vertices allow
    weights : [E] float32 or float64; None = all 1
    """

    rows: Index
    cols: Index
    weights: npt.NDArray[np.floating] | None = None

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True, eq=False)
class SparseFeatures:
    """Sparse features of vertices, by rows.

    Attributes
    ----------
    indptr : [N + 1], where the entries of each vertex begin
    indices : [Z], which feature each entry is
    values : [Z] float32; None = all 1
    width : number of features
    """

    indptr: Array
    indices: Array
    values: npt.NDArray[np.floating] | None
    width: int

    @property
    def shape(self) -> tuple[int, int]:
        """(vertices, features)."""
        return len(self.indptr) - 1, self.width

    def dense(self, start: int = 0, stop: int | None = None) -> npt.NDArray[np.floating]:
        """Return the dense features of vertices ``start`` to ``stop``, [stop - start, width]."""
        stop = self.shape[0] if stop is None else stop
        counts = np.diff(self.indptr[start : stop + 1])
        own = slice(int(self.indptr[start]), int(self.indptr[stop]))
        values = np.float32(1.0) if self.values is None else self.values[own]
        dtype = np.float32 if self.values is None else self.values.dtype
        out = np.zeros((stop - start, self.width), dtype=dtype)
        out[np.repeat(np.arange(stop - start), counts), self.indices[own]] = values
        return out


@dataclass(frozen=True)
class Found:
    """What was found in the file, and what was changed.

    Attributes
    ----------
    given : edges that the file holds
    duplicates : repeated edges among them
    reversed : edges added by symmetrising
    added_loops : self loops added
    """

    given: int = 0
    duplicates: int = 0
    reversed: int = 0
    added_loops: int = 0


@dataclass(frozen=True, eq=False)
class GraphArrays:
    """A graph with the data of its vertices.

    Attributes
    ----------
    name : the file, for messages
    num_nodes : number of vertices
    edges : sorted by row, then by column, without duplicates
    features : [N, C], dense or sparse; None = none
    labels
        [N] int32, class from 0, -1 = none; or [N, T] float32, answers 0 or 1 to T questions, NaN =
        none. None = no labels at all.
    roles : [N] uint8: 1 + position in `bevatron.data.dataset.ROLES`, 0 = none; None = no split
    found : counts of edges, and changes made to them
    ids : [N] the file's ids of the vertices if they were renumbered
    """

    name: str
    num_nodes: int
    edges: Edges
    features: npt.NDArray[np.floating] | SparseFeatures | None = None
    labels: Labels | None = None
    roles: npt.NDArray[np.uint8] | None = None
    found: Found = field(default_factory=Found)
    ids: IntArray | None = None

    @property
    def num_edges(self) -> int:
        """Stored entries."""
        return len(self.edges)

    @property
    def num_features(self) -> int:
        """Features of each vertex."""
        return 0 if self.features is None else int(self.features.shape[1])

    @property
    def num_classes(self) -> int:
        """Largest label + 1, or the number of questions."""
        if self.labels is None or not len(self.labels):
            return 0
        if self.labels.ndim == 2:
            return int(self.labels.shape[1])
        return max(int(self.labels.max()) + 1, 0)

    def mask(self, role: str) -> BoolArray:
        """Mark the vertices of ``train``, ``valid`` or ``test``, [N]."""
        if self.roles is None:
            return np.zeros(self.num_nodes, dtype=bool)
        mask: BoolArray = self.roles == 1 + ROLES.index(role)
        return mask

    def dense_features(self) -> npt.NDArray[np.floating]:
        """Return the dense features, [N, C]; [N, 0] without any."""
        if self.features is None:
            return np.zeros((self.num_nodes, 0), dtype=np.float32)
        return self.features.dense() if isinstance(self.features, SparseFeatures) else self.features

    def report(self) -> list[str]:
        """Describe the graph and what was done to it, in a few lines."""
        found = self.found
        n, rows, cols = self.num_nodes, self.edges.rows, self.edges.cols
        degrees, referred = np.bincount(rows, minlength=n), np.bincount(cols, minlength=n)
        others = rows != cols
        alone = np.ones(n, dtype=bool)
        alone[rows[others]] = alone[cols[others]] = False
        changes = [
            (found.duplicates, "duplicates merged"),
            (found.reversed, "reversed edges added"),
            (found.added_loops, "self loops added"),
        ]
        done = [f", {k:,} {what}" for k, what in changes if k]
        origin = (
            f" ({found.given:,} in the file{''.join(done)})"
            if done or found.given != self.num_edges
            else ""
        )
        entries = f"{n:,} vertices, {self.num_edges:,} stored entries{origin}"
        neighbours = (
            f"neighbours of a vertex {degrees.min() if n else 0:,} to "
            f"{degrees.max() if n else 0:,}, mean {self.num_edges / max(n, 1):.1f}; "
            f"{int(alone.sum()):,} isolated, {int((degrees == 0).sum()):,} empty rows, "
            f"{int((referred == 0).sum()):,} empty columns"
        )
        lines = [f"{self.name}: {entries}", f"{self.name}: {neighbours}"]
        if self.labels is not None:
            lines.append(self._label_line(self.labels))
        return lines

    def sample(self) -> dict[str, Array]:
        """Write the graph as a sample, see `bevatron.data.samples.graphs.check_graph`."""
        roles = np.zeros(self.num_nodes, dtype=np.uint8) if self.roles is None else self.roles
        labels = np.full(self.num_nodes, -1) if self.labels is None else self.labels
        weights = self.edges.weights
        sample: dict[str, Array] = {
            "num_nodes": np.array(self.num_nodes, dtype=np.int64),
            "edges": np.stack([self.edges.cols, self.edges.rows], axis=1),
            "edge_values": np.zeros(0, np.float32) if weights is None else weights,
            "labels": labels if labels.ndim == 2 else labels.astype(np.int64),
            "masks": roles[:, None] == np.arange(1, len(ROLES) + 1, dtype=np.uint8),
            "part": np.array(0, dtype=np.int32),
        }
        if not isinstance(self.features, SparseFeatures):
            return {**sample, "features": self.dense_features()}
        sparse, values = self.features, self.features.values
        ones = np.ones(len(sparse.indices), dtype=np.float32)
        return {
            **sample,
            "feature_ptr": sparse.indptr.astype(np.int64),
            "feature_columns": sparse.indices.astype(np.int32),
            "feature_values": ones if values is None else values,
            "num_features": np.array(sparse.width, dtype=np.int64),
        }

    def _label_line(self, labels: Labels) -> str:
        split = ", ".join(f"{int(self.mask(role).sum()):,} {role}" for role in ROLES)
        begin = f"{self.name}: {self.num_features:,} features"
        if labels.ndim == 2:
            known = int((~np.isnan(labels)).any(axis=1).sum())
            return f"{begin}, {labels.shape[1]} questions, {known:,} answered; {split}"
        present = labels[labels >= 0]
        counts = np.bincount(present, minlength=self.num_classes)
        shown = ", ".join(f"{count:,}" for count in counts[:12])
        more = f", ... {len(counts) - 12} more" if len(counts) > 12 else ""
        return (
            f"{begin}, {self.num_classes} classes ({shown}{more}), "
            f"{len(labels) - len(present):,} without a label; {split}"
        )


def index_type(num_nodes: int) -> type[np.int32] | type[np.int64]:
    """Choose the smallest integer for numbers of vertices."""
    return np.int32 if num_nodes < 2**31 else np.int64


def in_float32(values: npt.NDArray[np.floating]) -> BoolArray:
    """Whether values are finite in float32, in which models train; a float64 may be too large."""
    with np.errstate(over="ignore"):
        return np.isfinite(values.astype(np.float32, copy=False))


def concatenate(parts: Sequence[Edges], num_nodes: int) -> Edges:
    """Join pieces of an edge list."""
    dtype = index_type(num_nodes)
    weighted = any(part.weights is not None for part in parts)
    return Edges(
        np.concatenate([np.empty(0, dtype), *(part.rows.astype(dtype) for part in parts)]),
        np.concatenate([np.empty(0, dtype), *(part.cols.astype(dtype) for part in parts)]),
        np.concatenate([_weights_of(part) for part in parts]) if weighted else None,
    )


def _weights_of(part: Edges) -> npt.NDArray[np.floating]:
    return np.ones(len(part), dtype=np.float32) if part.weights is None else part.weights
