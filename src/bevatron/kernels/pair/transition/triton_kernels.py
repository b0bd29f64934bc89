"""Fused transition, ``down(silu(gate(n)) * up(n))`` or ``down(relu(up(n)))`` with n = LayerNorm(x).

The hidden layer [rows, H] exists in registers only; backward recomputes it from x and statistics.
- `forward_kernel`: a program owns BLOCK rows, loops over H and writes y, mean and 1/sigma.
- `input_kernel`: the same loop gives dx; it also writes the normalised rows n for `weight_kernel`.
- `weight_kernel`: a program owns BLOCK_H hidden channels and loops over a range of rows. It
  computes the transposed hidden block, which is then the left operand of the matmuls without a
  round trip through shared memory, and writes float32 partial sums of the weight gradients.
- `add_kernel` adds partial sums in a fixed order; `order_kernel` rounds and rearranges weights.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import triton
import triton.language as tl

from bevatron.kernels.shared.triton_math import load_vector, logistic, norm_gradient


@triton.jit
def load_rows(base, first, count, width: tl.constexpr, BLOCK: tl.constexpr):
    """Load rows ``first .. first + BLOCK`` of a [count, width] matrix, zero from ``count`` on."""
    row = first + tl.arange(0, BLOCK)
    at = base + tl.cast(first, tl.int64) * width
    at = at + tl.arange(0, BLOCK)[:, None] * width + tl.arange(0, width)[None, :]
    return tl.load(at, mask=(row < count)[:, None], other=0.0)  # [BLOCK, width]


@triton.jit
def store_rows(base, first, count, block, width: tl.constexpr, BLOCK: tl.constexpr):
    """Store a block [BLOCK, width] where `load_rows` loads it."""
    row = first + tl.arange(0, BLOCK)
    at = base + tl.cast(first, tl.int64) * width
    at = at + tl.arange(0, BLOCK)[:, None] * width + tl.arange(0, width)[None, :]
    tl.store(at, block.to(base.dtype.element_ty), mask=(row < count)[:, None])


@triton.jit
def load_weight(base, h, C: tl.constexpr, BLOCK_H: tl.constexpr):
    """Load the hidden channels ``h .. h + BLOCK_H`` of an [H, C] matrix."""
    row, col = h + tl.arange(0, BLOCK_H), tl.arange(0, C)
    return tl.load(base + row[:, None] * C + col[None, :])  # [BLOCK_H, C]


@triton.jit
def load_down(base, h, C: tl.constexpr, H: tl.constexpr, BLOCK_H: tl.constexpr):
    """Load the hidden channels ``h .. h + BLOCK_H`` of a [C, H] matrix."""
    row, col = tl.arange(0, C), h + tl.arange(0, BLOCK_H)
    return tl.load(base + row[:, None] * H + col[None, :])  # [C, BLOCK_H]


@triton.jit
def affine(xhat, NormWeight, NormBias, C: tl.constexpr, HAS_WEIGHT: tl.constexpr,
           HAS_BIAS: tl.constexpr):  # fmt: skip
    """Apply the weight and bias of the LayerNorm to xhat [BLOCK, C]."""
    col = tl.arange(0, C)
    if HAS_WEIGHT:
        xhat = xhat * load_vector(NormWeight, col, C)  # [BLOCK, C]
    if HAS_BIAS:
        xhat = xhat + load_vector(NormBias, col, C)  # [BLOCK, C]
    return xhat


@triton.jit
def load_up(base, h, C: tl.constexpr, BLOCK_H: tl.constexpr, GATED: tl.constexpr):
    """Load BLOCK_H hidden channels of Up; if GATED, their gates before their values."""
    matrices: tl.constexpr = 2 if GATED else 1
    return load_weight(base, matrices * h, C, matrices * BLOCK_H)  # [matrices * BLOCK_H, C]


@triton.jit
def up_projection(
    normed, up, Bias, BLOCK: tl.constexpr, BLOCK_H: tl.constexpr, GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Compute gates and values [BLOCK, BLOCK_H] of a block of hidden channels in one matmul.

    Splitting its result is free: gate and value of one element are in the same thread.
    """
    value = tl.dot(normed, tl.trans(up))  # [BLOCK, (1 + GATED) * BLOCK_H]
    gate = value
    if GATED:
        both = tl.permute(tl.reshape(value, (BLOCK, 2, BLOCK_H)), (0, 2, 1))
        gate, value = tl.split(both)  # [BLOCK, BLOCK_H]
    if HAS_BIAS:
        # [BLOCK, BLOCK_H]
        value += tl.load(Bias + tl.arange(0, BLOCK_H)).to(tl.float32)[None, :]
    return gate, value


