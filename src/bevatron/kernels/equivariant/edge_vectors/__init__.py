"""Vectors along the edges of a graph, from the positions of its nodes."""

from jaxtyping import Float, Int
from torch import Tensor

from bevatron.kernels import registry
from bevatron.kernels.equivariant.channelwise_tensor_product import EdgeOrder
from bevatron.kernels.shared import support

__all__ = ["edge_vectors"]

_operator = registry.operator("edge_vectors", __name__, takes=support.float32_or_float64)


def edge_vectors(
    positions: Float[Tensor, "N 3"],
    edges: Int[Tensor, "2 E"] | EdgeOrder,
    shifts: Float[Tensor, "E 3"],
    cells: Float[Tensor, "G 3 3"],
    structures: Int[Tensor, " N"],
) -> Float[Tensor, "E 3"]:
    r"""Compute :math:`v_e = r_{receiver(e)} - r_{sender(e)} + s_e C_{g(e)}`.

    Forces are sums, over the edges of each atom, of gradients with respect to these vectors. The
    order of summation is fixed, so that results repeat bit for bit. Raises ValueError if a shape
    does not fit the others.

    Parameters
    ----------
    positions : r
    edges : senders and receivers; an `EdgeOrder` if other operators need the order too
    shifts : s, in cell vectors: the periodic image of the sender; not differentiated
    cells : C, cell vectors of each structure as rows
    structures : g, the structure of each node

    Examples
    --------
    >>> import torch
    >>> positions = torch.tensor([[0.0, 0.0, 0.0], [1.0, 2.0, 3.0]])
    >>> edges = torch.tensor([[0], [1]])
    >>> cells, shifts = 5 * torch.eye(3).unsqueeze(0), torch.tensor([[-1.0, 0.0, 0.0]])
    >>> edge_vectors(positions, edges, shifts, cells, torch.tensor([0, 0]))
    tensor([[-4.,  2.,  3.]])
    """
    if positions.ndim != 2 or positions.shape[1] != 3 or cells.shape[1:] != (3, 3):
        raise ValueError(
            f"edge_vectors: positions {tuple(positions.shape)} and cells {tuple(cells.shape)}, "
            "expected [N, 3] and [G, 3, 3]"
        )
    order = EdgeOrder.of(edges, positions.shape[0])
    if shifts.shape != (order.num_edges, 3) or structures.shape != positions.shape[:1]:
        raise ValueError(
            f"edge_vectors: shifts {tuple(shifts.shape)} and structures {tuple(structures.shape)} "
            f"of {order.num_edges} edges and {len(positions)} nodes"
        )
    run = _operator.dispatch(positions)
    result: Tensor = run(positions, order, shifts, cells, structures)
    return result
