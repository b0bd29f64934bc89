"""Attention in windows of atoms: a program owns one window, or one block of keys, of one head.

Window w has NQ queries from w NQ on and NK keys from w NQ - (NK - NQ) / 2 on: block c of NQ keys,
which begins at c NQ - (NK - NQ) / 2, is read by the windows c - NK / NQ + 1 to c. A program loads
its part of the bias once, masked keys as minus infinity, and goes through copies; the logits of a
window fit on chip. Nothing is added up across programs, so results repeat bit for bit.

The logarithm of the sum of exponentials of a query that does not exist is infinite: its weights are
0 even where its part of the bias is large.

Two warps own 16 rows of logits each: sums over a row stay within a warp, and weights enter the next
matmul from registers. Rows of inputs and gradients have strides along samples, copies and atoms;
heads are contiguous.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import triton
import triton.language as tl

from bevatron.kernels.shared.triton_math import LOG2E, logistic, sigmoids

NUMBERS = ("A", "W", "M", "copies")
"""Arguments that the kernels are not specialised on: new values need no compilation."""


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


@triton.jit(do_not_specialize=NUMBERS)
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
    bias = load_bias(Bias + ((b * W + w) * H + h) * NQ * NK, Mask + b * A, key, A, NQ, NK)
    first = tl.program_id(1) * copies
    for copy in range(first, tl.minimum(first + copies, M)):
        m = tl.cast(copy, tl.int64)
        q = load_rows(Q + b * q_B + m * q_M + h * D, row, A, q_A, D, D_PAD)  # [NQ, D_PAD]
        k = load_rows(K + b * k_B + m * k_M + h * D, key, A, k_A, D, D_PAD)  # [NK, D_PAD]
        v = load_rows(V + b * v_B + m * v_M + h * D, key, A, v_A, D, D_PAD)  # [NK, D_PAD]
        g = load_rows(Gate + b * g_B + m * g_M + h * D, row, A, g_A, D, D_PAD)  # [NQ, D_PAD]
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [NQ, NK]
        s = s * (scale * LOG2E) + bias
        top = tl.max(s, 1)  # [NQ]
        top = tl.where(top == float("-inf"), 0.0, top)
        p = tl.exp2(s - top[:, None])
        total = tl.sum(p, 1)
        some = total > 0
        o = tl.dot(p.to(v.dtype), v, input_precision=PRECISION)  # [NQ, D_PAD]
        o *= (1.0 / tl.where(some, total, 1.0))[:, None] * logistic(g.to(tl.float32))
        place = b * M + m
        store_rows(Out + place * A * H * D + h * D, row, A, H * D, o, D, D_PAD)
        lse = tl.where(some, top + tl.log2(tl.where(some, total, 1.0)), 0.0)
        tl.store(Lse + (place * H + h) * A + row, lse, mask=row < A)


@triton.jit
def load_bias(Bias, Mask, key, A, NQ: tl.constexpr, NK: tl.constexpr):
    """Load a window's bias in units of log 2, minus infinity where no key is kept."""
    at = Bias + tl.arange(0, NQ)[:, None] * NK + tl.arange(0, NK)[None, :]
    bias = tl.load(at).to(tl.float32) * LOG2E  # [NQ, NK]
    return tl.where(load_kept(Mask, key, A)[None, :], bias, float("-inf"))


