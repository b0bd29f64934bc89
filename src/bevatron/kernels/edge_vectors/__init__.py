"""Vectors along the edges of a graph, from the positions of its nodes."""

from jaxtyping import Float, Int
from torch import Tensor

from bevatron.kernels import registry
from bevatron.kernels.channelwise_tensor_product import EdgeOrder, only_32_and_64_bit

__all__ = ["edge_vectors"]

for _name, _obstacle in (("reference", None), ("triton", only_32_and_64_bit)):
    registry.register(
        "edge_vectors", _name, f"bevatron.kernels.edge_vectors.{_name}:edge_vectors", _obstacle
    )


def edge_vectors(
    positions: Float[Tensor, "N 3"], edges: Int[Tensor, "2 E"] | EdgeOrder
) -> Float[Tensor, "E 3"]:
    r"""Subtract: :math:`v_e = r_{receiver(e)} - r_{sender(e)}`.

    Forces are sums of gradients by these vectors over the edges of each atom. They are added here
    in an order that never changes, so that the same input gives the same bits.

    Parameters
    ----------
    positions
        r.
    edges
        Senders and receivers; an `EdgeOrder` if others need the order too.

    Raises
    ------
    ValueError
        If the positions are not [N, 3].

    Examples
    --------
    >>> import torch
    >>> edge_vectors(torch.tensor([[0.0, 0.0, 0.0], [1.0, 2.0, 3.0]]), torch.tensor([[0], [1]]))
    tensor([[1., 2., 3.]])
    """
    if positions.ndim != 2 or positions.shape[1] != 3:
        raise ValueError(f"edge_vectors: positions {tuple(positions.shape)}, expected [N, 3]")
    order = EdgeOrder.of(edges, positions.shape[0])
    result: Tensor = registry.dispatch("edge_vectors", positions)(positions, order)
    return result
