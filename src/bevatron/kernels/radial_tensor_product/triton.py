"""The radial tensor product in Triton: chunk by chunk of edges, weights made when they are used.

Three custom operators as for the channelwise product, and its kernels. Edges sorted by receiver are
cut into chunks of equal size. For each, a matrix product makes the weights and a kernel uses them
while they are still in the cache. A receiver whose edges lie in two chunks continues its sum in the
later launch: an order that never changes. Gradients by the weights overwrite the weights in place
and leave through matrix products with hidden and last_weight.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bevatron.kernels.channelwise_tensor_product import EdgeOrder, PathTable
from bevatron.kernels.channelwise_tensor_product.triton_autograd import none_unless, wanted
from bevatron.kernels.channelwise_tensor_product.triton_launch import Chunk, Index, chunks, run
from bevatron.kernels.channelwise_tensor_product.triton_source import product_of
from bevatron.maths.irreps import Irreps

CHUNK = 16384
"""Edges of a chunk: enough to fill a GPU, few enough to fit into memory unnoticed."""

CHUNK_BYTES = 96 * 2**20
"""What the weights of a chunk may take, if that is fewer edges."""


def radial_tensor_product(
    x: Tensor,
    harmonics: Tensor,
    hidden: Tensor,
    last_weight: Tensor,
    edges: Tensor | EdgeOrder,
    irreps_in: Irreps,
    irreps_harmonics: Irreps,
    table: PathTable,
) -> Tensor:
    """Compute what the reference does."""
    order = EdgeOrder.of(edges, x.shape[0])
    if order.permutation is not None:
        harmonics = harmonics.index_select(0, order.permutation)
        hidden = hidden.index_select(0, order.permutation)
    size = chunk_size(table.num_weights, x.element_size())
    irreps = f"{irreps_in} {irreps_harmonics} {table.irreps_mid}"
    index = Index.of(order, size)._replace(permutation=None)
    tensors = (index.senders, index.receiver_ptr, index.by_sender, index.sender_ptr)
    result: Tensor = _forward(x, harmonics, hidden, last_weight, *tensors, irreps, size)
    return result


def chunk_size(num_weights: int, element_size: int) -> int:
    """Choose the number of edges of a chunk, a power of two."""
    most = max(CHUNK_BYTES // max(num_weights * element_size, 1), 16)
    return min(CHUNK, 1 << (most.bit_length() - 1))


# In the operators below edges are sorted by receiver, so that `Index` needs no permutation.


@torch.library.custom_op("bevatron::radial_tensor_product", mutates_args=())
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
) -> Tensor:
    """Compute the product; ``irreps`` are those of x, of the harmonics and of the result."""
    product = product_of(*irreps.split(" "))
    index = Index(senders, receiver_ptr, None, by_sender, sender_ptr)
    out = x.new_zeros(x.shape[0], product.dim_out)
    x, harmonics, hidden = x.contiguous(), harmonics.contiguous(), hidden.contiguous()
    buffer = _buffer(hidden, last_weight, size)
    for chunk in chunks(len(hidden), size):
        part = slice(chunk.first, chunk.stop)
        w = torch.mm(hidden[part], last_weight, out=buffer[: chunk.stop - chunk.first])
        tensors = {"x": x, "y": harmonics[part], "w": w}
        run(product, "forward", tensors, {"out": out}, index, chunk)
    return out


@torch.library.custom_op("bevatron::radial_tensor_product_backward", mutates_args=())
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
    irreps: str,
    size: int,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the gradients by the first four inputs, empty where ``needs`` says no."""
    product = product_of(*irreps.split(" "))
    index = Index(senders, receiver_ptr, None, by_sender, sender_ptr)
    results = gx, gy, gh, g_last = _results(x, harmonics, hidden, last_weight, needs)
    x, harmonics, hidden, g = (t.contiguous() for t in (x, harmonics, hidden, g))
    buffer = _buffer(hidden, last_weight, size)
    for chunk in chunks(len(hidden), size):
        part = slice(chunk.first, chunk.stop)
        w = torch.mm(hidden[part], last_weight, out=buffer[: chunk.stop - chunk.first])
        into = {"gx": gx} if needs[0] else {}
        into |= {"gy": gy[part]} if needs[1] else {}
        into |= {"gw": w} if needs[2] or needs[3] else {}
        run(product, "backward", {"x": x, "y": harmonics[part], "w": w, "g": g}, into, index, chunk)
        if needs[2]:
            torch.mm(w, last_weight.mT, out=gh[part])
        if needs[3]:
            g_last.addmm_(hidden[part].mT, w)
    return results


