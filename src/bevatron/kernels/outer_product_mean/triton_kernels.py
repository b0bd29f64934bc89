"""Kernels of the outer products, of their gradients' sums, and of rows times a number each.

Outer products lie by pairs of residues, P[i, j, c, d], so that the last layer is a plain product.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import triton
import triton.language as tl

GROUP = tl.constexpr(8)
"""Rows of blocks whose programs run side by side: they share what they load."""


@triton.jit
def line_offset(ic, length, H: tl.constexpr):
    """Say where channel c of the first residue of all pairs (i, .) lies; ``ic`` is i H + c."""
    return (ic // H).to(tl.int64) * length * (H * H) + ic % H * H


@triton.jit
def pair_offset(jd, H: tl.constexpr):
    """Say how far channel d of residue j lies behind the line's begin; ``jd`` is j H + d."""
    return (jd // H).to(tl.int64) * (H * H) + jd % H


@triton.jit
def outer_kernel(
    A, B, P, rows, a_stride, b_stride, lines, length,
    H: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute P[i, j, c, d] = sum_s A[s, i, c] B[s, j, d] for a block of (i, c) and of (j, d)."""
    most_ic, most_jd = lines * H, length * H
    across = tl.cdiv(most_jd, BN)
    group = tl.program_id(0) // (GROUP * across)
    size = tl.minimum(tl.cdiv(most_ic, BM) - group * GROUP, GROUP)
    ic = (group * GROUP + tl.program_id(0) % size) * BM + tl.arange(0, BM)
    jd = tl.program_id(0) % (GROUP * across) // size * BN + tl.arange(0, BN)
    keep_ic, keep_jd = (ic < most_ic)[None, :], (jd < most_jd)[None, :]
    total = tl.zeros([BM, BN], tl.float32)
    for first in tl.range(0, rows, BK, num_stages=STAGES):
        s = (first + tl.arange(0, BK)).to(tl.int64)
        keep = (s < rows)[:, None]
        a = tl.load(A + s[:, None] * a_stride + ic[None, :], mask=keep & keep_ic, other=0.0)
        b = tl.load(B + s[:, None] * b_stride + jd[None, :], mask=keep & keep_jd, other=0.0)
        total = tl.dot(tl.trans(a), b, total, input_precision=PRECISION)
    at = P + line_offset(ic, length, H)[:, None] + pair_offset(jd, H)[None, :]
    keep = (ic < most_ic)[:, None] & (jd < most_jd)[None, :]
    tl.store(at, total.to(P.dtype.element_ty), mask=keep)


@triton.jit
def outer_back_kernel(
    DP, X, Out, Mask, rows, x_stride, out_row, out_residue, mask_stride, lines, length,
    H: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
    OF_LINES: tl.constexpr, ADD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sum ``DP[i, j, c, d] X[s, .]`` over all j, d (OF_LINES) or all i, c, for a block of rows s.

    The sum over all j, d is masked; the other is added to what is there, if ADD.
    """
    s = (tl.program_id(1) * BM + tl.arange(0, BM)).to(tl.int64)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    most_n, most_k = (lines * H, length * H) if OF_LINES else (length * H, lines * H)
    to_n = line_offset(n, length, H) if OF_LINES else pair_offset(n, H)
    keep_s, keep_n = (s < rows)[:, None], (n < most_n)[None, :]
    total = tl.zeros([BM, BN], tl.float32)
    for first in tl.range(0, most_k, BK, num_stages=STAGES):
        k = first + tl.arange(0, BK)
        to_k = pair_offset(k, H) if OF_LINES else line_offset(k, length, H)
        keep = keep_s & (k < most_k)[None, :]
        x = tl.load(X + s[:, None] * x_stride + k[None, :], mask=keep, other=0.0)
        keep = keep_n & (k < most_k)[:, None]
        p = tl.load(DP + to_k[:, None] + to_n[None, :], mask=keep, other=0.0)
        total = tl.dot(x, p, total, input_precision=PRECISION)
    keep = keep_s & keep_n
    if OF_LINES:
        at = Mask + s[:, None] * mask_stride + (n // H)[None, :]
        total *= tl.load(at, mask=keep, other=0.0).to(tl.float32)
    at = Out + s[:, None] * out_row + (n // H * out_residue + n % H)[None, :]
    if ADD:
        total += tl.load(at, mask=keep, other=0.0)
    tl.store(at, total.to(Out.dtype.element_ty), mask=keep)


@triton.jit
def scaled_kernel(
    X, Scale, Y, Shares, rows, x_stride,
    C: tl.constexpr, C_PAD: tl.constexpr, BLOCK: tl.constexpr, WANTS_SUM: tl.constexpr,
):  # fmt: skip
    """Multiply each row of X by its number; leave this program's share of the rows' sum in Shares.

    A program walks over every so many blocks of rows.
    """
    col = tl.arange(0, C_PAD)
    total = tl.zeros([BLOCK, C_PAD], tl.float32)
    for block in range(tl.program_id(0), tl.cdiv(rows, BLOCK), tl.num_programs(0)):
        row = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        keep = (row < rows)[:, None] & (col < C)[None, :]
        x = tl.load(X + row[:, None] * x_stride + col[None, :], mask=keep, other=0.0)
        scale = tl.load(Scale + row, mask=row < rows, other=0.0).to(tl.float32)
        y = x.to(tl.float32) * scale[:, None]
        tl.store(Y + row[:, None] * C + col[None, :], y.to(Y.dtype.element_ty), mask=keep)
        if WANTS_SUM:
            total += y
    if WANTS_SUM:
        at = Shares + tl.program_id(0) * C + col
        tl.store(at, tl.sum(total, 0), mask=col < C)
