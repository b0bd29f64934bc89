"""Triangle multiplication: gradients of all weights, as matmuls that contract over the pair's rows.

A program of `weigh` owns BLOCK_H channels of a layer's output gradient D and a range of columns,
and writes one float32 partial sum of D xhat^T [BLOCK_H, C] and of D; no atomics. `joint_kernel`
does so for values and gates of a and b, `output_weights_kernel` for both layers behind the
contraction. `finish_output_kernel` and `shared.triton_partial_sums.finish_layer_kernel` turn
these sums into gradients, and `sum_norms_kernel` adds those of both norms. `round_kernel` rounds
and joins the weights, once for both passes. Columns as in `triton_project`.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import triton
import triton.language as tl

from bevatron.kernels.pair.triangle_multiply.triton_project import (
    columns_of_block,
    load_channels,
    load_cols,
    load_rows,
    normalise,
)
from bevatron.kernels.shared.triton_partial_sums import finish_layer, sum_shares

SUMS = tl.constexpr(16)
"""Columns of ones, which all give the same sum: the narrowest tile of a matmul."""


@triton.jit
def load_piece(Weight, i, count):
    """Load those of these elements that a weight has, zero for others."""
    return tl.load(Weight + i, mask=(i >= 0) & (i < count), other=0.0).to(tl.float32)  # [BLOCK]


@triton.jit
def round_kernel(
    A, AGate, B, BGate, Out, Gate, Rounded, of_each, of_out, of_gate, BLOCK: tl.constexpr
):
    """Write six weights one after another in another type; those of a and b have ``of_each``."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = load_piece(A, i, of_each) + load_piece(AGate, i - of_each, of_each)  # [BLOCK]
    x += load_piece(B, i - 2 * of_each, of_each)  # [BLOCK]
    x += load_piece(BGate, i - 3 * of_each, of_each)  # [BLOCK]
    i_out = i - 4 * of_each
    x += load_piece(Out, i_out, of_out) + load_piece(Gate, i_out - of_out, of_gate)  # [BLOCK]
    tl.store(Rounded + i, x.to(Rounded.dtype.element_ty), mask=i_out < of_out + of_gate)


