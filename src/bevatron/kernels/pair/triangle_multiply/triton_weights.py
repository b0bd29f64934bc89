"""Triangle multiplication: gradients of all weights, as matmuls that contract over the pair's rows.

A program of `weigh` owns BLOCK_H channels of a layer's output gradient D and a range of columns,
and writes one float32 partial sum of D xhat^T [BLOCK_H, C] and of D; no atomics. `joint_kernel`
does so for values and gates of a and b, `output_weights_kernel` for both layers behind the
contraction; `finish_output_kernel` and `shared.triton_partial_sums.finish_layer_kernel` make
gradients of these sums, and `sum_norms_kernel` those of both norms. `round_kernel` rounds and joins
the weights, once for both passes. Columns as in `triton_project`.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import triton
import triton.language as tl

from bevatron.kernels.pair.triangle_multiply.triton_project import (
    columns_of_block,
    load_channels,
    load_cols,
    load_two,
    store_channels,
    two_ranges,
)
from bevatron.kernels.shared.triton_math import logistic
from bevatron.kernels.shared.triton_partial_sums import finish_layer, sum_shares

SUMS = tl.constexpr(16)
"""Columns of ones, all giving the same sum: the narrowest matmul."""


@triton.jit
def load_piece(Weight, i, count):
    """Load the elements of a weight that are among these, zero for others."""
    return tl.load(Weight + i, mask=(i >= 0) & (i < count), other=0.0).to(tl.float32)  # [BLOCK]


@triton.jit
def round_kernel(
    A, AGate, B, BGate, Out, Gate, Rounded, of_each, of_out, of_gate, BLOCK: tl.constexpr
):
    """Write six weights, of a and b ``of_each`` elements, one after another in another type."""
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
def store_part(Part, first, count, channels, total, sums, C: tl.constexpr, C_PAD: tl.constexpr,
               BLOCK_H: tl.constexpr):  # fmt: skip
    """Store sums of up to ``count`` channels into a part [channels C + channels]."""
    i, out = tl.arange(0, BLOCK_H), tl.arange(0, C_PAD)
    keep, copy = (i < count)[:, None], tl.arange(0, SUMS)[None, :]
    at = Part + (first + i)[:, None] * C + out[None, :]
    tl.store(at, total, mask=keep & (out < C)[None, :])
    tl.store(Part + channels * C + (first + i)[:, None] + copy, sums, mask=keep & (copy == 0))


@triton.jit
def weigh(
    D, X, Mean, Rstd, Parts, h, channels, columns_per_part, N, N_pad, plane,
    C: tl.constexpr, C_PAD: tl.constexpr, BLOCK: tl.constexpr, BLOCK_H: tl.constexpr,
    FULL: tl.constexpr, FROM_CHANNELS: tl.constexpr, PADDED: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Sum ``d xhat^T`` and d over a range of columns, for BLOCK_H channels from h.

    xhat are rows of X, normalised, without the norm's weight and bias. X is channel-first if
    FROM_CHANNELS (the contraction), otherwise it has rows (the pair); so is D unless D_ROWS. Parts
    is [parts, channels C + channels]: the matmul, then the sums.

    Some channels of the contraction hardly differ from their mean, so rounding xhat would shift all
    rows alike: its mean over the first block is subtracted before the matmul and added afterwards.
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
            # [BLOCK_H, BLOCK]
            d = load_channels(D, h, channels, first + tl.arange(0, BLOCK), plane, BLOCK_H, FULL)
        else:
            _, row, inside = columns_of_block(first, N, N_pad, plane, BLOCK, PADDED)
            xhat = load_cols(X, row, inside, 0, C, C_PAD)  # [BLOCK, C_PAD]
            d = tl.trans(load_cols(D, row, inside, h, C, BLOCK_H))  # [BLOCK_H, BLOCK]
        # A matmul, so that d goes from shared memory to the tensor cores only. Never in TF32.
        sums = tl.dot(d, ones, sums, input_precision="ieee")  # [BLOCK_H, SUMS]
        total = tl.dot(d, xhat, total, input_precision=PRECISION)  # [BLOCK_H, C_PAD]
    if FROM_CHANNELS:
        total += tl.max(sums, 1)[:, None] * centre[None, :]  # [BLOCK_H, C_PAD]
    part = Parts + tl.program_id(1).to(tl.int64) * channels * (C + 1)
    store_part(part, h, channels - h, channels, total, sums, C, C_PAD, BLOCK_H)


@triton.jit
def joint_kernel(
    D, Normed, Joint, JointBias, Mask, Parts, columns_per_part, N, N_pad, plane,
    C: tl.constexpr, C_PAD: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_H: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_MASK: tl.constexpr,
    PADDED: tl.constexpr, STAGES: tl.constexpr, HOLD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Turn gradients of a or b into those of values and gates, and sum ``d n^T`` and d of both.

    A program takes BLOCK_H channels and a range of columns. D is [4 H, plane]: the gradient of a,
    replaced by that of its values; space for that of its gates; the same of b. Joint is [4 H, C],
    Parts [parts, 4 H C + 4 H] as in `weigh`. One matmul recomputes values and gates.
    """
    FULL: tl.constexpr = H % BLOCK_H == 0
    BLOCKS: tl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
    at, h = tl.program_id(0) // BLOCKS * (2 * H), (tl.program_id(0) % BLOCKS) * BLOCK_H
    start = tl.program_id(1).to(tl.int64) * columns_per_part
    last = tl.minimum(start + columns_per_part, plane)
    # [2 * BLOCK_H, C_PAD]
    weight = load_two(Joint + at * C, h, H, H, C, C_PAD, BLOCK_H, FULL)
    if HAS_BIAS:
        channel, exists = two_ranges(h, H, H, BLOCK_H)
        bias = tl.load(JointBias + at + channel, mask=exists, other=0.0)  # [2 * BLOCK_H]
        bias = bias.to(tl.float32)[:, None]
    planes = D + tl.cast(at, tl.int64) * plane
    of_values = tl.zeros([BLOCK_H, C_PAD], tl.float32)
    of_gates = tl.zeros([BLOCK_H, C_PAD], tl.float32)
    value_sums = tl.zeros([BLOCK_H, SUMS], tl.float32)
    gate_sums = tl.zeros([BLOCK_H, SUMS], tl.float32)
    ones = tl.full([BLOCK, SUMS], 1.0, D.dtype.element_ty)
    for first in tl.range(start, last, BLOCK, num_stages=STAGES):
        col, row, inside = columns_of_block(first, N, N_pad, plane, BLOCK, PADDED)
        normed = load_cols(Normed, row, inside, 0, C, C_PAD)  # [BLOCK, C_PAD]
        if HOLD:
            normed = tl.where(inside[:, None], normed, 0.0)
        # [2 * BLOCK_H, BLOCK]
        both = tl.dot(weight, tl.trans(normed), input_precision=PRECISION)
        if HAS_BIAS:
            both += bias
        both = tl.permute(tl.reshape(both, (2, BLOCK_H, BLOCK)), (1, 2, 0))
        value, gate = tl.split(both)  # [BLOCK_H, BLOCK]
        # [BLOCK_H, BLOCK]
        d = load_channels(planes, h, H, col, plane, BLOCK_H, FULL).to(tl.float32)
        if PADDED:
            d = tl.where(inside[None, :], d, 0.0)
        if HAS_MASK:
            mask = tl.load(Mask + row, mask=inside, other=0.0).to(tl.float32)  # [BLOCK]
            d *= mask[None, :]
        s = logistic(gate)
        d *= s
        dvalue = d.to(D.dtype.element_ty)
        dgate = (d * value * (1.0 - s)).to(D.dtype.element_ty)
        store_channels(planes, h, H, col, plane, dvalue, BLOCK_H, FULL)
        gates_at = tl.cast(H, tl.int64) * plane
        store_channels(planes + gates_at, h, H, col, plane, dgate, BLOCK_H, FULL)
        # Never in TF32.
        value_sums = tl.dot(dvalue, ones, value_sums, input_precision="ieee")  # [BLOCK_H, SUMS]
        gate_sums = tl.dot(dgate, ones, gate_sums, input_precision="ieee")  # [BLOCK_H, SUMS]
        of_values = tl.dot(dvalue, normed, of_values, input_precision=PRECISION)  # [BLOCK_H, C_PAD]
        of_gates = tl.dot(dgate, normed, of_gates, input_precision=PRECISION)  # [BLOCK_H, C_PAD]
    part = Parts + tl.program_id(1).to(tl.int64) * (4 * H) * (C + 1)
    store_part(part, at + h, H - h, 4 * H, of_values, value_sums, C, C_PAD, BLOCK_H)
    store_part(part, at + H + h, H - h, 4 * H, of_gates, gate_sums, C, C_PAD, BLOCK_H)


