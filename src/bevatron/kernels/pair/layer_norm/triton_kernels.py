"""Layer normalisation: forward, backward, and the reduction of the weight gradients.

A program holds a block of whole rows [BLOCK, C_PAD] in registers, so statistics need one read of x.
The forward kernel writes y and, in float32, each row's mean and 1/sigma. The backward kernel is
persistent: its programs loop over all blocks, write dx (and dscale), and keep partial sums of
dweight and dbias in registers, which `sum_kernel` adds in a fixed order. Nothing is atomic.

A row's offset is ``i0 s0 + i1 s1 + i2 s2``. AXES, the number of these axes in use, is constexpr, so
a plain matrix costs no integer division.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import triton
import triton.language as tl

from bevatron.kernels.shared.triton_math import (
    load_vector,
    logistic,
    norm_gradient,
    normalise,
    row_offsets,
)


@triton.jit
def forward_kernel(
    X, Weight, Bias, Scale, Shift, Update, Gate, Sum, Y, Mean, Rstd,
    count, n1, n2, x_0, x_1, x_2, x_C, scale_0, scale_1, scale_2, scale_C,
    shift_0, shift_1, shift_2, shift_C, update_0, update_1, update_2, update_C,
    gate_0, gate_1, gate_2, gate_C, eps,
    C: tl.constexpr, C_PAD: tl.constexpr, BLOCK: tl.constexpr, AXES: tl.constexpr,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SCALE: tl.constexpr,
    HAS_SHIFT: tl.constexpr, SIGMOID: tl.constexpr, HAS_UPDATE: tl.constexpr,
):  # fmt: skip
    """Normalise BLOCK rows; write each row's mean and 1/sigma in float32.

    With an update, rows are those of the sum ``x + gate update``, which is written too.
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    col = tl.arange(0, C_PAD)
    inside = (row < count)[:, None] & (col < C)[None, :]
    at = X + row_offsets(row, n1, n2, x_0, x_1, x_2, AXES)[:, None] + (col * x_C)[None, :]
    x = tl.load(at, mask=inside, other=0.0).to(tl.float32)  # [BLOCK, C_PAD]
    if HAS_UPDATE:
        at = Update + row_offsets(row, n1, n2, update_0, update_1, update_2, AXES)[:, None]
        # [BLOCK, C_PAD]
        update = tl.load(at + (col * update_C)[None, :], mask=inside, other=0.0).to(tl.float32)
        at = Gate + row_offsets(row, n1, n2, gate_0, gate_1, gate_2, AXES)[:, None]
        # [BLOCK, C_PAD]
        gate = tl.load(at + (col * gate_C)[None, :], mask=inside, other=0.0).to(tl.float32)
        total = (x + gate * update).to(Sum.dtype.element_ty)
        tl.store(Sum + row[:, None] * C + col[None, :], total, mask=inside)
        x = total.to(tl.float32)  # as whoever reads the sum sees it
    y, mean, rstd = normalise(x, inside, eps, C)
    tl.store(Mean + row, mean, mask=row < count)
    tl.store(Rstd + row, rstd, mask=row < count)
    if HAS_WEIGHT:
        y *= load_vector(Weight, col, C)  # [BLOCK, C_PAD]
    if HAS_BIAS:
        y += load_vector(Bias, col, C)  # [BLOCK, C_PAD]
    if HAS_SCALE:
        at = Scale + row_offsets(row, n1, n2, scale_0, scale_1, scale_2, AXES)[:, None]
        # [BLOCK, C_PAD]
        scale = tl.load(at + (col * scale_C)[None, :], mask=inside, other=0.0).to(tl.float32)
        y *= logistic(scale) if SIGMOID else scale
    if HAS_SHIFT:
        at = Shift + row_offsets(row, n1, n2, shift_0, shift_1, shift_2, AXES)[:, None]
        # [BLOCK, C_PAD]
        y += tl.load(at + (col * shift_C)[None, :], mask=inside, other=0.0).to(tl.float32)
    tl.store(Y + row[:, None] * C + col[None, :], y.to(Y.dtype.element_ty), mask=inside)


