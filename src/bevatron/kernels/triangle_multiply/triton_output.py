"""Kernels of what follows the contraction: LayerNorm, output projection and gate.

The contraction's result and its gradient lie with channels outermost, the pair with rows; see
`triton_project`.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import triton
import triton.language as tl

from bevatron.kernels.layer_norm.triton_kernels import load_vector, logistic
from bevatron.kernels.triangle_multiply.triton_project import (
    affine,
    column,
    load_bias,
    load_channels,
    load_matrix,
    load_rows,
    norm_backward,
    scaled,
    store_channels,
    store_rows,
    store_share,
)


@triton.jit
def load_cols(Z, row, count, first, C: tl.constexpr, BLOCK_C: tl.constexpr):
    """Load channels ``first .. first + BLOCK_C`` of rows that follow each other, zero outside."""
    col = first + tl.arange(0, BLOCK_C)
    keep = (row < count)[:, None]
    if C % BLOCK_C != 0:
        keep = keep & (col < C)[None, :]
    return tl.load(Z + row[:, None] * C + col[None, :], mask=keep, other=0.0)


@triton.jit
def output_kernel(
    X, Z, NormWeight, NormBias, InWeight, InBias, Weight, Gate, Bias, GateBias, Mean, Rstd,
    InMean, InRstd, Y, count, n1, n2, z_0, z_1, z_2, eps, N, N_pad, plane,
    C: tl.constexpr, C_PAD: tl.constexpr, H: tl.constexpr, H_PAD: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_H: tl.constexpr, AXES: tl.constexpr, HAS_BIAS: tl.constexpr,
    PADDED: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK rows of the result, and the statistics of the contraction's rows."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = row < count
    col = column(row, N, N_pad, PADDED)
    x = load_channels(X, 0, H, col, inside, plane, H_PAD, H == H_PAD)
    x = tl.trans(x).to(tl.float32)
    mean = tl.sum(x, 1) / H
    centred = x - mean[:, None]
    if H != H_PAD:
        centred = tl.where((tl.arange(0, H_PAD) < H)[None, :], centred, 0.0)
    rstd = 1.0 / tl.sqrt_rn(tl.sum(centred * centred, 1) / H + eps)
    tl.store(Mean + row, mean, mask=inside)
    tl.store(Rstd + row, rstd, mask=inside)
    xn = affine(centred * rstd[:, None], NormWeight, NormBias, H, H_PAD).to(X.dtype.element_ty)
    in_mean = tl.load(InMean + row, mask=inside, other=0.0)
    in_rstd = tl.load(InRstd + row, mask=inside, other=0.0)
    z = load_rows(Z, row, count, n1, n2, z_0, z_1, z_2, C, C_PAD, AXES)
    normed = affine(scaled(z, in_mean, in_rstd, C, C_PAD), InWeight, InBias, C, C_PAD)
    normed = normed.to(Z.dtype.element_ty)
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
    InMean, InRstd, DX, DN, Parts, count, n1, n2, z_0, z_1, z_2, N, N_pad, plane,
    C: tl.constexpr, C_PAD: tl.constexpr, H: tl.constexpr, H_PAD: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_H: tl.constexpr, AXES: tl.constexpr, HAS_BIAS: tl.constexpr,
    PADDED: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the contraction's gradient, and in DN the gate's part of that of the pair's norm."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = row < count
    col = column(row, N, N_pad, PADDED)
    mean = tl.load(Mean + row, mask=inside, other=0.0)
    rstd = tl.load(Rstd + row, mask=inside, other=0.0)
    x = tl.trans(load_channels(X, 0, H, col, inside, plane, H_PAD, H == H_PAD))
    xn = affine(scaled(x, mean, rstd, H, H_PAD), NormWeight, NormBias, H, H_PAD)
    xn = xn.to(X.dtype.element_ty)
    in_mean = tl.load(InMean + row, mask=inside, other=0.0)
    in_rstd = tl.load(InRstd + row, mask=inside, other=0.0)
    z = load_rows(Z, row, count, n1, n2, z_0, z_1, z_2, C, C_PAD, AXES)
    normed = affine(scaled(z, in_mean, in_rstd, C, C_PAD), InWeight, InBias, C, C_PAD)
    normed = normed.to(Z.dtype.element_ty)
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
        d = load_cols(DY, row, count, h, C, BLOCK_H).to(tl.float32) * s
        g = tl.dot(d.to(xn.dtype), weight, g, input_precision=PRECISION)
        d *= value * (1.0 - s)
        dn = tl.dot(d.to(xn.dtype), gate_weight, dn, input_precision=PRECISION)
    store_rows(DN, row, count, dn, C, C_PAD)
    x = tl.trans(load_channels(X, 0, H, col, inside, plane, H_PAD, H == H_PAD))
    xhat = scaled(x, mean, rstd, H, H_PAD)
    dx = norm_backward(g, xhat, rstd, inside, NormWeight, Parts, H, H_PAD)
    store_channels(DX, 0, H, col, inside, plane, tl.trans(dx), H_PAD, H == H_PAD)


@triton.jit
def output_weight_kernel(
    DY, X, Z, NormWeight, NormBias, InWeight, InBias, Weight, Gate, Bias, GateBias, Mean, Rstd,
    InMean, InRstd, Parts, GateParts, BiasParts, count, rows_per_part,
    n1, n2, z_0, z_1, z_2, N, N_pad, plane,
    C: tl.constexpr, C_PAD: tl.constexpr, H: tl.constexpr, H_PAD: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_H: tl.constexpr, AXES: tl.constexpr, HAS_BIAS: tl.constexpr,
    PADDED: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute one part's share of the gradients of both weights for BLOCK_H channels of the result.

    Parts is [part, C, H], GateParts [part, C, C], BiasParts [part, 2, C].
    """
    h = tl.program_id(0) * BLOCK_H
    FULL: tl.constexpr = C % BLOCK_H == 0
    start = tl.program_id(1).to(tl.int64) * rows_per_part
    last = tl.minimum(start + rows_per_part, count)
    weight = load_matrix(Weight, h, C, H, H_PAD, BLOCK_H, FULL)
    gate_weight = load_matrix(Gate, h, C, C, C_PAD, BLOCK_H, FULL)
    dweight = tl.zeros([BLOCK_H, H_PAD], tl.float32)
    dgate = tl.zeros([BLOCK_H, C_PAD], tl.float32)
    norm_weight = tl.trans(load_vector(NormWeight, tl.arange(0, H_PAD), H))
    norm_bias = tl.trans(load_vector(NormBias, tl.arange(0, H_PAD), H))
    if HAS_BIAS:
        bias = load_bias(Bias, h, C, BLOCK_H)[:, None]
        gate_bias = load_bias(GateBias, h, C, BLOCK_H)[:, None]
        dbias = tl.zeros([BLOCK_H], tl.float32)
        dgate_bias = tl.zeros([BLOCK_H], tl.float32)
    for first in tl.range(start, last, BLOCK, num_stages=STAGES):
        # Rows behind the last have dy = 0: whatever else they hold, they add nothing.
        row = first + tl.arange(0, BLOCK)
        inside = row < last
        mean = tl.load(Mean + row, mask=inside, other=0.0)
        rstd = tl.load(Rstd + row, mask=inside, other=0.0)
        col = column(row, N, N_pad, PADDED)
        x = load_channels(X, 0, H, col, inside, plane, H_PAD, H == H_PAD).to(tl.float32)
        xn = (x - mean[None, :]) * rstd[None, :] * norm_weight + norm_bias
        xn = xn.to(X.dtype.element_ty)
        in_mean = tl.load(InMean + row, mask=inside, other=0.0)
        in_rstd = tl.load(InRstd + row, mask=inside, other=0.0)
        z = load_rows(Z, row, last, n1, n2, z_0, z_1, z_2, C, C_PAD, AXES)
        normed = affine(scaled(z, in_mean, in_rstd, C, C_PAD), InWeight, InBias, C, C_PAD)
        normed = normed.to(Z.dtype.element_ty)
        value = tl.dot(weight, xn, input_precision=PRECISION)
        gate = tl.dot(gate_weight, tl.trans(normed), input_precision=PRECISION)
        if HAS_BIAS:
            value += bias
            gate += gate_bias
        s = logistic(gate)
        d = tl.trans(load_cols(DY, row, last, h, C, BLOCK_H)).to(tl.float32) * s
        dweight = tl.dot(d.to(xn.dtype), tl.trans(xn), dweight, input_precision=PRECISION)
        if HAS_BIAS:
            dbias += tl.sum(d, 1)
        d *= value * (1.0 - s)
        dgate = tl.dot(d.to(xn.dtype), normed, dgate, input_precision=PRECISION)
        if HAS_BIAS:
            dgate_bias += tl.sum(d, 1)
    store_share(Parts, 0, 1, h, dweight, C, H, H_PAD, BLOCK_H)
    store_share(GateParts, 0, 1, h, dgate, C, C, C_PAD, BLOCK_H)
    if HAS_BIAS:
        i = h + tl.arange(0, BLOCK_H)
        at = BiasParts + tl.program_id(1).to(tl.int64) * 2 * C + i
        tl.store(at, dbias, mask=i < C)
        tl.store(at + C, dgate_bias, mask=i < C)
