"""Kernels of the gated projections: a pair [rows, C] to a and b with channels outermost.

Rows of the pair are numbered in one line; in tensors with channels outermost row ``i`` of the pair
is column ``column(i)``, since rows of the matrices that are multiplied begin at aligned places.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import triton
import triton.language as tl

from bevatron.kernels.layer_norm.triton_kernels import load_vector, logistic, row_offsets


@triton.jit
def column(row, N, N_pad, PADDED: tl.constexpr):
    """Say which column of a tensor with channels outermost belongs to a row of the pair."""
    if PADDED:
        line = row // N
        return line * N_pad + (row - line * N)
    return row


@triton.jit
def load_rows(Z, row, count, n1, n2, z_0, z_1, z_2, C: tl.constexpr, C_PAD: tl.constexpr,
              AXES: tl.constexpr):  # fmt: skip
    """Load rows of the pair as [BLOCK, C_PAD], zero outside."""
    col = tl.arange(0, C_PAD)
    at = Z + row_offsets(row, n1, n2, z_0, z_1, z_2, AXES)[:, None] + col[None, :]
    inside = (row < count)[:, None]
    if C != C_PAD:
        inside = inside & (col < C)[None, :]
    return tl.load(at, mask=inside, other=0.0)


@triton.jit
def store_rows(Z, row, count, block, C: tl.constexpr, C_PAD: tl.constexpr):
    """Store [BLOCK, C_PAD] into rows that follow each other."""
    col = tl.arange(0, C_PAD)
    inside = (row < count)[:, None]
    if C != C_PAD:
        inside = inside & (col < C)[None, :]
    tl.store(Z + row[:, None] * C + col[None, :], block.to(Z.dtype.element_ty), mask=inside)


@triton.jit
def load_matrix(base, first, count, C: tl.constexpr, C_PAD: tl.constexpr, BLOCK_H: tl.constexpr,
                FULL: tl.constexpr):  # fmt: skip
    """Load rows ``first .. first + BLOCK_H`` of a [count, C] weight, zero outside."""
    row, col = first + tl.arange(0, BLOCK_H), tl.arange(0, C_PAD)
    at = base + row[:, None] * C + col[None, :]
    if FULL and C == C_PAD:
        return tl.load(at)
    return tl.load(at, mask=(row < count)[:, None] & (col < C)[None, :], other=0.0)


@triton.jit
def load_channels(base, first, count, col, inside, plane, BLOCK_H: tl.constexpr,
                  FULL: tl.constexpr):  # fmt: skip
    """Load channels of a tensor with channels outermost as [BLOCK_H, BLOCK], zero outside."""
    channel = first + tl.arange(0, BLOCK_H)
    at = base + channel.to(tl.int64)[:, None] * plane + col[None, :]
    keep = inside[None, :]
    if not FULL:
        keep = keep & (channel < count)[:, None]
    return tl.load(at, mask=keep, other=0.0)


@triton.jit
def store_channels(base, first, count, col, inside, plane, block, BLOCK_H: tl.constexpr,
                   FULL: tl.constexpr):  # fmt: skip
    """Store what `load_channels` would load."""
    channel = first + tl.arange(0, BLOCK_H)
    at = base + channel.to(tl.int64)[:, None] * plane + col[None, :]
    keep = inside[None, :]
    if not FULL:
        keep = keep & (channel < count)[:, None]
    tl.store(at, block.to(base.dtype.element_ty), mask=keep)


@triton.jit
def load_bias(Bias, first, count, BLOCK_H: tl.constexpr):
    """Load a part of a bias in float32."""
    i = first + tl.arange(0, BLOCK_H)
    return tl.load(Bias + i, mask=i < count, other=0.0).to(tl.float32)


@triton.jit
def scaled(x, mean, rstd, C: tl.constexpr, C_PAD: tl.constexpr):
    """Normalise rows [BLOCK, C_PAD] without weight and bias; zero behind the last channel."""
    xhat = (x.to(tl.float32) - mean[:, None]) * rstd[:, None]
    if C != C_PAD:
        xhat = tl.where((tl.arange(0, C_PAD) < C)[None, :], xhat, 0.0)
    return xhat


@triton.jit
def affine(xhat, Weight, Bias, C: tl.constexpr, C_PAD: tl.constexpr):
    """Apply the LayerNorm's weight and bias to [BLOCK, C_PAD]."""
    col = tl.arange(0, C_PAD)
    return xhat * load_vector(Weight, col, C) + load_vector(Bias, col, C)


@triton.jit
def norm_backward(g, xhat, rstd, inside, Weight, Parts, C: tl.constexpr, C_PAD: tl.constexpr):
    """Return the gradient of the rows; leave shares of the weight's and the bias's in Parts."""
    col = tl.arange(0, C_PAD)
    xhat = tl.where(inside[:, None], xhat, 0.0)
    part = Parts + tl.program_id(0).to(tl.int64) * 2 * C + col
    tl.store(part, tl.sum(g * xhat, 0), mask=col < C)
    tl.store(part + C, tl.sum(g, 0), mask=col < C)
    g *= load_vector(Weight, col, C)
    mean_g = tl.sum(g, 1) / C
    mean_gx = tl.sum(g * xhat, 1) / C
    return (g - mean_g[:, None] - xhat * mean_gx[:, None]) * rstd[:, None]


