"""Sample and batch types: the fields in a store, and the inputs of models.

A sample is a plain mapping from field name to numpy array; kinds that are stored have a registry
of fields (`STRUCTURE_FIELDS` for structures of atoms, `molecule_fields` for molecules), and each
has a batch, which is what samples become for one step.
"""

from bevatron.data.samples.feature_sets import (
    ATOM_VOCABULARIES,
    BOND_VOCABULARIES,
    FEATURE_SETS,
    FEATURES_VERSION,
    FeatureSet,
    feature_set,
)
from bevatron.data.samples.fields import Field
from bevatron.data.samples.graphs import (
    Graph,
    GraphBatch,
    SparseRows,
    WholeGraph,
    check_graph,
    collate_graphs,
)
from bevatron.data.samples.molecules import (
    MAX_DISTANCE,
    UNREACHABLE,
    MoleculeBatch,
    collate_molecules,
    molecule_fields,
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
    "ATOM_VOCABULARIES",
    "BOND_VOCABULARIES",
    "EDGE_FIELDS",
    "FEATURES_VERSION",
    "FEATURE_SETS",
    "MAX_DISTANCE",
    "RAW_STRUCTURE_FIELDS",
    "STRUCTURE_FIELDS",
    "UNREACHABLE",
    "FeatureSet",
    "Field",
    "Graph",
    "GraphBatch",
    "MoleculeBatch",
    "SparseRows",
    "StructureBatch",
    "WholeGraph",
    "check_graph",
    "collate_graphs",
    "collate_molecules",
    "collate_structures",
    "feature_set",
    "molecule_fields",
    "unlabelled_structure",
]
