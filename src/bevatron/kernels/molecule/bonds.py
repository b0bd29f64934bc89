"""Bonds as edges in both directions, and the edges of each atom, computed once per batch."""

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor


@dataclass(frozen=True)
class Bonds:
    """Directed edges; rows 2k and 2k + 1 are the two directions of one bond.

    The reverse of edge e is therefore edge e ^ 1, so one list of the edges into each atom also
    gives those out of it, and no sum over an atom's bonds needs a float atomic. Make it with
    `index_bonds` and pass it to all layers.

    Attributes
    ----------
    senders, receivers : [E]
    incoming : [E], the edges sorted by receiver, stably
    incoming_ptr : [N + 1], offsets of each atom's edges in ``incoming``
    """

    senders: Int[Tensor, " E"]
    receivers: Int[Tensor, " E"]
    incoming: Int[Tensor, " E"]
    incoming_ptr: Int[Tensor, " _"]

    @property
    def num_edges(self) -> int:
        """Number of directed edges, twice that of bonds."""
        return self.senders.shape[0]

    @property
    def num_atoms(self) -> int:
        """Number of atoms."""
        return self.incoming_ptr.shape[0] - 1


def index_bonds(edges: Int[Tensor, "2 E"], num_atoms: int) -> Bonds:
    """Sort the edges by receiver, on their device and without waiting for it.

    Raises ValueError if the number of edges is odd.

    Parameters
    ----------
    edges
        Senders and receivers; edge 2k + 1 is edge 2k reversed. This is not checked, because that
        would wait for the device.
    num_atoms : N

    Examples
    --------
    Propane, C-C-C:

    >>> bonds = index_bonds(torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]]), 3)
    >>> bonds.incoming, bonds.incoming_ptr
    (tensor([1, 0, 3, 2]), tensor([0, 1, 3, 4]))
    """
    if edges.shape[1] % 2:
        raise ValueError(
            f"index_bonds: {edges.shape[1]} edges are not pairs of directions; rows 2k and 2k + 1 "
            "must be the two directions of one bond"
        )
    senders, receivers = edges[0].contiguous(), edges[1].contiguous()
    ordered, incoming = torch.sort(receivers, stable=True)
    bounds = torch.arange(num_atoms + 1, device=edges.device, dtype=ordered.dtype)
    return Bonds(senders, receivers, incoming, torch.searchsorted(ordered, bounds))
