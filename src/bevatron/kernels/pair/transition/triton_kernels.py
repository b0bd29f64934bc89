"""The fused kernels of the transition: the hidden layer lives in registers only.

``forward_kernel`` and ``input_kernel`` own a block of rows and walk the hidden channels;
``weight_kernel`` owns a block of hidden channels and walks rows, computing the transposed hidden
block, so that it enters the products with the rows as it lies.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import triton
import triton.language as tl

from bevatron.kernels.shared.triton_math import load_vector, logistic, norm_gradient


@triton.jit
def load_rows(base, first, count, width: tl.constexpr, BLOCK: tl.constexpr):
    """Load rows ``first .. first + BLOCK`` of a [count, width] matrix, zero behind the last."""
    row = first + tl.arange(0, BLOCK)
    at = base + tl.cast(first, tl.int64) * width
    at = at + tl.arange(0, BLOCK)[:, None] * width + tl.arange(0, width)[None, :]
    return tl.load(at, mask=(row < count)[:, None], other=0.0)


@triton.jit
def store_rows(base, first, count, block, width: tl.constexpr, BLOCK: tl.constexpr):
    """Store what `load_rows` would load."""
    row = first + tl.arange(0, BLOCK)
    at = base + tl.cast(first, tl.int64) * width
    at = at + tl.arange(0, BLOCK)[:, None] * width + tl.arange(0, width)[None, :]
    tl.store(at, block.to(base.dtype.element_ty), mask=(row < count)[:, None])


@triton.jit
def load_weight(base, h, C: tl.constexpr, BLOCK_H: tl.constexpr):
    """Load the hidden channels ``h .. h + BLOCK_H`` of a [H, C] matrix."""
    row, col = h + tl.arange(0, BLOCK_H), tl.arange(0, C)
    return tl.load(base + row[:, None] * C + col[None, :])


@triton.jit
def load_down(base, h, C: tl.constexpr, H: tl.constexpr, BLOCK_H: tl.constexpr):
    """Load the hidden channels ``h .. h + BLOCK_H`` of a [C, H] matrix, as [C, BLOCK_H]."""
    row, col = tl.arange(0, C), h + tl.arange(0, BLOCK_H)
    return tl.load(base + row[:, None] * H + col[None, :])


@triton.jit
def affine(xhat, NormWeight, NormBias, C: tl.constexpr, HAS_WEIGHT: tl.constexpr,
           HAS_BIAS: tl.constexpr):  # fmt: skip
    """Apply the LayerNorm's weight and bias."""
    col = tl.arange(0, C)
    if HAS_WEIGHT:
        xhat = xhat * load_vector(NormWeight, col, C)
    if HAS_BIAS:
        xhat = xhat + load_vector(NormBias, col, C)
    return xhat


@triton.jit
def load_up(base, h, C: tl.constexpr, BLOCK_H: tl.constexpr, GATED: tl.constexpr):
    """Load a block of hidden channels of Up; with gates, BLOCK_H of these lie before each block."""
    halves: tl.constexpr = 2 if GATED else 1
    return load_weight(base, halves * h, C, halves * BLOCK_H)


