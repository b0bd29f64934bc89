"""Pair-weighted averaging: matmuls of cuBLAS between kernels that turn rows.

For the matmul of a head its values lie as [N, S D], all rows side by side. The kernels that bring
them there and back also apply the gate or its gradient.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from bevatron.kernels.shared.custom_op import custom_op
from bevatron.kernels.shared.launch import pointers
from bevatron.kernels.shared.layouts import per_layout
from bevatron.kernels.shared.triton_launch import Launch
from bevatron.kernels.shared.triton_math import logistic, sigmoids

ELEMENTS = 4096
"""Of a block."""


def pair_weighted_averaging(v: Tensor, gate: Tensor, weights: Tensor) -> Tensor:
    """Compute the same as the reference; see `bevatron.kernels.pair.pair_weighted_averaging`."""
    given = [x.flatten(0, -4) if x.ndim > 3 else x[None] for x in (v, gate, weights)]
    out: Tensor = averaged(*given)
    return out.view(v.shape)


@custom_op("pair_weighted_averaging", outputs="out", fake="v")
def averaged(v: Tensor, gate: Tensor, weights: Tensor) -> Tensor:
    """Return the gated averages."""
    v, gate = _readable(v), _readable(gate)
    (B, S, N, C), H = v.shape, weights.shape[1]
    turned, out = v.new_empty((B, H, N, S * (C // H))), v.new_empty(v.shape)
    _turn(v, turned)
    _turn_back(torch.matmul(weights, turned), out, gate)
    return out


def _new_gradients(v: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    return v.new_empty((*v.shape[:3], 2, v.shape[3])), weights.new_empty(weights.shape)


@averaged.backward(
    of="v gate weights",
    fake=_new_gradients,
    unpack=lambda joint, dweights: (*joint.unbind(3), dweights),
)
def averaged_backward(
    dout: Tensor, v: Tensor, gate: Tensor, weights: Tensor, out: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of v and gate side by side, so that nothing joins them; of weights."""
    dout, gate = dout.contiguous(), _readable(gate)
    (B, S, N, C), H = v.shape, weights.shape[1]
    D = C // H
    joint = _new_gradients(v, weights)[0]
    dv, dgate = joint.unbind(3)
    # Until the gradients are written, what is turned lies in their place.
    turned, gated = joint.view(2, B, H, N, S * D)
    _turn(_readable(v), turned)
    _turn(dout, gated, gate)
    dweights = torch.matmul(gated, turned.mT)
    # The first half of one sample's rows ends before `gated` begins.
    for rows in (slice(S // 2), slice(S // 2, S)) if B == 1 else (slice(S),):
        of_rows = gated.unflatten(-1, (S, D))[..., rows, :].flatten(-2)
        backward = dgate[:, rows], out[:, rows], dout[:, rows]
        _turn_back(torch.matmul(weights.mT, of_rows), dv[:, rows], gate[:, rows], backward)
    return joint, dweights


def _readable(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _turn(x: Tensor, turned: Tensor, gate: Tensor | None = None) -> None:
    """Write rows, with a gate their gradient behind it, as [B, H, N, S D]."""
    (given,) = pointers(x, gate)
    _prepare(x, given, turned.shape[1], gate is not None, True)(x, given, turned)


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
