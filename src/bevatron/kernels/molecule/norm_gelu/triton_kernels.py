"""The kernels of normalisation and activation, for rows that are sums of gathered rows.

A program owns BLOCK whole rows of C channels, padded to C_PAD, in registers. It gathers and sums
the terms, so the normalised sum never exists in memory: the backward kernel gathers it again. The
forward writes one row and its mean and 1/sigma; the backward strides over blocks of rows, writes
the gradient of each row, and one partial sum per program of the vectors' gradients, [3, C], which
`add_shares_kernel` adds in order.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import triton
import triton.language as tl

from bevatron.kernels.molecule.triton_norm_rows import normalise_rows, renormalise_rows
from bevatron.kernels.shared.triton_math import load_vector, norm_gradient

SLOPE = tl.constexpr(1.5957691216057308)
CUBIC = tl.constexpr(0.07135481627260025)
"""gelu(u) = u sigmoid(SLOPE u + CUBIC u^3): 2 sqrt(2/pi), and 0.044715 times that."""
SLOPE_2 = tl.constexpr(-1.5957691216057308 * 1.4426950408889634)
CUBIC_2 = tl.constexpr(-0.07135481627260025 * 1.4426950408889634)
"""The same for a power of 2."""


@triton.jit
def gelu_sigmoid(u, square):
    """Compute the sigmoid inside GELU from u and u^2; where exp2 overflows it is 0."""
    root = tl.rsqrt(1.0 + tl.exp2(u * (SLOPE_2 + CUBIC_2 * square)))
    return root * root


@triton.jit
def load_sum(
    X, Atoms, Rows, Linear, Receivers, Senders, Graph, row, col, count,
    C: tl.constexpr, BOND: tl.constexpr, HAS_ROWS: tl.constexpr, HAS_LINEAR: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Gather and add the terms to be normalised; zero where masked, except for the linear bias."""
    mask = (row < count)[:, None] & (col < C)[None, :]
    own = X + row[:, None] * C + col[None, :]
    z = tl.load(own, mask=mask, other=0.0).to(WIDE)  # [BLOCK, C_PAD]
    owner = row
    if BOND:
        owner = tl.load(Receivers + row, mask=row < count, other=0).to(tl.int64)  # [BLOCK]
        sender = tl.load(Senders + row, mask=row < count, other=0).to(tl.int64)  # [BLOCK]
        received = Atoms + owner[:, None] * (2 * C) + col[None, :]
        z += tl.load(received, mask=mask, other=0.0).to(WIDE)  # [BLOCK, C_PAD]
        sent = Atoms + sender[:, None] * (2 * C) + C + col[None, :]
        z += tl.load(sent, mask=mask, other=0.0).to(WIDE)  # [BLOCK, C_PAD]
    if HAS_ROWS:
        graph = tl.load(Graph + owner, mask=row < count, other=0).to(tl.int64)  # [BLOCK]
        graph_row = Rows + graph[:, None] * C + col[None, :]
        z += tl.load(graph_row, mask=mask, other=0.0).to(WIDE)  # [BLOCK, C_PAD]
    if HAS_LINEAR:
        z += load_vector(Linear, col, C, WIDE)  # [1, C_PAD]
    return z, mask


@triton.jit
def norm_gelu_forward(
    X, Atoms, Rows, Linear, Weight, Bias, Receivers, Senders, Graph, Y, Mean, Rstd, count,
    eps: tl.constexpr,
    C: tl.constexpr, C_PAD: tl.constexpr, BLOCK: tl.constexpr, BOND: tl.constexpr,
    HAS_ROWS: tl.constexpr, HAS_LINEAR: tl.constexpr, NORM: tl.constexpr, RELU: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Sum, normalise and activate BLOCK rows; store each row's mean and 1/sigma."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    col = tl.arange(0, C_PAD)
    z, mask = load_sum(
        X, Atoms, Rows, Linear, Receivers, Senders, Graph, row, col, count, C, BOND, HAS_ROWS,
        HAS_LINEAR, WIDE,
    )  # [BLOCK, C_PAD]  # fmt: skip
    u = z
    if NORM:
        xhat = normalise_rows(z, mask, Mean, Rstd, row, count, eps, C)
        u = xhat * load_vector(Weight, col, C, WIDE)  # [BLOCK, C_PAD]
        u += load_vector(Bias, col, C, WIDE)  # [BLOCK, C_PAD]
    y = tl.maximum(u, 0.0) if RELU else u * gelu_sigmoid(u, u * u)
    tl.store(Y + row[:, None] * C + col[None, :], y.to(Y.dtype.element_ty), mask=mask)


@triton.jit
def norm_gelu_backward(
    DY, X, Atoms, Rows, Linear, Weight, Bias, Receivers, Senders, Graph, Mean, Rstd, DZ, Parts,
    count,
    C: tl.constexpr, C_PAD: tl.constexpr, BLOCK: tl.constexpr, BOND: tl.constexpr,
    HAS_ROWS: tl.constexpr, HAS_LINEAR: tl.constexpr, NORM: tl.constexpr, RELU: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of blocks of rows and partial sums of the vectors' gradients.

    With xhat the normalised row, g the gradient before the activation and h = g weight,
    dz = rstd (h - mean(h) - xhat mean(h xhat)). Parts [programs, 3, C] receives the sums over rows
    of dz, g xhat and g.
    """
    col = tl.arange(0, C_PAD)
    if NORM:
        weight = load_vector(Weight, col, C, WIDE)  # [1, C_PAD]
        bias = load_vector(Bias, col, C, WIDE)  # [1, C_PAD]
        dweight = tl.zeros([C_PAD], WIDE)
        dbias = tl.zeros([C_PAD], WIDE)
    if HAS_LINEAR:
        dlinear = tl.zeros([C_PAD], WIDE)
    for block in range(tl.program_id(0), tl.cdiv(count, BLOCK), tl.num_programs(0)):
        row = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        offsets = row[:, None] * C + col[None, :]
        z, mask = load_sum(
            X, Atoms, Rows, Linear, Receivers, Senders, Graph, row, col, count, C, BOND, HAS_ROWS,
            HAS_LINEAR, WIDE,
        )  # [BLOCK, C_PAD]  # fmt: skip
        dy = tl.load(DY + offsets, mask=mask, other=0.0).to(WIDE)  # [BLOCK, C_PAD]
        u = z
        if NORM:
            xhat, rstd = renormalise_rows(z, Mean, Rstd, row, count, WIDE)
            u = xhat * weight + bias
        if RELU:
            g = tl.where(u > 0.0, dy, 0.0)
        else:
            square = u * u
            s = gelu_sigmoid(u, square)
            gelu = u * s
            g = dy * (s + (gelu - gelu * s) * (SLOPE + 3.0 * CUBIC * square))
        dz = g
        if NORM:
            # A thread owns all rows of its channels, so these sums need no shuffles.
            dweight += tl.sum(g * xhat, 0)  # [C_PAD]
            dbias += tl.sum(g, 0)  # [C_PAD]
            dz = norm_gradient(g * weight, xhat, rstd, C)
        if HAS_LINEAR:
            dlinear += tl.sum(dz, 0)  # [C_PAD]
        tl.store(DZ + offsets, dz.to(DZ.dtype.element_ty), mask=mask)
    part = Parts + tl.program_id(0).to(tl.int64) * 3 * C + col
    if HAS_LINEAR:
        tl.store(part, dlinear, mask=col < C)
    if NORM:
        tl.store(part + C, dweight, mask=col < C)
        tl.store(part + 2 * C, dbias, mask=col < C)
