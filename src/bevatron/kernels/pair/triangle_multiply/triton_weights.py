"""Triangle multiplication: gradients of all weights, as matmuls that contract over the pair's rows.

A program of `weight_kernel` owns BLOCK_H channels of a layer's output gradient D and a range of
columns, and writes one float32 partial sum of D xhat^T [BLOCK_H, C] and of D; no atomics.
`shared.triton_partial_sums.finish_normed_layer` makes gradients of them. `round_kernel` rounds the
weights, once for both passes.
Columns as in `triton_project`.
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

SUMS = tl.constexpr(16)
"""Columns of ones, all giving the same sum: the narrowest matmul."""


@triton.jit
def round_kernel(Joint, Out, Gate, Rounded, joint_end, out_end, end, BLOCK: tl.constexpr):
    """Round three weights to the type of the rows, one after another."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(Joint + i, mask=i < joint_end, other=0.0).to(tl.float32)  # [BLOCK]
    of_out = (i >= joint_end) & (i < out_end)
    x += tl.load(Out + (i - joint_end), mask=of_out, other=0.0).to(tl.float32)  # [BLOCK]
    of_gate = (i >= out_end) & (i < end)
    x += tl.load(Gate + (i - out_end), mask=of_gate, other=0.0).to(tl.float32)  # [BLOCK]
    tl.store(Rounded + i, x.to(Rounded.dtype.element_ty), mask=i < end)


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
def weight_kernel(
    D, X, Mean, Rstd, Parts, channels, columns_per_part,
    n1, n2, z_0, z_1, z_2, N, N_pad, plane,
    C: tl.constexpr, C_PAD: tl.constexpr, BLOCK: tl.constexpr, BLOCK_H: tl.constexpr,
    AXES: tl.constexpr, FULL: tl.constexpr, FROM_CHANNELS: tl.constexpr, D_ROWS: tl.constexpr,
    PADDED: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sum ``d xhat^T`` and d over a range of columns, for BLOCK_H channels.

    xhat are rows of X, normalised, without the norm's weight and bias. X is channel-first if
    FROM_CHANNELS (the contraction), otherwise it has rows (the pair); so is D unless D_ROWS. Parts
    is [parts, channels C + channels]: the matmul, then the sums.

    Some channels of the contraction hardly differ from their mean, so rounding xhat would shift all
    rows alike: its mean over the first block is subtracted before the matmul and added afterwards.
    """
    h = tl.program_id(0) * BLOCK_H
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
        # A matmul, so that d goes from shared memory to the tensor cores only. Never in TF32.
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
