"""Triangle multiplication after the contraction: ``sigmoid(Wg n) (Wo LayerNorm(x))``, and backward.

The update may be dropped by a mask, and the pair added to it.

x, the result of the contraction, and its gradient are channel-first [H, plane], the normalised pair
n is [rows, C]; columns, rows and padding as in `triton_project`. A program owns BLOCK columns,
holds the normalised rows of x and of the pair in registers, and loops over the C output channels.

- `output_kernel` writes y and the statistics of x.
- `output_input_kernel` recomputes values and gates; it writes dx and the gradients of the results
  of both linear layers: of the projection for `triton_weights`, of the gate as rows, which
  `project_input_kernel` multiplies by the gate's weight.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import triton
import triton.language as tl

from bevatron.kernels.pair.triangle_multiply.triton_project import (
    affine,
    columns_of_block,
    concatenate,
    identity,
    load_bias,
    load_channels,
    load_cols,
    load_drop,
    load_matrix,
    norm_backward,
    normalise,
    store_channels,
    store_cols,
    transpose_by_dot,
)
from bevatron.kernels.shared.triton_math import logistic, prefetch, row_offsets


@triton.jit
def load_as_rows(X, H: tl.constexpr, col, plane, BLOCK: tl.constexpr, H_PAD: tl.constexpr,
                 BY_DOT: tl.constexpr):  # fmt: skip
    """Load all channels of a channel-first tensor, transposed, in float32.

    By matmuls rows lie in a dot result's layout, where a sum over channels stays within a warp.
    """
    if not BY_DOT:
        x = load_channels(X, 0, H, col, plane, H_PAD, H == H_PAD)  # [H_PAD, BLOCK]
        return tl.trans(x).to(tl.float32)  # [BLOCK, H_PAD]
    HALF: tl.constexpr = H_PAD // 2
    low = load_channels(X, 0, H, col, plane, HALF, H == H_PAD)  # [HALF, BLOCK]
    high = load_channels(X, HALF, H, col, plane, HALF, H == H_PAD)  # [HALF, BLOCK]
    eye = identity(HALF, X.dtype.element_ty)
    # [BLOCK, H_PAD]
    return concatenate(transpose_by_dot(low, eye), transpose_by_dot(high, eye), BLOCK, HALF)


@triton.jit
def output_kernel(
    X, Normed, NormWeight, NormBias, Weight, Gate, Bias, GateBias, Drop, Z, Mean, Rstd, Y,
    n1, n2, z_0, z_1, z_2, eps, N, N_pad, plane, edges,
    C: tl.constexpr, C_PAD: tl.constexpr, H: tl.constexpr, H_PAD: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_H: tl.constexpr, AXES: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_DROP: tl.constexpr, RESIDUAL: tl.constexpr, PADDED: tl.constexpr,
    STAGES: tl.constexpr, HOLD: tl.constexpr, PREFETCH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK rows of y, and mean and 1/sigma of x over its channels.

    A pair has ``edges`` rows.
    """
    first = tl.program_id(0).to(tl.int64) * BLOCK
    col, row, inside = columns_of_block(first, N, N_pad, plane, BLOCK, PADDED)
    if PREFETCH:
        prefetch(Normed, tl.where(inside, row, 0), 0, C, C_PAD)
    x = load_as_rows(X, H, col, plane, BLOCK, H_PAD, HOLD)  # [BLOCK, H_PAD]
    mean = tl.sum(x, 1) / H  # [BLOCK]
    centred = x - mean[:, None]
    if H != H_PAD:
        centred = tl.where((tl.arange(0, H_PAD) < H)[None, :], centred, 0.0)
    rstd = tl.rsqrt(tl.sum(centred * centred, 1) / H + eps)  # [BLOCK]
    tl.store(Mean + row, mean, mask=inside)
    tl.store(Rstd + row, rstd, mask=inside)
    xn = affine(centred * rstd[:, None], NormWeight, NormBias, H, H_PAD)
    xn = xn.to(X.dtype.element_ty)
    normed = load_cols(Normed, row, inside, 0, C, C_PAD)  # [BLOCK, C_PAD]
    FULL: tl.constexpr = C % BLOCK_H == 0
    if RESIDUAL:
        z_at = Z + row_offsets(row, n1, n2, z_0, z_1, z_2, AXES)[:, None]
    for h in tl.range(0, C, BLOCK_H, num_stages=STAGES):
        weight = load_matrix(Weight, h, C, H, H_PAD, BLOCK_H, FULL)  # [BLOCK_H, H_PAD]
        y = tl.dot(xn, tl.trans(weight), input_precision=PRECISION)  # [BLOCK, BLOCK_H]
        weight = load_matrix(Gate, h, C, C, C_PAD, BLOCK_H, FULL)  # [BLOCK_H, C_PAD]
        gate = tl.dot(normed, tl.trans(weight), input_precision=PRECISION)  # [BLOCK, BLOCK_H]
        if HAS_BIAS:
            y += load_bias(Bias, h, C, BLOCK_H)[None, :]  # [BLOCK, BLOCK_H]
            gate += load_bias(GateBias, h, C, BLOCK_H)[None, :]  # [BLOCK, BLOCK_H]
        y *= logistic(gate)
        if HAS_DROP:
            # [BLOCK, BLOCK_H]
            y *= load_drop(Drop, row, inside, h, N, edges, plane, C, BLOCK_H)
        if RESIDUAL:
            channel = h + tl.arange(0, BLOCK_H)[None, :]
            # [BLOCK, BLOCK_H]
            y += tl.load(z_at + channel, mask=inside[:, None] & (channel < C), other=0.0)
        store_cols(Y, row, inside, h, y, C, BLOCK_H)


