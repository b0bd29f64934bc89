"""Graphs with many vertices: readers, normalisation, reading in pieces, random graphs."""

from bevatron.data.graphs.graph import Edges, GraphArrays, SparseFeatures
from bevatron.data.graphs.options import EdgePolicy, GraphOptions
from bevatron.data.graphs.pieces import EdgeSource, read_in_pieces
from bevatron.data.graphs.reading import read_graph

__all__ = [
    "EdgePolicy",
    "EdgeSource",
    "Edges",
    "GraphArrays",
    "GraphOptions",
    "SparseFeatures",
    "read_graph",
    "read_in_pieces",
]
