"""The specification of edge_vectors."""

from torch import Tensor

from bevatron.kernels.channelwise_tensor_product import EdgeOrder


def edge_vectors(positions: Tensor, edges: EdgeOrder) -> Tensor:
    """Look up both ends of every edge."""
    senders, receivers = edges.edges
    return positions.index_select(0, receivers) - positions.index_select(0, senders)
