"""The kernels of normalisation and activation, for rows that are sums of gathered rows.

A program owns BLOCK whole rows of C channels, padded to C_PAD, in registers. It gathers and sums
what is normalised, so that sum never exists in memory: the backward kernel gathers it again. The
forward writes one row and its mean and 1/sigma; the backward strides over blocks of rows, writes
the gradient of each row, and one partial sum per program of the vectors' gradients, [3, C], which
`add_shares_kernel` adds in order.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import triton
import triton.language as tl

SLOPE = tl.constexpr(1.5957691216057308)
CUBIC = tl.constexpr(0.07135481627260025)
"""gelu(u) = u sigmoid(SLOPE u + CUBIC u^3): 2 sqrt(2/pi), and 0.044715 times that."""
SLOPE_2 = tl.constexpr(-1.5957691216057308 * 1.4426950408889634)
CUBIC_2 = tl.constexpr(-0.07135481627260025 * 1.4426950408889634)
"""The same for a power of 2."""


@triton.jit
def load_vector(vector, col, C: tl.constexpr, WIDE: tl.constexpr):
    """Load one value per channel."""
    return tl.load(vector + col, mask=col < C, other=0.0).to(WIDE)[None, :]  # [1, C_PAD]


@triton.jit
def normalise_rows(z, mask, Mean, Rstd, row, count, eps, C: tl.constexpr):
    """Normalise rows that are zero where masked; store each row's mean and 1/sigma."""
    mean = tl.sum(z, 1) / C  # [BLOCK]
    centred = z - mean[:, None]
    if z.shape[1] != C:
        centred = tl.where(mask, centred, 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(centred * centred, 1) / C + eps)  # [BLOCK]
    tl.store(Mean + row, mean, mask=row < count)
    tl.store(Rstd + row, rstd, mask=row < count)
    return centred * rstd[:, None]


@triton.jit
def renormalise_rows(z, Mean, Rstd, row, count, WIDE: tl.constexpr):
    """Normalise rows with the statistics `normalise_rows` stored; return 1/sigma too.

    Rows past the end get 1/sigma = 0. Masked channels are not zero: callers that sum over channels
    multiply them by zeros.
    """
    mean = tl.load(Mean + row, mask=row < count, other=0.0).to(WIDE)  # [BLOCK]
    rstd = tl.load(Rstd + row, mask=row < count, other=0.0).to(WIDE)  # [BLOCK]
    return (z - mean[:, None]) * rstd[:, None], rstd


@triton.jit
def norm_gradient(h, xhat, rstd, C: tl.constexpr):
    """Turn the gradient h of normalised rows into that of the rows."""
    mean_h = tl.sum(h, 1) / C  # [BLOCK]
    mean_hx = tl.sum(h * xhat, 1) / C  # [BLOCK]
    return (h - mean_h[:, None] - xhat * mean_hx[:, None]) * rstd[:, None]


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
    """Gather and add what is normalised; zero where masked, except for the linear bias."""
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
            # A thread owns all rows of its channels: these sums need no exchange.
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


@triton.jit
def add_shares_kernel(
    Parts, Out, parts, width, BLOCK: tl.constexpr, BLOCK_C: tl.constexpr, WIDE: tl.constexpr
):
    """Add the programs' partial sums [parts, width] of BLOCK_C columns in order."""
    col = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    total = tl.zeros([BLOCK, BLOCK_C], WIDE)
    for first in range(0, parts, BLOCK):
        part = first + tl.arange(0, BLOCK)
        mask = (part < parts)[:, None] & (col < width)[None, :]
        block = Parts + part[:, None].to(tl.int64) * width + col[None, :]
        total += tl.load(block, mask=mask, other=0.0)  # [BLOCK, BLOCK_C]
    tl.store(Out + col, tl.sum(total, 0), mask=col < width)  # [BLOCK_C]
