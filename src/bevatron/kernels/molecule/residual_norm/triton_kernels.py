"""The kernels of residual, row dropout and normalisation of one or two branches.

A program owns BLOCK whole rows of C channels, padded to C_PAD, in registers. Forward: it reads x
and each branch once, and writes one row and each branch's statistics. Backward: it strides over
blocks of rows, recomputes the normalised rows, and writes the gradients of x and of each branch,
and one partial sum per program of the gradients of weights and biases.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import triton
import triton.language as tl

from bevatron.kernels.molecule.triton_norm_rows import normalise_rows, renormalise_rows
from bevatron.kernels.shared.triton_math import load_vector, norm_gradient


@triton.jit
def _add_branch(
    x, Branch, Scale, row, offsets, mask, count, SCALED: tl.constexpr, WIDE: tl.constexpr
):
    """Return x plus the scaled branch, and the branch's scales."""
    u = tl.load(Branch + offsets, mask=mask, other=0.0).to(WIDE)  # [BLOCK, C_PAD]
    scale = tl.full([row.shape[0]], 1.0, WIDE)
    if SCALED:
        scale = tl.load(Scale + row, mask=row < count, other=0.0).to(WIDE)  # [BLOCK]
    return x + u * scale[:, None], scale


@triton.jit
def _forward(
    x, Branch, Scale, Weight, Bias, Mean, Rstd, row, col, offsets, mask, count, eps,
    C: tl.constexpr, SCALED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Return one branch's term of the result, [BLOCK, C_PAD]."""
    z, _ = _add_branch(x, Branch, Scale, row, offsets, mask, count, SCALED, WIDE)
    xhat = normalise_rows(z, mask, Mean, Rstd, row, count, eps, C)
    y = xhat * load_vector(Weight, col, C, WIDE)  # [BLOCK, C_PAD]
    return y + load_vector(Bias, col, C, WIDE)  # [BLOCK, C_PAD]


@triton.jit
def residual_norm_forward(
    X, U1, U2, S1, S2, W1, B1, W2, B2, Y, Mean, Rstd, count, eps: tl.constexpr,
    C: tl.constexpr, C_PAD: tl.constexpr, BLOCK: tl.constexpr, TWO: tl.constexpr,
    SCALED_1: tl.constexpr, SCALED_2: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Merge the branches of BLOCK rows; store each row's means and 1/sigmas."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    col = tl.arange(0, C_PAD)
    offsets = row[:, None] * C + col[None, :]
    mask = (row < count)[:, None] & (col < C)[None, :]
    x = tl.load(X + offsets, mask=mask, other=0.0).to(WIDE)  # [BLOCK, C_PAD]
    y = _forward(
        x, U1, S1, W1, B1, Mean, Rstd, row, col, offsets, mask, count, eps, C, SCALED_1, WIDE
    )  # fmt: skip
    if TWO:
        y += _forward(
            x, U2, S2, W2, B2, Mean + count, Rstd + count, row, col, offsets, mask, count, eps, C,
            SCALED_2, WIDE,
        )  # fmt: skip
    tl.store(Y + offsets, y.to(Y.dtype.element_ty), mask=mask)


@triton.jit
def _backward(
    x, dy, Branch, Scale, weight, Mean, Rstd, DBranch, row, offsets, mask, count,
    C: tl.constexpr, SCALED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Store a branch's gradient; return that of its sum with x, and dy times the normalised row."""
    z, scale = _add_branch(x, Branch, Scale, row, offsets, mask, count, SCALED, WIDE)
    xhat, rstd = renormalise_rows(z, Mean, Rstd, row, count, WIDE)
    dz = norm_gradient(dy * weight, xhat, rstd, C)
    tl.store(DBranch + offsets, (dz * scale[:, None]).to(DBranch.dtype.element_ty), mask=mask)
    return dz, dy * xhat


@triton.jit
def residual_norm_backward(
    DY, X, U1, U2, S1, S2, W1, W2, Mean, Rstd, DX, DU1, DU2, Parts, count,
    C: tl.constexpr, C_PAD: tl.constexpr, BLOCK: tl.constexpr, TWO: tl.constexpr,
    SCALED_1: tl.constexpr, SCALED_2: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of blocks of rows and partial sums for weights and biases.

    Parts [programs, 3, C] receives this program's sums over rows of dy (the gradient of every bias)
    and of dy times each branch's normalised rows (the gradients of the weights).
    """
    col = tl.arange(0, C_PAD)
    weight_1 = load_vector(W1, col, C, WIDE)  # [1, C_PAD]
    dbias = tl.zeros([C_PAD], WIDE)
    dweight_1 = tl.zeros([C_PAD], WIDE)
    if TWO:
        weight_2 = load_vector(W2, col, C, WIDE)  # [1, C_PAD]
        dweight_2 = tl.zeros([C_PAD], WIDE)
    for block in range(tl.program_id(0), tl.cdiv(count, BLOCK), tl.num_programs(0)):
        row = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        offsets = row[:, None] * C + col[None, :]
        mask = (row < count)[:, None] & (col < C)[None, :]
        x = tl.load(X + offsets, mask=mask, other=0.0).to(WIDE)  # [BLOCK, C_PAD]
        dy = tl.load(DY + offsets, mask=mask, other=0.0).to(WIDE)  # [BLOCK, C_PAD]
        dbias += tl.sum(dy, 0)  # [C_PAD]
        dx, dy_xhat = _backward(
            x, dy, U1, S1, weight_1, Mean, Rstd, DU1, row, offsets, mask, count, C, SCALED_1, WIDE
        )  # fmt: skip
        dweight_1 += tl.sum(dy_xhat, 0)  # [C_PAD]
        if TWO:
            dx_2, dy_xhat = _backward(
                x, dy, U2, S2, weight_2, Mean + count, Rstd + count, DU2, row, offsets, mask, count,
                C, SCALED_2, WIDE,
            )  # fmt: skip
            dx += dx_2
            dweight_2 += tl.sum(dy_xhat, 0)  # [C_PAD]
        tl.store(DX + offsets, dx.to(DX.dtype.element_ty), mask=mask)
    part = Parts + tl.program_id(0).to(tl.int64) * 3 * C + col
    tl.store(part, dbias, mask=col < C)
    tl.store(part + C, dweight_1, mask=col < C)
    if TWO:
        tl.store(part + 2 * C, dweight_2, mask=col < C)
