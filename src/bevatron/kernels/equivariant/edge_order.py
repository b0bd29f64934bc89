"""The orders in which fast kernels walk the edges of a graph, computed once per batch."""

import torch
from jaxtyping import Int
from torch import Tensor

from bevatron.kernels.shared.checks import check_axes, check_index
from bevatron.maths.irreps import Irreps


class EdgeOrder:
    """The edges of a graph, with their orders by receiver and by sender, computed on first use.

    Everything is computed on the device of the edges without synchronising, so a CUDA graph can
    capture it. Make one per batch and pass it to all layers: an operator that takes ``edges`` takes
    this too, and sorts for itself if it is given a tensor. Raises RuntimeError if the edges
    were declared sorted and are not (on a GPU: at the next synchronisation).

    Parameters
    ----------
    edges : senders and receivers
    num_nodes : N
    by_receiver
        Whether the edges are already sorted by receiver, which saves sorting them. This is
        checked on the device, without waiting for it.

    Examples
    --------
    >>> order = EdgeOrder(torch.tensor([[1, 0, 0], [2, 0, 2]]), 3)
    >>> order.permutation, order.receiver_ptr
    (tensor([1, 0, 2]), tensor([0, 1, 1, 3]))
    """

    def __init__(
        self, edges: Int[Tensor, "2 E"], num_nodes: int, by_receiver: bool = False
    ) -> None:
        self.edges, self.num_nodes, self.by_receiver = edges, num_nodes, by_receiver
        self._sorted: tuple[Tensor, Tensor, Tensor | None] | None = None
        self._sorted_senders: tuple[Tensor, Tensor] | None = None
        self._by_sender: dict[int, tuple[Tensor, Tensor]] = {}

    @classmethod
    def of(cls, edges: "Tensor | EdgeOrder", num_nodes: int) -> "EdgeOrder":
        """Wrap the argument of an operator."""
        return edges if isinstance(edges, EdgeOrder) else cls(edges, num_nodes)

    @property
    def num_edges(self) -> int:
        """E."""
        return self.edges.shape[1]

    @property
    def senders(self) -> Int[Tensor, " E"]:
        """The sender of each edge, edges sorted by receiver."""
        return self._by_receiver()[0]

    @property
    def receiver_ptr(self) -> Int[Tensor, " _"]:
        """Offsets of each node's incoming edges, sorted by receiver."""
        return self._by_receiver()[1]

    @property
    def permutation(self) -> Int[Tensor, " E"] | None:
        """Permutation that sorts the edges by receiver; None if they are sorted."""
        return self._by_receiver()[2]

    def by_sender(self, chunk: int) -> tuple[Int[Tensor, " E"], Int[Tensor, " _"]]:
        """Sort runs of the receiver-ordered edges by sender.

        Returns
        -------
        permutation, ptr
            The edges of sender n in run c are ``permutation[ptr[n * C + c] : ptr[n * C + c + 1]]``,
            ascending; there are C runs of ``chunk`` edges.
        """
        if chunk not in self._by_sender:
            if self._sorted_senders is None:
                # Fewer digits mean fewer passes of the radix sort.
                narrow = torch.int16 if self.num_nodes < 2**15 else torch.int32
                self._sorted_senders = torch.sort(self.senders.to(narrow), stable=True)
            ordered, permutation = self._sorted_senders
            if chunk >= self.num_edges:
                self._by_sender[chunk] = permutation, _pointers(ordered, self.num_nodes)
                return self._by_sender[chunk]
            num_edges, runs = self.num_edges, -(-self.num_edges // chunk)
            wide = torch.int32 if self.num_nodes * max(num_edges, 1) < 2**31 else torch.int64
            places = ordered.to(wide) * num_edges + permutation.to(wide)
            count = torch.arange(self.num_nodes * runs + 1, device=places.device, dtype=wide)
            bounds = count // max(runs, 1) * num_edges + count % max(runs, 1) * chunk
            self._by_sender[chunk] = permutation, torch.searchsorted(places, bounds)
        return self._by_sender[chunk]

    def _by_receiver(self) -> tuple[Tensor, Tensor, Tensor | None]:
        if self._sorted is None:
            senders, receivers = self.edges[0], self.edges[1]
            permutation = None
            if self.by_receiver:
                ascending = (receivers[1:] >= receivers[:-1]).all()
                torch._assert_async(ascending, "the edges are not sorted by receiver")  # noqa: SLF001
            else:
                receivers, permutation = torch.sort(receivers, stable=True)
                senders = senders.index_select(0, permutation)
            pointers = _pointers(receivers, self.num_nodes)
            self._sorted = senders.to(torch.int64).contiguous(), pointers, permutation
        return self._sorted


def _pointers(ordered: Tensor, num_segments: int) -> Tensor:
    """Offsets of the segments in a sorted list of segment numbers."""
    bounds = torch.arange(num_segments + 1, device=ordered.device, dtype=ordered.dtype)
    return torch.searchsorted(ordered.contiguous(), bounds)


def check_edge_product(
    operator: str,
    x: Tensor,
    harmonics: Tensor,
    edges: Tensor | EdgeOrder,
    irreps_in: Irreps,
    irreps_harmonics: Irreps,
) -> int:
    """Check the common arguments of products over edges; return the number of edges."""
    num_nodes = len(x) if x.dim() else 0
    _check_product(operator, "x", x, (num_nodes, irreps_in.dim), irreps_in, irreps_harmonics)
    num_edges = check_edges(operator, edges, x)
    shape = (num_edges, irreps_harmonics.dim)
    _check_product(operator, "harmonics", harmonics, shape, irreps_in, irreps_harmonics)
    return num_edges


def _check_product(
    operator: str, name: str, tensor: Tensor, shape: tuple[int, int], *of: Irreps
) -> None:
    if tensor.shape != shape:
        raise ValueError(
            f"{operator}: {name} has shape {tuple(tensor.shape)}, expected {shape} for '{of[0]}' "
            f"times '{of[1]}'"
        )


def check_edges(operator: str, edges: Tensor | EdgeOrder, nodes: Tensor) -> int:
    """Check what an operator takes as edges, on the device of the nodes; return their number."""
    pairs = edges.edges if isinstance(edges, EdgeOrder) else edges
    try:
        num_edges = pairs.shape[1]
    except IndexError:
        check_axes(operator, "[2, E]", edges=pairs)
        raise
    check_index(operator, "edges", pairs, (2, num_edges), nodes=nodes)
    num_nodes = len(nodes)
    if isinstance(edges, EdgeOrder) and edges.num_nodes != num_nodes:
        raise ValueError(
            f"{operator}: the order is of edges between {edges.num_nodes} nodes, there are "
            f"{num_nodes}"
        )
    if num_edges and not num_nodes:
        raise ValueError(f"{operator}: {num_edges} edges between no nodes")
    return num_edges