@triton.jit
def _load_both(
    X, DY, block, count, n1, n2, x_0, x_1, x_2, x_C, dy_0, dy_1, dy_2, dy_C,
    C: tl.constexpr, C_PAD: tl.constexpr, BLOCK: tl.constexpr, AXES: tl.constexpr,
):  # fmt: skip
    """Load a block of x and dy, [BLOCK, C_PAD] each, and return its rows [BLOCK] too."""
    col = tl.arange(0, C_PAD)
    row = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = (row < count)[:, None] & (col < C)[None, :]
    at = X + row_offsets(row, n1, n2, x_0, x_1, x_2, AXES)[:, None] + (col * x_C)[None, :]
    x = tl.load(at, mask=inside, other=0.0)  # [BLOCK, C_PAD]
    at = DY + row_offsets(row, n1, n2, dy_0, dy_1, dy_2, AXES)[:, None] + (col * dy_C)[None, :]
    dy = tl.load(at, mask=inside, other=0.0)  # [BLOCK, C_PAD]
    return x, dy, row


@triton.jit
def backward_kernel(
    DY, X, Weight, Bias, Scale, Mean, Rstd, DX, DScale, Parts,
    count, n1, n2, dy_0, dy_1, dy_2, dy_C, x_0, x_1, x_2, x_C,
    scale_0, scale_1, scale_2, scale_C, dscale_N,
    C: tl.constexpr, C_PAD: tl.constexpr, BLOCK: tl.constexpr, AXES: tl.constexpr,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SCALE: tl.constexpr,
    SIGMOID: tl.constexpr, WANTS_VECTORS: tl.constexpr,
):  # fmt: skip
    """Compute dx and dscale of every num_programs-th block; write partial dweight, dbias to Parts.

    With xhat the normalised row and g = dy scale weight,
    dx = rstd (g - mean(g) - xhat mean(g xhat)).
    """
    col = tl.arange(0, C_PAD)
    if HAS_WEIGHT:
        weight = load_vector(Weight, col, C)  # [1, C_PAD]
    if WANTS_VECTORS:
        dweight = tl.zeros([BLOCK, C_PAD], tl.float32)
        dbias = tl.zeros([BLOCK, C_PAD], tl.float32)
    # Software pipelining by hand: the next block loads while this one is computed.
    # next_x [BLOCK, C_PAD], next_dy [BLOCK, C_PAD], next_row [BLOCK]
    next_x, next_dy, next_row = _load_both(
        X, DY, tl.program_id(0), count, n1, n2, x_0, x_1, x_2, x_C, dy_0, dy_1, dy_2, dy_C,
        C, C_PAD, BLOCK, AXES,
    )  # fmt: skip
    for block in range(tl.program_id(0), tl.cdiv(count, BLOCK), tl.num_programs(0)):
        x, g, row = next_x.to(tl.float32), next_dy.to(tl.float32), next_row
        # next_x [BLOCK, C_PAD], next_dy [BLOCK, C_PAD], next_row [BLOCK]
        next_x, next_dy, next_row = _load_both(
            X, DY, block + tl.num_programs(0), count, n1, n2, x_0, x_1, x_2, x_C,
            dy_0, dy_1, dy_2, dy_C, C, C_PAD, BLOCK, AXES,
        )  # fmt: skip
        inside = (row < count)[:, None] & (col < C)[None, :]
        mean = tl.load(Mean + row, mask=row < count, other=0.0)  # [BLOCK]
        rstd = tl.load(Rstd + row, mask=row < count, other=0.0)  # [BLOCK]
        xhat = tl.where(inside, (x - mean[:, None]) * rstd[:, None], 0.0)
        if HAS_SCALE:
            at = Scale + row_offsets(row, n1, n2, scale_0, scale_1, scale_2, AXES)[:, None]
            # [BLOCK, C_PAD]
            scale = tl.load(at + (col * scale_C)[None, :], mask=inside, other=0.0).to(tl.float32)
            dscale = xhat
            if HAS_WEIGHT:
                dscale *= weight
            if HAS_BIAS:
                dscale += load_vector(Bias, col, C)  # [BLOCK, C_PAD]
            dscale *= g
            if SIGMOID:
                scale = logistic(scale)
                dscale *= scale * (1.0 - scale)
            at = DScale + (row * dscale_N)[:, None] + col[None, :]
            tl.store(at, dscale.to(DScale.dtype.element_ty), mask=inside)
            g *= scale
        if WANTS_VECTORS:
            dweight += g * xhat
            dbias += g
        if HAS_WEIGHT:
            g *= weight
        dx = norm_gradient(g, xhat, rstd, C)
        tl.store(DX + row[:, None] * C + col[None, :], dx.to(DX.dtype.element_ty), mask=inside)
    if WANTS_VECTORS:
        part = Parts + tl.program_id(0).to(tl.int64) * 2 * C + col
        tl.store(part, tl.sum(dweight, 0), mask=col < C)  # [C_PAD]
        tl.store(part + C, tl.sum(dbias, 0), mask=col < C)  # [C_PAD]
