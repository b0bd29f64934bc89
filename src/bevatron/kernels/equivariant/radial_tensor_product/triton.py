"""The radial tensor product in Triton, chunk by chunk of edges, computing weights as needed.

Three custom operators like those of the channelwise product, on its kernels. Edges sorted by
receiver are cut into chunks of equal size. For each chunk a matmul computes the weights and a
kernel uses them while they are still in L2. A receiver whose edges span two chunks continues its
sum in the later launch: a fixed order. Gradients of the weights overwrite the weights and are
reduced by matmuls with hidden and last_weight.

The weights of the first chunks, up to `KEPT_BYTES` per edge, are kept for the derivatives: memory
stays proportional to the number of edges.
"""

import torch
from torch import Tensor

from bevatron.kernels.equivariant.channelwise_tensor_product import EdgeOrder, PathTable
from bevatron.kernels.equivariant.channelwise_tensor_product.triton import (
    Chunk,
    Index,
    chunks,
    named_product,
    run,
)
from bevatron.kernels.equivariant.radial_tensor_product.triton_matmul import Layer, OuterSum
from bevatron.kernels.shared.autograd import needs_grad
from bevatron.kernels.shared.custom_op import custom_op
from bevatron.maths.irreps import Irreps, Layout

CHUNK_BYTES = 128 * 2**20
"""Size of the weights of a chunk: enough to fill a GPU, small compared with all weights."""
KEPT_BYTES = 3840
"""Bytes per edge of weights that are kept for the derivatives, which otherwise recompute them three
times. This is three quarters of the weights of 10 paths of 128 channels, and more than 4 paths
need: MACE's step on forces keeps 70 to 80 % of its weights, in less than half the memory of
cuEquivariance's step."""


def radial_tensor_product(
    x: Tensor,
    harmonics: Tensor,
    hidden: Tensor,
    last_weight: Tensor,
    edges: Tensor | EdgeOrder,
    irreps_in: Irreps,
    irreps_harmonics: Irreps,
    table: PathTable,
    layout: Layout = "mul_ir",
) -> Tensor:
    """Compute the same as the reference."""
    order = EdgeOrder.of(edges, x.shape[0])
    if order.permutation is not None:
        harmonics = harmonics.index_select(0, order.permutation)
        hidden = hidden.index_select(0, order.permutation)
    size = chunk_size(order.num_edges, table.num_weights * x.element_size())
    irreps = " ".join([str(irreps_in), str(irreps_harmonics), str(table.irreps_mid), layout])
    index = Index.of(order, size)._replace(permutation=None)
    tensors = (index.senders, index.receiver_ptr, index.by_sender, index.sender_ptr)
    given = (x, harmonics, hidden, last_weight)
    kept = kept_edges(order.num_edges, size, last_weight) if needs_grad(*given) else 0
    result: Tensor = _forward(*given, *tensors, irreps, size, kept)[0]
    return result


