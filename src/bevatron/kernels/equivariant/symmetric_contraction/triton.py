"""The symmetric contraction in Triton: terms unrolled, each atom and channel in registers.

One matmul that autograd differentiates folds the weights into coefficients C [Z, terms, K]
(`polynomial`); the generated kernels (`triton_source`) take A and C. Atoms are sorted by element,
so all atoms of a program share the coefficients it loads, and the gradient of C is summed without
atomics: over the atoms of a tile, then over the tiles in order.

Operators: ``forward`` -> ``backward`` and ``weights`` -> ``double_backward`` and ``weights_along``.
The backward of ``weights``, which is linear in g and does not depend on C, uses the first two.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from bevatron.kernels.equivariant.element_order import ElementOrder
from bevatron.kernels.equivariant.symmetric_contraction.polynomial import (
    known_polynomial,
    polynomial_key,
)
from bevatron.kernels.equivariant.symmetric_contraction.triton_source import (
    num_chunks,
    write_source,
)
from bevatron.kernels.equivariant.triton_element_tiles import sum_tiles, tile_table
from bevatron.kernels.shared.custom_op import custom_op
from bevatron.kernels.shared.dtypes import wide_type
from bevatron.kernels.shared.triton_generated import generated
from bevatron.maths.irreps import Layout
from bevatron.maths.symmetric_product import CouplingTensor

ROWS = {"forward": 2, "backward": 1, "double_backward": 1, "weights": 1, "weights_along": 2}
"""Atoms in the registers of a program; half of it, at least 1, in float64."""
LANES = 32
"""Channels of a program, one per thread of a single warp, so threads never exchange data."""
SUMMED_ROWS = 64
"""Atoms of a tile, over which a program sums the gradient of the coefficients."""
CHUNK = {torch.float32: 64, torch.float64: 32}
"""Terms whose sums a program keeps in registers."""


def symmetric_contraction(
    a: Tensor,
    weights: Sequence[Sequence[Tensor]],
    elements: Tensor | ElementOrder,
    couplings: tuple[tuple[CouplingTensor, ...], ...],
    layout: Layout = "mul_ir",
) -> Tensor:
    """Evaluate all degrees at once, atoms sorted by element."""
    key = polynomial_key(couplings, layout)
    flat = torch.cat([weight for orders in weights for weight in orders], dim=1)
    c = fold(flat.to(wide_type(a)), key)
    groups = ElementOrder.of(elements, c.shape[0])
    result: Tensor = forward(_dense(a), c, groups.order, groups.ptr, key)
    return result


@custom_op(
    "symmetric_contraction_fold",
    fake=lambda weights, key: weights.new_empty(
        weights.shape[0], len(known_polynomial(key).terms), weights.shape[2]
    ),
)
def fold(weights: Tensor, key: str) -> Tensor:
    """C [Z, T, K] from the weights [Z, paths of all degrees and orders, K]."""
    return known_polynomial(key).matrix(weights.dtype, weights.device) @ weights


@custom_op(
    "symmetric_contraction_unfold",
    fake=lambda c, key: c.new_empty(c.shape[0], known_polynomial(key).mixing.shape[1], c.shape[2]),
)
def unfold(c: Tensor, key: str) -> Tensor:
    """Gradient with respect to the weights from that of C."""
    return known_polynomial(key).matrix(c.dtype, c.device).T @ c


@custom_op(
    "symmetric_contraction",
    fake=lambda a, key: a.new_empty(a.shape[0], a.shape[1] * known_polynomial(key).num_m),
)
def forward(a: Tensor, c: Tensor, order: Tensor, ptr: Tensor, key: str) -> Tensor:
    """B [N, M * K] from A [N, K, S], C [Z, T, K] and the atoms by element."""
    num_m = known_polynomial(key).num_m
    # Rows of atoms without weights stay NaN.
    b = a.new_full((a.shape[0], a.shape[1] * num_m), float("nan"))
    _tile_by_tile("forward", (b, a, c), a, order, ptr, key)
    return b


@custom_op(
    "symmetric_contraction_backward",
    fake=lambda a: torch.empty_like(a),  # noqa: PLW0108  which has another name for a
)
def backward(g: Tensor, a: Tensor, c: Tensor, order: Tensor, ptr: Tensor, key: str) -> Tensor:
    """Gradient with respect to A."""
    e = torch.empty_like(a)
    _tile_by_tile("backward", (e, g, a, c), a, order, ptr, key)
    return e


def _empty_coefficients(a: Tensor, ptr: Tensor, key: str) -> Tensor:
    num_terms = len(known_polynomial(key).terms)
    return a.new_empty(ptr.shape[0] - 1, num_terms, a.shape[1], dtype=wide_type(a))


@custom_op("symmetric_contraction_weights", fake=_empty_coefficients)
def weights(g: Tensor, a: Tensor, order: Tensor, ptr: Tensor, key: str) -> Tensor:
    """Gradient with respect to C."""
    return _summed("weights", (g, a), order, ptr, key)


@custom_op(
    "symmetric_contraction_double_backward",
    fake=lambda g, a: (torch.empty_like(g), torch.empty_like(a)),
)
def double_backward(
    v: Tensor, g: Tensor, a: Tensor, c: Tensor, order: Tensor, ptr: Tensor, key: str
) -> tuple[Tensor, Tensor]:
    """Gradients of g and A from that of `backward`'s result, v."""
    u, h = torch.empty_like(g), torch.empty_like(a)
    _tile_by_tile("double_backward", (u, h, v, g, a, c), a, order, ptr, key)
    return u, h


