"""Kernels of what follows the contraction: LayerNorm, output projection and gate.

The contraction's result and its gradient lie with channels outermost, the pair with rows; see
`triton_project`.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import triton
import triton.language as tl

from bevatron.kernels.pair.triangle_multiply.triton_project import (
    affine,
    beside,
    identity,
    in_registers,
    load_bias,
    load_channels,
    load_matrix,
    load_rows,
    norm_backward,
    places,
    scaled,
    store_channels,
    store_pair,
    store_rows,
    turned,
)
from bevatron.kernels.shared.triton_math import logistic


@triton.jit
def load_cols(Z, row, inside, first, C: tl.constexpr, BLOCK_C: tl.constexpr):
    """Load channels ``first .. first + BLOCK_C`` of rows that follow each other, zero outside."""
    col = first + tl.arange(0, BLOCK_C)
    keep = inside[:, None]
    if C % BLOCK_C != 0:
        keep = keep & (col < C)[None, :]
    return tl.load(Z + row[:, None] * C + col[None, :], mask=keep, other=0.0)


@triton.jit
def output_kernel(
    X, Z, NormWeight, NormBias, InWeight, InBias, Weight, Gate, Bias, GateBias, Mean, Rstd,
    InMean, InRstd, Y, n1, n2, z_0, z_1, z_2, eps, N, N_pad, plane,
    C: tl.constexpr, C_PAD: tl.constexpr, H: tl.constexpr, H_PAD: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_H: tl.constexpr, AXES: tl.constexpr, HAS_BIAS: tl.constexpr,
    PADDED: tl.constexpr, STAGES: tl.constexpr, HOLD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK rows of the result, and the statistics of the contraction's rows."""
    first = tl.program_id(0).to(tl.int64) * BLOCK
    col, row, inside = places(first, N, N_pad, plane, BLOCK, PADDED)
    x = load_channels(X, 0, H, col, plane, H_PAD, H == H_PAD)
    x = tl.trans(x).to(tl.float32)
    mean = tl.sum(x, 1) / H
    centred = x - mean[:, None]
    if H != H_PAD:
        centred = tl.where((tl.arange(0, H_PAD) < H)[None, :], centred, 0.0)
    rstd = tl.rsqrt(tl.sum(centred * centred, 1) / H + eps)
    tl.store(Mean + row, mean, mask=inside)
    tl.store(Rstd + row, rstd, mask=inside)
    xn = affine(centred * rstd[:, None], NormWeight, NormBias, H, H_PAD)
    xn = in_registers(xn.to(X.dtype.element_ty), H_PAD, HOLD)
    in_mean = tl.load(InMean + row, mask=inside, other=0.0)
    in_rstd = tl.load(InRstd + row, mask=inside, other=0.0)
    z = load_rows(Z, row, inside, n1, n2, z_0, z_1, z_2, C, C_PAD, AXES)
    normed = affine(scaled(z, in_mean, in_rstd, C, C_PAD), InWeight, InBias, C, C_PAD)
    normed = in_registers(normed.to(Z.dtype.element_ty), C_PAD, HOLD)
    FULL: tl.constexpr = C % BLOCK_H == 0
    for h in tl.range(0, C, BLOCK_H, num_stages=STAGES):
        weight = load_matrix(Weight, h, C, H, H_PAD, BLOCK_H, FULL)
        y = tl.dot(xn, tl.trans(weight), input_precision=PRECISION)
        weight = load_matrix(Gate, h, C, C, C_PAD, BLOCK_H, FULL)
        gate = tl.dot(normed, tl.trans(weight), input_precision=PRECISION)
        if HAS_BIAS:
            y += load_bias(Bias, h, C, BLOCK_H)[None, :]
            gate += load_bias(GateBias, h, C, BLOCK_H)[None, :]
        y *= logistic(gate)
        out = h + tl.arange(0, BLOCK_H)
        keep = inside[:, None]
        if not FULL:
            keep = keep & (out < C)[None, :]
        tl.store(Y + row[:, None] * C + out[None, :], y.to(Y.dtype.element_ty), mask=keep)