def chunk_size(num_edges: int, edge_bytes: int) -> int:
    """Cut the edges into as few chunks of equal length as `CHUNK_BYTES` allows."""
    most = max(CHUNK_BYTES // max(edge_bytes, 1), 1)
    return -(-num_edges // max(-(-num_edges // most), 1))


def kept_edges(num_edges: int, size: int, last_weight: Tensor) -> int:
    """Count the edges of the whole chunks that fit into `KEPT_BYTES` per edge, at least one."""
    bytes_of_chunk = max(size * last_weight.shape[1] * last_weight.element_size(), 1)
    return min(max(KEPT_BYTES * num_edges // bytes_of_chunk, 1) * size, num_edges)


# In the operators below edges are sorted by receiver, so that `Index` needs no permutation.


@custom_op(
    "radial_tensor_product",
    outputs="out kept",
    fake=lambda x, last_weight, irreps, kept: (
        x.new_empty(x.shape[0], named_product(irreps).dim_out),
        x.new_empty(kept, last_weight.shape[1]),
    ),
)
def _forward(
    x: Tensor,
    harmonics: Tensor,
    hidden: Tensor,
    last_weight: Tensor,
    senders: Tensor,
    receiver_ptr: Tensor,
    by_sender: Tensor,
    sender_ptr: Tensor,
    irreps: str,
    size: int,
    kept: int,
) -> tuple[Tensor, Tensor]:
    """Compute the product; for ``irreps`` see `named_product`.

    Also return the weights of the first ``kept`` edges, whole chunks of ``size``.
    """
    product = named_product(irreps)
    index = Index(senders, receiver_ptr, None, by_sender, sender_ptr)
    out = x.new_zeros(x.shape[0], product.dim_out)
    x, harmonics, hidden, last_weight = (
        t.contiguous() for t in (x, harmonics, hidden, last_weight)
    )
    weights = _Weights(hidden, last_weight, size, hidden.new_empty(kept, last_weight.shape[1]))
    for chunk in chunks(len(hidden), size):
        part = slice(chunk.first, chunk.stop)
        tensors = {"x": x, "y": harmonics[part], "w": weights.make(chunk)}
        run(product, "forward", tensors, {"out": out}, index, chunk)
    return out, weights.kept


def _results(
    x: Tensor, harmonics: Tensor, hidden: Tensor, last_weight: Tensor, needs: list[bool]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Allocate gradients; those of x and the last layer accumulate, so they start as zeros."""
    return (
        x.new_zeros(x.shape if needs[0] else 0),
        x.new_empty(harmonics.shape if needs[1] else 0),
        x.new_empty(hidden.shape if needs[2] else 0),
        x.new_zeros(last_weight.shape if needs[3] else 0),
    )


@_forward.backward("x harmonics hidden last_weight", fake=_results)
def _backward(
    g: Tensor,
    x: Tensor,
    harmonics: Tensor,
    hidden: Tensor,
    last_weight: Tensor,
    senders: Tensor,
    receiver_ptr: Tensor,
    by_sender: Tensor,
    sender_ptr: Tensor,
    kept: Tensor,
    irreps: str,
    size: int,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the gradients of the first four inputs, empty if not in ``needs``."""
    product = named_product(irreps)
    index = Index(senders, receiver_ptr, None, by_sender, sender_ptr)
    results = gx, gy, gh, g_last = _results(x, harmonics, hidden, last_weight, needs)
    x, harmonics, hidden, last_weight, g = (
        t.contiguous() for t in (x, harmonics, hidden, last_weight, g)
    )
    weights, outer = _Weights(hidden, last_weight, size, kept), OuterSum(g_last)
    for chunk in chunks(len(hidden), size):
        part = slice(chunk.first, chunk.stop)
        w, gw = weights.of(chunk), weights.room(chunk)
        into = {"gx": gx} if needs[0] else {}
        into |= {"gy": gy[part]} if needs[1] else {}
        into |= {"gw": gw} if needs[2] or needs[3] else {}
        run(product, "backward", {"x": x, "y": harmonics[part], "w": w, "g": g}, into, index, chunk)
        if needs[2]:
            weights.layer.contract(gw, gh[part])
        if needs[3]:
            outer.add(hidden[part], gw)
    outer.finish()
    return results


@_backward.backward(
    "g x harmonics hidden last_weight",
    fake=lambda g, x, harmonics, hidden, last_weight, needs: (
        g.new_empty(g.shape if needs[0] else 0),
        *_results(x, harmonics, hidden, last_weight, needs[1:]),
    ),
)
def _double_backward(
    ax: Tensor | None,
    ay: Tensor | None,
    ah: Tensor | None,
    a_last: Tensor | None,
    g: Tensor,
    x: Tensor,
    harmonics: Tensor,
    hidden: Tensor,
    last_weight: Tensor,
    senders: Tensor,
    receiver_ptr: Tensor,
    by_sender: Tensor,
    sender_ptr: Tensor,
    kept: Tensor,
    irreps: str,
    size: int,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute the gradients of g and the first four inputs from those of their gradients.

    With w = h W the gradients gh = gw W^T and gW = h^T gw pass on aw = ah W + h aW, and by
    themselves dW = ah^T gw and dh = gw aW^T, on top of dh = dw W^T and dW = h^T dw.
    """
    product = named_product(irreps)
    index = Index(senders, receiver_ptr, None, by_sender, sender_ptr)
    dg = g.new_zeros(g.shape if needs[0] else 0)
    results = dx, dy, dh, d_last = _results(x, harmonics, hidden, last_weight, needs[1:])
    x, harmonics, hidden, last_weight, g = (
        t.contiguous() for t in (x, harmonics, hidden, last_weight, g)
    )
    along = {"ax": ax.contiguous()} if ax is not None else {}
    weights = _Weights(hidden, last_weight, size, kept)
    second = torch.empty_like(weights.buffer)
    ay, ah, a_last = (None if t is None else t.contiguous() for t in (ay, ah, a_last))
    layer, outer = weights.layer, OuterSum(d_last)
    along_last = None if a_last is None else Layer(a_last)
    for chunk in chunks(len(hidden), size):
        part = slice(chunk.first, chunk.stop)
        w, dw = weights.of(chunk), weights.room(chunk)
        tensors = {"x": x, "y": harmonics[part], "w": w, "g": g, **along}
        tensors |= {"ay": ay[part]} if ay is not None else {}
        into = {"dg": dg} if needs[0] else {}
        into |= {"dx": dx} if needs[1] else {}
        into |= {"dy": dy[part]} if needs[2] else {}
        into |= {"dw": dw} if needs[3] or needs[4] else {}
        if ah is not None or along_last is not None:
            aw = tensors["aw"] = second[: chunk.stop - chunk.first]
            if ah is not None:
                layer.expand(ah[part], aw)
            if along_last is not None:
                along_last.expand(hidden[part], aw, add=ah is not None)
            if (ah is not None and needs[4]) or (along_last is not None and needs[3]):
                into |= {"gw": aw}
        run(product, "double_backward", tensors, into, index, chunk)
        if needs[3]:
            layer.contract(dw, dh[part])
            if along_last is not None:
                along_last.contract(aw, dh[part], add=True)
        if needs[4]:
            outer.add(hidden[part], dw)
            if ah is not None:
                outer.add(ah[part], aw)
    outer.finish()
    return dg, *results


class _Weights:
    """The weights of the edges: some kept, the others computed chunk by chunk in one buffer.

    Parameters
    ----------
    hidden, last_weight : contiguous
    size : edges of a chunk
    kept : the weights of the edges in the first chunks, or a buffer for them
    """

    def __init__(self, hidden: Tensor, last_weight: Tensor, size: int, kept: Tensor) -> None:
        self.layer, self.kept, self._hidden = Layer(last_weight), kept, hidden
        self.buffer = hidden.new_empty(min(size, hidden.shape[0]), last_weight.shape[1])

    def room(self, chunk: Chunk) -> Tensor:
        """Return a buffer for a chunk's weight gradients: the weights, unless they are kept."""
        return self.buffer[: chunk.stop - chunk.first]

    def make(self, chunk: Chunk) -> Tensor:
        """Compute the weights of a chunk."""
        part = slice(chunk.first, chunk.stop)
        w = self.kept[part] if chunk.stop <= len(self.kept) else self.room(chunk)
        self.layer.expand(self._hidden[part], w)
        return w

    def of(self, chunk: Chunk) -> Tensor:
        """Return the weights of a chunk, recomputed unless they are kept."""
        if chunk.stop <= len(self.kept):
            return self.kept[chunk.first : chunk.stop]
        return self.make(chunk)
