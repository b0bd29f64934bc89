"""Attention in windows of atoms: a program owns one window, or one block of keys, of one head.

Window w has NQ queries from w NQ on and NK keys from w NQ - (NK - NQ) / 2 on: block c of NQ keys,
which begins at c NQ - (NK - NQ) / 2, is read by the windows c - NK / NQ + 1 to c. A program loads
its part of the bias once, masked keys as minus infinity, and goes through copies; the logits of a
window fit on chip. Nothing is added up across programs, so results repeat bit for bit.

Blocks of logits have their longer side first, in two halves [NK / 2, NQ]: the second matmul then
takes half as many registers at a time.

Rows of inputs and gradients have strides along samples, copies and atoms; heads are contiguous.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import triton
import triton.language as tl

from bevatron.kernels.shared.triton_math import LOG2E, logistic, sigmoids


@triton.jit
def load_rows(base, row, A, stride, D: tl.constexpr, D_PAD: tl.constexpr):
    """Load one head of some atoms of a copy, zero where there is none."""
    col = tl.arange(0, D_PAD)
    inside = ((row >= 0) & (row < A))[:, None] & (col < D)[None, :]
    # [rows, D_PAD]
    return tl.load(base + row[:, None] * stride + col[None, :], mask=inside, other=0.0)


@triton.jit
def load_pair(one, other, row, A, stride, other_stride, D: tl.constexpr, D_PAD: tl.constexpr):
    """Load the same atoms of two tensors."""
    first = load_rows(one, row, A, stride, D, D_PAD)  # [rows, D_PAD]
    return first, load_rows(other, row, A, other_stride, D, D_PAD)  # [rows, D_PAD]


@triton.jit
def store_rows(base, row, A, stride, block, D: tl.constexpr, D_PAD: tl.constexpr):
    """Store one head of the atoms that exist."""
    col = tl.arange(0, D_PAD)
    inside = ((row >= 0) & (row < A))[:, None] & (col < D)[None, :]
    at = base + row[:, None] * stride + col[None, :]
    tl.store(at, block.to(base.dtype.element_ty), mask=inside)


@triton.jit
def load_kept(Mask, key, A):
    """Return which keys exist and are kept."""
    return tl.load(Mask + key, mask=(key >= 0) & (key < A), other=0) != 0  # [keys]


@triton.jit
def load_bias(Bias, Mask, start, key, A, NQ: tl.constexpr, NK: tl.constexpr, FIRST: tl.constexpr):
    """Load half of a window's bias in units of log 2, minus infinity where no key is kept."""
    HALF: tl.constexpr = NK // 2
    i, j = tl.arange(0, NQ), FIRST + tl.arange(0, HALF)
    # [HALF, NQ]
    bias = tl.load(Bias + start + i[None, :] * NK + j[:, None]).to(tl.float32) * LOG2E
    return tl.where(load_kept(Mask, key, A)[:, None], bias, float("-inf"))