@triton.jit
def load_normalised(
    X, Mean, Rstd, first, N, N_pad, plane,
    C: tl.constexpr, C_PAD: tl.constexpr, BLOCK: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Load columns of a channel-first tensor and normalise them, zero outside."""
    col, row, inside = columns_of_block(first, N, N_pad, plane, BLOCK, PADDED)
    mean = tl.load(Mean + row, mask=inside, other=0.0)  # [BLOCK]
    rstd = tl.load(Rstd + row, mask=inside, other=0.0)  # [BLOCK]
    # [C_PAD, BLOCK]
    x = load_channels(X, 0, C, col, plane, C_PAD, C == C_PAD).to(tl.float32)
    if PADDED:
        x = tl.where(inside[None, :], x, 0.0)
    return (x - mean[None, :]) * rstd[None, :]  # [C_PAD, BLOCK]


@triton.jit
def weigh(
    D, X, Mean, Rstd, Parts, h, channels, columns_per_part,
    n1, n2, z_0, z_1, z_2, N, N_pad, plane,
    C: tl.constexpr, C_PAD: tl.constexpr, BLOCK: tl.constexpr, BLOCK_H: tl.constexpr,
    AXES: tl.constexpr, FULL: tl.constexpr, FROM_CHANNELS: tl.constexpr, D_ROWS: tl.constexpr,
    PADDED: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sum ``d xhat^T`` and d over a range of columns, for BLOCK_H channels from h.

    xhat are rows of X, normalised, without the norm's weight and bias. X is channel-first if
    FROM_CHANNELS (the contraction), otherwise it has rows (the pair); so is D unless D_ROWS. Parts
    is [parts, channels C + channels]: the matmul, then the sums.

    Some channels of the contraction hardly differ from their mean, so rounding xhat would shift all
    rows alike: the mean over the first block is subtracted before the matmul and added afterwards.
    """
    start = tl.program_id(1).to(tl.int64) * columns_per_part
    last = tl.minimum(start + columns_per_part, plane)
    if FROM_CHANNELS:
        # [C_PAD, BLOCK]
        x = load_normalised(X, Mean, Rstd, start, N, N_pad, plane, C, C_PAD, BLOCK, PADDED)
        centre = tl.sum(x, 1) / BLOCK  # [C_PAD]
    total = tl.zeros([BLOCK_H, C_PAD], tl.float32)
    sums = tl.zeros([BLOCK_H, SUMS], tl.float32)
    ones = tl.full([BLOCK, SUMS], 1.0, D.dtype.element_ty)
    for first in tl.range(start, last, BLOCK, num_stages=STAGES):
        # d is 0 in the padding.
        if FROM_CHANNELS:
            # [C_PAD, BLOCK]
            x = load_normalised(X, Mean, Rstd, first, N, N_pad, plane, C, C_PAD, BLOCK, PADDED)
            xhat = tl.trans((x - centre[:, None]).to(X.dtype.element_ty))  # [BLOCK, C_PAD]
        else:
            _, row, inside = columns_of_block(first, N, N_pad, plane, BLOCK, PADDED)
            mean = tl.load(Mean + row, mask=inside, other=0.0)  # [BLOCK]
            rstd = tl.load(Rstd + row, mask=inside, other=0.0)  # [BLOCK]
            # [BLOCK, C_PAD]
            x = load_rows(X, row, inside, n1, n2, z_0, z_1, z_2, C, C_PAD, AXES)
            xhat = normalise(x, mean, rstd, C, C_PAD).to(X.dtype.element_ty)
        if D_ROWS:
            d = tl.trans(load_cols(D, row, inside, h, C, BLOCK_H))  # [BLOCK_H, BLOCK]
        else:
            # [BLOCK_H, BLOCK]
            d = load_channels(D, h, channels, first + tl.arange(0, BLOCK), plane, BLOCK_H, FULL)
        # A matmul sums d, so that only the tensor cores read it from shared memory; never TF32.
        sums = tl.dot(d, ones, sums, input_precision="ieee")  # [BLOCK_H, SUMS]
        total = tl.dot(d, xhat, total, input_precision=PRECISION)  # [BLOCK_H, C_PAD]
    if FROM_CHANNELS:
        total += tl.max(sums, 1)[:, None] * centre[None, :]  # [BLOCK_H, C_PAD]
    i, out = h + tl.arange(0, BLOCK_H), tl.arange(0, C_PAD)
    part = Parts + tl.program_id(1).to(tl.int64) * channels * (C + 1)
    keep = (i < channels)[:, None]
    tl.store(part + i[:, None] * C + out[None, :], total, mask=keep & (out < C)[None, :])
    copy = tl.arange(0, SUMS)[None, :]
    at = part + channels * C + i[:, None] + copy
    tl.store(at, sums, mask=keep & (copy == 0))


@triton.jit
def joint_kernel(
    D, Z, Mean, Rstd, Parts, channels, columns_per_part, n1, n2, z_0, z_1, z_2, N, N_pad, plane,
    C: tl.constexpr, C_PAD: tl.constexpr, BLOCK: tl.constexpr, BLOCK_H: tl.constexpr,
    AXES: tl.constexpr, FULL: tl.constexpr, PADDED: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Sum over a range of columns, for BLOCK_H channels of the layers of a, b and their gates."""
    weigh(
        D, Z, Mean, Rstd, Parts, tl.program_id(0) * BLOCK_H, channels, columns_per_part,
        n1, n2, z_0, z_1, z_2, N, N_pad, plane,
        C, C_PAD, BLOCK, BLOCK_H, AXES, FULL, False, False, PADDED, STAGES, PRECISION,
    )  # fmt: skip


@triton.jit
def output_weights_kernel(
    D, X, Mean, Rstd, Parts, DGate, Z, InMean, InRstd, GateParts, channels, columns_per_part,
    n1, n2, z_0, z_1, z_2, N, N_pad, plane,
    C: tl.constexpr, C_PAD: tl.constexpr, H: tl.constexpr, H_PAD: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_H: tl.constexpr, AXES: tl.constexpr, FULL: tl.constexpr,
    PADDED: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sum over a range of columns, for BLOCK_H channels of the output's layer or of its gate's."""
    h, of_output = tl.program_id(0) * BLOCK_H, tl.cdiv(channels, BLOCK_H) * BLOCK_H
    if h < of_output:
        weigh(
            D, X, Mean, Rstd, Parts, h, channels, columns_per_part,
            n1, n2, z_0, z_1, z_2, N, N_pad, plane,
            H, H_PAD, BLOCK, BLOCK_H, AXES, FULL, True, False, PADDED, STAGES, PRECISION,
        )  # fmt: skip
    else:
        weigh(
            DGate, Z, InMean, InRstd, GateParts, h - of_output, channels, columns_per_part,
            n1, n2, z_0, z_1, z_2, N, N_pad, plane,
            C, C_PAD, BLOCK, BLOCK_H, AXES, FULL, False, True, PADDED, STAGES, PRECISION,
        )  # fmt: skip


@triton.jit
def finish_output_kernel(
    Parts, Weight, NormWeight, NormBias, DWeight, Shares,
    GateParts, Gate, InWeight, InBias, DGate, InShares, DBias, parts,
    C: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr, BLOCK_C: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Finish BLOCK_C weights of a channel of the output's layer, or from channel C of its gate's.

    DBias is [2 C], of both layers.
    """
    h = tl.program_id(0)
    if h < C:
        finish_layer(
            Parts, Weight, NormWeight, NormBias, DWeight, DBias, Shares, parts, h,
            C, H, BLOCK, BLOCK_C, True, True, HAS_BIAS,
        )  # fmt: skip
    else:
        finish_layer(
            GateParts, Gate, InWeight, InBias, DGate, DBias + C, InShares, parts, h - C,
            C, C, BLOCK, BLOCK_C, True, True, HAS_BIAS,
        )  # fmt: skip


@triton.jit
def sum_norms_kernel(
    Shares, DWeight, DBias, InShares, DInWeight, DInBias,
    C: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr, BLOCK_IN: tl.constexpr,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Add partial gradients of the output's norm [C, 2, H] and the pair's [C + 4 H, 2, C]."""
    which = tl.program_id(1)
    if which == 0:
        sum_shares(Shares, DWeight, C, 0, H, BLOCK, BLOCK_C)
    elif which == 1:
        sum_shares(Shares, DBias, C, 1, H, BLOCK, BLOCK_C)
    elif which == 2:
        sum_shares(InShares, DInWeight, C + 4 * H, 0, C, BLOCK_IN, BLOCK_C)
    else:
        sum_shares(InShares, DInBias, C + 4 * H, 1, C, BLOCK_IN, BLOCK_C)
