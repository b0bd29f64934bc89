# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""The kernels of the radial network: all layers of a block of edges on chip.

A program keeps the weights in shared memory and strides over blocks of ROWS edges (persistent
kernels). It reads one length per edge, computes the basis, the layers and their derivatives with
respect to the length in registers, and writes [E, H] results, or one partial sum per program of
each weight's gradient, which the host sums: no atomics.

Names: ``x_i`` the input of layer i's activation and ``y_i`` its derivative with respect to the
length; ``c_i``, ``d_i`` the gradients of these two. Widths are padded with zeros: B functions to
FULL_B, all hidden widths to FULL.
"""

import triton
import triton.language as tl

from bevatron.kernels.shared.triton_math import cutoff, multiply


@triton.jit
def sigmoids(x):
    """Return sigma(x) and sigma(-x), neither computed as 1 minus the other, which would cancel."""
    e = tl.exp(-tl.abs(x))
    large = 1.0 / (1.0 + e)
    small = e * large
    return tl.where(x >= 0, large, small), tl.where(x >= 0, small, large)


@triton.jit
def matrix(ptr, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr, T: tl.constexpr):
    """Load a weight, padded with zeros."""
    mask = (rows < ROWS)[:, None] & (columns < COLUMNS)[None, :]
    block = rows[:, None] * COLUMNS + columns[None, :]
    return tl.load(ptr + block, mask=mask, other=0.0).to(T)  # [len(rows), len(columns)]


@triton.jit
def transposed(ptr, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr, T: tl.constexpr):
    """Load the transpose of a weight [ROWS, COLUMNS], padded with zeros."""
    mask = (rows < ROWS)[None, :] & (columns < COLUMNS)[:, None]
    block = rows[None, :] * COLUMNS + columns[:, None]
    return tl.load(ptr + block, mask=mask, other=0.0).to(T)  # [len(columns), len(rows)]


@triton.jit
def basis(r, w, c, r_max, ORDER: tl.constexpr):
    """Return the basis functions and two derivatives; zero where ``w`` is padded with zeros."""
    u, du, ddu = cutoff(r, r_max, ORDER)
    u, du, ddu = u[:, None], du[:, None], ddu[:, None]
    r_column = r[:, None]
    phase = w[None, :] * r_column  # [ROWS, FULL_B]
    sine = tl.sin(phase)
    f = sine / r_column
    df = (w[None, :] * tl.cos(phase) - f) / r_column
    ddf = -(w[None, :] * w[None, :] * sine + 2.0 * df) / r_column
    first = c * (df * u + f * du)
    return c * f * u, first, c * (ddf * u + 2.0 * df * du + f * ddu)


@triton.jit
def activated(x, y):
    """Return s(x) and its derivative s'(x) y."""
    s, t = sigmoids(x)
    return x * s, s * (1.0 + x * t) * y


@triton.jit
def deactivated(c, d, x, y):
    """Turn the gradients of s(x) and s'(x) y into those of x and y."""
    s, t = sigmoids(x)
    first = s * (1.0 + x * t)
    return c * first + d * (s * t * (2.0 + x * (t - s))) * y, d * first