@torch.library.custom_op("bevatron::radial_tensor_product_double_backward", mutates_args=())
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
    irreps: str,
    size: int,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute the gradients by g and the first four inputs from those of their gradients.

    With w = h W the gradients gh = gw W^T and gW = h^T gw pass on aw = ah W + h aW, and by
    themselves dW = ah^T gw and dh = gw aW^T, on top of dh = dw W^T and dW = h^T dw.
    """
    product = product_of(*irreps.split(" "))
    index = Index(senders, receiver_ptr, None, by_sender, sender_ptr)
    dg = g.new_zeros(g.shape if needs[0] else 0)
    results = dx, dy, dh, d_last = _results(x, harmonics, hidden, last_weight, needs[1:])
    x, harmonics, hidden, g = (t.contiguous() for t in (x, harmonics, hidden, g))
    along = {"ax": ax.contiguous()} if ax is not None else {}
    buffer, second = (_buffer(hidden, last_weight, size) for _ in range(2))
    ay = ay if ay is None else ay.contiguous()
    for chunk in chunks(len(hidden), size):
        part = slice(chunk.first, chunk.stop)
        rows = chunk.stop - chunk.first
        w = torch.mm(hidden[part], last_weight, out=buffer[:rows])
        tensors = {"x": x, "y": harmonics[part], "w": w, "g": g, **along}
        tensors |= {"ay": ay[part]} if ay is not None else {}
        into = {"dg": dg} if needs[0] else {}
        into |= {"dx": dx} if needs[1] else {}
        into |= {"dy": dy[part]} if needs[2] else {}
        into |= {"dw": w} if needs[3] or needs[4] else {}
        if ah is not None or a_last is not None:
            aw = tensors["aw"] = second[:rows]
            _last_layer(aw, [(ah, last_weight), (hidden, a_last)], part)
            if (ah is not None and needs[4]) or (a_last is not None and needs[3]):
                into |= {"gw": aw}
        run(product, "double_backward", tensors, into, index, chunk)
        if needs[3]:
            torch.mm(w, last_weight.mT, out=dh[part])
            if a_last is not None:
                dh[part].addmm_(aw, a_last.mT)
        if needs[4]:
            d_last.addmm_(hidden[part].mT, w)
            if ah is not None:
                d_last.addmm_(ah[part].mT, aw)
    return dg, *results


def _last_layer(
    out: Tensor, terms: Sequence[tuple[Tensor | None, Tensor | None]], part: slice
) -> None:
    """Sum the products of those pairs of which both are there."""
    pairs = [(rows[part], weight) for rows, weight in terms if rows is not None and weight is not None]
    torch.mm(*pairs[0], out=out)
    for rows, weight in pairs[1:]:
        out.addmm_(rows, weight)


def _buffer(hidden: Tensor, last_weight: Tensor, size: int) -> Tensor:
    """Make room for the weights of a chunk."""
    return hidden.new_empty(min(size, hidden.shape[0]), last_weight.shape[1])


def _results(
    x: Tensor, harmonics: Tensor, hidden: Tensor, last_weight: Tensor, needs: list[bool]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Make room for gradients; those by x and the last layer are sums."""
    return (
        x.new_zeros(x.shape if needs[0] else 0),
        x.new_empty(harmonics.shape if needs[1] else 0),
        x.new_empty(hidden.shape if needs[2] else 0),
        x.new_zeros(last_weight.shape if needs[3] else 0),
    )


@_forward.register_fake
def _(x: Tensor, *rest: Any) -> Tensor:
    return x.new_empty(x.shape[0], product_of(*rest[-2].split(" ")).dim_out)


@_backward.register_fake
def _(g: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _results(*rest[:4], rest[-1])


@_double_backward.register_fake
def _(
    ax: Tensor | None, ay: Tensor | None, ah: Tensor | None, a_last: Tensor | None, g: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    needs = rest[-1]
    return g.new_empty(g.shape if needs[0] else 0), *_results(*rest[:4], needs[1:])


def _keep_forward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:8])
    ctx.others = inputs[8:10]


def _forward_gradients(ctx: Any, g: Tensor | None) -> tuple[Tensor | None, ...]:
    needs = wanted(ctx, 4)
    if g is None or not any(needs):
        return (None,) * 10
    results = _backward(g, *ctx.saved_tensors, *ctx.others, needs)
    return *none_unless(needs, results), *(None,) * 6


def _keep_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:9])
    ctx.others = inputs[9:11]


def _backward_gradients(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
    needs = wanted(ctx, 5)
    if all(cotangent is None for cotangent in cotangents) or not any(needs):
        return (None,) * 12
    results = _double_backward(*cotangents, *ctx.saved_tensors, *ctx.others, needs)
    return *none_unless(needs, results), *(None,) * 7


_forward.register_autograd(_forward_gradients, setup_context=_keep_forward)
_backward.register_autograd(_backward_gradients, setup_context=_keep_backward)