@triton.jit
def operand_in_registers(block, C: tl.constexpr):
    """Multiply [BLOCK, C] by the identity, which is exact, to get it in the layout of a dot result.

    Tensor cores take their left operand from registers in that layout: rows used by many matmuls
    stay there and are not read from shared memory for each.
    """
    i = tl.arange(0, C)
    identity = (i[:, None] == i[None, :]).to(block.dtype)  # [C, C]
    return tl.dot(block, identity).to(block.dtype)  # [BLOCK, C]


@triton.jit
def forward_kernel(
    X, NormWeight, NormBias, Up, Down, UpBias, DownBias, Y, Mean, Rstd, count, eps,
    C: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr, BLOCK_H: tl.constexpr,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, GATED: tl.constexpr,
    HAS_UP_BIAS: tl.constexpr, HAS_DOWN_BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK rows of y, and their mean and 1/sigma; RESIDUAL adds the rows of x."""
    first = tl.program_id(0) * BLOCK
    row = first + tl.arange(0, BLOCK)
    x = load_rows(X, first, count, C, BLOCK).to(tl.float32)  # [BLOCK, C]
    mean = tl.sum(x, 1) / C  # [BLOCK]
    centred = x - mean[:, None]
    rstd = 1.0 / tl.sqrt_rn(tl.sum(centred * centred, 1) / C + eps)  # [BLOCK]
    tl.store(Mean + row, mean, mask=row < count)
    tl.store(Rstd + row, rstd, mask=row < count)
    normed = affine(centred * rstd[:, None], NormWeight, NormBias, C, HAS_WEIGHT, HAS_BIAS)
    normed = operand_in_registers(normed.to(X.dtype.element_ty), C)  # [BLOCK, C]
    y = tl.zeros([BLOCK, C], tl.float32)
    for h in tl.range(0, H, BLOCK_H, num_stages=STAGES):
        up = load_up(Up, h, C, BLOCK_H, GATED)  # [(1 + GATED) * BLOCK_H, C]
        # [BLOCK, BLOCK_H]
        gate, value = up_projection(normed, up, UpBias + h, BLOCK, BLOCK_H, GATED, HAS_UP_BIAS)
        hidden = gate * logistic(gate) * value if GATED else tl.maximum(value, 0.0)
        # [BLOCK, C]
        y = tl.dot(hidden.to(normed.dtype), tl.trans(load_down(Down, h, C, H, BLOCK_H)), y)
    if HAS_DOWN_BIAS:
        y += load_vector(DownBias, tl.arange(0, C), C)  # [BLOCK, C]
    if RESIDUAL:
        y += load_rows(X, first, count, C, BLOCK)  # [BLOCK, C]
    store_rows(Y, first, count, y, C, BLOCK)


@triton.jit
def input_kernel(
    DY, X, NormWeight, NormBias, Up, Down, UpBias, Mean, Rstd, DX, Normed, Parts, count,
    C: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr, BLOCK_H: tl.constexpr,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, GATED: tl.constexpr,
    HAS_UP_BIAS: tl.constexpr, RESIDUAL: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute dx of BLOCK rows; write n = LayerNorm(x) and partial sums of its weight gradients."""
    first = tl.program_id(0) * BLOCK
    row = first + tl.arange(0, BLOCK)
    mean = tl.load(Mean + row, mask=row < count, other=0.0)  # [BLOCK]
    rstd = tl.load(Rstd + row, mask=row < count, other=0.0)  # [BLOCK]
    # [BLOCK, C]
    xhat = (load_rows(X, first, count, C, BLOCK).to(tl.float32) - mean[:, None]) * rstd[:, None]
    normed = affine(xhat, NormWeight, NormBias, C, HAS_WEIGHT, HAS_BIAS).to(X.dtype.element_ty)
    store_rows(Normed, first, count, normed, C, BLOCK)
    # dy enters one narrow matmul per step: reading it from shared memory is faster.
    dy = load_rows(DY, first, count, C, BLOCK)  # [BLOCK, C]
    normed = operand_in_registers(normed, C)  # [BLOCK, C]
    g = tl.zeros([BLOCK, C], tl.float32)
    for h in tl.range(0, H, BLOCK_H, num_stages=STAGES):
        up = load_up(Up, h, C, BLOCK_H, GATED)  # [(1 + GATED) * BLOCK_H, C]
        # [BLOCK, BLOCK_H]
        gate, value = up_projection(normed, up, UpBias + h, BLOCK, BLOCK_H, GATED, HAS_UP_BIAS)
        dhidden = tl.dot(dy, load_down(Down, h, C, H, BLOCK_H))  # [BLOCK, BLOCK_H]
        if GATED:
            s = logistic(gate)
            silu = gate * s
            dgate = dhidden * value * (s + silu * (1.0 - s))
            # Gates, then values, as the rows of `up`.
            both = tl.permute(tl.join(dgate, dhidden * silu), (0, 2, 1))
            dvalue = tl.reshape(both, (BLOCK, 2 * BLOCK_H))  # [BLOCK, 2 * BLOCK_H]
        else:
            dvalue = tl.where(value > 0.0, dhidden, 0.0)
        g = tl.dot(dvalue.to(dy.dtype), up, g)  # [BLOCK, C]
    # [BLOCK, C], loaded again: xhat would occupy registers during the loop.
    xhat = (load_rows(X, first, count, C, BLOCK).to(tl.float32) - mean[:, None]) * rstd[:, None]
    xhat = tl.where((row < count)[:, None], xhat, 0.0)
    col = tl.arange(0, C)
    if HAS_WEIGHT or HAS_BIAS:
        part = Parts + tl.program_id(0).to(tl.int64) * 2 * C + col
        tl.store(part, tl.sum(g * xhat, 0))  # [C]
        tl.store(part + C, tl.sum(g, 0))  # [C]
    if HAS_WEIGHT:
        g *= load_vector(NormWeight, col, C)  # [BLOCK, C]
    dx = norm_gradient(g, xhat, rstd, C)
    if RESIDUAL:
        dx += load_rows(DY, first, count, C, BLOCK)  # [BLOCK, C]
    store_rows(DX, first, count, dx, C, BLOCK)


@triton.jit
def weight_kernel(
    DY, Normed, Wide, DownT, UpBias, Parts, BiasParts, count, rows_per_part,
    C: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr, BLOCK_H: tl.constexpr,
    GATED: tl.constexpr, HAS_UP_BIAS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute the weight gradients of BLOCK_H hidden channels, summed over rows_per_part rows.

    Wide interleaves the gates and values of BLOCK_H channels, so one matmul, and one wait for the
    tensor cores, gives both. Parts is [part, 2 or 3, H C]: dUp [H, C], dDown [C, H], dGate [H, C].
    """
    h = tl.program_id(0) * BLOCK_H
    first = tl.program_id(1) * rows_per_part
    last = tl.minimum(first + rows_per_part, count)
    wide = load_up(Wide, h, C, BLOCK_H, GATED)  # [(1 + GATED) * BLOCK_H, C]
    down = load_weight(DownT, h, C, BLOCK_H)  # [BLOCK_H, C]
    dup = tl.zeros([BLOCK_H, C], tl.float32)
    ddown = tl.zeros([BLOCK_H, C], tl.float32)
    if GATED:
        dweight = tl.zeros([BLOCK_H, C], tl.float32)
    if HAS_UP_BIAS:
        # [BLOCK_H, 1]
        bias = tl.load(UpBias + h + tl.arange(0, BLOCK_H)).to(tl.float32)[:, None]
        dbias = tl.zeros([BLOCK_H], tl.float32)
    for start in tl.range(first, last, BLOCK, num_stages=STAGES):
        # Rows from `last` on have dy = 0 and add nothing, whatever their hidden channels.
        normed = load_rows(Normed, start, last, C, BLOCK)  # [BLOCK, C]
        dy = load_rows(DY, start, last, C, BLOCK)  # [BLOCK, C]
        value = tl.dot(wide, tl.trans(normed))  # [(1 + GATED) * BLOCK_H, BLOCK]
        if GATED:
            both = tl.permute(tl.reshape(value, (2, BLOCK_H, BLOCK)), (1, 2, 0))
            gate, value = tl.split(both)  # [BLOCK_H, BLOCK]
        if HAS_UP_BIAS:
            value += bias
        dvalue = tl.dot(down, tl.trans(dy))  # [BLOCK_H, BLOCK]
        if GATED:
            s = logistic(gate)
            silu = gate * s
            hidden = silu * value
            dgate = dvalue * value * (s + silu * (1.0 - s))
            dvalue = dvalue * silu
            dweight = tl.dot(dgate.to(dy.dtype), normed, dweight)  # [BLOCK_H, C]
        else:
            hidden = tl.maximum(value, 0.0)
            dvalue = tl.where(value > 0.0, dvalue, 0.0)
        ddown = tl.dot(hidden.to(dy.dtype), dy, ddown)  # [BLOCK_H, C]
        dup = tl.dot(dvalue.to(dy.dtype), normed, dup)  # [BLOCK_H, C]
        if HAS_UP_BIAS:
            dbias += tl.sum(dvalue, 1)  # [BLOCK_H]
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
    Up, Gate, Down, Narrower, RoundedDown, Wider, DownT,
    C: tl.constexpr, H: tl.constexpr, NARROWER_H: tl.constexpr, WIDER_H: tl.constexpr,
    GATED: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    """Write Up and Down, rounded; Gate and Up are interleaved in blocks of NARROWER_H.

    For BACKWARD, write them in blocks of WIDER_H too, and Down transposed.
    """
    h = tl.program_id(0) * NARROWER_H
    at = tl.arange(0, NARROWER_H)[:, None] * C + tl.arange(0, C)[None, :]
    # [C, NARROWER_H]
    down = load_down(Down, h, C, H, NARROWER_H).to(RoundedDown.dtype.element_ty)
    row, col = tl.arange(0, C), h + tl.arange(0, NARROWER_H)
    tl.store(RoundedDown + row[:, None] * H + col[None, :], down)
    # [NARROWER_H, C]
    up = load_weight(Up, h, C, NARROWER_H).to(Narrower.dtype.element_ty)
    matrices: tl.constexpr = 2 if GATED else 1
    tl.store(Narrower + (matrices * h + (matrices - 1) * NARROWER_H) * C + at, up)
    if GATED:
        # [NARROWER_H, C]
        gate = load_weight(Gate, h, C, NARROWER_H).to(Narrower.dtype.element_ty)
        tl.store(Narrower + 2 * h * C + at, gate)
    if BACKWARD:
        tl.store(DownT + h * C + at, tl.trans(down))
        if GATED:
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
    """Add partial sums in order: of matrix program_id(1), or after the last, of the norm.

    Parts is [parts, MATRICES, NUMBERS], as `weight_kernel` writes it; NormParts [norm_parts, 2, C].
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
                total += tl.load(Parts + start + number, mask=here, other=0.0)  # [BLOCK]
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
            # [NORM_BLOCK, NORM_BLOCK_C]
            sums += tl.load(at, mask=(part < norm_parts)[:, None], other=0.0)
        vector = tl.sum(sums, 0)  # [NORM_BLOCK_C]
        if HAS_WEIGHT:
            tl.store(DNormWeight + col, vector.to(DNormWeight.dtype.element_ty), mask=col < C)
        if HAS_BIAS:
            behind = (col >= C) & (col < 2 * C)
            tl.store(DNormBias + col - C, vector.to(DNormBias.dtype.element_ty), mask=behind)