@triton.jit
def output_weights_kernel(
    D, X, Mean, Rstd, Parts, DGate, Normed, GateParts, channels, columns_per_part, N, N_pad, plane,
    C: tl.constexpr, C_PAD: tl.constexpr, H: tl.constexpr, H_PAD: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_H: tl.constexpr, FULL: tl.constexpr, PADDED: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sum over a range of columns, for BLOCK_H channels of the output's layer or of its gate's."""
    h, of_output = tl.program_id(0) * BLOCK_H, tl.cdiv(channels, BLOCK_H) * BLOCK_H
    if h < of_output:
        weigh(
            D, X, Mean, Rstd, Parts, h, channels, columns_per_part, N, N_pad, plane,
            H, H_PAD, BLOCK, BLOCK_H, FULL, True, PADDED, STAGES, PRECISION,
        )  # fmt: skip
    else:
        weigh(
            DGate, Normed, Mean, Rstd, GateParts, h - of_output, channels, columns_per_part,
            N, N_pad, plane, C, C_PAD, BLOCK, BLOCK_H, FULL, False, PADDED, STAGES, PRECISION,
        )  # fmt: skip


@triton.jit
def finish_output_kernel(
    Parts, Weight, NormWeight, NormBias, DWeight, Shares,
    GateParts, DGate, DBias, parts,
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
            GateParts, GateParts, GateParts, GateParts, DGate, DBias + C, GateParts, parts, h - C,
            C, C, BLOCK, BLOCK_C, False, False, HAS_BIAS,
        )  # fmt: skip


@triton.jit
def sum_norms_kernel(
    Shares, DWeight, DBias, InShares, DInWeight, DInBias, in_shares,
    C: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr, BLOCK_IN: tl.constexpr,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Add shares of the gradients of the output's norm [C, 2, H] and the pair's [.., 2, C]."""
    which = tl.program_id(1)
    if which == 0:
        sum_shares(Shares, DWeight, C, 0, H, BLOCK, BLOCK_C)
    elif which == 1:
        sum_shares(Shares, DBias, C, 1, H, BLOCK, BLOCK_C)
    elif which == 2:
        sum_shares(InShares, DInWeight, in_shares, 0, C, BLOCK_IN, BLOCK_C)
    else:
        sum_shares(InShares, DInBias, in_shares, 1, C, BLOCK_IN, BLOCK_C)
