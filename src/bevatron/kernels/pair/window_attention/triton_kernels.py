"""Attention in windows of atoms: a program owns one window, or one block of keys, of one head.

Window w has NQ queries from w NQ on and NK keys from w NQ - (NK - NQ) / 2 on: block c of NQ keys,
which begins at c NQ - (NK - NQ) / 2, is read by the windows c - NK / NQ + 1 to c. A program loads
its part of the bias once, masked keys as minus infinity, and goes through copies; the logits of a
window fit on chip. Nothing is added up across programs, so results repeat bit for bit.

Blocks of logits have their longer side first, [NK, NQ]: divided among warps by rows, 32 rows leave
warps without work. The matmul behind them reads them through `tl.trans`, without which Triton gives
all matmuls of a chain one division.

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
def forward_kernel(
    Q, K, V, Gate, Bias, Mask, Out, Lse,
    q_B, q_M, q_A, k_B, k_M, k_A, v_B, v_M, v_A, g_B, g_M, g_A, A, W, M, copies, scale,
    H: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, NQ: tl.constexpr, NK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the gated result and the logarithm (base 2) of each query's sum of exponentials."""
    h, w = tl.program_id(0) % H, tl.program_id(0) // H
    b = tl.program_id(2).to(tl.int64)
    row = w * NQ + tl.arange(0, NQ)
    key = w * NQ - (NK - NQ) // 2 + tl.arange(0, NK)
    i, j = tl.arange(0, NQ), tl.arange(0, NK)
    at = Bias + ((b * W + w) * H + h) * NQ * NK + i[None, :] * NK + j[:, None]
    bias = tl.load(at).to(tl.float32) * LOG2E  # [NK, NQ]
    bias = tl.where(load_kept(Mask + b * A, key, A)[:, None], bias, float("-inf"))
    first = tl.program_id(1) * copies
    for copy in range(first, tl.minimum(first + copies, M)):
        m = tl.cast(copy, tl.int64)
        q = load_rows(Q + b * q_B + m * q_M + h * D, row, A, q_A, D, D_PAD)  # [NQ, D_PAD]
        k = load_rows(K + b * k_B + m * k_M + h * D, key, A, k_A, D, D_PAD)  # [NK, D_PAD]
        v = load_rows(V + b * v_B + m * v_M + h * D, key, A, v_A, D, D_PAD)  # [NK, D_PAD]
        g = load_rows(Gate + b * g_B + m * g_M + h * D, row, A, g_A, D, D_PAD)  # [NQ, D_PAD]
        s = tl.dot(k, tl.trans(q), input_precision=PRECISION)  # [NK, NQ]
        s = s * (scale * LOG2E) + bias
        top = tl.max(s, 0)  # [NQ]
        top = tl.where(top == float("-inf"), 0.0, top)
        p = tl.exp2(s - top[None, :])
        total = tl.sum(p, 0)
        some = total > 0
        o = tl.dot(tl.trans(p.to(v.dtype)), v, input_precision=PRECISION)  # [NQ, D_PAD]
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
    h, w = tl.program_id(0) % H, tl.program_id(0) // H
    b = tl.program_id(1).to(tl.int64)
    row = w * NQ + tl.arange(0, NQ)
    key = w * NQ - (NK - NQ) // 2 + tl.arange(0, NK)
    i, j = tl.arange(0, NQ), tl.arange(0, NK)
    of_window = ((b * W + w) * H + h) * NQ * NK + i[None, :] * NK + j[:, None]
    bias = tl.load(Bias + of_window).to(tl.float32) * LOG2E  # [NK, NQ]
    bias = tl.where(load_kept(Mask + b * A, key, A)[:, None], bias, float("-inf"))
    dbias = tl.zeros([NK, NQ], dtype=tl.float32)
    for copy in range(0, M):
        m = tl.cast(copy, tl.int64)
        q = load_rows(Q + b * q_B + m * q_M + h * D, row, A, q_A, D, D_PAD)  # [NQ, D_PAD]
        k = load_rows(K + b * k_B + m * k_M + h * D, key, A, k_A, D, D_PAD)  # [NK, D_PAD]
        v = load_rows(V + b * v_B + m * v_M + h * D, key, A, v_A, D, D_PAD)  # [NK, D_PAD]
        g = load_rows(Gate + b * g_B + m * g_M + h * D, row, A, g_A, D, D_PAD)  # [NQ, D_PAD]
        place = b * M + m
        of_copy = place * A * H * D + h * D
        o = load_rows(Out + of_copy, row, A, H * D, D, D_PAD)  # [NQ, D_PAD]
        do = load_rows(DOut + of_copy, row, A, H * D, D, D_PAD)  # [NQ, D_PAD]
        of_query = (place * H + h) * A + row
        lse = tl.load(Lse + of_query, mask=row < A, other=0.0)  # [NQ]
        s = tl.dot(k, tl.trans(q), input_precision=PRECISION)  # [NK, NQ]
        p = tl.exp2(s * (scale * LOG2E) + bias - lse[None, :])
        opened, closed = sigmoids(g.to(tl.float32))
        gated = (do.to(tl.float32) * opened).to(v.dtype)
        dp = tl.dot(v, tl.trans(gated), input_precision=PRECISION)  # [NK, NQ]
        delta = tl.sum(p * dp, 0)  # [NQ]
        ds = p * (dp - delta[None, :])
        dbias += ds
        # [NQ, D_PAD]
        dq = tl.dot(tl.trans(ds.to(k.dtype)), k, input_precision=PRECISION) * scale
        dgate = do.to(tl.float32) * o.to(tl.float32) * closed
        at = b * dq_B + m * dq_M + h * D
        store_rows(DQ + at, row, A, dq_A, dq, D, D_PAD)
        store_rows(DGate + at, row, A, dq_A, dgate, D, D_PAD)
        tl.store(Delta + of_query, delta, mask=row < A)
    tl.store(DBias + of_window, dbias.to(DBias.dtype.element_ty))


