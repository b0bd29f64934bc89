"""Kernels of the gated projections: a pair [rows, C] to a and b with channels outermost.

In tensors with channels outermost a channel is a line of columns, and a program takes BLOCK of
them: edges of the pair, whose rows are numbered in one line, and places without one, since rows of
the matrices that are multiplied begin at aligned places. What lies there is read and written, but
is zero where it would enter a sum over edges.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import triton
import triton.language as tl

from bevatron.kernels.shared.triton_math import load_vector, logistic, row_offsets


@triton.jit
def places(first, N, N_pad, plane, BLOCK: tl.constexpr, PADDED: tl.constexpr):
    """Return BLOCK columns from ``first`` on, the rows of the pair there, and whether they exist.

    Columns follow each other, so that they are loaded and stored many at a time; the place behind
    the end of a line has no row.
    """
    col = first + tl.arange(0, BLOCK)
    row = col
    inside = col < plane
    if PADDED:
        line = col.to(plane.dtype) // N_pad  # in 32 bits where they suffice
        behind = col - line.to(tl.int64) * N_pad
        row = line.to(tl.int64) * N + behind
        inside = inside & (behind < N)
    return col, row, inside


@triton.jit
def load_rows(Z, row, inside, n1, n2, z_0, z_1, z_2, C: tl.constexpr, C_PAD: tl.constexpr,
              AXES: tl.constexpr):  # fmt: skip
    """Load rows of the pair as [BLOCK, C_PAD], zero outside."""
    col = tl.arange(0, C_PAD)
    at = Z + row_offsets(row, n1, n2, z_0, z_1, z_2, AXES)[:, None] + col[None, :]
    keep = inside[:, None]
    if C != C_PAD:
        keep = keep & (col < C)[None, :]
    return tl.load(at, mask=keep, other=0.0)


@triton.jit
def store_rows(Z, row, inside, block, C: tl.constexpr, C_PAD: tl.constexpr):
    """Store [BLOCK, C_PAD] into rows that follow each other."""
    col = tl.arange(0, C_PAD)
    keep = inside[:, None]
    if C != C_PAD:
        keep = keep & (col < C)[None, :]
    tl.store(Z + row[:, None] * C + col[None, :], block.to(Z.dtype.element_ty), mask=keep)


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
def load_channels(base, first, count, col, plane, BLOCK_H: tl.constexpr,
                  FULL: tl.constexpr):  # fmt: skip
    """Load channels of a tensor with channels outermost as [BLOCK_H, BLOCK], zero outside."""
    channel = first + tl.arange(0, BLOCK_H)
    at = base + channel.to(tl.int64)[:, None] * plane + col[None, :]
    keep = (col < plane)[None, :]
    if not FULL:
        keep = keep & (channel < count)[:, None]
    return tl.load(at, mask=keep, other=0.0)


@triton.jit
def store_channels(base, first, count, col, plane, block, BLOCK_H: tl.constexpr,
                   FULL: tl.constexpr):  # fmt: skip
    """Store what `load_channels` would load."""
    channel = first + tl.arange(0, BLOCK_H)
    at = base + channel.to(tl.int64)[:, None] * plane + col[None, :]
    keep = (col < plane)[None, :]
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
def norm_backward(g, xhat, rstd, Weight, C: tl.constexpr, C_PAD: tl.constexpr):
    """Return the gradient of the rows; weight's and bias's follow from those of the layers."""
    g *= load_vector(Weight, tl.arange(0, C_PAD), C)
    mean_g = tl.sum(g, 1) / C
    mean_gx = tl.sum(g * xhat, 1) / C
    return (g - mean_g[:, None] - xhat * mean_gx[:, None]) * rstd[:, None]


@triton.jit
def turned(block, eye):
    """Turn [channels, BLOCK] into [BLOCK, channels] where results of matrix units lie, exactly.

    The product with the identity takes no registers and few barriers on the way; float32, less
    channels than matrix units take, and many go without.
    """
    block = tl.trans(block)
    if eye.dtype.primitive_bitwidth == 16 and eye.shape[0] >= 16 and eye.shape[0] <= 64:
        return tl.dot(block, eye)
    return block.to(tl.float32)


@triton.jit
def identity(SIZE: tl.constexpr, dtype: tl.constexpr):
    """Make the identity [SIZE, SIZE]."""
    i = tl.arange(0, SIZE)
    return (i[:, None] == i[None, :]).to(dtype)


@triton.jit
def beside(first, second, BLOCK: tl.constexpr, BLOCK_H: tl.constexpr):
    """Put two [BLOCK, BLOCK_H] side by side: no number changes its thread."""
    pairs = tl.permute(tl.join(first, second), [0, 2, 1])
    return tl.reshape(pairs, [BLOCK, 2 * BLOCK_H])


@triton.jit
def apart(both, BLOCK: tl.constexpr, BLOCK_H: tl.constexpr):
    """Undo `beside`."""
    return tl.split(tl.permute(tl.reshape(both, [BLOCK, 2, BLOCK_H]), [0, 2, 1]))


@triton.jit
def pair_of_channels(first, second_at, count, BLOCK_H: tl.constexpr):
    """Return channels ``first ..`` and those ``second_at`` behind, and which of them exist."""
    i = tl.arange(0, 2 * BLOCK_H)
    channel = first + i % BLOCK_H
    return channel + (i // BLOCK_H) * second_at, channel < count


@triton.jit
def load_pair(base, first, second_at, count, C: tl.constexpr, C_PAD: tl.constexpr,
              BLOCK_H: tl.constexpr, FULL: tl.constexpr):  # fmt: skip
    """Load rows of two [count, C] weights, ``second_at`` rows apart, as [2 BLOCK_H, C_PAD]."""
    row, exists = pair_of_channels(first, second_at, count, BLOCK_H)
    col = tl.arange(0, C_PAD)
    at = base + row[:, None] * C + col[None, :]
    if FULL and C == C_PAD:
        return tl.load(at)
    return tl.load(at, mask=exists[:, None] & (col < C)[None, :], other=0.0)


@triton.jit
def store_pair(base, first, second_at, count, col, plane, both, BLOCK_H: tl.constexpr,
               FULL: tl.constexpr):  # fmt: skip
    """Store what stands `beside` each other into two tensors ``second_at`` channels apart."""
    channel, exists = pair_of_channels(first, second_at, count, BLOCK_H)
    at = base + channel.to(tl.int64)[:, None] * plane + col[None, :]
    keep = (col < plane)[None, :]
    if not FULL:
        keep = keep & exists[:, None]
    tl.store(at, tl.trans(both), mask=keep)


@triton.jit
def in_registers(block, C_PAD: tl.constexpr, WANTED: tl.constexpr):
    """Multiply by the identity, exactly: results of matrix units lie where operands are taken from.

    Rows that enter many products are then not read from shared memory for each.
    """
    if WANTED:
        i = tl.arange(0, C_PAD)
        block = tl.dot(block, (i[:, None] == i[None, :]).to(block.dtype)).to(block.dtype)
    return block


@triton.jit
def of_both(first, gates_at, count, BLOCK_H: tl.constexpr):
    """Return rows of values and gates in turn, eight of each, and which of them exist.

    Eight, since then a thread that gets a value from a product gets its gate too.
    """
    i = tl.arange(0, 2 * BLOCK_H)
    row = first + (i // 16) * 8 + i % 8
    return row + (i // 8 % 2) * gates_at, row < count


@triton.jit
def apart_in_rows(both, BLOCK: tl.constexpr, BLOCK_H: tl.constexpr):
    """Return values and gates [BLOCK_H, BLOCK] from rows numbered by `of_both`."""
    eights = tl.permute(tl.reshape(both, [BLOCK_H // 8, 2, 8, BLOCK]), [0, 2, 3, 1])
    value, gate = tl.split(eights)
    return tl.reshape(value, [BLOCK_H, BLOCK]), tl.reshape(gate, [BLOCK_H, BLOCK])


@triton.jit
def project_kernel(
    Z, NormWeight, NormBias, Joint, JointBias, Mask, AB, Mean, Rstd,
    n1, n2, z_0, z_1, z_2, eps, N, N_pad, plane,
    C: tl.constexpr, C_PAD: tl.constexpr, H: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_H: tl.constexpr, AXES: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_MASK: tl.constexpr, PADDED: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute a and b, one behind the other in AB, for BLOCK rows; and the rows' statistics.

    Joint is [4 H, C]: values and gates of a, of b. Values and gates are one product.
    """
    first = tl.program_id(0).to(tl.int64) * BLOCK
    col, row, inside = places(first, N, N_pad, plane, BLOCK, PADDED)
    x = load_rows(Z, row, inside, n1, n2, z_0, z_1, z_2, C, C_PAD, AXES).to(tl.float32)
    mean = tl.sum(x, 1) / C
    centred = x - mean[:, None]
    if C != C_PAD:
        centred = tl.where((tl.arange(0, C_PAD) < C)[None, :], centred, 0.0)
    rstd = tl.rsqrt(tl.sum(centred * centred, 1) / C + eps)
    tl.store(Mean + row, mean, mask=inside)
    tl.store(Rstd + row, rstd, mask=inside)
    normed = affine(centred * rstd[:, None], NormWeight, NormBias, C, C_PAD)
    normed = tl.trans(normed.to(Z.dtype.element_ty))
    if HAS_MASK:
        mask = tl.load(Mask + row, mask=inside, other=0.0).to(tl.float32)[None, :]
    FULL: tl.constexpr = H % BLOCK_H == 0
    BLOCKS: tl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
    channel = tl.arange(0, C_PAD)
    for i in tl.range(0, 2 * BLOCKS, num_stages=STAGES):
        at, h = (i // BLOCKS) * H, (i % BLOCKS) * BLOCK_H
        line, exists = of_both(h, H, H, BLOCK_H)
        weight = Joint + (2 * at + line)[:, None] * C + channel[None, :]
        if FULL and C == C_PAD:
            weight = tl.load(weight)
        else:
            weight = tl.load(weight, mask=exists[:, None] & (channel < C)[None, :], other=0.0)
        both = tl.dot(weight, normed, input_precision=PRECISION)
        if HAS_BIAS:
            bias = tl.load(JointBias + 2 * at + line, mask=exists, other=0.0)
            both += bias.to(tl.float32)[:, None]
        value, gate = apart_in_rows(both, BLOCK, BLOCK_H)
        made = value * logistic(gate)
        if HAS_MASK:
            made *= mask
        plane_at = tl.cast(at, tl.int64) * plane
        store_channels(AB + plane_at, h, H, col, plane, made, BLOCK_H, FULL)


@triton.jit
def project_input_kernel(
    D, Z, NormWeight, NormBias, Joint, JointBias, Mask, Mean, Rstd, DZ,
    n1, n2, z_0, z_1, z_2, N, N_pad, plane,
    C: tl.constexpr, C_PAD: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_H: tl.constexpr, AXES: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_MASK: tl.constexpr,
    PADDED: tl.constexpr, STAGES: tl.constexpr, HOLD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Turn the gradient of the normalised rows that lies in DZ, with that of a and b, into dz.

    D holds four tensors with channels outermost: the gradient of a, which becomes that of its
    values, a place for that of its gates, and the same of b. Joint is [4 H, C]: values
    and gates of a, of b. Values and gates are one product, and their gradients another.
    """
    first = tl.program_id(0).to(tl.int64) * BLOCK
    col, row, inside = places(first, N, N_pad, plane, BLOCK, PADDED)
    mean = tl.load(Mean + row, mask=inside, other=0.0)
    rstd = tl.load(Rstd + row, mask=inside, other=0.0)
    x = load_rows(Z, row, inside, n1, n2, z_0, z_1, z_2, C, C_PAD, AXES)
    # The sum begins with what is there: loaded while there is nothing else to do.
    g = load_rows(DZ, row, inside, 0, 0, 0, 0, C, C, C_PAD, 1).to(tl.float32)
    normed = affine(scaled(x, mean, rstd, C, C_PAD), NormWeight, NormBias, C, C_PAD)
    normed = in_registers(normed.to(Z.dtype.element_ty), C_PAD, HOLD)
    if HAS_MASK:
        mask = tl.load(Mask + row, mask=inside, other=0.0).to(tl.float32)[:, None]
    eye = identity(BLOCK_H, Z.dtype.element_ty)
    FULL: tl.constexpr = H % BLOCK_H == 0
    BLOCKS: tl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
    for i in tl.range(0, 2 * BLOCKS, num_stages=STAGES):
        at, h = (i // BLOCKS) * H, (i % BLOCKS) * BLOCK_H
        weight = load_pair(Joint + 2 * at * C, h, H, H, C, C_PAD, BLOCK_H, FULL)
        both = tl.dot(normed, tl.trans(weight), input_precision=PRECISION)
        if HAS_BIAS:
            channel, exists = pair_of_channels(h, H, H, BLOCK_H)
            bias = tl.load(JointBias + 2 * at + channel, mask=exists, other=0.0)
            both += bias.to(tl.float32)[None, :]
        value, gate = apart(both, BLOCK, BLOCK_H)
        planes = D + 2 * tl.cast(at, tl.int64) * plane
        d = turned(load_channels(planes, h, H, col, plane, BLOCK_H, FULL), eye)
        if PADDED:
            d = tl.where(inside[:, None], d, 0.0)
        if HAS_MASK:
            d *= mask
        s = logistic(gate)
        d *= s
        dvalue = d.to(normed.dtype)
        dgate = (d * value * (1.0 - s)).to(normed.dtype)
        both = beside(dvalue, dgate, BLOCK, BLOCK_H)
        g = tl.dot(both, weight, g, input_precision=PRECISION)
        store_pair(planes, h, H, H, col, plane, both, BLOCK_H, FULL)
    x = load_rows(Z, row, inside, n1, n2, z_0, z_1, z_2, C, C_PAD, AXES)
    dz = norm_backward(g, scaled(x, mean, rstd, C, C_PAD), rstd, NormWeight, C, C_PAD)
    store_rows(DZ, row, inside, dz, C, C_PAD)
