"""The kernels of residual, row dropout and normalisation of one or two branches."""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import triton
import triton.language as tl

from bevatron.kernels.molecule.triton_norm_rows import normalise_rows, normalised_again
from bevatron.kernels.shared.triton_math import load_vector, norm_gradient


@triton.jit
def _sum_of(x, Branch, Scale, row, at, inside, count, SCALED: tl.constexpr, WIDE: tl.constexpr):
    """Add a branch to its input; also return the branch's factors."""
    u = tl.load(Branch + at, mask=inside, other=0.0).to(WIDE)
    scale = tl.full([row.shape[0]], 1.0, WIDE)
    if SCALED:
        scale = tl.load(Scale + row, mask=row < count, other=0.0).to(WIDE)
    return x + u * scale[:, None], scale


@triton.jit
def _forward(
    x, Branch, Scale, Weight, Bias, Mean, Rstd, row, col, at, inside, count, eps,
    C: tl.constexpr, SCALED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    z, _ = _sum_of(x, Branch, Scale, row, at, inside, count, SCALED, WIDE)
    xhat = normalise_rows(z, inside, Mean, Rstd, row, count, eps, C)
    y = xhat * load_vector(Weight, col, C, WIDE)
    return y + load_vector(Bias, col, C, WIDE)


@triton.jit
def residual_norm_forward(
    X, U1, U2, S1, S2, W1, B1, W2, B2, Y, Mean, Rstd, count, eps: tl.constexpr,
    C: tl.constexpr, C_PAD: tl.constexpr, BLOCK: tl.constexpr, TWO: tl.constexpr,
    SCALED_1: tl.constexpr, SCALED_2: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Merge the branches of BLOCK rows; keep each row's means and 1/sigmas."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    col = tl.arange(0, C_PAD)
    at = row[:, None] * C + col[None, :]
    inside = (row < count)[:, None] & (col < C)[None, :]
    x = tl.load(X + at, mask=inside, other=0.0).to(WIDE)
    y = _forward(
        x, U1, S1, W1, B1, Mean, Rstd, row, col, at, inside, count, eps, C, SCALED_1, WIDE
    )  # fmt: skip
    if TWO:
        y += _forward(
            x, U2, S2, W2, B2, Mean + count, Rstd + count, row, col, at, inside, count, eps, C,
            SCALED_2, WIDE,
        )  # fmt: skip
    tl.store(Y + at, y.to(Y.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    x, dy, Branch, Scale, weight, Mean, Rstd, DBranch, row, at, inside, count,
    C: tl.constexpr, SCALED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Store a branch's gradient; return that of its sum with x, and dy times the normalised."""
    z, scale = _sum_of(x, Branch, Scale, row, at, inside, count, SCALED, WIDE)
    xhat, rstd = normalised_again(z, Mean, Rstd, row, count, WIDE)
    dz = norm_gradient(dy * weight, xhat, rstd, C)
    tl.store(DBranch + at, (dz * scale[:, None]).to(DBranch.dtype.element_ty), mask=inside)
    return dz, dy * xhat


@triton.jit
def residual_norm_backward(
    DY, X, U1, U2, S1, S2, W1, W2, Mean, Rstd, DX, DU1, DU2, Parts, count,
    C: tl.constexpr, C_PAD: tl.constexpr, BLOCK: tl.constexpr, TWO: tl.constexpr,
    SCALED_1: tl.constexpr, SCALED_2: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Walk every so many blocks of rows.

    Parts [programs, 3, C] holds this program's sums over rows of dy (every bias's gradient) and
    of dy times each branch's normalised rows (the weights').
    """
    col = tl.arange(0, C_PAD)
    weight_1 = load_vector(W1, col, C, WIDE)
    dbias = tl.zeros([C_PAD], WIDE)
    dweight_1 = tl.zeros([C_PAD], WIDE)
    if TWO:
        weight_2 = load_vector(W2, col, C, WIDE)
        dweight_2 = tl.zeros([C_PAD], WIDE)
    for block in range(tl.program_id(0), tl.cdiv(count, BLOCK), tl.num_programs(0)):
        row = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        at = row[:, None] * C + col[None, :]
        inside = (row < count)[:, None] & (col < C)[None, :]
        x = tl.load(X + at, mask=inside, other=0.0).to(WIDE)
        dy = tl.load(DY + at, mask=inside, other=0.0).to(WIDE)
        dbias += tl.sum(dy, 0)
        dx, product = _backward(
            x, dy, U1, S1, weight_1, Mean, Rstd, DU1, row, at, inside, count, C, SCALED_1, WIDE
        )  # fmt: skip
        dweight_1 += tl.sum(product, 0)
        if TWO:
            dx_2, product = _backward(
                x, dy, U2, S2, weight_2, Mean + count, Rstd + count, DU2, row, at, inside, count,
                C, SCALED_2, WIDE,
            )  # fmt: skip
            dx += dx_2
            dweight_2 += tl.sum(product, 0)
        tl.store(DX + at, dx.to(DX.dtype.element_ty), mask=inside)
    part = Parts + tl.program_id(0).to(tl.int64) * 3 * C + col
    tl.store(part, dbias, mask=col < C)
    tl.store(part + C, dweight_1, mask=col < C)
    if TWO:
        tl.store(part + 2 * C, dweight_2, mask=col < C)