@triton.jit(do_not_specialize=["count"])
def radial_network_forward(
    r_ptr, w_ptr, c_ptr, r_max_ptr, w1_ptr, w2_ptr, w3_ptr, h_ptr, slope_ptr, count,
    B: tl.constexpr, H1: tl.constexpr, H2: tl.constexpr, H3: tl.constexpr,
    ORDER: tl.constexpr, SLOPE: tl.constexpr, ROWS: tl.constexpr, FULL_B: tl.constexpr,
    FULL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute h and, if SLOPE, its derivative with respect to the lengths."""
    T: tl.constexpr = tl.float64 if PRECISION == "float64" else tl.float32
    n, k = tl.arange(0, FULL_B), tl.arange(0, FULL)
    w1 = matrix(w1_ptr, n, k, B, H1, T)  # [FULL_B, FULL]
    w2 = matrix(w2_ptr, k, k, H1, H2, T)  # [FULL, FULL]
    w3 = matrix(w3_ptr, k, k, H2, H3, T)  # [FULL, FULL]
    w = tl.load(w_ptr + n, mask=n < B, other=0.0).to(T)  # [FULL_B]
    c, r_max = tl.load(c_ptr).to(T), tl.load(r_max_ptr).to(T)  # [], []
    for block in range(tl.program_id(0), tl.cdiv(count, ROWS), tl.num_programs(0)):
        row = (block * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        r = tl.load(r_ptr + row, mask=row < count, other=1.0).to(T)  # [ROWS]
        b, db, _ = basis(r, w, c, r_max, ORDER)  # [ROWS, FULL_B]
        x = multiply(b, w1, PRECISION)  # [ROWS, FULL]
        if SLOPE:
            y = multiply(db, w1, PRECISION)  # [ROWS, FULL]
            a, da = activated(x, y)
            x, y = multiply(a, w2, PRECISION), multiply(da, w2, PRECISION)  # [ROWS, FULL]
            a, da = activated(x, y)
            x, y = multiply(a, w3, PRECISION), multiply(da, w3, PRECISION)  # [ROWS, FULL]
        else:
            s_1, _ = sigmoids(x)
            x = multiply(x * s_1, w2, PRECISION)  # [ROWS, FULL]
            s_2, _ = sigmoids(x)
            x = multiply(x * s_2, w3, PRECISION)  # [ROWS, FULL]
        offsets = row[:, None] * H3 + k[None, :]
        mask = (row < count)[:, None] & (k < H3)[None, :]
        if SLOPE:
            a, da = activated(x, y)
            tl.store(slope_ptr + offsets, da, mask=mask)
        else:
            s_3, _ = sigmoids(x)
            a = x * s_3
        tl.store(h_ptr + offsets, a, mask=mask)


@triton.jit(do_not_specialize=["count"])
def radial_network_top(
    p_ptr, q_ptr, r_ptr, w_ptr, c_ptr, r_max_ptr, w1_ptr, w2_ptr, w3_ptr, c_2_ptr, d_2_ptr,
    sums_ptr, count,
    B: tl.constexpr, H1: tl.constexpr, H2: tl.constexpr, H3: tl.constexpr,
    ORDER: tl.constexpr, ROWS: tl.constexpr, FULL_B: tl.constexpr, FULL: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute c_2, d_2 and the gradient of W_3 from the gradients p of h and q of its slope."""
    T: tl.constexpr = tl.float64 if PRECISION == "float64" else tl.float32
    n, k = tl.arange(0, FULL_B), tl.arange(0, FULL)
    w1 = matrix(w1_ptr, n, k, B, H1, T)  # [FULL_B, FULL]
    w2 = matrix(w2_ptr, k, k, H1, H2, T)  # [FULL, FULL]
    w3, w3_t = matrix(w3_ptr, k, k, H2, H3, T), transposed(w3_ptr, k, k, H2, H3, T)  # [FULL, FULL]
    w = tl.load(w_ptr + n, mask=n < B, other=0.0).to(T)  # [FULL_B]
    c, r_max = tl.load(c_ptr).to(T), tl.load(r_max_ptr).to(T)  # [], []
    sum_3 = tl.zeros([FULL, FULL], dtype=T)
    for block in range(tl.program_id(0), tl.cdiv(count, ROWS), tl.num_programs(0)):
        row = (block * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        r = tl.load(r_ptr + row, mask=row < count, other=1.0).to(T)  # [ROWS]
        offsets = row[:, None] * H3 + k[None, :]
        mask_rows = (row < count)[:, None] & (k < H3)[None, :]
        b, db, _ = basis(r, w, c, r_max, ORDER)  # [ROWS, FULL_B]
        x, y = multiply(b, w1, PRECISION), multiply(db, w1, PRECISION)  # [ROWS, FULL]
        a, da = activated(x, y)
        x_2, y_2 = multiply(a, w2, PRECISION), multiply(da, w2, PRECISION)  # [ROWS, FULL]
        a_2, da_2 = activated(x_2, y_2)
        x, y = multiply(a_2, w3, PRECISION), multiply(da_2, w3, PRECISION)  # [ROWS, FULL]
        p = tl.load(p_ptr + offsets, mask=mask_rows, other=0.0).to(T)  # [ROWS, FULL]
        q = tl.load(q_ptr + offsets, mask=mask_rows, other=0.0).to(T)  # [ROWS, FULL]
        c_3, d_3 = deactivated(p, q, x, y)
        sum_3 += multiply(tl.trans(a_2), c_3, PRECISION)  # [FULL, FULL]
        sum_3 += multiply(tl.trans(da_2), d_3, PRECISION)  # [FULL, FULL]
        c_2, d_2 = multiply(c_3, w3_t, PRECISION), multiply(d_3, w3_t, PRECISION)  # [ROWS, FULL]
        c_2, d_2 = deactivated(c_2, d_2, x_2, y_2)
        offsets = row[:, None] * H2 + k[None, :]
        mask_rows = (row < count)[:, None] & (k < H2)[None, :]
        tl.store(c_2_ptr + offsets, c_2, mask=mask_rows)
        tl.store(d_2_ptr + offsets, d_2, mask=mask_rows)
    sums_ptr += tl.program_id(0).to(tl.int64) * (H2 * H3)
    mask = (k < H2)[:, None] & (k < H3)[None, :]
    tl.store(sums_ptr + k[:, None] * H3 + k[None, :], sum_3, mask=mask)


@triton.jit(do_not_specialize=["count"])
def radial_network_bottom(
    c_2_ptr, d_2_ptr, r_ptr, w_ptr, c_ptr, r_max_ptr, w1_ptr, w2_ptr, dr_ptr, sums_ptr, count,
    B: tl.constexpr, H1: tl.constexpr, H2: tl.constexpr, ORDER: tl.constexpr,
    BY_R: tl.constexpr, ROWS: tl.constexpr, FULL_B: tl.constexpr, FULL: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of W_2, W_1 and, if BY_R, the lengths from c_2 and d_2."""
    T: tl.constexpr = tl.float64 if PRECISION == "float64" else tl.float32
    n, k = tl.arange(0, FULL_B), tl.arange(0, FULL)
    w1 = matrix(w1_ptr, n, k, B, H1, T)  # [FULL_B, FULL]
    w2_t = transposed(w2_ptr, k, k, H1, H2, T)  # [FULL, FULL]
    w = tl.load(w_ptr + n, mask=n < B, other=0.0).to(T)  # [FULL_B]
    c, r_max = tl.load(c_ptr).to(T), tl.load(r_max_ptr).to(T)  # [], []
    sum_1 = tl.zeros([FULL_B, FULL], dtype=T)
    sum_2 = tl.zeros([FULL, FULL], dtype=T)
    for block in range(tl.program_id(0), tl.cdiv(count, ROWS), tl.num_programs(0)):
        row = (block * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        r = tl.load(r_ptr + row, mask=row < count, other=1.0).to(T)  # [ROWS]
        offsets = row[:, None] * H2 + k[None, :]
        mask_rows = (row < count)[:, None] & (k < H2)[None, :]
        c_2 = tl.load(c_2_ptr + offsets, mask=mask_rows, other=0.0).to(T)  # [ROWS, FULL]
        d_2 = tl.load(d_2_ptr + offsets, mask=mask_rows, other=0.0).to(T)  # [ROWS, FULL]
        b, db, ddb = basis(r, w, c, r_max, ORDER)  # [ROWS, FULL_B]
        x_1, y_1 = multiply(b, w1, PRECISION), multiply(db, w1, PRECISION)  # [ROWS, FULL]
        a_1, da_1 = activated(x_1, y_1)
        sum_2 += multiply(tl.trans(a_1), c_2, PRECISION)  # [FULL, FULL]
        sum_2 += multiply(tl.trans(da_1), d_2, PRECISION)  # [FULL, FULL]
        c_1, d_1 = multiply(c_2, w2_t, PRECISION), multiply(d_2, w2_t, PRECISION)  # [ROWS, FULL]
        c_1, d_1 = deactivated(c_1, d_1, x_1, y_1)
        sum_1 += multiply(tl.trans(b), c_1, PRECISION)  # [FULL_B, FULL]
        sum_1 += multiply(tl.trans(db), d_1, PRECISION)  # [FULL_B, FULL]
        if BY_R:
            z_1 = multiply(ddb, w1, PRECISION)  # [ROWS, FULL]
            # The gradient of the lengths: [ROWS].
            tl.store(dr_ptr + row, tl.sum(c_1 * y_1 + d_1 * z_1, axis=1), mask=row < count)
    sums_ptr += tl.program_id(0).to(tl.int64) * (B * H1 + H1 * H2)
    mask = (n < B)[:, None] & (k < H1)[None, :]
    tl.store(sums_ptr + n[:, None] * H1 + k[None, :], sum_1, mask=mask)
    mask = (k < H1)[:, None] & (k < H2)[None, :]
    tl.store(sums_ptr + B * H1 + k[:, None] * H2 + k[None, :], sum_2, mask=mask)


@triton.jit(do_not_specialize=["count"])
def rows_product(
    p_ptr, slope_ptr, out_ptr, count, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    FULL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Compute the dot product of p and slope in every row."""
    T: tl.constexpr = tl.float64 if WIDE else tl.float32
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, FULL)
    offsets = row[:, None] * WIDTH + k[None, :]
    mask = (row < count)[:, None] & (k < WIDTH)[None, :]
    p = tl.load(p_ptr + offsets, mask=mask, other=0.0).to(T)  # [ROWS, FULL]
    slope = tl.load(slope_ptr + offsets, mask=mask, other=0.0).to(T)  # [ROWS, FULL]
    tl.store(out_ptr + row, tl.sum(p * slope, axis=1), mask=row < count)  # [ROWS]
