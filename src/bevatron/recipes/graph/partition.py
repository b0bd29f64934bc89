"""Training on one graph with many processes: each holds the vertices of its part.

The edges are read in pieces, so that no process needs the whole list; each process keeps its own
rows of features and labels. Loss and gradients are sums over all vertices, so the run equals that
of one process.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from torch import Tensor

from bevatron.data.graphs import EdgeSource, GraphArrays, read_in_pieces
from bevatron.data.graphs.graph import Edges, SparseFeatures
from bevatron.data.graphs.reading import read_vertices
from bevatron.data.samples.graphs import (
    PARTS,
    Graph,
    GraphBatch,
    SparseRows,
    WholeGraph,
    collate_graphs,
)
from bevatron.errors import ConfigError
from bevatron.models.graph_attention.config import GraphAttentionConfig, LabelKind
from bevatron.parallel.graph_partition import DistributedGraph
from bevatron.parallel.mesh import open_mesh
from bevatron.recipes.graph.data import GraphDataConfig, sample_of
from bevatron.typing import Arrays, IntArray

T = TypeVar("T")

Scheme = Literal["auto", "2d", "feature", "rows"]
SCHEMES = {
    "auto": "auto", "2d": "two_dimensional", "feature": "feature_parallel", "rows": "rows",
}  # fmt: skip
"""Value of the key ``partition`` -> name in `bevatron.parallel.graph_partition`."""


@dataclass(frozen=True, eq=False)
class GraphPart(Graph):
    """Vertices of this process; the matrix is the `DistributedGraph`."""

    whole: DistributedGraph | None = None

    def derived(self, key: Any, build: Callable[[Graph], T]) -> T:
        """Return the distributed matrix if a model asks for one."""
        if isinstance(key, tuple) and key[0] == "csr":
            return self.whole  # type: ignore[return-value]
        return super().derived(key, build)

    def map(self, key: Any, function: Callable[[Tensor], Tensor]) -> "GraphPart":
        """Apply a function to all tensors."""
        if key not in self._copies:
            features: Tensor | SparseRows = self.features
            moved = function(features) if isinstance(features, Tensor) else features.map(function)
            self._copies[key] = GraphPart(
                function(self.edges), self.num_nodes, moved, whole=self.whole
            )
        found = self._copies[key]
        assert isinstance(found, GraphPart)
        return found


class PartSample(WholeGraph):
    """The sample of one split (train, valid, test) of the labels; collated once."""

    def __init__(self, make: Callable[[], GraphBatch]) -> None:
        super().__init__({}, _batches={})
        self._make = make

    def batch(self, index: int = 0) -> GraphBatch:  # noqa: ARG002  there is one sample
        """Return the batch, the same object every time."""
        return self._make()


class PartedGraph:
    """A graph over all processes, partitioned when the first batch is made.

    Parameters
    ----------
    path
        The graph.
    vertices
        Features, labels and splits of its vertices; without edges.
    data, model
        Of the run.
    scheme
        How the graph is partitioned.
    device, seed
        Of the run.
    """

    def __init__(
        self,
        path: Path,
        vertices: GraphArrays,
        data: GraphDataConfig,
        model: GraphAttentionConfig,
        scheme: Scheme,
        device: str,
        seed: int,
    ) -> None:
        if model.layer not in {"gat", "agnn", "va", "agnn_paper", "va_softmax"}:
            raise ConfigError(
                f"model.layer: '{model.layer}' does not run on several processes; gat, agnn, va, "
                "va_softmax and agnn_paper do"
            )
        if model.norm == "batch":
            raise ConfigError(
                "model.norm: 'batch' averages over all vertices, which no process holds; use layer"
            )
        self.vertices, self.model, self.scheme = vertices, model, scheme
        self.device, self.seed = device, seed
        loops = "add" if model.self_loops else data.read.self_loops
        self.source: EdgeSource = read_in_pieces(path, replace(data.read, self_loops=loops))
        self.questions: LabelKind = model.labels
        self._graph: DistributedGraph | None = None
        self._batches: dict[int, GraphBatch] = {}

    def graph(self) -> DistributedGraph:
        """Partition the graph; collective on the first call."""
        if self._graph is None:
            with open_mesh(self.device) as mesh:
                self._graph = DistributedGraph.build(
                    self.source,
                    mesh,
                    scheme=SCHEMES[self.scheme],
                    attention="gat" if self.model.layer == "gat" else "dot",
                    heads=self.model.heads if self.model.layer == "gat" else 1,
                    channels=self.model.hidden,
                    seed=self.seed,
                )
                lines = self._graph.explain()
                if mesh.is_main:
                    print(*lines, sep="\n")  # noqa: T201
        return self._graph

    def batch(self, column: int) -> GraphBatch:
        """Build the batch of this process's vertices, with the labels of one split."""
        if column not in self._batches:
            graph = self.graph()
            own = _rows(self.vertices, graph.vertices.cpu().numpy())
            sample = {**sample_of(own, self.questions), "part": np.array(column, np.int32)}
            batch = collate_graphs([sample], np.zeros(1, np.int64), [1.0])
            first = next(iter(self._batches.values()), None)
            part = batch.graph if first is None else first.graph
            if not isinstance(part, GraphPart):
                part = GraphPart(part.edges, part.num_nodes, part.features, whole=graph)
            self._batches[column] = replace(batch, graph=part, _copies={})
        return self._batches[column]


class PartSet:
    """A data set of one sample: this process's part of the graph.

    Parameters
    ----------
    graph
        The graph.
    role
        train, valid or test.
    """

    def __init__(self, graph: PartedGraph, role: str) -> None:
        self.graph, self.column = graph, [*PARTS].index(role)  # type: ignore[arg-type]

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Arrays:
        return PartSample(lambda: self.graph.batch(self.column))

    def describe(self, index: int) -> str:  # noqa: ARG002
        """Name the file."""
        return self.graph.vertices.name

    def lengths(self, field: str) -> IntArray:
        """Vertices of the whole graph; edges are not counted."""
        return np.array([0 if field == "edges" else self.graph.vertices.num_nodes], dtype=np.int64)


def load_vertices(config: GraphDataConfig) -> GraphArrays:
    """Read features, labels and splits of the run's graph.

    Raises
    ------
    ConfigError
        For several graphs, which are not cut.
    """
    if config.inductive or len(config.train) != 1:
        raise ConfigError("partition: cuts one graph; several are distributed as they are")
    source = read_in_pieces(config.train[0], config.read)
    more_files = {"features": config.features, "labels": config.labels, "splits": config.splits}
    return read_vertices(config.train[0], source.num_vertices, config.read, **more_files)


def _rows(graph: GraphArrays, own: IntArray) -> GraphArrays:
    """Keep some vertices, in that order, without edges."""
    nothing = np.zeros(0, dtype=np.int32)
    features = graph.features
    if isinstance(features, SparseFeatures):
        counts = np.diff(features.indptr)[own]
        indptr = np.concatenate([[0], np.cumsum(counts)])
        place = np.repeat(features.indptr[own] - indptr[:-1], counts) + np.arange(indptr[-1])
        values = None if features.values is None else features.values[place]
        features = SparseFeatures(indptr, features.indices[place], values, features.width)
    elif features is not None:
        features = np.ascontiguousarray(features[own])
    return replace(
        graph,
        num_nodes=len(own),
        edges=Edges(nothing, nothing),
        features=features,
        labels=None if graph.labels is None else graph.labels[own],
        roles=None if graph.roles is None else graph.roles[own],
    )
