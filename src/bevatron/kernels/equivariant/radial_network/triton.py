"""The radial network in Triton: all layers of an edge on chip, with their derivative in its length.

The hidden features h of an edge depend on its length r alone, so forces need only the slope
h' = dh/dr, a tangent that propagates through the layers along with h. With p and q the gradients of
h and h':

- ``forward``: h and h'.
- ``along``: p . h', the gradient of r if only h is differentiated.
- ``backward``: from p and q the gradients of the weights, and of r if second derivatives with
  respect to positions are needed.

Training on forces takes the first derivative with respect to r through ``along`` and then all
gradients of the weights in one pass. ``backward`` recomputes the layers; the only intermediate
ever stored is the gradient of the second layer. Derivatives of ``backward``, which training does
not need, are plain PyTorch.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from bevatron.errors import KernelError
from bevatron.kernels.equivariant.radial_basis import radial_basis
from bevatron.kernels.equivariant.radial_network.reference import radial_network as plain
from bevatron.kernels.equivariant.radial_network.triton_kernels import (
    radial_network_bottom,
    radial_network_forward,
    radial_network_top,
    rows_product,
)
from bevatron.kernels.equivariant.silu import silu
from bevatron.kernels.equivariant.silu_linear import silu_linear
from bevatron.kernels.shared.autograd import empty_gradients, needs_grad
from bevatron.kernels.shared.custom_op import custom_op
from bevatron.kernels.shared.launch import on_gpu
from bevatron.kernels.shared.triton_math import precision

LAYERS, WIDEST, MOST_FUNCTIONS = 3, 64, 16
"""Supported shapes: all published models have three layers of 64 and 8 or 10 functions."""
ROWS = 32
"""Edges of a block. With 64 Triton uses Hopper's wgmma, and the backward kernel spills 400 to 700
registers per thread."""
WARPS = {"forward": 4, "top": 8, "bottom": 8}
STAGES = {"forward": 2, "top": 1, "bottom": 1}
"""Pipeline stages. With two in both backward kernels they took 700 us instead of 603 on an H200."""
PROGRAMS = {"forward": 264, "top": 132, "bottom": 132}
"""Programs that share the edges, as many as fit on an H200; each writes one partial sum of the
weight gradients."""


def radial_network(
    lengths: Tensor,
    frequencies: Tensor,
    prefactor: Tensor,
    r_max: Tensor,
    order: int,
    weights: Sequence[Tensor],
) -> Tensor:
    """Compute the same as the reference; other shapes layer by layer, and float64 on a GPU."""
    constants = (frequencies, prefactor, r_max)
    if any(tensor.requires_grad for tensor in constants):
        raise KernelError(
            "radial_network: Triton differentiates in the lengths and weights only; "
            "use(radial_network='reference') gives those by frequencies, prefactor and r_max"
        )
    if not _fits(lengths, frequencies, weights):
        x = radial_basis(lengths, *constants, order)
        for number, weight in enumerate(weights):
            x = silu_linear(x, weight) if number else x @ weight
        return silu(x)
    own = (tensor.to(lengths.dtype) for tensor in constants)
    sloped = needs_grad(lengths)
    h: Tensor = forward(lengths, *own, *weights, order, sloped)[0]
    return h


def _fits(lengths: Tensor, frequencies: Tensor, weights: Sequence[Tensor]) -> bool:
    widest = max(weight.shape[1] for weight in weights)
    wide = lengths.dtype == torch.float64 and on_gpu(lengths)
    small = widest <= WIDEST and len(frequencies) <= MOST_FUNCTIONS
    return len(weights) == LAYERS and small and not wide


@custom_op(
    "radial_network",
    outputs="h slope",
    fake=lambda r, w3, sloped: (
        r.new_empty(r.shape[0], w3.shape[1]),
        r.new_empty(r.shape[0] if sloped else 0, w3.shape[1]),
    ),
)
def forward(
    r: Tensor,
    w: Tensor,
    c: Tensor,
    r_max: Tensor,
    w1: Tensor,
    w2: Tensor,
    w3: Tensor,
    order: int,
    sloped: bool,
) -> tuple[Tensor, Tensor]:
    """H [E, H] and, if requested, its derivative with respect to r (otherwise empty)."""
    h = r.new_empty(r.shape[0], w3.shape[1])
    slope = r.new_empty(r.shape[0] if sloped else 0, w3.shape[1])
    tensors = [t.contiguous() for t in (r, w, c, r_max, w1, w2, w3)]
    if h.numel():
        radial_network_forward[_programs("forward", r)](
            *tensors, h, slope if sloped else h, len(r),
            **_sizes(w1, w2, w3), ORDER=order, SLOPE=sloped, ROWS=ROWS,
            PRECISION=precision(r), num_warps=WARPS["forward"],
            num_stages=STAGES["forward"],
        )  # fmt: skip
    return h, slope


@custom_op("radial_network_along", fake=lambda p: p.new_empty(p.shape[0]))
def along(p: Tensor, slope: Tensor) -> Tensor:
    """Return p . slope of every edge."""
    p, slope = p.contiguous(), slope.contiguous()
    out = p.new_empty(p.shape[0])
    if p.numel():
        rows_product[(triton.cdiv(len(p), ROWS),)](
            p, slope, out, len(p), WIDTH=p.shape[1], ROWS=ROWS,
            FULL=triton.next_power_of_2(p.shape[1]), WIDE=p.dtype == torch.float64,
        )  # fmt: skip
    return out if p.numel() else out.zero_()


@custom_op(
    "radial_network_backward",
    fake=lambda r, w1, w2, w3, by_r: (
        r.new_empty(r.shape[0] if by_r else 0),
        *empty_gradients(r, w1, w2, w3),
    ),
)
def backward(
    p: Tensor,
    q: Tensor,
    r: Tensor,
    w: Tensor,
    c: Tensor,
    r_max: Tensor,
    w1: Tensor,
    w2: Tensor,
    w3: Tensor,
    order: int,
    by_r: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients with respect to r (empty if not requested) and the weights."""
    p, q, r, w, c, r_max, w1, w2, w3 = (t.contiguous() for t in (p, q, r, w, c, r_max, w1, w2, w3))
    found = r.new_zeros(r.shape[0] if by_r else 0)
    top, bottom = _programs("top", r), _programs("bottom", r)
    upper = r.new_zeros(top[0], w3.numel())
    lower = r.new_zeros(bottom[0], w1.numel() + w2.numel())
    if r.numel() and w1.numel() and w2.numel() and w3.numel():
        c_2, d_2 = (r.new_empty(r.shape[0], w2.shape[1]) for _ in range(2))
        sizes, kind = _sizes(w1, w2, w3), precision(r)
        shared: dict[str, Any] = {"ORDER": order, "ROWS": ROWS, "PRECISION": kind}
        radial_network_top[top](
            p, q, r, w, c, r_max, w1, w2, w3, c_2, d_2, upper, len(r),
            **sizes, **shared, num_warps=WARPS["top"], num_stages=STAGES["top"],
        )  # fmt: skip
        sizes.pop("H3")
        radial_network_bottom[bottom](
            c_2, d_2, r, w, c, r_max, w1, w2, found if by_r else c_2, lower, len(r),
            **sizes, **shared, BY_R=by_r, num_warps=WARPS["bottom"],
            num_stages=STAGES["bottom"],
        )  # fmt: skip
    first, second = torch.sum(lower, 0).split([w1.numel(), w2.numel()])
    # Copies, because the results of a custom operator must not share memory.
    by_w1, by_w2 = first.clone().view_as(w1), second.clone().view_as(w2)
    return found, by_w1, by_w2, torch.sum(upper, 0).view_as(w3)


