"""Attention on one graph over many processes: partition the graph, train a stack of layers on it.

Each rank holds the features of its own vertices. Work on single vertices (projections,
activations, norms over features, the loss) stays there; attention goes through the graph:

    graph = DistributedGraph.build(Kronecker(2**21, 375_000_000), mesh, channels=128)
    x = graph.scatter(features)
    for layer in layers:
        h = layer.project(x)
        x = graph.graph_attention(h, layer.row_score(h), layer.col_score(h))
    loss(x, graph.scatter(labels)).backward()
    graph.sum_gradients(model.parameters())

See `two_dimensional`, `feature_parallel`, `rows` and `one_and_half_d` for the partitions,
`planner` for the choice and `bevatron.parallel.traffic` for counting the words sent.
"""

from bevatron.parallel.graph_partition.graph import DistributedGraph
from bevatron.parallel.graph_partition.grid import Grid
from bevatron.parallel.graph_partition.planner import Machine, Plan, Workload, plan
from bevatron.parallel.graph_partition.sources import EdgeList, EdgeSource
from bevatron.parallel.traffic import Traffic, count_traffic

__all__ = [
    "DistributedGraph",
    "EdgeList",
    "EdgeSource",
    "Grid",
    "Machine",
    "Plan",
    "Traffic",
    "Workload",
    "count_traffic",
    "plan",
]
