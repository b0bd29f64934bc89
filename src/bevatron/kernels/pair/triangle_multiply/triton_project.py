"""Triangle multiplication: LayerNorm and gated projections of the pair to a and b, and backward.

The pair is [rows, C], one row per edge (i, j). a and b are channel-first, [H, plane], so that the
contraction is a batch of H matmuls: a plane holds N x N_pad columns per sample, N_pad being N
rounded up so that matrix rows are aligned. A program owns BLOCK columns of a plane, padding
included; padding is read and written like an edge, but is zero where it would enter a sum.

- `project_kernel` normalises its rows once in registers, loops over the H channels of a and b, and
  writes them and the statistics of the rows.
- `project_input_kernel` recomputes values and gates in the same loop, turns the gradients of a and
  b into those of values and gates, which it writes for `triton_weights`, and writes dz.

C and H are the channels of the pair and of the contraction, C_PAD and H_PAD their padded sizes.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import triton
import triton.language as tl

from bevatron.kernels.shared.triton_math import (
    load_vector,
    logistic,
    row_offsets,
    split_columns,
)


@triton.jit
def columns_of_block(first, N, N_pad, plane, BLOCK: tl.constexpr, PADDED: tl.constexpr):
    """Return columns ``first .. first + BLOCK``, their rows of the pair, and which are edges.

    Columns are contiguous, so accesses are vectorised; those past N in a line of N_pad are padding.
    """
    col = first + tl.arange(0, BLOCK)
    row = col
    inside = col < plane  # [BLOCK]
    if PADDED:
        line = col.to(plane.dtype) // N_pad  # in 32 bits if they suffice
        in_line = col - line.to(tl.int64) * N_pad
        row = line.to(tl.int64) * N + in_line
        inside = inside & (in_line < N)
    return col, row, inside


@triton.jit
def load_rows(Z, row, inside, n1, n2, z_0, z_1, z_2, C: tl.constexpr, C_PAD: tl.constexpr,
              AXES: tl.constexpr):  # fmt: skip
    """Load rows of the pair, zero outside."""
    col = tl.arange(0, C_PAD)
    at = Z + row_offsets(row, n1, n2, z_0, z_1, z_2, AXES)[:, None] + col[None, :]
    keep = inside[:, None]
    if C != C_PAD:
        keep = keep & (col < C)[None, :]
    return tl.load(at, mask=keep, other=0.0)  # [BLOCK, C_PAD]


@triton.jit
def store_rows(Z, row, inside, block, C: tl.constexpr, C_PAD: tl.constexpr):
    """Store a block [BLOCK, C_PAD] into contiguous rows."""
    col = tl.arange(0, C_PAD)
    keep = inside[:, None]
    if C != C_PAD:
        keep = keep & (col < C)[None, :]
    tl.store(Z + row[:, None] * C + col[None, :], block.to(Z.dtype.element_ty), mask=keep)


@triton.jit
def load_cols(Z, row, inside, first, C: tl.constexpr, BLOCK_C: tl.constexpr):
    """Load channels ``first .. first + BLOCK_C`` of contiguous rows, zero outside."""
    col = first + tl.arange(0, BLOCK_C)
    keep = inside[:, None]
    if C % BLOCK_C != 0:
        keep = keep & (col < C)[None, :]
    return tl.load(Z + row[:, None] * C + col[None, :], mask=keep, other=0.0)  # [BLOCK, BLOCK_C]


@triton.jit
def store_cols(Z, row, inside, first, block, C: tl.constexpr, BLOCK_C: tl.constexpr):
    """Store a block [BLOCK, BLOCK_C] where `load_cols` loads it."""
    col = first + tl.arange(0, BLOCK_C)
    keep = inside[:, None]
    if C % BLOCK_C != 0:
        keep = keep & (col < C)[None, :]
    tl.store(Z + row[:, None] * C + col[None, :], block.to(Z.dtype.element_ty), mask=keep)


@triton.jit
def load_drop(Drop, row, inside, first, N, edges, plane, C: tl.constexpr, BLOCK_C: tl.constexpr):
    """Load channels of the dropout mask [batch, N, C], which the rows of a pair share."""
    row = row.to(plane.dtype)  # in 32 bits if they suffice
    place = (row // edges * N + row % N).to(tl.int64)
    # [BLOCK, BLOCK_C]
    return load_cols(Drop, place, inside, first, C, BLOCK_C).to(tl.float32)


@triton.jit
def load_matrix(base, first, count, C: tl.constexpr, C_PAD: tl.constexpr, BLOCK_H: tl.constexpr,
                FULL: tl.constexpr):  # fmt: skip
    """Load rows ``first .. first + BLOCK_H`` of a [count, C] weight, zero outside."""
    row, col = first + tl.arange(0, BLOCK_H), tl.arange(0, C_PAD)
    at = base + row[:, None] * C + col[None, :]
    if FULL and C == C_PAD:
        return tl.load(at)  # [BLOCK_H, C_PAD]
    # [BLOCK_H, C_PAD]
    return tl.load(at, mask=(row < count)[:, None] & (col < C)[None, :], other=0.0)


@triton.jit
def load_channels(base, first, count, col, plane, BLOCK_H: tl.constexpr,
                  FULL: tl.constexpr):  # fmt: skip
    """Load channels ``first .. first + BLOCK_H`` of a channel-first tensor, zero outside."""
    channel = first + tl.arange(0, BLOCK_H)
    at = base + channel.to(tl.int64)[:, None] * plane + col[None, :]
    keep = (col < plane)[None, :]
    if not FULL:
        keep = keep & (channel < count)[:, None]
    return tl.load(at, mask=keep, other=0.0)  # [BLOCK_H, BLOCK]


@triton.jit
def store_channels(base, first, count, col, plane, block, BLOCK_H: tl.constexpr,
                   FULL: tl.constexpr):  # fmt: skip
    """Store a block [BLOCK_H, BLOCK] where `load_channels` loads it."""
    channel = first + tl.arange(0, BLOCK_H)
    at = base + channel.to(tl.int64)[:, None] * plane + col[None, :]
    keep = (col < plane)[None, :]
    if not FULL:
        keep = keep & (channel < count)[:, None]
    tl.store(at, block.to(base.dtype.element_ty), mask=keep)


@triton.jit
def load_bias(Bias, first, count, BLOCK_H: tl.constexpr):
    """Load BLOCK_H elements of a bias in float32, zero outside."""
    i = first + tl.arange(0, BLOCK_H)
    return tl.load(Bias + i, mask=i < count, other=0.0).to(tl.float32)  # [BLOCK_H]


@triton.jit
def normalise(x, mean, rstd, C: tl.constexpr, C_PAD: tl.constexpr):
    """Normalise rows [BLOCK, C_PAD] without weight and bias; zero in the padding."""
    xhat = (x.to(tl.float32) - mean[:, None]) * rstd[:, None]
    if C != C_PAD:
        xhat = tl.where((tl.arange(0, C_PAD) < C)[None, :], xhat, 0.0)
    return xhat


@triton.jit
def affine(xhat, Weight, Bias, C: tl.constexpr, C_PAD: tl.constexpr):
    """Apply the weight and bias of the LayerNorm to xhat [BLOCK, C_PAD]."""
    col = tl.arange(0, C_PAD)
    return xhat * load_vector(Weight, col, C) + load_vector(Bias, col, C)  # [BLOCK, C_PAD]


@triton.jit
def norm_backward(g, xhat, rstd, Weight, C: tl.constexpr, C_PAD: tl.constexpr):
    """Return the gradient of the rows; those of weight and bias follow from the layer's."""
    g *= load_vector(Weight, tl.arange(0, C_PAD), C)  # [BLOCK, C_PAD]
    mean_g = tl.sum(g, 1) / C  # [BLOCK]
    mean_gx = tl.sum(g * xhat, 1) / C  # [BLOCK]
    return (g - mean_g[:, None] - xhat * mean_gx[:, None]) * rstd[:, None]


