"""The kernel of all weights' gradients: products over the rows of the pair."""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import triton
import triton.language as tl

from bevatron.kernels.layer_norm.triton_kernels import load_vector
from bevatron.kernels.triangle_multiply.triton_project import (
    affine,
    load_channels,
    load_rows,
    places,
    scaled,
)


@triton.jit
def weight_kernel(
    D, X, NormWeight, NormBias, Mean, Rstd, Parts, BiasParts, channels, columns_per_part,
    n1, n2, z_0, z_1, z_2, N, N_pad, plane,
    C: tl.constexpr, C_PAD: tl.constexpr, BLOCK: tl.constexpr, BLOCK_H: tl.constexpr,
    AXES: tl.constexpr, FULL: tl.constexpr, FROM_CHANNELS: tl.constexpr, HAS_BIAS: tl.constexpr,
    PADDED: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add ``d n^T`` over one part of the columns, n the normalised rows of X, for BLOCK_H channels.

    D has its channels outermost, X too (the contraction) or rows (the pair). Parts is
    [part, channels, C], BiasParts [part, channels].
    """
    h = tl.program_id(0) * BLOCK_H
    start = tl.program_id(1).to(tl.int64) * columns_per_part
    last = tl.minimum(start + columns_per_part, plane)
    total = tl.zeros([BLOCK_H, C_PAD], tl.float32)
    if HAS_BIAS:
        bias = tl.zeros([BLOCK_H], tl.float32)
    if FROM_CHANNELS:
        norm_weight = tl.trans(load_vector(NormWeight, tl.arange(0, C_PAD), C))
        norm_bias = tl.trans(load_vector(NormBias, tl.arange(0, C_PAD), C))
    for first in tl.range(start, last, BLOCK, num_stages=STAGES):
        # Places without an edge have d = 0.
        col, row, inside = places(first, N, N_pad, plane, BLOCK, PADDED)
        mean = tl.load(Mean + row, mask=inside, other=0.0)
        rstd = tl.load(Rstd + row, mask=inside, other=0.0)
        if FROM_CHANNELS:
            x = load_channels(X, 0, C, col, plane, C_PAD, C == C_PAD).to(tl.float32)
            if PADDED:
                x = tl.where(inside[None, :], x, 0.0)
            normed = (x - mean[None, :]) * rstd[None, :] * norm_weight + norm_bias
            normed = tl.trans(normed.to(X.dtype.element_ty))
        else:
            x = load_rows(X, row, inside, n1, n2, z_0, z_1, z_2, C, C_PAD, AXES)
            normed = affine(scaled(x, mean, rstd, C, C_PAD), NormWeight, NormBias, C, C_PAD)
            normed = normed.to(X.dtype.element_ty)
        d = load_channels(D, h, channels, col, plane, BLOCK_H, FULL)
        total = tl.dot(d, normed, total, input_precision=PRECISION)
        if HAS_BIAS:
            bias += tl.sum(d.to(tl.float32), 1)
    i, out = h + tl.arange(0, BLOCK_H), tl.arange(0, C_PAD)
    at = Parts + tl.program_id(1).to(tl.int64) * channels * C + i[:, None] * C + out[None, :]
    tl.store(at, total, mask=(i < channels)[:, None] & (out < C)[None, :])
    if HAS_BIAS:
        at = BiasParts + tl.program_id(1).to(tl.int64) * channels + i
        tl.store(at, bias, mask=i < channels)
