"""Pair-weighted averaging: matmuls of cuBLAS between kernels that turn rows.

For the matmul of a head its values lie as [N, S D], all rows side by side. The kernels that bring
them there and back also apply the gate or its gradient.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from bevatron.kernels.shared.custom_op import custom_op, is_watched
from bevatron.kernels.shared.launch import pointers
from bevatron.kernels.shared.layouts import per_layout
from bevatron.kernels.shared.triton_launch import Launch
from bevatron.kernels.shared.triton_math import logistic, sigmoids

ELEMENTS = 4096
"""Of a block."""


def pair_weighted_averaging(v: Tensor, gate: Tensor, weights: Tensor) -> Tensor:
    """Compute the same as the reference; see `bevatron.kernels.pair.pair_weighted_averaging`."""
    rows = [x.reshape(-1, *x.shape[-3:]) for x in (v, gate, weights)]
    out: Tensor = averaged(*rows)[0]
    return out.view(v.shape)


def _new_turned(v: Tensor, weights: Tensor) -> Tensor:
    (B, S, N, C), H = v.shape, weights.shape[1]
    return v.new_empty((B, H, N, S * (C // H)))


@custom_op(
    "pair_weighted_averaging",
    outputs="out turned",
    fake=lambda v, weights: (v.new_empty(v.shape), _new_turned(v, weights)),
)
def averaged(v: Tensor, gate: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return the result, and the values as [B, H, N, S D]."""
    v, gate = _readable(v), _readable(gate)
    turned, out = _new_turned(v, weights), v.new_empty(v.shape)
    _turn(v, turned)
    _turn_back(torch.matmul(weights, turned), out, gate)
    return out, turned


@custom_op("pair_weighted_averaging_backward", fake="gate gate weights")
def averaged_backward(
    dout: Tensor, gate: Tensor, weights: Tensor, out: Tensor, turned: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of v, gate and weights."""
    dv, dgate = gate.new_empty(gate.shape), gate.new_empty(gate.shape)
    return dv, dgate, _write_gradients(dout, gate, weights, out, turned, dv, dgate)


def _gradients(
    dout: Tensor, gate: Tensor, weights: Tensor, out: Tensor, turned: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients, those of v and gate side by side, so that nothing has to join them.

    What a custom operator returns must not lie in one piece of memory, so where torch watches they
    lie apart.
    """
    given = (dout, gate, weights, out, turned)
    if torch.is_grad_enabled() or is_watched(given):
        found: tuple[Tensor, Tensor, Tensor] = averaged_backward(*given)
        return found
    dv, dgate = gate.new_empty((*gate.shape[:3], 2, gate.shape[3])).unbind(3)
    return dv, dgate, _write_gradients(*given, dv, dgate)


averaged.gradients("v gate weights", _gradients)


def _write_gradients(
    dout: Tensor,
    gate: Tensor,
    weights: Tensor,
    out: Tensor,
    turned: Tensor,
    dv: Tensor,
    dgate: Tensor,
) -> Tensor:
    """Write the gradients of v and gate; return that of the weights."""
    gated = torch.empty_like(turned)
    _turn(dout.contiguous(), gated, _readable(gate), out, dgate)
    _turn_back(torch.matmul(weights.mT, gated), dv)
    return torch.matmul(gated, turned.mT)


def _readable(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _turn(
    x: Tensor,
    turned: Tensor,
    gate: Tensor | None = None,
    out: Tensor | None = None,
    dgate: Tensor | None = None,
) -> None:
    """Write rows, with a gate their gradient behind it, as [B, H, N, S D]."""
    given = pointers(x, gate, out, dgate)
    sides = x, given[0], given[2]
    _prepare(*sides, turned.shape[1], gate is not None)(x, *given, turned)


def _turn_back(turned: Tensor, x: Tensor, gate: Tensor | None = None) -> None:
    """Write rows from what is [B, H, N, S D], with a gate behind it."""
    (given,) = pointers(x, gate)
    _prepare(x, given, None, turned.shape[1], gate is not None)(x, given, turned)


@per_layout
def _prepare(x: Tensor, gate: Tensor, dgate: Tensor | None, heads: int, is_gated: bool) -> Launch:
    """Prepare the kernel that turns rows, or without ``dgate`` the one that turns them back."""
    B, S, N, C = x.shape
    block_c = 1 << max(C - 1, 0).bit_length()
    block = max(1, ELEMENTS // block_c)
    sides = (x, gate) if dgate is None else (x, gate, dgate)
    strides = [step for each in sides for step in each.stride()[:3]]
    return Launch(
        turn_back_kernel if dgate is None else turn_kernel,
        (-(-S // block), N, B) if C else (0,),
        (*strides, S, N),
        C=C,
        D=max(1, C // heads),
        BLOCK=block,
        BLOCK_C=block_c,
        GATED=is_gated,
    )


@triton.jit
def place_of(S, N, C: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_C: tl.constexpr):
    """Return rows and channels of a program's block, and where they lie when turned."""
    n, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    s = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    c = tl.arange(0, BLOCK_C)
    head = (b * (C // D) + c // D) * N + n
    turned = (head * S)[None, :] * D + s[:, None] * D + (c % D)[None, :]
    return s[:, None], c[None, :], (s < S)[:, None] & (c < C)[None, :], turned


@triton.jit
def turn_kernel(
    X, Gate, Out, DGate, Turned, x_B, x_S, x_N, g_B, g_S, g_N, d_B, d_S, d_N, S, N,
    C: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_C: tl.constexpr,
    GATED: tl.constexpr,
):  # fmt: skip
    """Turn a block of rows; GATED: of gradients, through the gate, whose gradient it writes."""
    n, b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    s, c, inside, turned = place_of(S, N, C, D, BLOCK, BLOCK_C)
    at = b * x_B + n * x_N + s.to(tl.int64) * x_S + c
    x = tl.load(X + at, mask=inside, other=0.0)  # [BLOCK, BLOCK_C]
    if GATED:
        of_gate = b * g_B + n * g_N + s.to(tl.int64) * g_S + c
        g = tl.load(Gate + of_gate, mask=inside, other=0.0).to(tl.float32)  # [BLOCK, BLOCK_C]
        o = tl.load(Out + at, mask=inside, other=0.0).to(tl.float32)  # [BLOCK, BLOCK_C]
        opened, closed = sigmoids(g)
        dgate = x.to(tl.float32) * o * closed
        of_dgate = b * d_B + n * d_N + s.to(tl.int64) * d_S + c
        tl.store(DGate + of_dgate, dgate.to(DGate.dtype.element_ty), mask=inside)
        x = (x.to(tl.float32) * opened).to(x.dtype)
    tl.store(Turned + turned, x, mask=inside)


@triton.jit
def turn_back_kernel(
    X, Gate, Turned, x_B, x_S, x_N, g_B, g_S, g_N, S, N,
    C: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_C: tl.constexpr,
    GATED: tl.constexpr,
):  # fmt: skip
    """Turn a block back, and apply the gate."""
    n, b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    s, c, inside, turned = place_of(S, N, C, D, BLOCK, BLOCK_C)
    x = tl.load(Turned + turned, mask=inside, other=0.0)  # [BLOCK, BLOCK_C]
    if GATED:
        of_gate = b * g_B + n * g_N + s.to(tl.int64) * g_S + c
        g = tl.load(Gate + of_gate, mask=inside, other=0.0).to(tl.float32)  # [BLOCK, BLOCK_C]
        x = (x.to(tl.float32) * logistic(g)).to(x.dtype)
    tl.store(X + b * x_B + n * x_N + s.to(tl.int64) * x_S + c, x, mask=inside)
