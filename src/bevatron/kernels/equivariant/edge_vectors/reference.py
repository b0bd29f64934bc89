"""The specification of edge_vectors."""

from torch import Tensor

from bevatron.kernels.equivariant.channelwise_tensor_product import EdgeOrder


def edge_vectors(
    positions: Tensor, edges: EdgeOrder, shifts: Tensor, cells: Tensor, structures: Tensor
) -> Tensor:
    """Look up both ends of every edge."""
    senders, receivers = edges.edges
    ends = positions.index_select(0, receivers) - positions.index_select(0, senders)
    return ends + offsets(shifts, cells, structures, senders)


def offsets(shifts: Tensor, cells: Tensor, structures: Tensor, senders: Tensor) -> Tensor:
    """Multiply the shifts by the cells."""
    # A batched matmul would have one row per edge.
    return (shifts.unsqueeze(2) * cells[structures[senders]]).sum(dim=1)
