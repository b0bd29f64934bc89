"""How batches of molecules are padded.

Padding atoms are spread evenly over all padding molecules, so that none of these is larger than a
molecule may be; padding bonds join a padding atom with itself, evenly spread too. Nothing real
touches any of it.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from bevatron.data.padding.shape import BatchShape
from bevatron.data.samples import MoleculeBatch


def layout(
    like: MoleculeBatch, shape: BatchShape, dtype: torch.dtype
) -> Mapping[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Type and shape of every tensor of a padded batch."""
    if shape.edges % 2:
        raise ValueError(f"edges of molecules come in pairs, {shape.edges} is odd")
    counts = {"atoms": shape.atoms, "edges": shape.edges, "graphs": shape.graphs}
    counts |= {"pairs": shape.pairs, "ends": shape.graphs + 1, "atom_ends": shape.atoms + 1}
    found = {}
    for name, axis in _AXES.items():
        value: Tensor = getattr(like, name)
        kept = dtype if value.is_floating_point() else value.dtype
        found[name] = (kept, (counts[axis], *value.shape[1:]))
    found["edges"] = (torch.int64, (2, shape.edges))
    return found


_AXES = {
    "atom_features": "atoms",
    "bond_features": "edges",
    "graph": "atoms",
    "graph_ptr": "ends",
    "edge_graph": "edges",
    "degree": "atoms",
    "reverse_edge": "edges",
    "incoming": "edges",
    "incoming_ptr": "atom_ends",
    "neighbours": "edges",
    "shortest_paths": "pairs",
    "pair_ptr": "ends",
    "random_walk": "atoms",
    "laplacian_vectors": "atoms",
    "laplacian_values": "graphs",
    "positions": "atoms",
    "has_positions": "graphs",
    "targets": "graphs",
    "target_weight": "graphs",
    "graph_weight": "graphs",
}
"""What the first axis of each tensor counts."""


def padded_fields(
    batch: MoleculeBatch, shape: BatchShape
) -> dict[str, tuple[Tensor, Tensor | float | bool | int]]:
    """Give every field's values and what follows them, its ragged axis first."""
    atoms, edges, graphs = batch.num_atoms, batch.num_edges, batch.num_graphs
    spare, missing = shape.atoms - atoms, shape.edges - edges
    sizes = _even(spare, shape.graphs - graphs)
    owner = graphs + torch.repeat_interleave(torch.arange(len(sizes)), sizes)
    # Both directions of a padding bond leave and reach one atom.
    bonds = torch.arange(missing // 2) * spare // max(missing // 2, 1)
    place = bonds.repeat_interleave(2)
    found: dict[str, tuple[Tensor, Tensor | float | bool | int]] = {
        name: (getattr(batch, name), 0) for name in _AXES
    }
    found["edges"] = (batch.edges.T, (atoms + place)[:, None])
    found["graph"] = (batch.graph, owner)
    found["graph_ptr"] = (batch.graph_ptr, atoms + sizes.cumsum(0))
    found["edge_graph"] = (batch.edge_graph, owner[place])
    found["reverse_edge"] = (batch.reverse_edge, torch.arange(edges, shape.edges) ^ 1)
    found["incoming"] = (batch.incoming, torch.arange(edges, shape.edges))
    ends = edges + torch.bincount(place, minlength=spare).cumsum(0)
    found["incoming_ptr"] = (batch.incoming_ptr, ends)
    found["neighbours"] = (batch.neighbours, atoms + place)
    found["pair_ptr"] = (batch.pair_ptr, batch.num_pairs + (sizes**2).cumsum(0))
    return found


def _even(total: int, parts: int) -> Tensor:
    """Whole numbers that differ by one at most and add up to ``total``."""
    sizes = torch.full((parts,), total // parts)
    sizes[: total % parts] += 1
    return sizes