@triton.jit
def forward_kernel(
    Q, K, V, Gate, Bias, Mask, Out, Lse,
    q_B, q_M, q_A, k_B, k_M, k_A, v_B, v_M, v_A, g_B, g_M, g_A, A, W, M, copies, scale,
    H: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, NQ: tl.constexpr, NK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the gated result and the logarithm (base 2) of each query's sum of exponentials."""
    HALF: tl.constexpr = NK // 2
    h, w = tl.program_id(0) % H, tl.program_id(0) // H
    b = tl.program_id(2).to(tl.int64)
    row = w * NQ + tl.arange(0, NQ)
    key0 = w * NQ - (NK - NQ) // 2 + tl.arange(0, HALF)
    key1 = key0 + HALF
    start = ((b * W + w) * H + h) * NQ * NK
    bias0 = load_bias(Bias, Mask + b * A, start, key0, A, NQ, NK, 0)
    bias1 = load_bias(Bias, Mask + b * A, start, key1, A, NQ, NK, HALF)
    first = tl.program_id(1) * copies
    for copy in range(first, tl.minimum(first + copies, M)):
        m = tl.cast(copy, tl.int64)
        q = load_rows(Q + b * q_B + m * q_M + h * D, row, A, q_A, D, D_PAD)  # [NQ, D_PAD]
        k, v = K + b * k_B + m * k_M + h * D, V + b * v_B + m * v_M + h * D
        k0, v0 = load_pair(k, v, key0, A, k_A, v_A, D, D_PAD)  # [HALF, D_PAD]
        k1, v1 = load_pair(k, v, key1, A, k_A, v_A, D, D_PAD)  # [HALF, D_PAD]
        g = load_rows(Gate + b * g_B + m * g_M + h * D, row, A, g_A, D, D_PAD)  # [NQ, D_PAD]
        s0 = tl.dot(k0, tl.trans(q), input_precision=PRECISION)  # [HALF, NQ]
        s1 = tl.dot(k1, tl.trans(q), input_precision=PRECISION)  # [HALF, NQ]
        s0, s1 = s0 * (scale * LOG2E) + bias0, s1 * (scale * LOG2E) + bias1
        top = tl.maximum(tl.max(s0, 0), tl.max(s1, 0))  # [NQ]
        top = tl.where(top == float("-inf"), 0.0, top)
        p0, p1 = tl.exp2(s0 - top[None, :]), tl.exp2(s1 - top[None, :])
        total = tl.sum(p0, 0) + tl.sum(p1, 0)
        some = total > 0
        o = tl.dot(tl.trans(p0.to(v0.dtype)), v0, input_precision=PRECISION)  # [NQ, D_PAD]
        o = tl.dot(tl.trans(p1.to(v1.dtype)), v1, o, input_precision=PRECISION)  # [NQ, D_PAD]
        o *= (1.0 / tl.where(some, total, 1.0))[:, None] * logistic(g.to(tl.float32))
        place = b * M + m
        store_rows(Out + place * A * H * D + h * D, row, A, H * D, o, D, D_PAD)
        lse = tl.where(some, top + tl.log2(tl.where(some, total, 1.0)), 0.0)
        tl.store(Lse + (place * H + h) * A + row, lse, mask=row < A)


@triton.jit
def queries_kernel(
    Q, K, V, Gate, Bias, Mask, Out, Lse, DOut, DQ, DGate, DBias, Delta,
    q_B, q_M, q_A, k_B, k_M, k_A, v_B, v_M, v_A, g_B, g_M, g_A, dq_B, dq_M, dq_A, A, W, M, scale,
    H: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, NQ: tl.constexpr, NK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the gradients of queries, gate and bias; delta is each query's mean of dp by p.

    Delta is the sum of what it is subtracted from, so a query's gradients of logits sum to zero.
    """
    HALF: tl.constexpr = NK // 2
    h, w = tl.program_id(0) % H, tl.program_id(0) // H
    b = tl.program_id(1).to(tl.int64)
    row = w * NQ + tl.arange(0, NQ)
    key0 = w * NQ - (NK - NQ) // 2 + tl.arange(0, HALF)
    key1 = key0 + HALF
    start = ((b * W + w) * H + h) * NQ * NK
    bias0 = load_bias(Bias, Mask + b * A, start, key0, A, NQ, NK, 0)
    bias1 = load_bias(Bias, Mask + b * A, start, key1, A, NQ, NK, HALF)
    dbias0 = tl.zeros([HALF, NQ], dtype=tl.float32)
    dbias1 = tl.zeros([HALF, NQ], dtype=tl.float32)
    for copy in range(M):
        m = tl.cast(copy, tl.int64)
        q = load_rows(Q + b * q_B + m * q_M + h * D, row, A, q_A, D, D_PAD)  # [NQ, D_PAD]
        k, v = K + b * k_B + m * k_M + h * D, V + b * v_B + m * v_M + h * D
        k0, v0 = load_pair(k, v, key0, A, k_A, v_A, D, D_PAD)  # [HALF, D_PAD]
        k1, v1 = load_pair(k, v, key1, A, k_A, v_A, D, D_PAD)  # [HALF, D_PAD]
        g = load_rows(Gate + b * g_B + m * g_M + h * D, row, A, g_A, D, D_PAD)  # [NQ, D_PAD]
        place = b * M + m
        of_copy = place * A * H * D + h * D
        o = load_rows(Out + of_copy, row, A, H * D, D, D_PAD)  # [NQ, D_PAD]
        do = load_rows(DOut + of_copy, row, A, H * D, D, D_PAD)  # [NQ, D_PAD]
        of_query = (place * H + h) * A + row
        lse = tl.load(Lse + of_query, mask=row < A, other=0.0)  # [NQ]
        opened, closed = sigmoids(g.to(tl.float32))
        gated = (do.to(tl.float32) * opened).to(q.dtype)
        dgate = do.to(tl.float32) * o.to(tl.float32) * closed
        at = b * dq_B + m * dq_M + h * D
        store_rows(DGate + at, row, A, dq_A, dgate, D, D_PAD)
        s0 = tl.dot(k0, tl.trans(q), input_precision=PRECISION)  # [HALF, NQ]
        s1 = tl.dot(k1, tl.trans(q), input_precision=PRECISION)  # [HALF, NQ]
        dp0 = tl.dot(v0, tl.trans(gated), input_precision=PRECISION)  # [HALF, NQ]
        dp1 = tl.dot(v1, tl.trans(gated), input_precision=PRECISION)  # [HALF, NQ]
        p0 = tl.exp2(s0 * (scale * LOG2E) + bias0 - lse[None, :])
        p1 = tl.exp2(s1 * (scale * LOG2E) + bias1 - lse[None, :])
        delta = tl.sum(p0 * dp0, 0) + tl.sum(p1 * dp1, 0)  # [NQ]
        ds0, ds1 = p0 * (dp0 - delta[None, :]), p1 * (dp1 - delta[None, :])
        dbias0 += ds0
        dbias1 += ds1
        dq = tl.dot(tl.trans(ds0.to(q.dtype)), k0, input_precision=PRECISION)  # [NQ, D_PAD]
        dq = tl.dot(tl.trans(ds1.to(q.dtype)), k1, dq, input_precision=PRECISION)  # [NQ, D_PAD]
        store_rows(DQ + at, row, A, dq_A, dq * scale, D, D_PAD)
        tl.store(Delta + of_query, delta, mask=row < A)
    i, j = tl.arange(0, NQ), tl.arange(0, HALF)
    target = DBias + start + i[None, :] * NK + j[:, None]
    tl.store(target, dbias0.to(DBias.dtype.element_ty))
    tl.store(target + HALF, dbias1.to(DBias.dtype.element_ty))


@triton.jit
def keys_kernel(
    Q, K, V, Gate, Bias, Mask, Lse, Delta, DOut, DK, DV,
    q_B, q_M, q_A, k_B, k_M, k_A, v_B, v_M, v_A, g_B, g_M, g_A, dk_B, dk_M, dk_A,
    A, W, M, copies, scale,
    H: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, NQ: tl.constexpr, NK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the gradients of a block of NQ keys and values, from all NK queries that read them."""
    HALF: tl.constexpr = NK // 2
    h, block = tl.program_id(0) % H, tl.program_id(0) // H
    b = tl.program_id(2).to(tl.int64)
    key = block * NQ - (NK - NQ) // 2 + tl.arange(0, NQ)
    kept = load_kept(Mask + b * A, key, A)
    of_head = (b * W * H + h) * NQ * NK
    bias0 = load_bias_of_keys(Bias + of_head, kept, block, W, H, NQ, NK, 0)
    bias1 = load_bias_of_keys(Bias + of_head, kept, block, W, H, NQ, NK, HALF)
    first = tl.program_id(1) * copies
    for copy in range(first, tl.minimum(first + copies, M)):
        m = tl.cast(copy, tl.int64)
        place = b * M + m
        k = load_rows(K + b * k_B + m * k_M + h * D, key, A, k_A, D, D_PAD)  # [NQ, D_PAD]
        v = load_rows(V + b * v_B + m * v_M + h * D, key, A, v_A, D, D_PAD)  # [NQ, D_PAD]
        dk = tl.zeros([NQ, D_PAD], dtype=tl.float32)
        dv = tl.zeros([NQ, D_PAD], dtype=tl.float32)
        for part in tl.static_range(2):
            row = (block - NK // NQ + 1) * NQ + part * HALF + tl.arange(0, HALF)
            q, g = load_pair(
                Q + b * q_B + m * q_M + h * D, Gate + b * g_B + m * g_M + h * D, row, A, q_A, g_A,
                D, D_PAD,
            )  # fmt: skip
            of_copy = place * A * H * D + h * D
            do = load_rows(DOut + of_copy, row, A, H * D, D, D_PAD)  # [HALF, D_PAD]
            of_row, exists = (place * H + h) * A + row, (row >= 0) & (row < A)
            lse = tl.load(Lse + of_row, mask=exists, other=0.0)  # [HALF]
            delta = tl.load(Delta + of_row, mask=exists, other=0.0)  # [HALF]
            bias = bias0 if part == 0 else bias1
            s = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [HALF, NQ]
            p = tl.exp2(s * (scale * LOG2E) + bias - lse[:, None])
            gated = (do.to(tl.float32) * logistic(g.to(tl.float32))).to(q.dtype)
            dv = tl.dot(tl.trans(p.to(q.dtype)), gated, dv, input_precision=PRECISION)
            dp = tl.dot(gated, tl.trans(v), input_precision=PRECISION)  # [HALF, NQ]
            ds = (p * (dp - delta[:, None])).to(q.dtype)
            dk = tl.dot(tl.trans(ds), q, dk, input_precision=PRECISION)  # [NQ, D_PAD]
        at = b * dk_B + m * dk_M + h * D
        store_rows(DK + at, key, A, dk_A, dk * scale, D, D_PAD)
        store_rows(DV + at, key, A, dk_A, dv, D, D_PAD)


@triton.jit
def load_bias_of_keys(
    Bias, kept, block, W, H: tl.constexpr, NQ: tl.constexpr, NK: tl.constexpr, FIRST: tl.constexpr
):
    """Load the bias of half of the queries that read a block of keys, as `load_bias` does."""
    OTHERS: tl.constexpr = NK // NQ - 1
    i, j = FIRST + tl.arange(0, NK // 2), tl.arange(0, NQ)
    w, within = block - OTHERS + i // NQ, (OTHERS - i // NQ) * NQ
    at = Bias + w.to(tl.int64)[:, None] * (H * NQ * NK) + (i % NQ * NK + within)[:, None]
    real = ((w >= 0) & (w < W))[:, None]
    bias = tl.load(at + j[None, :], mask=real, other=float("-inf"))  # [HALF, NQ]
    return tl.where(kept[None, :], bias.to(tl.float32) * LOG2E, float("-inf"))
