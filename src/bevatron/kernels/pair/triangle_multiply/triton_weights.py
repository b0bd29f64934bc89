"""The kernel of all weights' gradients: products over the rows of the pair."""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import triton
import triton.language as tl

from bevatron.kernels.pair.triangle_multiply.triton_project import (
    load_channels,
    load_rows,
    places,
    scaled,
)

SUMS = tl.constexpr(16)
"""Equal columns: the narrowest product."""


@triton.jit
def load_normalised(
    X, Mean, Rstd, first, N, N_pad, plane,
    C: tl.constexpr, C_PAD: tl.constexpr, BLOCK: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Load columns with channels outermost and normalise them: [C_PAD, BLOCK], zero outside."""
    col, row, inside = places(first, N, N_pad, plane, BLOCK, PADDED)
    mean = tl.load(Mean + row, mask=inside, other=0.0)
    rstd = tl.load(Rstd + row, mask=inside, other=0.0)
    x = load_channels(X, 0, C, col, plane, C_PAD, C == C_PAD).to(tl.float32)
    if PADDED:
        x = tl.where(inside[None, :], x, 0.0)
    return (x - mean[None, :]) * rstd[None, :]


@triton.jit
def weight_kernel(
    D, X, Mean, Rstd, Parts, channels, columns_per_part,
    n1, n2, z_0, z_1, z_2, N, N_pad, plane,
    C: tl.constexpr, C_PAD: tl.constexpr, BLOCK: tl.constexpr, BLOCK_H: tl.constexpr,
    AXES: tl.constexpr, FULL: tl.constexpr, FROM_CHANNELS: tl.constexpr,
    PADDED: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add ``d xhat^T`` and d over one part of the columns, for BLOCK_H channels.

    xhat are rows of X, normalised, without the norm's weight and bias. D has its channels
    outermost, X too (the contraction) or rows (the pair). Parts is [part, channels C + channels]:
    the products, then the sums.

    Some channels of a contraction hardly differ from their mean, so that rounding xhat would change
    all rows alike: its mean over the part's first block is left out of the product.
    """
    h = tl.program_id(0) * BLOCK_H
    start = tl.program_id(1).to(tl.int64) * columns_per_part
    last = tl.minimum(start + columns_per_part, plane)
    if FROM_CHANNELS:
        x = load_normalised(X, Mean, Rstd, start, N, N_pad, plane, C, C_PAD, BLOCK, PADDED)
        centre = tl.sum(x, 1) / BLOCK
    total = tl.zeros([BLOCK_H, C_PAD], tl.float32)
    sums = tl.zeros([BLOCK_H, SUMS], tl.float32)
    ones = tl.full([BLOCK, SUMS], 1.0, D.dtype.element_ty)
    for first in tl.range(start, last, BLOCK, num_stages=STAGES):
        # Places without an edge have d = 0.
        if FROM_CHANNELS:
            x = load_normalised(X, Mean, Rstd, first, N, N_pad, plane, C, C_PAD, BLOCK, PADDED)
            xhat = tl.trans((x - centre[:, None]).to(X.dtype.element_ty))
        else:
            _, row, inside = places(first, N, N_pad, plane, BLOCK, PADDED)
            mean = tl.load(Mean + row, mask=inside, other=0.0)
            rstd = tl.load(Rstd + row, mask=inside, other=0.0)
            x = load_rows(X, row, inside, n1, n2, z_0, z_1, z_2, C, C_PAD, AXES)
            xhat = scaled(x, mean, rstd, C, C_PAD).to(X.dtype.element_ty)
        d = load_channels(D, h, channels, first + tl.arange(0, BLOCK), plane, BLOCK_H, FULL)
        # A product: d goes from memory to the matrix units and nowhere else. Never in TF32.
        sums = tl.dot(d, ones, sums, input_precision="ieee")
        total = tl.dot(d, xhat, total, input_precision=PRECISION)
    if FROM_CHANNELS:
        total += tl.max(sums, 1)[:, None] * centre[None, :]
    i, out = h + tl.arange(0, BLOCK_H), tl.arange(0, C_PAD)
    part = Parts + tl.program_id(1).to(tl.int64) * channels * (C + 1)
    keep = (i < channels)[:, None]
    tl.store(part + i[:, None] * C + out[None, :], total, mask=keep & (out < C)[None, :])
    first_of_equal = tl.arange(0, SUMS)[None, :]
    at = part + channels * C + i[:, None] + first_of_equal
    tl.store(at, sums, mask=keep & (first_of_equal == 0))


@triton.jit
def finish_kernel(
    Total, Weight, NormWeight, NormBias, Before, DWeight, DBias, DNormWeight, DNormBias,
    C, CHANNELS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_C: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_BEFORE: tl.constexpr,
):  # fmt: skip
    """Make gradients of a layer behind a norm, and of the norm, from sums over rows.

    With X = sum d xhat^T and s = sum d (both in Total), W the layer's weight, w and b the norm's:
    dW = X w + s b, ds = s, dw = sum_h W_h X_h, db = sum_h W_h s_h; of several layers behind one
    norm dw and db add up, those of layers `Before` lie there, [2, C].
    """
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    of_c = c < C
    norm_weight = tl.load(NormWeight + c, mask=of_c, other=0.0).to(tl.float32)[None, :]
    norm_bias = tl.load(NormBias + c, mask=of_c, other=0.0).to(tl.float32)[None, :]
    dw = tl.zeros([BLOCK_C], tl.float32)
    db = tl.zeros([BLOCK_C], tl.float32)
    if HAS_BEFORE:
        dw += tl.load(Before + c, mask=of_c, other=0.0)
        db += tl.load(Before + C + c, mask=of_c, other=0.0)
    for first in range(0, CHANNELS, BLOCK):
        h = first + tl.arange(0, BLOCK)
        of_h = h < CHANNELS
        at, keep = h[:, None] * C + c[None, :], of_h[:, None] & of_c[None, :]
        product = tl.load(Total + at, mask=keep, other=0.0)
        total = tl.load(Total + CHANNELS * C + h, mask=of_h, other=0.0)
        weight = tl.load(Weight + at, mask=keep, other=0.0).to(tl.float32)
        dw += tl.sum(weight * product, 0)
        db += tl.sum(weight * total[:, None], 0)
        gradient = product * norm_weight + total[:, None] * norm_bias
        tl.store(DWeight + at, gradient.to(DWeight.dtype.element_ty), mask=keep)
        if HAS_BIAS:
            tl.store(DBias + h, total.to(DBias.dtype.element_ty), mask=of_h)
    tl.store(DNormWeight + c, dw.to(DNormWeight.dtype.element_ty), mask=of_c)
    tl.store(DNormBias + c, db.to(DNormBias.dtype.element_ty), mask=of_c)
