# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""The kernels of the radial network: some rows of edges go through all layers on chip.

A program keeps the weights and walks over blocks of edges. Names: ``x_i`` what enters the
activation of layer i and ``y_i`` its derivative by the length; ``c_i``, ``d_i`` the gradients by
these.
"""

import triton
import triton.language as tl

from bevatron.kernels.shared.triton_math import cutoff, multiply


@triton.jit
def sigmoids(x):
    """Sigma(x) and sigma(-x), neither of them as a difference."""
    e = tl.exp(-tl.abs(x))
    large = 1.0 / (1.0 + e)
    small = e * large
    return tl.where(x >= 0, large, small), tl.where(x >= 0, small, large)


@triton.jit
def matrix(ptr, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr, T: tl.constexpr):
    """Load a weight, filled up with zeros."""
    mask = (rows < ROWS)[:, None] & (columns < COLUMNS)[None, :]
    where = rows[:, None] * COLUMNS + columns[None, :]
    return tl.load(ptr + where, mask=mask, other=0.0).to(T)


@triton.jit
def transposed(ptr, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr, T: tl.constexpr):
    """Load a weight [ROWS, COLUMNS] the other way round."""
    mask = (rows < ROWS)[None, :] & (columns < COLUMNS)[:, None]
    where = rows[None, :] * COLUMNS + columns[:, None]
    return tl.load(ptr + where, mask=mask, other=0.0).to(T)


@triton.jit
def basis(r, w, c, r_max, ORDER: tl.constexpr):
    """Evaluate the functions and two derivatives; all zero where ``w`` is filled up with zeros."""
    u, du, ddu = cutoff(r, r_max, ORDER)
    u, du, ddu = u[:, None], du[:, None], ddu[:, None]
    far = r[:, None]
    phase = w[None, :] * far
    sine = tl.sin(phase)
    f = sine / far
    df = (w[None, :] * tl.cos(phase) - f) / far
    ddf = -(w[None, :] * w[None, :] * sine + 2.0 * df) / far
    first = c * (df * u + f * du)
    return c * f * u, first, c * (ddf * u + 2.0 * df * du + f * ddu)


@triton.jit
def activated(x, y):
    """S(x), and its derivative s'(x) y."""
    s, t = sigmoids(x)
    return x * s, s * (1.0 + x * t) * y


