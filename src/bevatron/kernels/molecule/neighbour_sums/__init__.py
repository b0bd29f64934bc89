"""Sums over the bonds of every atom: of messages into and out of it, and of its neighbours."""

from jaxtyping import Float
from torch import Tensor

from bevatron.kernels import registry
from bevatron.kernels.molecule.bonds import Bonds

__all__ = ["neighbour_sums", "neighbour_sums_with_inputs"]

_operator = registry.operator("neighbour_sums", __name__)


def neighbour_sums(
    messages: Float[Tensor, "E C"] | None,
    nodes: Float[Tensor, "N D"] | None,
    bonds: Bonds,
    *,
    scale: Float[Tensor, " E"] | None = None,
    outgoing: bool = True,
    own: bool = False,
) -> Float[Tensor, "N _"]:
    r"""Sum messages and neighbours over the bonds of every atom, concatenated in one row.

    .. math::

        y_i = \Big[ \sum_{e: r(e) = i} s_e m_e \;\Big|\; \sum_{e: s(e) = i} s_e m_e \;\Big|\;
        \sum_{e: r(e) = i} x_{s(e)} \;\Big|\; x_i \Big]

    This is the aggregation of GPS++ (arXiv 2302.02947): receiver and sender aggregation of messages
    and the sum over adjacent nodes, which is the same for both directions of the bonds. Raises
    ValueError if a shape or type does not fit, or there is nothing to sum.

    Parameters
    ----------
    messages : m, one row per directed edge; None leaves the first two parts out
    nodes : x; None leaves the last two parts out
    bonds : see `bevatron.kernels.molecule.bonds.index_bonds`
    scale
        s, a factor per edge such as a row dropout; not differentiated. None = 1.
    outgoing : whether to compute the second part
    own : whether to append the last part: the input of a linear layer on nodes is then complete

    Returns
    -------
    Tensor
        [N, C + C + D + D] or fewer parts, of the type of ``messages`` (or ``nodes``); summed in
        float32 for 16-bit types, in a fixed order.

    Examples
    --------
    >>> import torch
    >>> from bevatron.kernels.molecule.bonds import index_bonds
    >>> bonds = index_bonds(torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]]), 3)
    >>> messages = torch.tensor([[1.0], [2.0], [4.0], [8.0]])
    >>> neighbour_sums(messages, torch.tensor([[10.0], [20.0], [30.0]]), bonds)
    tensor([[ 2.,  1., 20.],
            [ 9.,  6., 40.],
            [ 4.,  8., 20.]])
    """
    run = _operator.dispatch(_checked(messages, nodes, bonds))
    sums: Tensor = run(messages, nodes, bonds, scale, outgoing, own)[0]
    return sums


def neighbour_sums_with_inputs(
    messages: Float[Tensor, "E C"] | None,
    nodes: Float[Tensor, "N D"] | None,
    bonds: Bonds,
    *,
    scale: Float[Tensor, " E"] | None = None,
    outgoing: bool = True,
    own: bool = False,
) -> tuple[Float[Tensor, "N _"], Float[Tensor, "E C"] | None, Float[Tensor, "N D"] | None]:
    """Compute `neighbour_sums` and return messages and nodes for one other consumer.

    The kernels that gather the gradients of messages and nodes add the gradients of these results:
    one pass instead of two. Raises ValueError if a shape or type does not fit, or there is nothing
    to sum.

    Parameters
    ----------
    messages, nodes, bonds, scale, outgoing, own : see `neighbour_sums`

    Returns
    -------
    The sums, the messages and the nodes.

    Examples
    --------
    >>> import torch
    >>> from bevatron.kernels.molecule.bonds import index_bonds
    >>> bonds = index_bonds(torch.tensor([[0, 1], [1, 0]]), 2)
    >>> neighbour_sums_with_inputs(None, torch.tensor([[10.0], [20.0]]), bonds)[0]
    tensor([[20.],
            [10.]])
    """
    run = _operator.dispatch(_checked(messages, nodes, bonds))
    found: tuple[Tensor, Tensor | None, Tensor | None] = run(
        messages, nodes, bonds, scale, outgoing, own
    )
    return found


def _checked(messages: Tensor | None, nodes: Tensor | None, bonds: Bonds) -> Tensor:
    """Check the shapes; return a tensor that chooses the implementation."""
    given = messages if messages is not None else nodes
    if given is None:
        raise ValueError("neighbour_sums: neither messages nor nodes are given")
    if messages is not None and messages.shape[0] != bonds.num_edges:
        raise ValueError(
            f"neighbour_sums: {messages.shape[0]} messages do not go with {bonds.num_edges} edges"
        )
    if nodes is not None and nodes.shape[0] != bonds.num_atoms:
        raise ValueError(
            f"neighbour_sums: {nodes.shape[0]} nodes do not go with {bonds.num_atoms} atoms"
        )
    if messages is not None and nodes is not None and messages.dtype != nodes.dtype:
        raise ValueError(
            f"neighbour_sums: messages are {messages.dtype} and nodes {nodes.dtype}; make them "
            "one type"
        )
    return given
