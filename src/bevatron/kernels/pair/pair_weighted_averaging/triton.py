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
    # Autocast leaves a softmax in float32.
    tensors = v, gate, weights.to(v.dtype)
    given = [x.flatten(0, -4) if x.ndim > 3 else x[None] for x in tensors]
    out: Tensor = averaged(*given)
    return out.view(v.shape)


@custom_op("pair_weighted_averaging", outputs="out", fake="v")
def averaged(v: Tensor, gate: Tensor, weights: Tensor) -> Tensor:
    """Return the gated averages."""
    v, gate = _readable(v), _readable(gate)
    out = v.new_empty(v.shape)
    _turn_back(torch.matmul(weights, _turned(v, weights)), out, gate)
    return out


@custom_op("pair_weighted_averaging_backward", fake="v gate weights")
def averaged_backward(
    dout: Tensor, v: Tensor, gate: Tensor, weights: Tensor, out: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of v, gate and weights."""
    dturned, dweights = _behind_gate(dout, v, gate, weights)
    dv, dgate = v.new_empty(v.shape), gate.new_empty(gate.shape)
    _turn_back(dturned, dv, _readable(gate), (dgate, out, dout.contiguous()))
    return dv, dgate, dweights


def _gradients(
    dout: Tensor, v: Tensor, gate: Tensor, weights: Tensor, out: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients, those of v and gate side by side, so that nothing has to join them.

    What a custom operator returns must not lie in one piece of memory, so where torch watches they
    lie apart.
    """
    given = (dout, v, gate, weights, out)
    if torch.is_grad_enabled() or is_watched(given):
        found: tuple[Tensor, Tensor, Tensor] = averaged_backward(*given)
        return found
    dturned, dweights = _behind_gate(dout, v, gate, weights)
    dv, dgate = v.new_empty((*v.shape[:3], 2, v.shape[3])).unbind(3)
    _turn_back(dturned, dv, _readable(gate), (dgate, out, dout.contiguous()))
    return dv, dgate, dweights


averaged.gradients("v gate weights", _gradients)


def _behind_gate(dout: Tensor, v: Tensor, gate: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of turned values and of weights; nothing else is left in memory."""
    gated = _turned(dout.contiguous(), weights, _readable(gate))
    dweights = torch.matmul(gated, _turned(_readable(v), weights).mT)
    return torch.matmul(weights.mT, gated), dweights


def _readable(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _turned(x: Tensor, weights: Tensor, gate: Tensor | None = None) -> Tensor:
    """Return rows, with a gate their gradient behind it, as [B, H, N, S D]."""
    (B, S, N, C), H = x.shape, weights.shape[1]
    turned = x.new_empty((B, H, N, S * (C // H)))
    (given,) = pointers(x, gate)
    _prepare(x, given, H, gate is not None, True)(x, given, turned)
    return turned


def _turn_back(
    turned: Tensor, x: Tensor, gate: Tensor, backward: tuple[Tensor, Tensor, Tensor] | None = None
) -> None:
    """Write gated rows from what is [B, H, N, S D].

    Or the gradient of rows without a gate, and beside it that of the gate: ``backward`` has its
    place, the result and the result's gradient.
    """
    launch = _prepare(x, gate, turned.shape[1], backward is None, False)
    launch(x, gate, turned, *(backward or (x, x, x)))


@per_layout
def _prepare(x: Tensor, gate: Tensor, heads: int, is_gated: bool, turns: bool) -> Launch:
    B, S, N, C = x.shape
    block_c = 1 << max(C - 1, 0).bit_length()
    block = max(1, ELEMENTS // block_c)
    return Launch(
        turn_kernel if turns else turn_back_kernel,
        (-(-S // block), N, B) if C else (0,),
        (*x.stride()[:3], *gate.stride()[:3], S, N),
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
    return s.to(tl.int64)[:, None], c[None, :], (s < S)[:, None] & (c < C)[None, :], turned


@triton.jit
def turn_kernel(
    X, Gate, Turned, x_B, x_S, x_N, g_B, g_S, g_N, S, N,
    C: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_C: tl.constexpr,
    GATED: tl.constexpr,
):  # fmt: skip
    """Turn a block of rows; GATED: of gradients, to those behind the gate."""
    n, b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    s, c, inside, turned = place_of(S, N, C, D, BLOCK, BLOCK_C)
    # [BLOCK, BLOCK_C]
    x = tl.load(X + b * x_B + n * x_N + s * x_S + c, mask=inside, other=0.0)
    if GATED:
        at = Gate + b * g_B + n * g_N + s * g_S + c
        g = tl.load(at, mask=inside, other=0.0).to(tl.float32)  # [BLOCK, BLOCK_C]
        x = (x.to(tl.float32) * logistic(g)).to(x.dtype)
    tl.store(Turned + turned, x, mask=inside)


@triton.jit
def turn_back_kernel(
    X, Gate, Turned, DGate, Out, DOut, x_B, x_S, x_N, g_B, g_S, g_N, S, N,
    C: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_C: tl.constexpr,
    GATED: tl.constexpr,
):  # fmt: skip
    """Turn a block back and apply the gate; not GATED: write the gradient of the gate beside it."""
    n, b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    s, c, inside, turned = place_of(S, N, C, D, BLOCK, BLOCK_C)
    x = tl.load(Turned + turned, mask=inside, other=0.0)  # [BLOCK, BLOCK_C]
    of_gate = Gate + b * g_B + n * g_N + s * g_S + c
    g = tl.load(of_gate, mask=inside, other=0.0).to(tl.float32)  # [BLOCK, BLOCK_C]
    at = b * x_B + n * x_N + s * x_S + c
    if GATED:
        x = (x.to(tl.float32) * logistic(g)).to(x.dtype)
    else:
        of_result = ((b * S + s) * N + n) * C + c
        o = tl.load(Out + of_result, mask=inside, other=0.0).to(tl.float32)  # [BLOCK, BLOCK_C]
        do = tl.load(DOut + of_result, mask=inside, other=0.0).to(tl.float32)  # [BLOCK, BLOCK_C]
        dgate = o * do * sigmoids(g)[1]
        tl.store(DGate + at, dgate.to(DGate.dtype.element_ty), mask=inside)
    tl.store(X + at, x, mask=inside)
