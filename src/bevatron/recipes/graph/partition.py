"""One graph on many processes: each holds the vertices of its part.

The edges are read in pieces, so that no process needs the whole list; each process keeps its own
rows of features and labels. Loss, gradients and metrics are sums over all vertices, so training and
evaluation equal those of one process.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

from bevatron.data.dataset import ROLES
from bevatron.data.graphs import (
    EdgePolicy,
    EdgeSource,
    GraphArrays,
    GraphOptions,
    read_graph,
    read_in_pieces,
)
from bevatron.data.graphs.graph import Edges, SparseFeatures
from bevatron.data.graphs.pieces import needs_whole_list
from bevatron.data.graphs.reading import read_vertices, rows_of_files
from bevatron.data.ragged import members
from bevatron.data.samples.graphs import (
    Graph,
    GraphBatch,
    SparseRows,
    WholeGraph,
    collate_graphs,
)
from bevatron.errors import ConfigError
from bevatron.models.graph_attention import NodeClassifier
from bevatron.models.graph_attention.config import GraphAttentionConfig
from bevatron.parallel.graph_partition import DistributedGraph, EdgeList
from bevatron.parallel.graph_partition.planner import ATTENDS
from bevatron.parallel.mesh import open_mesh
from bevatron.recipes.graph.data import sample_of
from bevatron.typing import Arrays, IntArray

T = TypeVar("T")

Source = EdgeSource | EdgeList

Scheme = Literal["auto", "2d", "feature", "rows"]
SCHEMES = {
    "auto": "auto", "2d": "two_dimensional", "feature": "feature_parallel", "rows": "rows",
}  # fmt: skip
"""Value of the key ``partition`` -> name in `bevatron.parallel.graph_partition`."""


def open_graph(
    graph: GraphArrays | Path | str,
    options: GraphOptions,
    *,
    self_loops: bool,
    **more_files: Path | None,
) -> tuple[Source, GraphArrays]:
    """Open a graph for partitioning: its edges in pieces if possible, its vertices whole.

    Parameters
    ----------
    graph, options, more_files : as in `bevatron.data.graphs.read_graph`
    self_loops : whether the model adds one where there is none

    Returns
    -------
    The edges; the vertices, without edges.
    """
    nothing = np.zeros(0, dtype=np.int32)
    if isinstance(graph, str | Path) and not needs_whole_list(Path(graph), options):
        edges = read_in_pieces(graph, options, rows_of_files(**more_files))
        policy = edges.policy.with_self_loops() if self_loops else edges.policy
        vertices = read_vertices(edges.path, edges.num_vertices, options, **more_files)
        return replace(edges, policy=policy), vertices
    if not isinstance(graph, GraphArrays):
        graph = read_graph(graph, options, **more_files)
    rows, cols, weights = graph.edges.rows, graph.edges.cols, graph.edges.weights
    source = EdgeList(
        *(torch.from_numpy(rows), torch.from_numpy(cols), graph.num_nodes),
        None if weights is None else torch.from_numpy(weights),
        policy=EdgePolicy(self_loops="add" if self_loops else "keep"),
        name=graph.name,
    )
    return source, replace(graph, edges=Edges(nothing, nothing))


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

    Raises ConfigError if the model does not run on this partition.

    Parameters
    ----------
    edges, vertices : see `open_graph`
    model : configuration of the model that works on it
    scheme : how the graph is partitioned
    seed : seed of the order of vertices and of masks of dropout

    Attributes
    ----------
    generator : draws the seeds of attention dropout, in the same state on all processes
    """

    def __init__(
        self,
        edges: Source,
        vertices: GraphArrays,
        model: GraphAttentionConfig,
        scheme: Scheme,
        device: str = "auto",
        seed: int = 0,
    ) -> None:
        if model.norm == "batch":
            raise ConfigError(
                "model.norm: 'batch' averages over all vertices, which no process holds; use layer"
            )
        # What its formulas need is known without weights.
        with torch.device("meta"):
            self.attends = NodeClassifier(model).attends(weighted=edges.weighted)
        able = [key for key, name in SCHEMES.items() if self.attends in ATTENDS.get(name, ())]
        if scheme not in {"auto", *able}:
            raise ConfigError(
                f"partition: '{scheme}' does not run model.layer '{model.layer}'; choose auto or "
                f"{' or '.join(able)}"
            )
        self.edges, self.vertices, self.model, self.scheme = edges, vertices, model, scheme
        self.device, self.seed = device, seed
        self.generator = torch.Generator().manual_seed(seed)
        self._graph: DistributedGraph | None = None
        self._batches: dict[int, GraphBatch] = {}

    def graph(self) -> DistributedGraph:
        """Partition the graph; the first call is collective."""
        if self._graph is None:
            several_heads = self.model.layer in {"gat", "gatv2"}
            with open_mesh(self.device) as mesh:
                self._graph = DistributedGraph.build(
                    self.edges,
                    mesh,
                    scheme=SCHEMES[self.scheme],
                    attention=self.attends,
                    heads=self.model.heads if several_heads else 1,
                    channels=self.model.hidden,
                    seed=self.seed,
                    generator=self.generator,
                )
                lines = self._graph.explain()
                if mesh.is_main:
                    print(*map(_as_typed, lines), sep="\n")  # noqa: T201
        return self._graph

    def batch(self, column: int) -> GraphBatch:
        """Build the batch of this process's vertices, with the labels of one split."""
        if column not in self._batches:
            graph = self.graph()
            own = _rows(self.vertices, graph.vertices.cpu().numpy())
            sample = {**sample_of(own, self.model.labels), "part": np.array(column, np.int32)}
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
    role : train, valid or test
    """

    def __init__(self, graph: PartedGraph, role: str) -> None:
        self.graph, self.column = graph, ROLES.index(role)

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


def _rows(graph: GraphArrays, own: IntArray) -> GraphArrays:
    """Keep some vertices, in that order, without edges."""
    nothing = np.zeros(0, dtype=np.int32)
    features = graph.features
    if isinstance(features, SparseFeatures):
        place, indptr = members(features.indptr, own)
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


def _as_typed(line: str) -> str:
    """Name schemes by the values of the key ``partition``."""
    for typed, name in SCHEMES.items():
        line = line.replace(f"{name} ", f"{typed} ")
    return line