@triton.jit
def project_kernel(
    Z, NormWeight, NormBias, Value, Gate, ValueBias, GateBias, Mask, A, B, Mean, Rstd,
    count, n1, n2, z_0, z_1, z_2, eps, first, N, N_pad, plane,
    C: tl.constexpr, C_PAD: tl.constexpr, H: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_H: tl.constexpr, AXES: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_MASK: tl.constexpr, PADDED: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute CHUNK channels of a and of b, from ``first`` on, for BLOCK rows; and the statistics.

    Value and Gate are [2 H, C]: the weights of a, then those of b.
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = row < count
    x = load_rows(Z, row, count, n1, n2, z_0, z_1, z_2, C, C_PAD, AXES).to(tl.float32)
    mean = tl.sum(x, 1) / C
    centred = x - mean[:, None]
    if C != C_PAD:
        centred = tl.where((tl.arange(0, C_PAD) < C)[None, :], centred, 0.0)
    rstd = 1.0 / tl.sqrt_rn(tl.sum(centred * centred, 1) / C + eps)
    tl.store(Mean + row, mean, mask=inside)
    tl.store(Rstd + row, rstd, mask=inside)
    normed = affine(centred * rstd[:, None], NormWeight, NormBias, C, C_PAD)
    normed = tl.trans(normed.to(Z.dtype.element_ty))
    col = column(row, N, N_pad, PADDED)
    FULL: tl.constexpr = CHUNK % BLOCK_H == 0
    for which in tl.static_range(2):
        at = which * H + first
        for h in tl.range(0, CHUNK, BLOCK_H, num_stages=STAGES):
            weight = load_matrix(Value + at * C, h, CHUNK, C, C_PAD, BLOCK_H, FULL)
            value = tl.dot(weight, normed, input_precision=PRECISION)
            weight = load_matrix(Gate + at * C, h, CHUNK, C, C_PAD, BLOCK_H, FULL)
            gate = tl.dot(weight, normed, input_precision=PRECISION)
            if HAS_BIAS:
                value += load_bias(ValueBias + at, h, CHUNK, BLOCK_H)[:, None]
                gate += load_bias(GateBias + at, h, CHUNK, BLOCK_H)[:, None]
            made = value * logistic(gate)
            if HAS_MASK:
                made *= tl.load(Mask + row, mask=inside, other=0.0).to(tl.float32)[None, :]
            if which == 0:
                store_channels(A, h, CHUNK, col, inside, plane, made, BLOCK_H, FULL)
            else:
                store_channels(B, h, CHUNK, col, inside, plane, made, BLOCK_H, FULL)


@triton.jit
def project_input_kernel(
    DA, DB, Z, NormWeight, NormBias, Value, Gate, ValueBias, GateBias, Mask, Mean, Rstd, DZ, Parts,
    count, n1, n2, z_0, z_1, z_2, N, N_pad, plane,
    C: tl.constexpr, C_PAD: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_H: tl.constexpr, AXES: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_MASK: tl.constexpr,
    PADDED: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Turn the gradient of the normalised rows that lies in DZ, with that of a and b, into dz."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = row < count
    mean = tl.load(Mean + row, mask=inside, other=0.0)
    rstd = tl.load(Rstd + row, mask=inside, other=0.0)
    x = load_rows(Z, row, count, n1, n2, z_0, z_1, z_2, C, C_PAD, AXES)
    normed = affine(scaled(x, mean, rstd, C, C_PAD), NormWeight, NormBias, C, C_PAD)
    normed = normed.to(Z.dtype.element_ty)
    col = column(row, N, N_pad, PADDED)
    g = tl.zeros([BLOCK, C_PAD], tl.float32)
    FULL: tl.constexpr = H % BLOCK_H == 0
    for which in tl.static_range(2):
        at = which * H
        for h in tl.range(0, H, BLOCK_H, num_stages=STAGES):
            value_weight = load_matrix(Value + at * C, h, H, C, C_PAD, BLOCK_H, FULL)
            value = tl.dot(normed, tl.trans(value_weight), input_precision=PRECISION)
            gate_weight = load_matrix(Gate + at * C, h, H, C, C_PAD, BLOCK_H, FULL)
            gate = tl.dot(normed, tl.trans(gate_weight), input_precision=PRECISION)
            if HAS_BIAS:
                value += load_bias(ValueBias + at, h, H, BLOCK_H)[None, :]
                gate += load_bias(GateBias + at, h, H, BLOCK_H)[None, :]
            if which == 0:
                d = load_channels(DA, h, H, col, inside, plane, BLOCK_H, FULL)
            else:
                d = load_channels(DB, h, H, col, inside, plane, BLOCK_H, FULL)
            d = tl.trans(d).to(tl.float32)
            if HAS_MASK:
                d *= tl.load(Mask + row, mask=inside, other=0.0).to(tl.float32)[:, None]
            s = logistic(gate)
            d *= s
            g = tl.dot(d.to(normed.dtype), value_weight, g, input_precision=PRECISION)
            d *= value * (1.0 - s)
            g = tl.dot(d.to(normed.dtype), gate_weight, g, input_precision=PRECISION)
    g += load_rows(DZ, row, count, 0, 0, 0, 0, C, C, C_PAD, 1).to(tl.float32)
    x = load_rows(Z, row, count, n1, n2, z_0, z_1, z_2, C, C_PAD, AXES)
    xhat = scaled(x, mean, rstd, C, C_PAD)
    dz = norm_backward(g, xhat, rstd, inside, NormWeight, Parts, C, C_PAD)
    store_rows(DZ, row, count, dz, C, C_PAD)


@triton.jit
def project_weight_kernel(
    D, Z, NormWeight, NormBias, Value, Gate, ValueBias, GateBias, Mask, Mean, Rstd, Parts,
    BiasParts, count, rows_per_part, n1, n2, z_0, z_1, z_2, N, N_pad, plane,
    C: tl.constexpr, C_PAD: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_H: tl.constexpr, AXES: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_MASK: tl.constexpr,
    PADDED: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute one part's share of the gradients of the weights of a, or of b, for BLOCK_H channels.

    Parts is [part, 2, H, C]: values, then gates. All weights here are those of a, or of b.
    """
    h = tl.program_id(0) * BLOCK_H
    FULL: tl.constexpr = H % BLOCK_H == 0
    start = tl.program_id(1).to(tl.int64) * rows_per_part
    last = tl.minimum(start + rows_per_part, count)
    value_weight = load_matrix(Value, h, H, C, C_PAD, BLOCK_H, FULL)
    gate_weight = load_matrix(Gate, h, H, C, C_PAD, BLOCK_H, FULL)
    dvalue = tl.zeros([BLOCK_H, C_PAD], tl.float32)
    dgate = tl.zeros([BLOCK_H, C_PAD], tl.float32)
    if HAS_BIAS:
        value_bias = load_bias(ValueBias, h, H, BLOCK_H)[:, None]
        gate_bias = load_bias(GateBias, h, H, BLOCK_H)[:, None]
        dvalue_bias = tl.zeros([BLOCK_H], tl.float32)
        dgate_bias = tl.zeros([BLOCK_H], tl.float32)
    for first in tl.range(start, last, BLOCK, num_stages=STAGES):
        # Rows behind the last have d = 0: whatever else they hold, they add nothing.
        row = first + tl.arange(0, BLOCK)
        inside = row < last
        mean = tl.load(Mean + row, mask=inside, other=0.0)
        rstd = tl.load(Rstd + row, mask=inside, other=0.0)
        x = load_rows(Z, row, last, n1, n2, z_0, z_1, z_2, C, C_PAD, AXES)
        normed = affine(scaled(x, mean, rstd, C, C_PAD), NormWeight, NormBias, C, C_PAD)
        normed = normed.to(Z.dtype.element_ty)
        value = tl.dot(value_weight, tl.trans(normed), input_precision=PRECISION)
        gate = tl.dot(gate_weight, tl.trans(normed), input_precision=PRECISION)
        if HAS_BIAS:
            value += value_bias
            gate += gate_bias
        col = column(row, N, N_pad, PADDED)
        d = load_channels(D, h, H, col, inside, plane, BLOCK_H, FULL).to(tl.float32)
        if HAS_MASK:
            d *= tl.load(Mask + row, mask=inside, other=0.0).to(tl.float32)[None, :]
        s = logistic(gate)
        d *= s
        dvalue = tl.dot(d.to(normed.dtype), normed, dvalue, input_precision=PRECISION)
        if HAS_BIAS:
            dvalue_bias += tl.sum(d, 1)
        d *= value * (1.0 - s)
        dgate = tl.dot(d.to(normed.dtype), normed, dgate, input_precision=PRECISION)
        if HAS_BIAS:
            dgate_bias += tl.sum(d, 1)
    store_share(Parts, 0, 2, h, dvalue, H, C, C_PAD, BLOCK_H)
    store_share(Parts, 1, 2, h, dgate, H, C, C_PAD, BLOCK_H)
    if HAS_BIAS:
        i = h + tl.arange(0, BLOCK_H)
        at = BiasParts + tl.program_id(1).to(tl.int64) * 2 * H + i
        tl.store(at, dvalue_bias, mask=i < H)
        tl.store(at + H, dgate_bias, mask=i < H)


@triton.jit
def store_share(Parts, which, matrices, h, share, H: tl.constexpr, C: tl.constexpr,
                C_PAD: tl.constexpr, BLOCK_H: tl.constexpr):  # fmt: skip
    """Store rows ``h .. h + BLOCK_H`` of matrix ``which`` of this part (grid's axis 1)."""
    i, col = h + tl.arange(0, BLOCK_H), tl.arange(0, C_PAD)
    at = Parts + (tl.program_id(1) * matrices + which).to(tl.int64) * H * C
    at = at + i[:, None] * C + col[None, :]
    tl.store(at, share, mask=(i < H)[:, None] & (col < C)[None, :])