@triton.jit
def keys_kernel(
    Q, K, V, Gate, Bias, Mask, Lse, Delta, DOut, DK, DV,
    q_B, q_M, q_A, k_B, k_M, k_A, v_B, v_M, v_A, g_B, g_M, g_A, dk_B, dk_M, dk_A,
    A, W, M, copies, scale,
    H: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, NQ: tl.constexpr, NK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the gradients of a block of NQ keys and values, from all NK queries that read them."""
    OTHERS: tl.constexpr = NK // NQ - 1
    h, block = tl.program_id(0) % H, tl.program_id(0) // H
    b = tl.program_id(2).to(tl.int64)
    key = block * NQ - (NK - NQ) // 2 + tl.arange(0, NQ)
    row = (block - OTHERS) * NQ + tl.arange(0, NK)
    i, j = tl.arange(0, NK), tl.arange(0, NQ)
    w, within = block - OTHERS + i // NQ, (OTHERS - i // NQ) * NQ
    of_query = ((b * W + w) * H + h) * NQ * NK + i % NQ * NK + within
    real = ((w >= 0) & (w < W))[:, None]
    # [NK, NQ]
    bias = tl.load(Bias + of_query[:, None] + j[None, :], mask=real, other=float("-inf"))
    kept = load_kept(Mask + b * A, key, A)
    bias = tl.where(kept[None, :], bias.to(tl.float32) * LOG2E, float("-inf"))
    first = tl.program_id(1) * copies
    for copy in range(first, tl.minimum(first + copies, M)):
        m = tl.cast(copy, tl.int64)
        q = load_rows(Q + b * q_B + m * q_M + h * D, row, A, q_A, D, D_PAD)  # [NK, D_PAD]
        g = load_rows(Gate + b * g_B + m * g_M + h * D, row, A, g_A, D, D_PAD)  # [NK, D_PAD]
        k = load_rows(K + b * k_B + m * k_M + h * D, key, A, k_A, D, D_PAD)  # [NQ, D_PAD]
        v = load_rows(V + b * v_B + m * v_M + h * D, key, A, v_A, D, D_PAD)  # [NQ, D_PAD]
        place = b * M + m
        do = load_rows(DOut + place * A * H * D + h * D, row, A, H * D, D, D_PAD)  # [NK, D_PAD]
        of_row, exists = (place * H + h) * A + row, (row >= 0) & (row < A)
        lse = tl.load(Lse + of_row, mask=exists, other=0.0)  # [NK]
        delta = tl.load(Delta + of_row, mask=exists, other=0.0)  # [NK]
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [NK, NQ]
        p = tl.exp2(s * (scale * LOG2E) + bias - lse[:, None])
        gated = (do.to(tl.float32) * logistic(g.to(tl.float32))).to(q.dtype)
        dv = tl.dot(tl.trans(p.to(q.dtype)), gated, input_precision=PRECISION)  # [NQ, D_PAD]
        dp = tl.dot(gated, tl.trans(v), input_precision=PRECISION)  # [NK, NQ]
        ds = (p * (dp - delta[:, None])).to(q.dtype)
        dk = tl.dot(tl.trans(ds), q, input_precision=PRECISION) * scale  # [NQ, D_PAD]
        at = b * dk_B + m * dk_M + h * D
        store_rows(DK + at, key, A, dk_A, dk, D, D_PAD)
        store_rows(DV + at, key, A, dk_A, dv, D, D_PAD)
