"""Kernels between the products of the conditioned transition."""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import triton
import triton.language as tl

from bevatron.kernels.shared.triton_math import logistic, norm_gradient, place


@triton.jit
def statistics_kernel(
    X, Mean, Rstd, count, x_N, x_C, eps, C: tl.constexpr, C_PAD: tl.constexpr, BLOCK: tl.constexpr
):
    """Write mean and 1/sigma of BLOCK rows."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    col = tl.arange(0, C_PAD)
    inside = (row < count)[:, None] & (col < C)[None, :]
    at = X + (row * x_N)[:, None] + (col * x_C)[None, :]
    x = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(x, 1) / C
    centred = tl.where(inside, x - mean[:, None], 0.0)
    tl.store(Mean + row, mean, mask=row < count)
    rstd = 1.0 / tl.sqrt_rn(tl.sum(centred * centred, 1) / C + eps)
    tl.store(Rstd + row, rstd, mask=row < count)


@triton.jit
def adapt_kernel(
    Condition, Weight, Bias, X, Mean, Rstd, Normed, Scale, count, x_N, x_C,
    D: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """Compute a block of scales and shifts, and with them normalise X; Weight is [2 C, D]."""
    row, column = place(tl.program_id(0), count, C // BLOCK_C, BLOCK, ROWS)
    row, column = row * BLOCK, column * BLOCK_C
    at_row, col = row + tl.arange(0, BLOCK), column + tl.arange(0, BLOCK_C)
    inside = (at_row < count)[:, None]
    at = at_row.to(tl.int64)[:, None] * C + col[None, :]
    # On its way while the products are computed.
    x_at = X + (at_row.to(tl.int64) * x_N)[:, None] + (col * x_C)[None, :]
    x = tl.load(x_at, mask=inside, other=0.0)
    scale = tl.zeros([BLOCK, BLOCK_C], tl.float32)
    shift = tl.zeros([BLOCK, BLOCK_C], tl.float32)
    for k in tl.range(0, D, BLOCK_K, num_stages=STAGES):
        condition = Condition.load([row, k])
        scale = tl.dot(condition, tl.trans(Weight.load([column, k])), scale)
        shift = tl.dot(condition, tl.trans(Weight.load([C + column, k])), shift)
    scale += tl.load(Bias + col).to(tl.float32)[None, :]
    if KEEP:
        tl.store(Scale + at, scale.to(Scale.dtype.element_ty), mask=inside)
    mean = tl.load(Mean + at_row, mask=at_row < count, other=0.0)
    rstd = tl.load(Rstd + at_row, mask=at_row < count, other=0.0)
    xhat = (x.to(tl.float32) - mean[:, None]) * rstd[:, None]
    normed = logistic(scale) * xhat + shift
    tl.store(Normed + at, normed.to(Normed.dtype.element_ty), mask=inside)


@triton.jit
def output_gradients_kernel(
    DY, Y, Out, DNarrow, Parts, count,
    C: tl.constexpr, C_PAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """From y = sigmoid(out) narrow: the gradient of narrow, and that of out over it.

    As d out = dy narrow sigma (1 - sigma) = dy y (1 - sigma), narrow need not be known. A program
    leaves its share of the sum of d out over rows in Parts.
    """
    col = tl.arange(0, C_PAD)
    total = tl.zeros([BLOCK, C_PAD], tl.float32)
    for block in range(tl.program_id(0), tl.cdiv(count, BLOCK), tl.num_programs(0)):
        row = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = (row < count)[:, None] & (col < C)[None, :]
        at = row[:, None] * C + col[None, :]
        s = logistic(tl.load(Out + at, mask=inside, other=0.0).to(tl.float32))
        dy = tl.load(DY + at, mask=inside, other=0.0).to(tl.float32)
        y = tl.load(Y + at, mask=inside, other=0.0).to(tl.float32)
        dout = dy * y * (1.0 - s)
        total += dout
        tl.store(DNarrow + at, (dy * s).to(DNarrow.dtype.element_ty), mask=inside)
        tl.store(Out + at, dout.to(Out.dtype.element_ty), mask=inside)
    part = Parts + tl.program_id(0).to(tl.int64) * 2 * C + col
    tl.store(part, tl.sum(total, 0), mask=col < C)


@triton.jit
def adapted_backward_kernel(
    X, Scale, Mean, Rstd, DX, DAdapted, Parts, count, x_N, x_C, scale_N,
    C: tl.constexpr, C_PAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Gradients of the adaptive norm from that of its result, the shift's, in DAdapted [n, 2 C].

    The scale's goes before it, and may lie on Scale, whose rows are scale_N apart; so may DX. A
    program leaves its share of the sum of the scale's gradient over rows in Parts.
    """
    col = tl.arange(0, C_PAD)
    total = tl.zeros([BLOCK, C_PAD], tl.float32)
    for block in range(tl.program_id(0), tl.cdiv(count, BLOCK), tl.num_programs(0)):
        row = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = (row < count)[:, None] & (col < C)[None, :]
        at, twice = row[:, None] * C + col[None, :], row[:, None] * (2 * C) + col[None, :]
        x_at = X + (row * x_N)[:, None] + (col * x_C)[None, :]
        x = tl.load(x_at, mask=inside, other=0.0).to(tl.float32)
        scale_at = Scale + (row * scale_N)[:, None] + col[None, :]
        s = logistic(tl.load(scale_at, mask=inside, other=0.0).to(tl.float32))
        g = tl.load(DAdapted + twice + C, mask=inside, other=0.0).to(tl.float32)
        mean = tl.load(Mean + row, mask=row < count, other=0.0)
        rstd = tl.load(Rstd + row, mask=row < count, other=0.0)
        xhat = tl.where(inside, (x - mean[:, None]) * rstd[:, None], 0.0)
        g *= s
        dscale = g * xhat * (1.0 - s)
        total += dscale
        tl.store(DAdapted + twice, dscale.to(DAdapted.dtype.element_ty), mask=inside)
        dx = norm_gradient(g, xhat, rstd, C)
        tl.store(DX + at, dx.to(DX.dtype.element_ty), mask=inside)
    part = Parts + tl.program_id(0).to(tl.int64) * 2 * C + col
    tl.store(part, tl.sum(total, 0), mask=col < C)
