"""The channelwise tensor product in Triton: forward, backward and double backward.

Three custom operators, each the gradient of the one before; `triton_source` has the equations and
the tiling. Kernels are generated for the irreps, with the coefficients unrolled. Messages are never
written to memory, and every sum has a fixed order: over receivers and channels it runs in
registers, over senders along a permutation that `EdgeOrder` computed before.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from bevatron.kernels.equivariant.channelwise_tensor_product.couplings import named_product
from bevatron.kernels.equivariant.channelwise_tensor_product.edge_order import EdgeOrder
from bevatron.kernels.equivariant.channelwise_tensor_product.paths import PathTable
from bevatron.kernels.equivariant.channelwise_tensor_product.triton_launch import Index, chunks, run
from bevatron.kernels.shared.autograd import is_wanted
from bevatron.maths.irreps import Irreps, Layout


def channelwise_tensor_product(
    x: Tensor,
    harmonics: Tensor,
    weights: Tensor,
    edges: Tensor | EdgeOrder,
    irreps_in: Irreps,
    irreps_harmonics: Irreps,
    table: PathTable,
    layout: Layout = "mul_ir",
) -> Tensor:
    """Compute what the reference does."""
    order = EdgeOrder.of(edges, x.shape[0])
    irreps = " ".join([str(irreps_in), str(irreps_harmonics), str(table.irreps_mid), layout])
    result: Tensor = _forward(x, harmonics, weights, *Index.of(order, order.num_edges), irreps)
    return result


@torch.library.custom_op("bevatron::channelwise_tensor_product", mutates_args=())
def _forward(
    x: Tensor,
    harmonics: Tensor,
    weights: Tensor,
    senders: Tensor,
    receiver_ptr: Tensor,
    permutation: Tensor | None,
    by_sender: Tensor,
    sender_ptr: Tensor,
    irreps: str,
) -> Tensor:
    """Compute the product; ``irreps`` as `named_product` takes them."""
    index = Index(senders, receiver_ptr, permutation, by_sender, sender_ptr)
    out = x.new_zeros(x.shape[0], named_product(irreps).dim_out)
    _run(irreps, "forward", {"x": x, "y": harmonics, "w": weights}, {"out": out}, index)
    return out


@torch.library.custom_op("bevatron::channelwise_tensor_product_backward", mutates_args=())
def _backward(
    g: Tensor,
    x: Tensor,
    harmonics: Tensor,
    weights: Tensor,
    senders: Tensor,
    receiver_ptr: Tensor,
    permutation: Tensor | None,
    by_sender: Tensor,
    sender_ptr: Tensor,
    irreps: str,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients by x, harmonics and weights, empty where ``needs`` says no."""
    index = Index(senders, receiver_ptr, permutation, by_sender, sender_ptr)
    tensors = {"x": x, "y": harmonics, "w": weights, "g": g}
    results = _results(x, harmonics, weights, needs)
    into = _named(("gx", "gy", "gw"), results, needs)
    _run(irreps, "backward", tensors, into, index)
    return results


@torch.library.custom_op("bevatron::channelwise_tensor_product_double_backward", mutates_args=())
def _double_backward(
    ax: Tensor | None,
    ay: Tensor | None,
    aw: Tensor | None,
    g: Tensor,
    x: Tensor,
    harmonics: Tensor,
    weights: Tensor,
    senders: Tensor,
    receiver_ptr: Tensor,
    permutation: Tensor | None,
    by_sender: Tensor,
    sender_ptr: Tensor,
    irreps: str,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the gradients by g, x, harmonics and weights from those of the gradients."""
    index = Index(senders, receiver_ptr, permutation, by_sender, sender_ptr)
    tensors = {"x": x, "y": harmonics, "w": weights, "g": g, "ax": ax, "ay": ay, "aw": aw}
    results = _results(x, harmonics, weights, needs[1:])
    by_g = g.new_zeros(g.shape if needs[0] else 0)
    into = _named(("dg", "dx", "dy", "dw"), (by_g, *results), needs)
    _run(irreps, "double_backward", tensors, into, index)
    return by_g, *results


def _run(
    irreps: str,
    kind: str,
    tensors: Mapping[str, Tensor | None],
    into: Mapping[str, Tensor],
    index: Index,
) -> None:
    """Run one kernel on all edges at once."""
    there = {name: t.contiguous() for name, t in tensors.items() if t is not None}
    num_edges = index.senders.shape[0]
    for chunk in chunks(num_edges, num_edges):
        run(named_product(irreps), kind, there, into, index, chunk)


def _results(
    x: Tensor, harmonics: Tensor, weights: Tensor, needs: list[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """Make room for gradients; that by x is a sum."""
    return (
        x.new_zeros(x.shape if needs[0] else 0),
        x.new_empty(harmonics.shape if needs[1] else 0),
        x.new_empty(weights.shape if needs[2] else 0),
    )


def _named(
    names: tuple[str, ...], results: tuple[Tensor, ...], needs: list[bool]
) -> dict[str, Tensor]:
    triples = zip(names, results, needs, strict=True)
    return {name: result for name, result, need in triples if need}


@_forward.register_fake
def _(x: Tensor, *rest: Any) -> Tensor:
    return x.new_empty(x.shape[0], named_product(rest[-1]).dim_out)


@_backward.register_fake
def _(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    _, x, harmonics, weights = inputs[:4]
    return _results(x, harmonics, weights, inputs[-1])


@_double_backward.register_fake
def _(*inputs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    g, x, harmonics, weights = inputs[3:7]
    needs = inputs[-1]
    by_g: Tensor = g.new_empty(g.shape if needs[0] else 0)
    return by_g, *_results(x, harmonics, weights, needs[1:])


def _keep_forward(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:  # noqa: ARG001
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:8])
    ctx.irreps = inputs[8]


def _forward_gradients(ctx: Any, g: Tensor | None) -> tuple[Tensor | None, ...]:
    needs = [is_wanted(ctx, i) for i in range(3)]
    if g is None or not any(needs):
        return (None,) * 9
    results = _backward(g, *ctx.saved_tensors, ctx.irreps, needs)
    return *_where(needs, results), *(None,) * 6


def _keep_backward(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:  # noqa: ARG001
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:9])
    ctx.irreps = inputs[9]


def _backward_gradients(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
    needs = [is_wanted(ctx, i) for i in range(4)]
    if all(cotangent is None for cotangent in cotangents) or not any(needs):
        return (None,) * 11
    results = _double_backward(*cotangents, *ctx.saved_tensors, ctx.irreps, needs)
    return *_where(needs, results), *(None,) * 7


def _where(needs: list[bool], results: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
    """Replace the placeholders of what was not computed."""
    return tuple(r if need else None for need, r in zip(needs, results, strict=True))


_forward.register_autograd(_forward_gradients, setup_context=_keep_forward)
_backward.register_autograd(_backward_gradients, setup_context=_keep_backward)