@triton.jit
def output_input_kernel(
    DY, X, Normed, NormWeight, NormBias, Weight, Gate, Bias, GateBias, Drop, Mean, Rstd,
    DX, DGate, DOut, N, N_pad, plane, edges,
    C: tl.constexpr, C_PAD: tl.constexpr, H: tl.constexpr, H_PAD: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_H: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_DROP: tl.constexpr,
    PADDED: tl.constexpr, STAGES: tl.constexpr, HOLD: tl.constexpr, PREFETCH: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute dx of BLOCK columns, and the gradients of the results of both linear layers.

    DOut [C, plane] is of the output projection; DGate, of the gate, has rows like the pair.
    """
    first = tl.program_id(0).to(tl.int64) * BLOCK
    col, row, inside = columns_of_block(first, N, N_pad, plane, BLOCK, PADDED)
    if PREFETCH:
        prefetch(Normed, tl.where(inside, row, 0), 0, C, C_PAD)
        prefetch(DY, tl.where(inside, row, 0), 0, C, C_PAD)
    mean = tl.load(Mean + row, mask=inside, other=0.0)  # [BLOCK]
    rstd = tl.load(Rstd + row, mask=inside, other=0.0)  # [BLOCK]
    x = load_as_rows(X, H, col, plane, BLOCK, H_PAD, HOLD)  # [BLOCK, H_PAD]
    if PADDED:
        x = tl.where(inside[:, None], x, 0.0)
    xn = affine(normalise(x, mean, rstd, H, H_PAD), NormWeight, NormBias, H, H_PAD)
    xn = xn.to(X.dtype.element_ty)
    normed = load_cols(Normed, row, inside, 0, C, C_PAD)  # [BLOCK, C_PAD]
    g = tl.zeros([BLOCK, H_PAD], tl.float32)
    FULL: tl.constexpr = C % BLOCK_H == 0
    for h in tl.range(0, C, BLOCK_H, num_stages=STAGES):
        weight = load_matrix(Weight, h, C, H, H_PAD, BLOCK_H, FULL)  # [BLOCK_H, H_PAD]
        value = tl.dot(xn, tl.trans(weight), input_precision=PRECISION)  # [BLOCK, BLOCK_H]
        gate = load_matrix(Gate, h, C, C, C_PAD, BLOCK_H, FULL)  # [BLOCK_H, C_PAD]
        gate = tl.dot(normed, tl.trans(gate), input_precision=PRECISION)  # [BLOCK, BLOCK_H]
        if HAS_BIAS:
            value += load_bias(Bias, h, C, BLOCK_H)[None, :]  # [BLOCK, BLOCK_H]
            gate += load_bias(GateBias, h, C, BLOCK_H)[None, :]  # [BLOCK, BLOCK_H]
        s = logistic(gate)
        d = load_cols(DY, row, inside, h, C, BLOCK_H).to(tl.float32) * s  # [BLOCK, BLOCK_H]
        if HAS_DROP:
            # [BLOCK, BLOCK_H]
            d *= load_drop(Drop, row, inside, h, N, edges, plane, C, BLOCK_H)
        dout = d.to(xn.dtype)
        g = tl.dot(dout, weight, g, input_precision=PRECISION)  # [BLOCK, H_PAD]
        store_cols(DGate, row, inside, h, d * value * (1.0 - s), C, BLOCK_H)
        store_channels(DOut, h, C, col, plane, tl.trans(dout), BLOCK_H, FULL)
    # Loaded again, because it is needed last, but before anything is stored.
    x = load_as_rows(X, H, col, plane, BLOCK, H_PAD, True)  # [BLOCK, H_PAD]
    xhat = normalise(x, mean, rstd, H, H_PAD)
    dx = norm_backward(g, xhat, rstd, NormWeight, H, H_PAD)
    store_channels(DX, 0, H, col, plane, tl.trans(dx), H_PAD, H == H_PAD)