@custom_op("symmetric_contraction_weights_along", fake=_empty_coefficients)
def weights_along(v: Tensor, g: Tensor, a: Tensor, order: Tensor, ptr: Tensor, key: str) -> Tensor:
    """Gradient of C from that of `backward`'s result, v."""
    return _summed("weights_along", (v, g, a), order, ptr, key)


def _forward_gradients(
    g: Tensor, a: Tensor, c: Tensor, order: Tensor, ptr: Tensor, key: str, needs: list[bool]
) -> tuple[Tensor | None, ...]:
    g = g.contiguous()
    da = backward(g, a, c, order, ptr, key) if needs[0] else None
    return da, weights(g, a, order, ptr, key) if needs[1] else None


def _backward_gradients(
    v: Tensor,
    g: Tensor,
    a: Tensor,
    c: Tensor,
    order: Tensor,
    ptr: Tensor,
    key: str,
    needs: list[bool],
) -> tuple[Tensor | None, ...]:
    v = _laid_out_as(v, a)
    dg = da = None
    if needs[0] or needs[1]:
        dg, da = double_backward(v, g, a, c, order, ptr, key)
    return dg, da, weights_along(v, g, a, order, ptr, key) if needs[2] else None


def _weights_gradients(
    w: Tensor, g: Tensor, a: Tensor, order: Tensor, ptr: Tensor, key: str, needs: list[bool]
) -> tuple[Tensor | None, ...]:
    w = w.contiguous()
    dg = forward(a, w, order, ptr, key) if needs[0] else None
    return dg, backward(g, a, w, order, ptr, key) if needs[1] else None


fold.gradients("weights", unfold)
unfold.gradients("c", fold)
forward.gradients("a c", _forward_gradients)
backward.gradients("g a c", _backward_gradients)
weights.gradients("g a", _weights_gradients)


def _summed(kind: str, inputs: tuple[Tensor, ...], order: Tensor, ptr: Tensor, key: str) -> Tensor:
    """Sum products over the atoms of each element: over those of a tile, then over its tiles."""
    a = inputs[-1]
    like = _empty_coefficients(a, ptr, key)
    table = tile_table(ptr, len(order), SUMMED_ROWS)
    parts = like.new_empty(len(table), *like.shape[1:])
    _launch(kind, key, (parts, *inputs), a, order, table)
    return sum_tiles(parts, ptr, SUMMED_ROWS)


def _tile_by_tile(
    kind: str, pointers: tuple[Tensor, ...], a: Tensor, order: Tensor, ptr: Tensor, key: str
) -> None:
    """Launch a kernel whose tiles are the atoms that a program keeps in registers."""
    _launch(kind, key, pointers, a, order, tile_table(ptr, len(order), _rows(kind, a)))


def _launch(
    kind: str, key: str, pointers: tuple[Tensor, ...], a: Tensor, order: Tensor, table: Tensor
) -> None:
    _, num_channels, size = a.shape
    dtype = wide_type(a)
    lanes = LANES if a.is_cuda else triton.next_power_of_2(num_channels)
    chunk = CHUNK[dtype] if a.is_cuda else 10**9
    chunks = num_chunks(known_polynomial(key), chunk) if kind.startswith("weights") else 1
    grid = (len(table), triton.cdiv(num_channels, lanes), chunks)
    if 0 in grid:
        return
    component_major = _is_component_major(a)
    _kernel(key, kind, chunk, a.is_cuda)[grid](
        *pointers, order, table,
        K=num_channels, STRIDE_K=1 if component_major else size,
        STRIDE_S=num_channels if component_major else 1, ROWS=_rows(kind, a), LANES=lanes,
        ACC=tl.float32 if dtype == torch.float32 else tl.float64,
        num_warps=max(1, lanes // 32),
    )  # fmt: skip


def _rows(kind: str, a: Tensor) -> int:
    if not a.is_cuda:
        return 8  # Interpreted: few, large programs.
    return ROWS[kind] if wide_type(a) == torch.float32 else max(1, ROWS[kind] // 2)


@cache
def _kernel(key: str, kind: str, chunk: int, compiled: bool) -> Any:
    """Build the kernel of one kind for a polynomial."""
    source = write_source(known_polynomial(key), kind, chunk, layouts=compiled)
    return generated(source, f"contraction_{kind}", __name__, compiled)


def _is_component_major(a: Tensor) -> bool:
    """Whether channels, rather than components, are contiguous."""
    return not a.is_contiguous() and a.transpose(1, 2).is_contiguous()


def _dense(a: Tensor) -> Tensor:
    """Make A dense in one of its two layouts."""
    return a if _is_component_major(a) else a.contiguous()


def _laid_out_as(v: Tensor, a: Tensor) -> Tensor:
    """Give v the layout of A."""
    if _is_component_major(a):
        return v.transpose(1, 2).contiguous().transpose(1, 2)
    return v.contiguous()
