"""How batches of structures are padded.

A padded batch ends with structures that count nowhere: the first of them holds all padding atoms,
the others are empty. Padding edges join padding atoms with their own periodic images, so the forces
on these cancel, and no real atom has a padding neighbour.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from bevatron.data.padding.shape import BatchShape
from bevatron.data.samples import StructureBatch

PADDING_LENGTH = 100.0
"""Length of padding edges in Å. Any length above zero would do; beyond every model's cutoff their
messages are zero, so nothing can overflow."""


def layout(
    _like: StructureBatch | None, shape: BatchShape, dtype: torch.dtype
) -> Mapping[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Type and shape of every tensor of a padded batch."""
    n, e, g = shape.atoms, shape.edges, shape.graphs
    integer, flag = torch.int64, torch.bool
    return {
        "positions": (dtype, (n, 3)),
        "atomic_numbers": (integer, (n,)),
        "cell": (dtype, (g, 3, 3)),
        "pbc": (flag, (g, 3)),
        "edges": (integer, (2, e)),
        "edge_shifts": (dtype, (e, 3)),
        "graph": (integer, (n,)),
        "graph_ptr": (integer, (g + 1,)),
        "head": (integer, (g,)),
        "energy": (torch.float64, (g,)),
        "forces": (dtype, (n, 3)),
        "stress": (dtype, (g, 3, 3)),
        "energy_weight": (dtype, (g,)),
        "forces_weight": (dtype, (g,)),
        "stress_weight": (dtype, (g,)),
        "has_energy": (flag, (g,)),
        "has_forces": (flag, (g,)),
        "has_stress": (flag, (g,)),
    }


def padded_fields(
    batch: StructureBatch, shape: BatchShape
) -> dict[str, tuple[Tensor, Tensor | float | bool | int]]:
    """Give every field's values and what follows them, its ragged axis first."""
    zeros = ("positions", "head", "energy", "forces", "stress")
    weights = ("energy_weight", "forces_weight", "stress_weight")
    flags = ("pbc", "has_energy", "has_forces", "has_stress")
    found: dict[str, tuple[Tensor, Tensor | float | bool | int]] = {
        name: (getattr(batch, name), 0) for name in (*zeros, *weights, *flags)
    }
    found["edges"] = (batch.edges.T, _padding_edges(batch, shape)[:, None])
    found["edge_shifts"] = (
        batch.edge_shifts,
        torch.tensor([1.0, 0.0, 0.0], dtype=batch.edge_shifts.dtype),
    )
    found["cell"] = (batch.cell, PADDING_LENGTH * torch.eye(3, dtype=batch.cell.dtype))
    # An element of the batch is one that the model knows.
    found["atomic_numbers"] = (batch.atomic_numbers, batch.atomic_numbers[:1])
    found["graph"] = (batch.graph, batch.num_graphs)
    found["graph_ptr"] = (batch.graph_ptr, shape.atoms)
    return found


def _padding_edges(batch: StructureBatch, shape: BatchShape) -> Tensor:
    """Spread the padding edges evenly over the padding atoms, sorted: the receiver of each."""
    missing, spare = shape.edges - batch.num_edges, shape.atoms - batch.num_atoms
    return batch.num_atoms + torch.arange(missing) * spare // max(missing, 1)
