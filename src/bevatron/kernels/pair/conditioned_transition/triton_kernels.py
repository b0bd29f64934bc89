"""Kernels around the matmuls of the conditioned transition.

`adapt_kernel` is a matmul with the adaptive norm as its epilogue: scales and shifts of a block
[BLOCK, BLOCK_C] stay in registers, the normalised rows are written. The other three are
memory-bound: a program holds whole rows [BLOCK, C_PAD] in registers; the backward kernels, which
also need column sums, are persistent, and each program writes one partial sum [C].
D is the number of channels of the condition, C that of x.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import triton
import triton.language as tl

from bevatron.kernels.shared.triton_math import logistic, norm_gradient, normalise, place


@triton.jit
def statistics_kernel(
    X, Mean, Rstd, count, x_N, x_C, eps, C: tl.constexpr, C_PAD: tl.constexpr, BLOCK: tl.constexpr
):
    """Write mean and 1/sigma of BLOCK rows in float32."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    col = tl.arange(0, C_PAD)
    inside = (row < count)[:, None] & (col < C)[None, :]
    at = X + (row * x_N)[:, None] + (col * x_C)[None, :]
    x = tl.load(at, mask=inside, other=0.0).to(tl.float32)  # [BLOCK, C_PAD]
    _, mean, rstd = normalise(x, inside, eps, C)
    tl.store(Mean + row, mean, mask=row < count)
    tl.store(Rstd + row, rstd, mask=row < count)


@triton.jit
def adapt_kernel(
    Condition, Weight, Bias, X, Mean, Rstd, Normed, Scale, count, x_N, x_C,
    D: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """Compute scales and shifts of a block and apply them to x normalised; Weight is [2 C, D]."""
    row, column = place(tl.program_id(0), count, C // BLOCK_C, BLOCK, ROWS)
    row, column = row * BLOCK, column * BLOCK_C
    at_row, col = row + tl.arange(0, BLOCK), column + tl.arange(0, BLOCK_C)
    inside = (at_row < count)[:, None]
    at = at_row.to(tl.int64)[:, None] * C + col[None, :]
    # Issued early, so that the load completes during the matmuls.
    x_at = X + (at_row.to(tl.int64) * x_N)[:, None] + (col * x_C)[None, :]
    x = tl.load(x_at, mask=inside, other=0.0)  # [BLOCK, BLOCK_C]
    scale = tl.zeros([BLOCK, BLOCK_C], tl.float32)
    shift = tl.zeros([BLOCK, BLOCK_C], tl.float32)
    for k in tl.range(0, D, BLOCK_K, num_stages=STAGES):
        condition = Condition.load([row, k])  # [BLOCK, BLOCK_K]
        scale_weight = Weight.load([column, k])  # [BLOCK_C, BLOCK_K]
        scale = tl.dot(condition, tl.trans(scale_weight), scale)  # [BLOCK, BLOCK_C]
        shift_weight = Weight.load([C + column, k])  # [BLOCK_C, BLOCK_K]
        shift = tl.dot(condition, tl.trans(shift_weight), shift)  # [BLOCK, BLOCK_C]
    scale += tl.load(Bias + col).to(tl.float32)[None, :]  # [BLOCK, BLOCK_C]
    if KEEP:
        tl.store(Scale + at, scale.to(Scale.dtype.element_ty), mask=inside)
    mean = tl.load(Mean + at_row, mask=at_row < count, other=0.0)  # [BLOCK]
    rstd = tl.load(Rstd + at_row, mask=at_row < count, other=0.0)  # [BLOCK]
    xhat = (x.to(tl.float32) - mean[:, None]) * rstd[:, None]
    normed = logistic(scale) * xhat + shift
    tl.store(Normed + at, normed.to(Normed.dtype.element_ty), mask=inside)


@triton.jit
def output_gradients_kernel(
    DY, Y, Out, DNarrow, Parts, count,
    C: tl.constexpr, C_PAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """From y = sigmoid(out) narrow compute d narrow, and d out in place of out.

    d out = dy narrow sigma (1 - sigma) = dy y (1 - sigma): narrow need not be recomputed. Each
    program writes its partial sum of d out over rows to Parts.
    """
    col = tl.arange(0, C_PAD)
    total = tl.zeros([BLOCK, C_PAD], tl.float32)
    for block in range(tl.program_id(0), tl.cdiv(count, BLOCK), tl.num_programs(0)):
        row = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = (row < count)[:, None] & (col < C)[None, :]
        at = row[:, None] * C + col[None, :]
        # [BLOCK, C_PAD]
        s = logistic(tl.load(Out + at, mask=inside, other=0.0).to(tl.float32))
        dy = tl.load(DY + at, mask=inside, other=0.0).to(tl.float32)  # [BLOCK, C_PAD]
        y = tl.load(Y + at, mask=inside, other=0.0).to(tl.float32)  # [BLOCK, C_PAD]
        dout = dy * y * (1.0 - s)
        total += dout
        tl.store(DNarrow + at, (dy * s).to(DNarrow.dtype.element_ty), mask=inside)
        tl.store(Out + at, dout.to(Out.dtype.element_ty), mask=inside)
    part = Parts + tl.program_id(0).to(tl.int64) * 2 * C + col
    tl.store(part, tl.sum(total, 0), mask=col < C)  # [C_PAD]


@triton.jit
def adapted_backward_kernel(
    X, Scale, Mean, Rstd, DX, DAdapted, Parts, count, x_N, x_C, scale_N,
    C: tl.constexpr, C_PAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute dscale and dx of the adaptive norm from the gradient of its result, dshift.

    DAdapted is [n, 2 C]: dshift is read from its last C columns, dscale written to the first C.
    DAdapted or DX may alias Scale, whose row stride is scale_N. Each program writes its partial sum
    of dscale over rows to Parts.
    """
    col = tl.arange(0, C_PAD)
    total = tl.zeros([BLOCK, C_PAD], tl.float32)
    for block in range(tl.program_id(0), tl.cdiv(count, BLOCK), tl.num_programs(0)):
        row = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = (row < count)[:, None] & (col < C)[None, :]
        at, twice = row[:, None] * C + col[None, :], row[:, None] * (2 * C) + col[None, :]
        x_at = X + (row * x_N)[:, None] + (col * x_C)[None, :]
        x = tl.load(x_at, mask=inside, other=0.0).to(tl.float32)  # [BLOCK, C_PAD]
        scale_at = Scale + (row * scale_N)[:, None] + col[None, :]
        # [BLOCK, C_PAD]
        s = logistic(tl.load(scale_at, mask=inside, other=0.0).to(tl.float32))
        g = tl.load(DAdapted + twice + C, mask=inside, other=0.0).to(tl.float32)  # [BLOCK, C_PAD]
        mean = tl.load(Mean + row, mask=row < count, other=0.0)  # [BLOCK]
        rstd = tl.load(Rstd + row, mask=row < count, other=0.0)  # [BLOCK]
        xhat = tl.where(inside, (x - mean[:, None]) * rstd[:, None], 0.0)
        g *= s
        dscale = g * xhat * (1.0 - s)
        total += dscale
        tl.store(DAdapted + twice, dscale.to(DAdapted.dtype.element_ty), mask=inside)
        dx = norm_gradient(g, xhat, rstd, C)
        tl.store(DX + at, dx.to(DX.dtype.element_ty), mask=inside)
    part = Parts + tl.program_id(0).to(tl.int64) * 2 * C + col
    tl.store(part, tl.sum(total, 0), mask=col < C)  # [C_PAD]