@triton.jit
def transpose_by_dot(block, eye):
    """Transpose [channels, BLOCK] into the layout of a dot result, exactly, in float32.

    A matmul with the identity needs no extra registers and few barriers. float32, fewer channels
    than a tensor core tile has, and more than 64 are transposed without it.
    """
    block = tl.trans(block)
    if eye.dtype.primitive_bitwidth == 16 and eye.shape[0] >= 16 and eye.shape[0] <= 64:
        return tl.dot(block, eye)  # [BLOCK, channels]
    return block.to(tl.float32)


@triton.jit
def identity(SIZE: tl.constexpr, dtype: tl.constexpr):
    """Return the identity matrix."""
    i = tl.arange(0, SIZE)
    return (i[:, None] == i[None, :]).to(dtype)  # [SIZE, SIZE]


@triton.jit
def concatenate(first, second, BLOCK: tl.constexpr, BLOCK_H: tl.constexpr):
    """Concatenate two [BLOCK, BLOCK_H] along channels; no element changes its thread."""
    joined = tl.permute(tl.join(first, second), [0, 2, 1])
    return tl.reshape(joined, [BLOCK, 2 * BLOCK_H])  # [BLOCK, 2 * BLOCK_H]


@triton.jit
def two_ranges(first, second_at, count, BLOCK_H: tl.constexpr):
    """Return channels ``first .. first + BLOCK_H`` and those ``second_at`` later, and which exist.

    [2 * BLOCK_H] each.
    """
    i = tl.arange(0, 2 * BLOCK_H)
    channel = first + i % BLOCK_H
    return channel + (i // BLOCK_H) * second_at, channel < count


@triton.jit
def load_two(base, first, second_at, count, C: tl.constexpr, C_PAD: tl.constexpr,
             BLOCK_H: tl.constexpr, FULL: tl.constexpr):  # fmt: skip
    """Load BLOCK_H rows each of two [count, C] weights, ``second_at`` rows apart; zero outside."""
    row, exists = two_ranges(first, second_at, count, BLOCK_H)
    col = tl.arange(0, C_PAD)
    at = base + row[:, None] * C + col[None, :]
    if FULL and C == C_PAD:
        return tl.load(at)  # [2 * BLOCK_H, C_PAD]
    # [2 * BLOCK_H, C_PAD]
    return tl.load(at, mask=exists[:, None] & (col < C)[None, :], other=0.0)


@triton.jit
def store_two(base, first, second_at, count, col, plane, both, BLOCK_H: tl.constexpr,
              FULL: tl.constexpr):  # fmt: skip
    """Store both [BLOCK, 2 BLOCK_H] to channel-first tensors, ``second_at`` channels apart."""
    channel, exists = two_ranges(first, second_at, count, BLOCK_H)
    at = base + channel.to(tl.int64)[:, None] * plane + col[None, :]
    keep = (col < plane)[None, :]
    if not FULL:
        keep = keep & exists[:, None]
    tl.store(at, tl.trans(both), mask=keep)


@triton.jit
def interleaved_rows(first, gates_at, count, BLOCK_H: tl.constexpr):
    """Return weight rows of values and gates, alternating in eights, and which exist.

    [2 * BLOCK_H] each. Eights, because the thread that holds a value in a dot result then holds
    its gate too.
    """
    i = tl.arange(0, 2 * BLOCK_H)
    row = first + (i // 16) * 8 + i % 8
    return row + (i // 8 % 2) * gates_at, row < count


@triton.jit
def split_rows(both, BLOCK: tl.constexpr, BLOCK_H: tl.constexpr):
    """Return values and gates [BLOCK_H, BLOCK] of a dot result with `interleaved_rows`."""
    eights = tl.permute(tl.reshape(both, [BLOCK_H // 8, 2, 8, BLOCK]), [0, 2, 3, 1])
    value, gate = tl.split(eights)  # [BLOCK_H // 8, 8, BLOCK]
    return tl.reshape(value, [BLOCK_H, BLOCK]), tl.reshape(gate, [BLOCK_H, BLOCK])


@triton.jit
def project_kernel(
    Z, NormWeight, NormBias, Joint, JointBias, Mask, AB, Normed, Mean, Rstd,
    n1, n2, z_0, z_1, z_2, eps, N, N_pad, plane,
    C: tl.constexpr, C_PAD: tl.constexpr, H: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_H: tl.constexpr, AXES: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_MASK: tl.constexpr, PADDED: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK columns of a and b, AB [2 H, plane]; normalise their rows.

    Joint is [4 H, C]: weights of the values and gates of a, then of b. One matmul gives both.
    """
    first = tl.program_id(0).to(tl.int64) * BLOCK
    col, row, inside = columns_of_block(first, N, N_pad, plane, BLOCK, PADDED)
    # [BLOCK, C_PAD]
    x = load_rows(Z, row, inside, n1, n2, z_0, z_1, z_2, C, C_PAD, AXES).to(tl.float32)
    mean = tl.sum(x, 1) / C  # [BLOCK]
    centred = x - mean[:, None]
    if C != C_PAD:
        centred = tl.where((tl.arange(0, C_PAD) < C)[None, :], centred, 0.0)
    rstd = tl.rsqrt(tl.sum(centred * centred, 1) / C + eps)  # [BLOCK]
    tl.store(Mean + row, mean, mask=inside)
    tl.store(Rstd + row, rstd, mask=inside)
    normed = affine(centred * rstd[:, None], NormWeight, NormBias, C, C_PAD)
    normed = normed.to(Z.dtype.element_ty)
    store_rows(Normed, row, inside, normed, C, C_PAD)
    normed = tl.trans(normed)  # [C_PAD, BLOCK]
    if HAS_MASK:
        # [1, BLOCK]
        mask = tl.load(Mask + row, mask=inside, other=0.0).to(tl.float32)[None, :]
    FULL: tl.constexpr = H % BLOCK_H == 0
    BLOCKS: tl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
    channel = tl.arange(0, C_PAD)
    for i in tl.range(0, 2 * BLOCKS, num_stages=STAGES):
        at, h = (i // BLOCKS) * H, (i % BLOCKS) * BLOCK_H
        line, exists = interleaved_rows(h, H, H, BLOCK_H)
        weight = Joint + (2 * at + line)[:, None] * C + channel[None, :]
        if FULL and C == C_PAD:
            weight = tl.load(weight)  # [2 * BLOCK_H, C_PAD]
        else:
            # [2 * BLOCK_H, C_PAD]
            weight = tl.load(weight, mask=exists[:, None] & (channel < C)[None, :], other=0.0)
        both = tl.dot(weight, normed, input_precision=PRECISION)  # [2 * BLOCK_H, BLOCK]
        if HAS_BIAS:
            bias = tl.load(JointBias + 2 * at + line, mask=exists, other=0.0)  # [2 * BLOCK_H]
            both += bias.to(tl.float32)[:, None]
        value, gate = split_rows(both, BLOCK, BLOCK_H)  # [BLOCK_H, BLOCK]
        ab = value * logistic(gate)
        if HAS_MASK:
            ab *= mask
        plane_at = tl.cast(at, tl.int64) * plane
        store_channels(AB + plane_at, h, H, col, plane, ab, BLOCK_H, FULL)


@triton.jit
def project_input_kernel(
    D, Z, Normed, NormWeight, Joint, JointBias, Mask, Gate, Mean, Rstd, DY, DZ,
    n1, n2, z_0, z_1, z_2, N, N_pad, plane,
    C: tl.constexpr, C_PAD: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_H: tl.constexpr, AXES: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_MASK: tl.constexpr,
    RESIDUAL: tl.constexpr, PADDED: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute dz of BLOCK rows from d a and d b, in D, and from that of the gate, in DZ.

    D is [4 H, plane]: the gradient of a, replaced by that of its values; room for that of its
    gates; the same for b. Joint is [4 H, C] as in `project_kernel`. One matmul computes values and
    gates, one backpropagates through both. RESIDUAL adds DY, the gradient of the result.
    """
    first = tl.program_id(0).to(tl.int64) * BLOCK
    col, row, inside = columns_of_block(first, N, N_pad, plane, BLOCK, PADDED)
    normed = load_cols(Normed, row, inside, 0, C, C_PAD)  # [BLOCK, C_PAD]
    g = tl.zeros([BLOCK, C_PAD], tl.float32)
    for h in tl.range(0, C, BLOCK_H, num_stages=STAGES):
        dgate = load_cols(DZ, row, inside, h, C, BLOCK_H)  # [BLOCK, BLOCK_H]
        weight = load_matrix(Gate, h, C, C, C_PAD, BLOCK_H, C % BLOCK_H == 0)  # [BLOCK_H, C_PAD]
        g = tl.dot(dgate, weight, g, input_precision=PRECISION)  # [BLOCK, C_PAD]
    if HAS_MASK:
        # [BLOCK, 1]
        mask = tl.load(Mask + row, mask=inside, other=0.0).to(tl.float32)[:, None]
    eye = identity(BLOCK_H, Z.dtype.element_ty)
    FULL: tl.constexpr = H % BLOCK_H == 0
    BLOCKS: tl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
    for i in tl.range(0, 2 * BLOCKS, num_stages=STAGES):
        at, h = (i // BLOCKS) * H, (i % BLOCKS) * BLOCK_H
        # [2 * BLOCK_H, C_PAD]
        weight = load_two(Joint + 2 * at * C, h, H, H, C, C_PAD, BLOCK_H, FULL)
        both = tl.dot(normed, tl.trans(weight), input_precision=PRECISION)  # [BLOCK, 2 * BLOCK_H]
        if HAS_BIAS:
            channel, exists = two_ranges(h, H, H, BLOCK_H)
            bias = tl.load(JointBias + 2 * at + channel, mask=exists, other=0.0)  # [2 * BLOCK_H]
            both += bias.to(tl.float32)[None, :]
        value, gate = split_columns(both, BLOCK, BLOCK_H)  # [BLOCK, BLOCK_H]
        planes = D + 2 * tl.cast(at, tl.int64) * plane
        # [BLOCK, BLOCK_H]
        d = transpose_by_dot(load_channels(planes, h, H, col, plane, BLOCK_H, FULL), eye)
        if PADDED:
            d = tl.where(inside[:, None], d, 0.0)
        if HAS_MASK:
            d *= mask
        s = logistic(gate)
        d *= s
        dvalue = d.to(normed.dtype)
        dgate = (d * value * (1.0 - s)).to(normed.dtype)
        both = concatenate(dvalue, dgate, BLOCK, BLOCK_H)  # [BLOCK, 2 * BLOCK_H]
        g = tl.dot(both, weight, g, input_precision=PRECISION)  # [BLOCK, C_PAD]
        store_two(planes, h, H, H, col, plane, both, BLOCK_H, FULL)
    mean = tl.load(Mean + row, mask=inside, other=0.0)  # [BLOCK]
    rstd = tl.load(Rstd + row, mask=inside, other=0.0)  # [BLOCK]
    x = load_rows(Z, row, inside, n1, n2, z_0, z_1, z_2, C, C_PAD, AXES)  # [BLOCK, C_PAD]
    dz = norm_backward(g, normalise(x, mean, rstd, C, C_PAD), rstd, NormWeight, C, C_PAD)
    if RESIDUAL:
        dz += load_cols(DY, row, inside, 0, C, C_PAD)  # [BLOCK, C_PAD]
    store_rows(DZ, row, inside, dz, C, C_PAD)