@triton.jit
def deactivated(c, d, x, y):
    """From the gradients by s(x) and s'(x) y those by x and y."""
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
    """H, and its derivative by the lengths."""
    T: tl.constexpr = tl.float64 if PRECISION == "float64" else tl.float32
    n, k = tl.arange(0, FULL_B), tl.arange(0, FULL)
    w1 = matrix(w1_ptr, n, k, B, H1, T)
    w2 = matrix(w2_ptr, k, k, H1, H2, T)
    w3 = matrix(w3_ptr, k, k, H2, H3, T)
    w = tl.load(w_ptr + n, mask=n < B, other=0.0).to(T)
    c, r_max = tl.load(c_ptr).to(T), tl.load(r_max_ptr).to(T)
    for block in range(tl.program_id(0), tl.cdiv(count, ROWS), tl.num_programs(0)):
        row = (block * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        r = tl.load(r_ptr + row, mask=row < count, other=1.0).to(T)
        b, db, _ = basis(r, w, c, r_max, ORDER)
        x = multiply(b, w1, PRECISION)
        if SLOPE:
            y = multiply(db, w1, PRECISION)
            a, da = activated(x, y)
            x, y = multiply(a, w2, PRECISION), multiply(da, w2, PRECISION)
            a, da = activated(x, y)
            x, y = multiply(a, w3, PRECISION), multiply(da, w3, PRECISION)
        else:
            for_2, _ = sigmoids(x)
            x = multiply(x * for_2, w2, PRECISION)
            for_3, _ = sigmoids(x)
            x = multiply(x * for_3, w3, PRECISION)
        where = row[:, None] * H3 + k[None, :]
        inside = (row < count)[:, None] & (k < H3)[None, :]
        if SLOPE:
            a, da = activated(x, y)
            tl.store(slope_ptr + where, da, mask=inside)
        else:
            last, _ = sigmoids(x)
            a = x * last
        tl.store(h_ptr + where, a, mask=inside)


@triton.jit(do_not_specialize=["count"])
def radial_network_top(
    p_ptr, q_ptr, r_ptr, w_ptr, c_ptr, r_max_ptr, w1_ptr, w2_ptr, w3_ptr, c_2_ptr, d_2_ptr,
    sums_ptr, count,
    B: tl.constexpr, H1: tl.constexpr, H2: tl.constexpr, H3: tl.constexpr,
    ORDER: tl.constexpr, ROWS: tl.constexpr, FULL_B: tl.constexpr, FULL: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """From the gradients p of h and q of its slope c_2, d_2 and the gradient by W_3."""
    T: tl.constexpr = tl.float64 if PRECISION == "float64" else tl.float32
    n, k = tl.arange(0, FULL_B), tl.arange(0, FULL)
    w1 = matrix(w1_ptr, n, k, B, H1, T)
    w2 = matrix(w2_ptr, k, k, H1, H2, T)
    w3, w3_t = matrix(w3_ptr, k, k, H2, H3, T), transposed(w3_ptr, k, k, H2, H3, T)
    w = tl.load(w_ptr + n, mask=n < B, other=0.0).to(T)
    c, r_max = tl.load(c_ptr).to(T), tl.load(r_max_ptr).to(T)
    sum_3 = tl.zeros([FULL, FULL], dtype=T)
    for block in range(tl.program_id(0), tl.cdiv(count, ROWS), tl.num_programs(0)):
        row = (block * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        r = tl.load(r_ptr + row, mask=row < count, other=1.0).to(T)
        where = row[:, None] * H3 + k[None, :]
        inside = (row < count)[:, None] & (k < H3)[None, :]
        b, db, _ = basis(r, w, c, r_max, ORDER)
        x, y = multiply(b, w1, PRECISION), multiply(db, w1, PRECISION)
        a, da = activated(x, y)
        x_2, y_2 = multiply(a, w2, PRECISION), multiply(da, w2, PRECISION)
        a_2, da_2 = activated(x_2, y_2)
        x, y = multiply(a_2, w3, PRECISION), multiply(da_2, w3, PRECISION)
        p = tl.load(p_ptr + where, mask=inside, other=0.0).to(T)
        q = tl.load(q_ptr + where, mask=inside, other=0.0).to(T)
        c_3, d_3 = deactivated(p, q, x, y)
        sum_3 += multiply(tl.trans(a_2), c_3, PRECISION)
        sum_3 += multiply(tl.trans(da_2), d_3, PRECISION)
        c_2, d_2 = multiply(c_3, w3_t, PRECISION), multiply(d_3, w3_t, PRECISION)
        c_2, d_2 = deactivated(c_2, d_2, x_2, y_2)
        where = row[:, None] * H2 + k[None, :]
        inside = (row < count)[:, None] & (k < H2)[None, :]
        tl.store(c_2_ptr + where, c_2, mask=inside)
        tl.store(d_2_ptr + where, d_2, mask=inside)
    sums_ptr += tl.program_id(0).to(tl.int64) * (H2 * H3)
    mask = (k < H2)[:, None] & (k < H3)[None, :]
    tl.store(sums_ptr + k[:, None] * H3 + k[None, :], sum_3, mask=mask)


@triton.jit(do_not_specialize=["count"])
def radial_network_bottom(
    c_2_ptr, d_2_ptr, r_ptr, w_ptr, c_ptr, r_max_ptr, w1_ptr, w2_ptr, by_r_ptr, sums_ptr, count,
    B: tl.constexpr, H1: tl.constexpr, H2: tl.constexpr, ORDER: tl.constexpr,
    BY_R: tl.constexpr, ROWS: tl.constexpr, FULL_B: tl.constexpr, FULL: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """From c_2 and d_2 the gradients by W_2, W_1 and the lengths."""
    T: tl.constexpr = tl.float64 if PRECISION == "float64" else tl.float32
    n, k = tl.arange(0, FULL_B), tl.arange(0, FULL)
    w1, w2_t = matrix(w1_ptr, n, k, B, H1, T), transposed(w2_ptr, k, k, H1, H2, T)
    w = tl.load(w_ptr + n, mask=n < B, other=0.0).to(T)
    c, r_max = tl.load(c_ptr).to(T), tl.load(r_max_ptr).to(T)
    sum_1 = tl.zeros([FULL_B, FULL], dtype=T)
    sum_2 = tl.zeros([FULL, FULL], dtype=T)
    for block in range(tl.program_id(0), tl.cdiv(count, ROWS), tl.num_programs(0)):
        row = (block * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        r = tl.load(r_ptr + row, mask=row < count, other=1.0).to(T)
        where = row[:, None] * H2 + k[None, :]
        inside = (row < count)[:, None] & (k < H2)[None, :]
        c_2 = tl.load(c_2_ptr + where, mask=inside, other=0.0).to(T)
        d_2 = tl.load(d_2_ptr + where, mask=inside, other=0.0).to(T)
        b, db, ddb = basis(r, w, c, r_max, ORDER)
        x_1, y_1 = multiply(b, w1, PRECISION), multiply(db, w1, PRECISION)
        a_1, da_1 = activated(x_1, y_1)
        sum_2 += multiply(tl.trans(a_1), c_2, PRECISION)
        sum_2 += multiply(tl.trans(da_1), d_2, PRECISION)
        c_1, d_1 = multiply(c_2, w2_t, PRECISION), multiply(d_2, w2_t, PRECISION)
        c_1, d_1 = deactivated(c_1, d_1, x_1, y_1)
        sum_1 += multiply(tl.trans(b), c_1, PRECISION)
        sum_1 += multiply(tl.trans(db), d_1, PRECISION)
        if BY_R:
            z_1 = multiply(ddb, w1, PRECISION)
            tl.store(by_r_ptr + row, tl.sum(c_1 * y_1 + d_1 * z_1, axis=1), mask=row < count)
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
    """Of every row the sum of p times slope."""
    T: tl.constexpr = tl.float64 if WIDE else tl.float32
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, FULL)
    where = row[:, None] * WIDTH + k[None, :]
    inside = (row < count)[:, None] & (k < WIDTH)[None, :]
    p = tl.load(p_ptr + where, mask=inside, other=0.0).to(T)
    slope = tl.load(slope_ptr + where, mask=inside, other=0.0).to(T)
    tl.store(out_ptr + row, tl.sum(p * slope, axis=1), mask=row < count)
