"""Kernels around the matmuls of the conditioned transition.

`adapt_kernel` and `output_product_kernel` are persistent matmuls with something as their epilogue:
of a block [BLOCK, BLOCK_C] scales and shifts, or the output's gate, stay in registers. The other
three are memory-bound: a program holds whole rows [BLOCK, C_PAD] in registers; the backward
kernels, which also need column sums, are persistent, and each program writes one partial sum [C].
D is the number of channels of the condition, C that of x.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import triton
import triton.language as tl

from bevatron.kernels.shared.triton_math import (
    logistic,
    norm_gradient,
    normalise,
    place,
    prefetch,
    split_columns,
)


@triton.jit
def statistics_kernel(
    X, Mean, Rstd, count, eps, C: tl.constexpr, C_PAD: tl.constexpr, BLOCK: tl.constexpr
):
    """Write mean and 1/sigma of BLOCK rows in float32."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    col = tl.arange(0, C_PAD)
    inside = (row < count)[:, None] & (col < C)[None, :]
    at = X + row[:, None] * C + col[None, :]
    x = tl.load(at, mask=inside, other=0.0).to(tl.float32)  # [BLOCK, C_PAD]
    _, mean, rstd = normalise(x, inside, eps, C)
    tl.store(Mean + row, mean, mask=row < count)
    tl.store(Rstd + row, rstd, mask=row < count)


