"""The channelwise tensor product in Triton: forward, backward and double backward.

Three custom operators, each the gradient of the one before; `triton_source` has the equations and
the tiling. Kernels are generated for the irreps, with the coefficients unrolled. Messages are never
written to memory, and every sum has a fixed order: over receivers and channels it runs in
registers, over senders along a permutation from `EdgeOrder`.
"""

from collections.abc import Mapping

from torch import Tensor

from bevatron.kernels.equivariant.channelwise_tensor_product.couplings import named_product
from bevatron.kernels.equivariant.channelwise_tensor_product.paths import PathTable
from bevatron.kernels.equivariant.channelwise_tensor_product.triton_launch import (
    Chunk,
    Index,
    chunks,
    run,
)
from bevatron.kernels.equivariant.edge_order import EdgeOrder
from bevatron.kernels.shared.custom_op import custom_op
from bevatron.maths.irreps import Irreps, Layout

__all__ = ["Chunk", "Index", "channelwise_tensor_product", "chunks", "named_product", "run"]
"""Names that other operators may use."""


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
    """Compute the same as the reference."""
    order = EdgeOrder.of(edges, x.shape[0])
    irreps = " ".join([str(irreps_in), str(irreps_harmonics), str(table.irreps_mid), layout])
    result: Tensor = _forward(x, harmonics, weights, *Index.of(order, order.num_edges), irreps)
    return result


@custom_op(
    "channelwise_tensor_product",
    fake=lambda x, irreps: x.new_empty(x.shape[0], named_product(irreps).dim_out),
)
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
    """Compute the product; for ``irreps`` see `named_product`."""
    index = Index(senders, receiver_ptr, permutation, by_sender, sender_ptr)
    out = x.new_zeros(x.shape[0], named_product(irreps).dim_out)
    _run(irreps, "forward", {"x": x, "y": harmonics, "w": weights}, {"out": out}, index)
    return out


def _results(
    x: Tensor, harmonics: Tensor, weights: Tensor, needs: list[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate gradients; x accumulates, so its gradient starts as zeros."""
    return (
        x.new_zeros(x.shape if needs[0] else 0),
        x.new_empty(harmonics.shape if needs[1] else 0),
        x.new_empty(weights.shape if needs[2] else 0),
    )


@_forward.backward("x harmonics weights", fake=_results)
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
    """Compute the gradients of x, harmonics and weights, empty if not in ``needs``."""
    index = Index(senders, receiver_ptr, permutation, by_sender, sender_ptr)
    tensors = {"x": x, "y": harmonics, "w": weights, "g": g}
    results = _results(x, harmonics, weights, needs)
    into = _named(("gx", "gy", "gw"), results, needs)
    _run(irreps, "backward", tensors, into, index)
    return results


@_backward.backward(
    "g x harmonics weights",
    fake=lambda g, x, harmonics, weights, needs: (
        g.new_empty(g.shape if needs[0] else 0),
        *_results(x, harmonics, weights, needs[1:]),
    ),
)
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
    """Compute the gradients of g, x, harmonics and weights from those of the gradients."""
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


def _named(
    names: tuple[str, ...], results: tuple[Tensor, ...], needs: list[bool]
) -> dict[str, Tensor]:
    triples = zip(names, results, needs, strict=True)
    return {name: result for name, result, need in triples if need}