@triton.jit(do_not_specialize=NUMBERS)
def queries_kernel(
    Q, K, V, Gate, Bias, Mask, Out, Lse, DOut, DQ, DGate, Gated, Delta,
    q_B, q_M, q_A, k_B, k_M, k_A, v_B, v_M, v_A, g_B, g_M, g_A, dq_B, dq_M, dq_A,
    A, W, M, copies, scale,
    H: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, NQ: tl.constexpr, NK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the gradients of queries and gate, that behind the gate, and each query's delta.

    Delta, the mean of dp by p, is the sum of what it is subtracted from, so that a query's
    gradients of logits sum to zero.
    """
    h, w = tl.program_id(0) % H, tl.program_id(0) // H
    b = tl.program_id(2).to(tl.int64)
    row = w * NQ + tl.arange(0, NQ)
    key = w * NQ - (NK - NQ) // 2 + tl.arange(0, NK)
    bias = load_bias(Bias + ((b * W + w) * H + h) * NQ * NK, Mask + b * A, key, A, NQ, NK)
    first = tl.program_id(1) * copies
    for copy in range(first, tl.minimum(first + copies, M)):
        m = tl.cast(copy, tl.int64)
        q = load_rows(Q + b * q_B + m * q_M + h * D, row, A, q_A, D, D_PAD)  # [NQ, D_PAD]
        k = load_rows(K + b * k_B + m * k_M + h * D, key, A, k_A, D, D_PAD)  # [NK, D_PAD]
        v = load_rows(V + b * v_B + m * v_M + h * D, key, A, v_A, D, D_PAD)  # [NK, D_PAD]
        g = load_rows(Gate + b * g_B + m * g_M + h * D, row, A, g_A, D, D_PAD)  # [NQ, D_PAD]
        place = b * M + m
        of_copy = place * A * H * D + h * D
        o = load_rows(Out + of_copy, row, A, H * D, D, D_PAD)  # [NQ, D_PAD]
        do = load_rows(DOut + of_copy, row, A, H * D, D, D_PAD).to(tl.float32)  # [NQ, D_PAD]
        opened, closed = sigmoids(g.to(tl.float32))
        at = b * dq_B + m * dq_M + h * D
        store_rows(DGate + at, row, A, dq_A, do * o.to(tl.float32) * closed, D, D_PAD)
        gated = (do * opened).to(q.dtype)
        store_rows(Gated + of_copy, row, A, H * D, gated, D, D_PAD)
        of_query = (place * H + h) * A + row
        lse = tl.load(Lse + of_query, mask=row < A, other=float("inf"))  # [NQ]
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [NQ, NK]
        p = tl.exp2(s * (scale * LOG2E) + (bias - lse[:, None]))
        dp = tl.dot(gated, tl.trans(v), input_precision=PRECISION)  # [NQ, NK]
        delta = tl.sum(p * dp, 1)  # [NQ]
        ds = (p * (dp - delta[:, None])).to(k.dtype)
        dq = tl.dot(ds, k, input_precision=PRECISION) * scale  # [NQ, D_PAD]
        store_rows(DQ + at, row, A, dq_A, dq, D, D_PAD)
        tl.store(Delta + of_query, delta, mask=row < A)


@triton.jit(do_not_specialize=NUMBERS)
def keys_kernel(
    Q, K, V, Bias, Mask, Lse, Delta, Gated, DK, DV,
    q_B, q_M, q_A, k_B, k_M, k_A, v_B, v_M, v_A, dk_B, dk_M, dk_A, A, W, M, copies, scale,
    H: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, NQ: tl.constexpr, NK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the gradients of a block of NQ keys and values, from two halves of their NK queries."""
    HALF: tl.constexpr = NK // 2
    h, block = tl.program_id(0) % H, tl.program_id(0) // H
    b = tl.program_id(2).to(tl.int64)
    key = block * NQ - (NK - NQ) // 2 + tl.arange(0, NQ)
    kept = load_kept(Mask + b * A, key, A)
    bias0 = load_bias_of_keys(Bias, kept, block, b * W, W, h, H, NQ, NK, 0)
    bias1 = load_bias_of_keys(Bias, kept, block, b * W, W, h, H, NQ, NK, HALF)
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
            q = load_rows(Q + b * q_B + m * q_M + h * D, row, A, q_A, D, D_PAD)  # [HALF, D_PAD]
            of_copy = place * A * H * D + h * D
            gated = load_rows(Gated + of_copy, row, A, H * D, D, D_PAD)  # [HALF, D_PAD]
            of_row, exists = (place * H + h) * A + row, (row >= 0) & (row < A)
            lse = tl.load(Lse + of_row, mask=exists, other=float("inf"))  # [HALF]
            delta = tl.load(Delta + of_row, mask=exists, other=0.0)  # [HALF]
            bias = bias0 if part == 0 else bias1
            s = tl.dot(k, tl.trans(q), input_precision=PRECISION)  # [NQ, HALF]
            p = tl.exp2(s * (scale * LOG2E) + (bias - lse[None, :]))
            dv = tl.dot(p.to(q.dtype), gated, dv, input_precision=PRECISION)  # [NQ, D_PAD]
            dp = tl.dot(v, tl.trans(gated), input_precision=PRECISION)  # [NQ, HALF]
            ds = (p * (dp - delta[None, :])).to(q.dtype)
            dk = tl.dot(ds, q, dk, input_precision=PRECISION)  # [NQ, D_PAD]
        at = b * dk_B + m * dk_M + h * D
        store_rows(DK + at, key, A, dk_A, dk * scale, D, D_PAD)
        store_rows(DV + at, key, A, dk_A, dv, D, D_PAD)


@triton.jit
def load_bias_of_keys(
    Bias, kept, block, first, W, h, H: tl.constexpr, NQ: tl.constexpr, NK: tl.constexpr,
    FIRST: tl.constexpr,
):  # fmt: skip
    """Load the bias of half of the queries that read a block of keys, as `load_bias` does."""
    OTHERS: tl.constexpr = NK // NQ - 1
    i, j = FIRST + tl.arange(0, NK // 2), tl.arange(0, NQ)
    w, within = block - OTHERS + i // NQ, (OTHERS - i // NQ) * NQ
    at = ((first + w) * H + h) * NQ * NK + (i % NQ * NK + within)
    real = ((w >= 0) & (w < W))[None, :]
    # [NQ, NK / 2]
    bias = tl.load(Bias + at[None, :] + j[:, None], mask=real, other=float("-inf"))
    return tl.where(kept[:, None], bias.to(tl.float32) * LOG2E, float("-inf"))


@triton.jit(do_not_specialize=NUMBERS[:3])
def bias_kernel(
    Q, K, V, Bias, Mask, Lse, Delta, Gated, DBias,
    q_B, q_M, q_A, k_B, k_M, k_A, v_B, v_M, v_A, A, W, M, scale,
    H: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, NQ: tl.constexpr, NK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the gradient of half of a window's bias: a sum over copies."""
    HALF: tl.constexpr = NK // 2
    h, w = tl.program_id(0) % H, tl.program_id(0) // H
    b = tl.program_id(2).to(tl.int64)
    row = w * NQ + tl.arange(0, NQ)
    j = tl.program_id(1) * HALF + tl.arange(0, HALF)
    key = w * NQ - (NK - NQ) // 2 + j
    at = ((b * W + w) * H + h) * NQ * NK + tl.arange(0, NQ)[:, None] * NK + j[None, :]
    bias = tl.load(Bias + at).to(tl.float32) * LOG2E  # [NQ, HALF]
    bias = tl.where(load_kept(Mask + b * A, key, A)[None, :], bias, float("-inf"))
    dbias = tl.zeros([NQ, HALF], dtype=tl.float32)
    for copy in range(M):
        m = tl.cast(copy, tl.int64)
        place = b * M + m
        q = load_rows(Q + b * q_B + m * q_M + h * D, row, A, q_A, D, D_PAD)  # [NQ, D_PAD]
        k = load_rows(K + b * k_B + m * k_M + h * D, key, A, k_A, D, D_PAD)  # [HALF, D_PAD]
        v = load_rows(V + b * v_B + m * v_M + h * D, key, A, v_A, D, D_PAD)  # [HALF, D_PAD]
        # [NQ, D_PAD]
        gated = load_rows(Gated + place * A * H * D + h * D, row, A, H * D, D, D_PAD)
        of_query = (place * H + h) * A + row
        lse = tl.load(Lse + of_query, mask=row < A, other=float("inf"))  # [NQ]
        delta = tl.load(Delta + of_query, mask=row < A, other=0.0)  # [NQ]
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [NQ, HALF]
        p = tl.exp2(s * (scale * LOG2E) + (bias - lse[:, None]))
        dp = tl.dot(gated, tl.trans(v), input_precision=PRECISION)  # [NQ, HALF]
        dbias += p * (dp - delta[:, None])
    tl.store(DBias + at, dbias.to(DBias.dtype.element_ty))