@triton.jit
def output_input_kernel(
    DY, X, Z, NormWeight, NormBias, InWeight, InBias, Weight, Gate, Bias, GateBias, Mean, Rstd,
    InMean, InRstd, DX, DN, Behind, n1, n2, z_0, z_1, z_2, N, N_pad, plane,
    C: tl.constexpr, C_PAD: tl.constexpr, H: tl.constexpr, H_PAD: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_H: tl.constexpr, AXES: tl.constexpr, HAS_BIAS: tl.constexpr,
    PADDED: tl.constexpr, STAGES: tl.constexpr, HOLD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the contraction's gradient, and in DN the gate's part of that of the pair's norm.

    In Behind, channels outermost, are left the gradients behind both linear layers, one after the
    other.
    """
    first = tl.program_id(0).to(tl.int64) * BLOCK
    col, row, inside = places(first, N, N_pad, plane, BLOCK, PADDED)
    mean = tl.load(Mean + row, mask=inside, other=0.0)
    rstd = tl.load(Rstd + row, mask=inside, other=0.0)
    x = tl.trans(load_channels(X, 0, H, col, plane, H_PAD, H == H_PAD))
    if PADDED:
        x = tl.where(inside[:, None], x, 0.0)
    xn = affine(scaled(x, mean, rstd, H, H_PAD), NormWeight, NormBias, H, H_PAD)
    xn = in_registers(xn.to(X.dtype.element_ty), H_PAD, HOLD)
    in_mean = tl.load(InMean + row, mask=inside, other=0.0)
    in_rstd = tl.load(InRstd + row, mask=inside, other=0.0)
    z = load_rows(Z, row, inside, n1, n2, z_0, z_1, z_2, C, C_PAD, AXES)
    normed = affine(scaled(z, in_mean, in_rstd, C, C_PAD), InWeight, InBias, C, C_PAD)
    normed = in_registers(normed.to(Z.dtype.element_ty), C_PAD, HOLD)
    g = tl.zeros([BLOCK, H_PAD], tl.float32)
    dn = tl.zeros([BLOCK, C_PAD], tl.float32)
    FULL: tl.constexpr = C % BLOCK_H == 0
    for h in tl.range(0, C, BLOCK_H, num_stages=STAGES):
        weight = load_matrix(Weight, h, C, H, H_PAD, BLOCK_H, FULL)
        value = tl.dot(xn, tl.trans(weight), input_precision=PRECISION)
        gate_weight = load_matrix(Gate, h, C, C, C_PAD, BLOCK_H, FULL)
        gate = tl.dot(normed, tl.trans(gate_weight), input_precision=PRECISION)
        if HAS_BIAS:
            value += load_bias(Bias, h, C, BLOCK_H)[None, :]
            gate += load_bias(GateBias, h, C, BLOCK_H)[None, :]
        s = logistic(gate)
        d = load_cols(DY, row, inside, h, C, BLOCK_H).to(tl.float32) * s
        dout = d.to(xn.dtype)
        dgate = (d * value * (1.0 - s)).to(xn.dtype)
        g = tl.dot(dout, weight, g, input_precision=PRECISION)
        dn = tl.dot(dgate, gate_weight, dn, input_precision=PRECISION)
        both = beside(dout, dgate, BLOCK, BLOCK_H)
        store_pair(Behind, h, C, C, col, plane, both, BLOCK_H, FULL)
    # Loaded before anything is stored: what waits for it comes last.
    HALF: tl.constexpr = H_PAD // 2
    x = load_channels(X, 0, H, col, plane, HALF, H == H_PAD)
    more = load_channels(X, HALF, H, col, plane, HALF, H == H_PAD)
    store_rows(DN, row, inside, dn, C, C_PAD)
    eye = identity(HALF, X.dtype.element_ty)
    x = beside(turned(x, eye), turned(more, eye), BLOCK, HALF)
    xhat = scaled(x, mean, rstd, H, H_PAD)
    dx = norm_backward(g, xhat, rstd, NormWeight, H, H_PAD)
    store_channels(DX, 0, H, col, plane, tl.trans(dx), H_PAD, H == H_PAD)