def _forward_gradients(
    p: Tensor | None,
    q: Tensor | None,
    r: Tensor,
    w: Tensor,
    c: Tensor,
    r_max: Tensor,
    w1: Tensor,
    w2: Tensor,
    w3: Tensor,
    slope: Tensor,
    order: int,
    needs: list[bool],
) -> tuple[Tensor | None, ...]:
    by_r = None
    if needs[0]:
        # q is present only for second derivatives in the lengths: forces need the slope alone.
        by_r = along(p, slope) if p is not None else None
    if q is None and not any(needs[1:]):
        return by_r, None, None, None
    curved = q is not None and needs[0]
    like = slope if p is None else p
    p, q = (torch.zeros_like(like) if t is None else t for t in (p, q))
    found, *of_weights = backward(p, q, r, w, c, r_max, w1, w2, w3, order, curved)
    return found if curved else by_r, *of_weights


def _along_gradients(
    u: Tensor, p: Tensor, slope: Tensor, needs: list[bool]
) -> tuple[Tensor | None, ...]:
    factor = u.unsqueeze(1)
    return factor * slope if needs[0] else None, factor * p if needs[1] else None


def _backward_gradients(
    dr: Tensor | None,
    dw1: Tensor | None,
    dw2: Tensor | None,
    dw3: Tensor | None,
    p: Tensor,
    q: Tensor,
    r: Tensor,
    w: Tensor,
    c: Tensor,
    r_max: Tensor,
    w1: Tensor,
    w2: Tensor,
    w3: Tensor,
    order: int,
    by_r: bool,
) -> tuple[Tensor, ...]:
    """Differentiate the plain network once more, differentiably to any order."""

    def gradients(p: Tensor, q: Tensor, r: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        def both(r: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor]:
            def network(r: Tensor) -> Tensor:
                return plain(r, w, c, r_max, order, weights)

            h, slope, *_ = torch.func.jvp(network, (r,), (torch.ones_like(r),))
            return h, slope

        found, *of_weights = torch.func.vjp(both, r, *weights)[1]((p, q))
        return (found if by_r else found[:0], *of_weights)

    made, pull, *_ = torch.func.vjp(gradients, p, q, r, w1, w2, w3)
    cotangents = zip(made, (dr, dw1, dw2, dw3), strict=True)
    found: tuple[Tensor, ...] = pull(
        tuple(torch.zeros_like(like) if given is None else given for like, given in cotangents)
    )
    return found


forward.gradients("r w1 w2 w3", _forward_gradients)
along.gradients("p slope", _along_gradients)
backward.gradients("p q r w1 w2 w3", _backward_gradients)


def _programs(kind: str, r: Tensor) -> tuple[int]:
    """Return the grid: programs that share the blocks of edges."""
    blocks = int(triton.cdiv(len(r), ROWS))
    return (max(1, min(blocks, PROGRAMS[kind] if r.is_cuda else 2)),)


def _sizes(w1: Tensor, w2: Tensor, w3: Tensor) -> dict[str, int]:
    """Name the widths of all layers and their padded sizes."""
    widest = max(w1.shape[1], w2.shape[1], w3.shape[1])
    full = max(16, int(triton.next_power_of_2(widest)))
    return {
        "B": w1.shape[0], "H1": w1.shape[1], "H2": w2.shape[1], "H3": w3.shape[1],
        "FULL_B": max(16, int(triton.next_power_of_2(w1.shape[0]))), "FULL": full,
    }  # fmt: skip
