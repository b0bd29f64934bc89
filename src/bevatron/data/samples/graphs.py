"""Graphs with labelled nodes: the fields of a sample, one graph for many steps, the batch.

Two ways of learning share one batch type. *Inductive*: many graphs; each step takes some of them as
the blocks of one graph (`collate_graphs`). *Transductive*: one graph in every step, with nodes for
training, validation and testing. Such a graph is a `WholeGraph`; its batches are made once, and
`Graph.derived` caches what a model builds from the edges, so no step copies or sorts them again.
"""

import copy
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from bevatron.data.dataset import ROLES, Role
from bevatron.data.ragged import pointer
from bevatron.data.samples.flat import mover
from bevatron.errors import DataError
from bevatron.typing import Arrays, IntArray

T = TypeVar("T")


@dataclass(frozen=True)
class SparseRows:
    """A matrix by the entries that are not zero, row after row.

    Attributes
    ----------
    ptr : [N + 1] int64, where the entries of each row begin
    columns : [nnz]
    values : [nnz]
    num_columns : width of the matrix
    """

    ptr: Tensor
    columns: Tensor
    values: Tensor
    num_columns: int

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, columns)."""
        return self.ptr.shape[0] - 1, self.num_columns

    def rows(self) -> Tensor:
        """Return the row of each entry, [nnz] int64."""
        numbers = torch.arange(self.shape[0], device=self.ptr.device)
        return torch.repeat_interleave(numbers, self.ptr.diff(), output_size=len(self.columns))

    def dense(self) -> Tensor:
        """Return all entries, [N, F]."""
        return self.values.new_zeros(self.shape).index_put(
            (self.rows(), self.columns.long()), self.values, accumulate=True
        )

    def map(self, function: Callable[[Tensor], Tensor]) -> "SparseRows":
        """Apply a function to the three tensors."""
        return SparseRows(
            function(self.ptr), function(self.columns), function(self.values), self.num_columns
        )


@dataclass(frozen=True, eq=False)
class Graph:
    """Edges and node features of a graph, or of several side by side as blocks of one.

    Attributes
    ----------
    edges : [2, E] (senders, receivers): a receiver attends to its senders
    num_nodes : N
    features : [N, F], or the entries that are not zero
    edge_values : [E] weights of the edges; None = all one
    """

    edges: Tensor
    num_nodes: int
    features: Tensor | SparseRows
    edge_values: Tensor | None = None
    _copies: dict[Any, "Graph"] = field(default_factory=dict, repr=False)
    _derived: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    @property
    def num_edges(self) -> int:
        """Number of directed edges."""
        return self.edges.shape[1]

    @property
    def num_features(self) -> int:
        """Width of the node features."""
        return int(self.features.shape[1])

    def derived(self, key: Hashable, build: Callable[["Graph"], T]) -> T:
        """Return the result of ``build`` for this graph, cached under ``key``."""
        if key not in self._derived:
            # What is remembered must serve training too, even if an evaluation asks first.
            with torch.inference_mode(mode=False):
                self._derived[key] = build(self)
        found: T = self._derived[key]
        return found

    def map(self, key: Hashable, function: Callable[[Tensor], Tensor]) -> "Graph":
        """Apply a function to all tensors, once for every key."""
        if key not in self._copies:
            features, values = self.features, self.edge_values
            with torch.inference_mode(mode=False):
                self._copies[key] = Graph(
                    function(self.edges),
                    self.num_nodes,
                    function(features) if isinstance(features, Tensor) else features.map(function),
                    None if values is None else function(values),
                )
        return self._copies[key]

    def __reduce__(self) -> tuple[Any, ...]:
        # What is remembered stays in the process that made it.
        return Graph, (self.edges, self.num_nodes, self.features, self.edge_values)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Graph":
        parts: Any = self.edges, self.num_nodes, self.features, self.edge_values
        made = Graph(*copy.deepcopy(parts, memo))
        made._derived.update(copy.deepcopy(self._derived, memo))
        return made


@dataclass(frozen=True, eq=False)
class GraphBatch:
    """One or several graphs for one step, and the labels that count.

    Attributes
    ----------
    graph : edges and features
    labels : [N] int64 classes (-1 = none), or [N, T] numbers (NaN = none)
    mask : [N] bool, nodes whose labels count in loss and metrics
    masks : [N, 3] bool, the nodes of the parts train, valid, test
    owner : [N] int64, the graph of each node, ascending
    graph_ptr : [G + 1] int64, where the nodes of each graph begin
    indices : [G] int64 numpy, positions of the samples in their data set
    """

    graph: Graph
    labels: Tensor
    mask: Tensor
    masks: Tensor
    owner: Tensor
    graph_ptr: Tensor
    indices: IntArray
    _copies: dict[Any, Self] = field(default_factory=dict, repr=False)

    unchanging: ClassVar[Literal[True]] = True
    """See `bevatron.task.Unchanging`."""

    @property
    def num_nodes(self) -> int:
        """Number of nodes of all graphs."""
        return self.graph.num_nodes

    @property
    def num_edges(self) -> int:
        """Number of directed edges."""
        return self.graph.num_edges

    @property
    def num_graphs(self) -> int:
        """Number of graphs."""
        return self.graph_ptr.shape[0] - 1

    @property
    def edges(self) -> Tensor:
        """[2, E] (senders, receivers)."""
        return self.graph.edges

    @property
    def features(self) -> Tensor | SparseRows:
        """[N, F] node features."""
        return self.graph.features

    @property
    def sample_indices(self) -> IntArray:
        """Positions of the samples in their data set."""
        return self.indices

    @property
    def sizes(self) -> Mapping[str, int]:
        """Counts for logs."""
        return {"graphs": self.num_graphs, "nodes": self.num_nodes, "edges": self.num_edges}

    def to(
        self,
        device: torch.device | str,
        dtype: torch.dtype | None = None,
        non_blocking: bool = False,
    ) -> Self:
        """Copy to a device, floating-point tensors to ``dtype``; the second time the same copy."""
        return self._map((str(device), dtype), mover(device, dtype, non_blocking))

    def pin_memory(self) -> Self:
        """Copy to page-locked memory; the second time the same copy."""
        return self._map("pinned", Tensor.pin_memory)

    def _map(self, key: Hashable, function: Callable[[Tensor], Tensor]) -> Self:
        if key not in self._copies:
            with torch.inference_mode(mode=False):
                self._copies[key] = replace(
                    self,
                    graph=self.graph.map(key, function),
                    labels=function(self.labels),
                    mask=function(self.mask),
                    masks=function(self.masks),
                    owner=function(self.owner),
                    graph_ptr=function(self.graph_ptr),
                    _copies={},
                )
        return self._copies[key]

    def __reduce__(self) -> tuple[Any, ...]:
        values = (self.graph, self.labels, self.mask, self.masks, self.owner, self.graph_ptr)
        return GraphBatch, (*values, self.indices)


class WholeGraph(Mapping[str, Any]):
    """A sample that is the same graph in every step, with a part of its nodes that counts.

    A mapping like any sample, see `check_graph`; `collate_graphs` gives the same
    batch object for it every time, and the samples of `part` share edges, features and whatever is
    derived from them, on every device. Raises DataError if fields contradict each other.

    Parameters
    ----------
    sample : the fields; see `check_graph`

    Examples
    --------
    >>> whole = WholeGraph({
    ...     "num_nodes": np.array(3), "edges": np.array([[0, 1], [1, 2]]),
    ...     "features": np.eye(3, dtype=np.float32), "labels": np.array([0, 1, -1]),
    ...     "masks": np.array([[True, False, False], [False, True, False], [False, False, True]]),
    ... })
    >>> collate_graphs([whole.part("valid")], np.array([0]), [1.0]).mask.tolist()
    [False, True, False]
    """

    def __init__(self, sample: Arrays, *, _batches: dict[int, GraphBatch] | None = None) -> None:
        if _batches is None:
            check_graph(sample)
        self._sample = dict(sample)
        self._parts: dict[int, WholeGraph] = {}
        # One dictionary for all parts: each finds the others' graph in it.
        self._batches: dict[int, GraphBatch] = {} if _batches is None else _batches

    def __getitem__(self, key: str) -> Any:
        return self._sample[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._sample)

    def __len__(self) -> int:
        return len(self._sample)

    def __getstate__(self) -> dict[str, Any]:
        return {"_sample": self._sample, "_parts": {}, "_batches": {}}

    def part(self, name: Role) -> "WholeGraph":
        """Return the sample in which the labels of one part count."""
        column = ROLES.index(name)
        if column not in self._parts:
            sample = {**self._sample, "part": np.array(column, dtype=np.int32)}
            self._parts[column] = WholeGraph(sample, _batches=self._batches)
        return self._parts[column]

    def batch(self, index: int = 0) -> GraphBatch:
        """Return this graph as a batch, the same object every time."""
        column = int(self._sample.get("part", 0))
        if column not in self._batches:
            batch = _collate([self], np.array([index]), [1.0])
            others = next(iter(self._batches.values()), None)
            if others is not None:
                batch = replace(batch, graph=others.graph)
            self._batches[column] = batch
        found = self._batches[column]
        if int(found.indices[0]) != index:
            found = self._batches[column] = replace(found, indices=np.array([index]))
        return found


def check_graph(sample: Arrays) -> None:
    """Refuse a sample whose fields contradict each other.

    Raises DataError naming the field, what was found and what was expected.

    Parameters
    ----------
    sample
        ``num_nodes`` N; ``edges`` int32 [E, 2], (sender, receiver); ``edge_values`` float32 [E],
        their weights, no rows for all one; ``features`` float32 [N, F], or those that are not zero
        by ``feature_ptr`` int64 [N + 1], ``feature_columns`` int32, ``feature_values`` float32 and
        ``num_features`` F; ``labels`` int64 [N], -1 without a class, or float32 [N, T], 0 or 1, NaN
        without an answer; ``masks`` bool [N, 3] of training, validation and test; ``part``, the
        column of the masks whose labels count.
    """
    n = int(sample["num_nodes"])
    edges: Any = np.asarray(sample["edges"])
    if edges.ndim != 2 or edges.shape[1] != 2 or edges.dtype.kind not in "iu":
        raise DataError(
            f"graph: edges are {edges.dtype} {edges.shape}, expected whole numbers [E, 2]"
        )
    if len(edges) and (edges.min() < 0 or edges.max() >= n):
        row = int(np.flatnonzero(((edges < 0) | (edges >= n)).any(axis=1))[0])
        raise DataError(
            f"graph: edge {row} is {tuple(edges[row].tolist())}, but nodes are 0..{n - 1}"
        )
    values = np.asarray(sample.get("edge_values", ()))
    if len(values) not in {0, len(edges)}:
        raise DataError(f"graph: {len(values)} edge_values do not go with {len(edges)} edges")
    rows = len(sample["feature_ptr"]) - 1 if "feature_ptr" in sample else len(sample["features"])
    for what, count in (("features", rows), *((f, len(sample[f])) for f in ("labels", "masks"))):
        if count != n:
            raise DataError(f"graph: {what} have {count} rows, but there are {n} nodes")


def collate_graphs(
    samples: Sequence[Arrays], indices: IntArray, weights: Sequence[float]
) -> GraphBatch:
    """Join graphs as the blocks of one.

    Parameters
    ----------
    samples : each with the fields of `check_graph`; a single `WholeGraph` is not copied
    indices : positions of the samples in their data set, [G]
    weights : 1, or 0 for a sample whose labels must not count, [G]
    """
    if len(samples) == 1 and isinstance(samples[0], WholeGraph) and weights[0]:
        return samples[0].batch(int(indices[0]))
    return _collate(samples, indices, weights)


def _collate(samples: Sequence[Arrays], indices: IntArray, weights: Sequence[float]) -> GraphBatch:
    num_nodes = np.array([int(s["num_nodes"]) for s in samples], dtype=np.int64)
    graph_ptr = pointer(num_nodes)
    edges: list[Any] = [np.asarray(s["edges"]).T for s in samples]
    for g in range(1, len(samples)):
        edges[g] = edges[g] + graph_ptr[g]
    parts = [int(s.get("part", 0)) for s in samples]
    masks = np.concatenate([np.asarray(s["masks"], dtype=bool) for s in samples])
    mask = np.concatenate(
        [
            np.asarray(s["masks"], dtype=bool)[:, part] & bool(weight)
            for s, part, weight in zip(samples, parts, weights, strict=True)
        ]
    )
    labels = np.concatenate([np.asarray(s["labels"]) for s in samples])
    graph = Graph(
        edges=_tensor(edges[0] if len(edges) == 1 else np.concatenate(edges, axis=1)),
        num_nodes=int(graph_ptr[-1]),
        features=_features(samples),
        edge_values=_edge_values(samples),
    )
    return GraphBatch(
        graph=graph,
        labels=_tensor(labels if labels.dtype.kind == "f" else labels.astype(np.int64)),
        mask=_tensor(mask),
        masks=_tensor(masks),
        owner=_tensor(np.repeat(np.arange(len(samples)), num_nodes)),
        graph_ptr=_tensor(graph_ptr),
        indices=np.asarray(indices, dtype=np.int64),
    )


def _features(samples: Sequence[Arrays]) -> Tensor | SparseRows:
    if "feature_ptr" not in samples[0]:
        return _tensor(np.concatenate([np.asarray(s["features"]) for s in samples]))
    widths = {int(s["num_features"]) for s in samples}
    if len(widths) > 1:
        raise DataError(f"graphs of one batch have {sorted(widths)} features; make them alike")
    starts = np.cumsum([0, *(len(s["feature_columns"]) for s in samples)])
    ptr = [np.asarray(s["feature_ptr"])[1:] + start for s, start in zip(samples, starts)]  # noqa: B905
    return SparseRows(
        _tensor(np.concatenate([[0], *ptr]).astype(np.int64)),
        _tensor(np.concatenate([np.asarray(s["feature_columns"]) for s in samples])),
        _tensor(np.concatenate([np.asarray(s["feature_values"]) for s in samples])),
        widths.pop(),
    )


def _edge_values(samples: Sequence[Arrays]) -> Tensor | None:
    values = [np.asarray(s.get("edge_values", ())) for s in samples]
    if not any(len(v) for v in values):
        return None
    # Doubles stay doubles; the model's precision decides.
    double = any(len(v) and v.dtype == np.float64 for v in values)
    values = [v.astype(np.float64 if double else np.float32, copy=False) for v in values]
    filled = [
        v if len(v) else np.ones(len(s["edges"]), dtype=np.float32)
        for s, v in zip(samples, values, strict=True)
    ]
    return _tensor(np.concatenate(filled))


def _tensor(array: np.ndarray) -> Tensor:
    # Read-only arrays are copied: torch cannot promise to leave them alone.
    return torch.as_tensor(np.require(array, requirements=["C", "W"]))
