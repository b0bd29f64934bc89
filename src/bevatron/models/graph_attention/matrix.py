"""Interface of a graph's matrix to a layer, whole or partitioned over processes.

On a partitioned graph, features are those of this rank's vertices. GAT's attention and dot products
run on every partition; everything else needs whole rows on one rank, with the features of their
columns fetched from the others.
"""

from typing import Any, Literal

from jaxtyping import Float
from torch import Tensor

from bevatron.kernels.graph import dot_attention as dot
from bevatron.kernels.graph import graph_attention as additive
from bevatron.kernels.graph.csr import Csr
from bevatron.parallel.graph_partition import DistributedGraph

Matrix = Csr | DistributedGraph
"""A graph's matrix, or a graph partitioned over processes."""

Attends = Literal["gat", "dot", "rows"]
"""Requirement of a layer on a partition: GAT's attention, dot products, whole rows."""


def graph_attention(
    matrix: Matrix,
    x: Float[Tensor, "n H C"],
    row: Float[Tensor, "n H"],
    column: Float[Tensor, "n H"],
    slope: float,
    dropout: float,
) -> Float[Tensor, "n H C"]:
    """Attend as GAT does; see `bevatron.kernels.graph.graph_attention`."""
    if isinstance(matrix, DistributedGraph):
        return matrix.graph_attention(x, row, column, slope, dropout)
    return additive.graph_attention(matrix, x, row, column, slope, dropout)


def dot_attention(matrix: Matrix, x: Float[Tensor, "n H C"], **options: Any) -> Tensor:
    """Attend by dot products of the features; see `bevatron.kernels.graph.dot_attention`."""
    if isinstance(matrix, DistributedGraph):
        return matrix.dot_attention(x, **options)
    return dot.dot_attention(matrix, x, **options)


def whole_rows(matrix: Matrix) -> Csr:
    """Return the matrix of this rank's rows, whose columns are those of `of_columns`."""
    return matrix.whole_rows if isinstance(matrix, DistributedGraph) else matrix


def of_columns(matrix: Matrix, x: Tensor) -> Tensor:
    """Return the values of the columns of `whole_rows`, given those of this rank's vertices."""
    return matrix.fetch(x) if isinstance(matrix, DistributedGraph) else x


def sum_of_columns(matrix: Matrix, x: Tensor) -> Tensor:
    """Return values on the columns of `whole_rows` to their vertices and sum them."""
    return matrix.add_up(x) if isinstance(matrix, DistributedGraph) else x


def over_vertices(matrix: Matrix, total: Tensor) -> Tensor:
    """Add the other ranks' terms to a sum over this rank's vertices."""
    return matrix.sum_of_shares(total) if isinstance(matrix, DistributedGraph) else total