@triton.jit
def widened(
    normed, up, Bias, BLOCK: tl.constexpr, BLOCK_H: tl.constexpr, GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Compute gates and values of a block of hidden channels, in one product.

    Taking the product apart costs nothing: a thread holds whole rows' shares of both halves.
    """
    value = tl.dot(normed, tl.trans(up))
    gate = value
    if GATED:
        both = tl.permute(tl.reshape(value, (BLOCK, 2, BLOCK_H)), (0, 2, 1))
        gate, value = tl.split(both)
    if HAS_BIAS:
        value += tl.load(Bias + tl.arange(0, BLOCK_H)).to(tl.float32)[None, :]
    return gate, value


@triton.jit
def as_product(block, C: tl.constexpr):
    """Multiply by the identity, exactly: matrix units leave results where they take operands from.

    Rows that enter many products then stay in registers, instead of being read from shared memory
    for each.
    """
    i = tl.arange(0, C)
    return tl.dot(block, (i[:, None] == i[None, :]).to(block.dtype)).to(block.dtype)


@triton.jit
def forward_kernel(
    X, NormWeight, NormBias, Up, Down, UpBias, DownBias, Y, Mean, Rstd, count, eps,
    C: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr, BLOCK_H: tl.constexpr,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, GATED: tl.constexpr,
    HAS_UP_BIAS: tl.constexpr, HAS_DOWN_BIAS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK rows of the result."""
    first = tl.program_id(0) * BLOCK
    row = first + tl.arange(0, BLOCK)
    x = load_rows(X, first, count, C, BLOCK).to(tl.float32)
    mean = tl.sum(x, 1) / C
    centred = x - mean[:, None]
    rstd = 1.0 / tl.sqrt_rn(tl.sum(centred * centred, 1) / C + eps)
    tl.store(Mean + row, mean, mask=row < count)
    tl.store(Rstd + row, rstd, mask=row < count)
    normed = affine(centred * rstd[:, None], NormWeight, NormBias, C, HAS_WEIGHT, HAS_BIAS)
    normed = as_product(normed.to(X.dtype.element_ty), C)
    y = tl.zeros([BLOCK, C], tl.float32)
    for h in tl.range(0, H, BLOCK_H, num_stages=STAGES):
        up = load_up(Up, h, C, BLOCK_H, GATED)
        gate, value = widened(normed, up, UpBias + h, BLOCK, BLOCK_H, GATED, HAS_UP_BIAS)
        hidden = gate * logistic(gate) * value if GATED else tl.maximum(value, 0.0)
        y = tl.dot(hidden.to(normed.dtype), tl.trans(load_down(Down, h, C, H, BLOCK_H)), y)
    if HAS_DOWN_BIAS:
        y += load_vector(DownBias, tl.arange(0, C), C)
    store_rows(Y, first, count, y, C, BLOCK)


@triton.jit
def input_kernel(
    DY, X, NormWeight, NormBias, Up, Down, UpBias, Mean, Rstd, DX, Normed, Parts, count,
    C: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr, BLOCK_H: tl.constexpr,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, GATED: tl.constexpr,
    HAS_UP_BIAS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute dx of BLOCK rows; leave the normalised rows, and shares of the norm's gradients."""
    first = tl.program_id(0) * BLOCK
    row = first + tl.arange(0, BLOCK)
    mean = tl.load(Mean + row, mask=row < count, other=0.0)
    rstd = tl.load(Rstd + row, mask=row < count, other=0.0)
    xhat = (load_rows(X, first, count, C, BLOCK).to(tl.float32) - mean[:, None]) * rstd[:, None]
    normed = affine(xhat, NormWeight, NormBias, C, HAS_WEIGHT, HAS_BIAS).to(X.dtype.element_ty)
    store_rows(Normed, first, count, normed, C, BLOCK)
    # Of dy there is one narrow product per block: it is read from shared memory faster.
    dy = load_rows(DY, first, count, C, BLOCK)
    normed = as_product(normed, C)
    g = tl.zeros([BLOCK, C], tl.float32)
    for h in tl.range(0, H, BLOCK_H, num_stages=STAGES):
        up = load_up(Up, h, C, BLOCK_H, GATED)
        gate, value = widened(normed, up, UpBias + h, BLOCK, BLOCK_H, GATED, HAS_UP_BIAS)
        dhidden = tl.dot(dy, load_down(Down, h, C, H, BLOCK_H))
        if GATED:
            s = logistic(gate)
            silu = gate * s
            dgate = dhidden * value * (s + silu * (1.0 - s))
            # Gates, then values: as the rows of `up`.
            both = tl.permute(tl.join(dgate, dhidden * silu), (0, 2, 1))
            dvalue = tl.reshape(both, (BLOCK, 2 * BLOCK_H))
        else:
            dvalue = tl.where(value > 0.0, dhidden, 0.0)
        g = tl.dot(dvalue.to(dy.dtype), up, g)
    xhat = (load_rows(X, first, count, C, BLOCK).to(tl.float32) - mean[:, None]) * rstd[:, None]
    xhat = tl.where((row < count)[:, None], xhat, 0.0)
    col = tl.arange(0, C)
    if HAS_WEIGHT or HAS_BIAS:
        part = Parts + tl.program_id(0).to(tl.int64) * 2 * C + col
        tl.store(part, tl.sum(g * xhat, 0))
        tl.store(part + C, tl.sum(g, 0))
    if HAS_WEIGHT:
        g *= load_vector(NormWeight, col, C)
    store_rows(DX, first, count, norm_gradient(g, xhat, rstd, C), C, BLOCK)


@triton.jit
def weight_kernel(
    DY, Normed, Wide, DownT, UpBias, Parts, BiasParts, count, rows_per_part,
    C: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr, BLOCK_H: tl.constexpr,
    GATED: tl.constexpr, HAS_UP_BIAS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute one part's share of the weights' gradients for BLOCK_H hidden channels.

    Wide has the gates of BLOCK_H channels before their values: products of the same rows are one,
    for which the matrix units are waited for once. Parts is [part, 2 or 3, H C]: of Up [H, C], of
    Down [C, H], of Gate [H, C].
    """
    h = tl.program_id(0) * BLOCK_H
    first = tl.program_id(1) * rows_per_part
    last = tl.minimum(first + rows_per_part, count)
    wide = load_up(Wide, h, C, BLOCK_H, GATED)
    down = load_weight(DownT, h, C, BLOCK_H)
    dup = tl.zeros([BLOCK_H, C], tl.float32)
    ddown = tl.zeros([BLOCK_H, C], tl.float32)
    if GATED:
        dweight = tl.zeros([BLOCK_H, C], tl.float32)
    if HAS_UP_BIAS:
        bias = tl.load(UpBias + h + tl.arange(0, BLOCK_H)).to(tl.float32)[:, None]
        dbias = tl.zeros([BLOCK_H], tl.float32)
    for start in tl.range(first, last, BLOCK, num_stages=STAGES):
        # Rows behind the last have dy = 0: whatever their hidden channels, they add nothing.
        normed = load_rows(Normed, start, last, C, BLOCK)
        dy = load_rows(DY, start, last, C, BLOCK)
        value = tl.dot(wide, tl.trans(normed))
        if GATED:
            both = tl.permute(tl.reshape(value, (2, BLOCK_H, BLOCK)), (1, 2, 0))
            gate, value = tl.split(both)
        if HAS_UP_BIAS:
            value += bias
        dvalue = tl.dot(down, tl.trans(dy))
        if GATED:
            s = logistic(gate)
            silu = gate * s
            hidden = silu * value
            dgate = dvalue * value * (s + silu * (1.0 - s))
            dvalue = dvalue * silu
            dweight = tl.dot(dgate.to(dy.dtype), normed, dweight)
        else:
            hidden = tl.maximum(value, 0.0)
            dvalue = tl.where(value > 0.0, dvalue, 0.0)
        ddown = tl.dot(hidden.to(dy.dtype), dy, ddown)
        dup = tl.dot(dvalue.to(dy.dtype), normed, dup)
        if HAS_UP_BIAS:
            dbias += tl.sum(dvalue, 1)
    matrices = 3 if GATED else 2
    at = Parts + (tl.program_id(1) * matrices).to(tl.int64) * H * C
    at = at + (h + tl.arange(0, BLOCK_H))[:, None] * C + tl.arange(0, C)[None, :]
    tl.store(at, dup)
    down_at = Parts + (tl.program_id(1) * matrices + 1).to(tl.int64) * H * C
    down_at = down_at + tl.arange(0, C)[None, :] * H + (h + tl.arange(0, BLOCK_H))[:, None]
    tl.store(down_at, ddown)
    if GATED:
        tl.store(at + 2 * H * C, dweight)
    if HAS_UP_BIAS:
        tl.store(BiasParts + tl.program_id(1) * H + h + tl.arange(0, BLOCK_H), dbias)


@triton.jit
def order_kernel(
    Up, Gate, Down, Narrower, Wider, DownT,
    C: tl.constexpr, H: tl.constexpr, NARROWER_H: tl.constexpr, WIDER_H: tl.constexpr,
    GATED: tl.constexpr,
):  # fmt: skip
    """Transpose Down, and put the gates of so many hidden channels before their values."""
    h = tl.program_id(0) * NARROWER_H
    at = tl.arange(0, NARROWER_H)[:, None] * C + tl.arange(0, C)[None, :]
    tl.store(DownT + h * C + at, tl.trans(load_down(Down, h, C, H, NARROWER_H)))
    if GATED:
        gate, up = load_weight(Gate, h, C, NARROWER_H), load_weight(Up, h, C, NARROWER_H)
        tl.store(Narrower + 2 * h * C + at, gate)
        tl.store(Narrower + (2 * h + NARROWER_H) * C + at, up)
        gate_row = h // WIDER_H * (2 * WIDER_H) + h % WIDER_H
        tl.store(Wider + gate_row * C + at, gate)
        tl.store(Wider + (gate_row + WIDER_H) * C + at, up)


@triton.jit
def add_kernel(
    Parts, DUp, DDown, DGate, NormParts, DNormWeight, DNormBias, parts, norm_parts,
    C: tl.constexpr, NUMBERS: tl.constexpr, BLOCK: tl.constexpr, AT_ONCE: tl.constexpr,
    NORM_BLOCK: tl.constexpr, NORM_BLOCK_C: tl.constexpr, MATRICES: tl.constexpr,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Add shares in their order: of a matrix (grid's axis 1), or of the norm's vectors.

    Parts is as `weight_kernel` leaves it, with NUMBERS in a matrix; NormParts [part, 2, C].
    """
    which = tl.program_id(1)
    if which < MATRICES:
        number = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = number < NUMBERS
        total = tl.zeros([BLOCK], tl.float32)
        for first in range(0, parts, AT_ONCE):
            for i in tl.static_range(AT_ONCE):
                start = ((first + i) * MATRICES + which).to(tl.int64) * NUMBERS
                here = inside & (first + i < parts)
                total += tl.load(Parts + start + number, mask=here, other=0.0)
        if which == 0:
            tl.store(DUp + number, total.to(DUp.dtype.element_ty), mask=inside)
        elif which == 1:
            tl.store(DDown + number, total.to(DDown.dtype.element_ty), mask=inside)
        else:
            tl.store(DGate + number, total.to(DGate.dtype.element_ty), mask=inside)
    elif tl.program_id(0) * NORM_BLOCK_C < 2 * C:
        col = tl.program_id(0) * NORM_BLOCK_C + tl.arange(0, NORM_BLOCK_C)
        sums = tl.zeros([NORM_BLOCK, NORM_BLOCK_C], tl.float32)
        for first in range(0, norm_parts, NORM_BLOCK):
            part = first + tl.arange(0, NORM_BLOCK)
            at = NormParts + part.to(tl.int64)[:, None] * (2 * C) + col[None, :]
            sums += tl.load(at, mask=(part < norm_parts)[:, None], other=0.0)
        vector = tl.sum(sums, 0)
        if HAS_WEIGHT:
            tl.store(DNormWeight + col, vector.to(DNormWeight.dtype.element_ty), mask=col < C)
        if HAS_BIAS:
            behind = (col >= C) & (col < 2 * C)
            tl.store(DNormBias + col - C, vector.to(DNormBias.dtype.element_ty), mask=behind)
