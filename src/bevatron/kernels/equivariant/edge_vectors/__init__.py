"""Vectors along the edges of a graph, from the positions of its nodes."""

from jaxtyping import Float, Int
from torch import Tensor

from bevatron.kernels import registry
from bevatron.kernels.equivariant.edge_order import EdgeOrder, check_edges
from bevatron.kernels.shared import support
from bevatron.kernels.shared.checks import check_index, check_shapes

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
    num_edges, num_nodes = check_edges("edge_vectors", edges, positions), len(positions)
    if shifts.shape != (num_edges, 3) or structures.shape != (num_nodes,):
        raise ValueError(
            f"edge_vectors: shifts {tuple(shifts.shape)} and structures {tuple(structures.shape)} "
            f"of {num_edges} edges and {num_nodes} nodes"
        )
    if num_nodes and not len(cells):
        raise ValueError(f"edge_vectors: {num_nodes} nodes in no cells")
    wanted = {"shifts": (shifts, (num_edges, 3)), "cells": (cells, (len(cells), 3, 3))}
    check_shapes("edge_vectors", wanted, positions=positions)
    check_index("edge_vectors", "structures", structures, (num_nodes,), positions=positions)
    order = EdgeOrder.of(edges, num_nodes)
    run = _operator.dispatch(positions)
    result: Tensor = run(positions, order, shifts, cells, structures)
    return result