@triton.jit
def store_adapted(
    Normed, Scale, X, Bias, scale, shift, mean, rstd, row, column,
    HALF: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """Apply scales, without their bias, and shifts to x normalised."""
    x = X.load([row, column]).to(tl.float32)  # [BLOCK, HALF]
    scale += tl.load(Bias + column + tl.arange(0, HALF)).to(tl.float32)[None, :]  # [BLOCK, HALF]
    if KEEP:
        Scale.store([row, column], scale.to(Scale.dtype))
    xhat = (x - mean[:, None]) * rstd[:, None]
    Normed.store([row, column], (logistic(scale) * xhat + shift).to(Normed.dtype))


@triton.jit
def adapt_kernel(
    Condition, Weight, X, Normed, Scale, Bias, Mean, Rstd, Rows, count,
    D: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """Compute scales and shifts of blocks and apply them to x normalised; Weight is [2, C, D].

    Rows is the memory of X, from which a block is brought to the L2 during its matmul.
    """
    columns: tl.constexpr = C // BLOCK_C
    blocks = tl.cdiv(count, BLOCK) * columns
    for block in tl.range(tl.program_id(0), blocks, tl.num_programs(0), flatten=True):
        row, column = place(block, count, columns, BLOCK, ROWS)
        row, column = row * BLOCK, column * BLOCK_C
        rows = tl.minimum(row + tl.arange(0, BLOCK), count - 1)  # [BLOCK]
        prefetch(Rows, rows, column, C, BLOCK_C)
        both = tl.zeros([BLOCK, 2 * BLOCK_C], tl.float32)
        for k in tl.range(0, D, BLOCK_K, num_stages=STAGES):
            condition = Condition.load([row, k])  # [BLOCK, BLOCK_K]
            weight = Weight.load([0, column, k])  # [2, BLOCK_C, BLOCK_K]
            weight = tl.reshape(weight, (2 * BLOCK_C, BLOCK_K))
            both = tl.dot(condition, tl.trans(weight), both)  # [BLOCK, 2 * BLOCK_C]
        at = row + tl.arange(0, BLOCK)
        mean = tl.load(Mean + at, mask=at < count, other=0.0)  # [BLOCK]
        rstd = tl.load(Rstd + at, mask=at < count, other=0.0)  # [BLOCK]
        scale, shift = split_columns(both, BLOCK, BLOCK_C)  # [BLOCK, BLOCK_C]
        HALF: tl.constexpr = BLOCK_C // 2
        scale_0, scale_1 = split_columns(scale, BLOCK, HALF)  # [BLOCK, HALF]
        shift_0, shift_1 = split_columns(shift, BLOCK, HALF)  # [BLOCK, HALF]
        store_adapted(Normed, Scale, X, Bias, scale_0, shift_0, mean, rstd, row, column, HALF, KEEP)
        store_adapted(
            Normed, Scale, X, Bias, scale_1, shift_1, mean, rstd, row, column + HALF, HALF, KEEP
        )


@triton.jit
def store_output(Y, Narrow, Bias, out, row, column, HALF: tl.constexpr):
    """Store ``sigmoid(out) narrow``, of ``out`` [BLOCK, HALF] without its bias."""
    bias = tl.load(Bias + column + tl.arange(0, HALF)).to(tl.float32)  # [HALF]
    narrow = Narrow.load([row, column]).to(tl.float32)  # [BLOCK, HALF]
    Y.store([row, column], (logistic(out + bias[None, :]) * narrow).to(Y.dtype))


@triton.jit
def store_output_gradients(
    DNarrow, DOut, DY, Y, Bias, Parts, out, row, column, part, C: tl.constexpr, HALF: tl.constexpr
):
    """Store what `output_gradients_kernel` computes, of ``out`` [BLOCK, HALF] without its bias."""
    col = column + tl.arange(0, HALF)
    s = logistic(out + tl.load(Bias + col).to(tl.float32)[None, :])  # [BLOCK, HALF]
    dy = DY.load([row, column]).to(tl.float32)  # [BLOCK, HALF]
    y = Y.load([row, column]).to(tl.float32)  # [BLOCK, HALF]
    dout = dy * y * (1.0 - s)
    tl.store(Parts + part * C + col, tl.sum(dout, 0))  # [HALF]
    DNarrow.store([row, column], (dy * s).to(DNarrow.dtype))
    DOut.store([row, column], dout.to(DOut.dtype))


@triton.jit
def output_product_kernel(
    S, Weight, Narrow, Y, DY, DOut, Bias, Parts, count,
    D: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    """Compute the output's gate of blocks, and y from it and narrow.

    If BACKWARD, y is read, and what `output_gradients_kernel` computes is written: d narrow to
    Narrow, d out, and a partial sum for every block of rows.
    """
    columns: tl.constexpr = C // BLOCK_C
    blocks = tl.cdiv(count, BLOCK) * columns
    for block in tl.range(tl.program_id(0), blocks, tl.num_programs(0), flatten=True):
        part, column = place(block, count, columns, BLOCK, ROWS)
        row, column = part * BLOCK, column * BLOCK_C
        out = tl.zeros([BLOCK, BLOCK_C], tl.float32)
        for k in tl.range(0, D, BLOCK_K, num_stages=STAGES):
            s = S.load([row, k])  # [BLOCK, BLOCK_K]
            weight = Weight.load([column, k])  # [BLOCK_C, BLOCK_K]
            out = tl.dot(s, tl.trans(weight), out)  # [BLOCK, BLOCK_C]
        HALF: tl.constexpr = BLOCK_C // 2
        out_0, out_1 = split_columns(out, BLOCK, HALF)  # [BLOCK, HALF]
        if BACKWARD:
            store_output_gradients(
                Narrow, DOut, DY, Y, Bias, Parts, out_0, row, column, part, C, HALF
            )
            store_output_gradients(
                Narrow, DOut, DY, Y, Bias, Parts, out_1, row, column + HALF, part, C, HALF
            )
        else:
            store_output(Y, Narrow, Bias, out_0, row, column, HALF)
            store_output(Y, Narrow, Bias, out_1, row, column + HALF, HALF)


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
    X, Scale, Mean, Rstd, DX, DAdapted, Parts, count, scale_N,
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
        x = tl.load(X + at, mask=inside, other=0.0).to(tl.float32)  # [BLOCK, C_PAD]
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
