"""Sample and batch types: what a store holds per sample and what a model is given.

A sample is a plain mapping from field name to numpy array; each kind of sample has a registry of
its fields (`STRUCTURE_FIELDS` for structures of atoms) and a batch, the same put together for one
step.
"""

from bevatron.data.samples.fields import Field
from bevatron.data.samples.graphs import (
    Graph,
    GraphBatch,
    SparseRows,
    WholeGraph,
    check_graph,
    collate_graphs,
    graph_fields,
)
from bevatron.data.samples.structures import (
    EDGE_FIELDS,
    RAW_STRUCTURE_FIELDS,
    STRUCTURE_FIELDS,
    StructureBatch,
    collate_structures,
    unlabelled_structure,
)

__all__ = [
    "EDGE_FIELDS",
    "RAW_STRUCTURE_FIELDS",
    "STRUCTURE_FIELDS",
    "Field",
    "Graph",
    "GraphBatch",
    "SparseRows",
    "StructureBatch",
    "WholeGraph",
    "check_graph",
    "collate_graphs",
    "collate_structures",
    "graph_fields",
    "unlabelled_structure",
]
