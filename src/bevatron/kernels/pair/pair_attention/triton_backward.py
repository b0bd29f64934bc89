"""Attention with a shared bias, backward.

With p = 2^(x - lse), dp = do v^T and delta = sum(do * o) over the channels of a query, the gradient
of the logits is ds = p (dp - delta). Nothing of size rows x Nq x Nk is stored: three kernels
recompute p and ds [BLOCK_Q, BLOCK_K], each with its accumulators in registers, without atomics:

- `dq_kernel`: a program owns a block of queries and loops over keys. It first computes delta and
  the gradients around the gate, and writes logsumexp and delta to Stats for the other two.
  Where o and do are rounded, delta misses the mean of dp by as much: then the sum of ds over keys
  is not zero, and what all keys have in common gets a gradient that it must not have. It always
  has the same sign and grows with the keys that it makes grow. So the kernel adds up the ds of a
  query, of which nothing should be left, and puts dq and delta right by it.
- `dkv_kernel`: a program owns a block of keys and loops over queries. Its blocks are transposed,
  [BLOCK_K, BLOCK_Q], so that they are left operands of the matmuls.
- `dbias_kernel`: a program owns a block of the bias and loops over the rows that share it. If there
  are few blocks, rows are split over several programs; `sum_kernel` adds the partial sums in order.

Dimensions as in `triton_forward`; STATS_WIDTH is the number of columns of Stats.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import triton
import triton.language as tl

from bevatron.kernels.pair.pair_attention.triton_forward import (
    NUMBERS,
    accumulate,
    alike,
    load_bias,
    load_block,
    load_end,
    load_pairs,
    logits,
    mask_keys,
    store_block,
)
from bevatron.kernels.shared.triton_math import LOG2E


@triton.jit
def _gradient_past_gate(
    do_base, out_base, gate_base, dgate_base, dout_base, first, do_N, o_N, g_N, dq_N,
    Nq, D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_Q: tl.constexpr, ALIGN: tl.constexpr,
    FULL: tl.constexpr, HAS_GATE: tl.constexpr,
):  # fmt: skip
    """Load do of a block, backpropagate through the gate, and compute delta."""
    do = load_block(do_base, first, do_N, Nq, BLOCK_Q, D, D_PAD, ALIGN, FULL)  # [BLOCK_Q, D_PAD]
    out = load_block(out_base, first, o_N, Nq, BLOCK_Q, D, D_PAD, ALIGN, FULL)  # [BLOCK_Q, D_PAD]
    product = do.to(tl.float32) * out.to(tl.float32)
    delta = tl.sum(product, 1)  # [BLOCK_Q]
    if HAS_GATE:
        # [BLOCK_Q, D_PAD]
        g = load_block(
            gate_base, first, g_N, Nq, BLOCK_Q, D, D_PAD, ALIGN, FULL
        ).to(tl.float32)  # fmt: skip
        gate = 1.0 / (1.0 + tl.exp2(-g * LOG2E))
        dgate = product * (1.0 - gate)
        store_block(dgate_base, first, dq_N, Nq, dgate, BLOCK_Q, D, D_PAD, ALIGN)
        do = (do.to(tl.float32) * gate).to(do.dtype)
        store_block(dout_base, first, o_N, Nq, do, BLOCK_Q, D, D_PAD, ALIGN)
    return do, delta


@triton.jit
def _dq_step(
    q, do, lse, delta, dq, left, mean_k, k_base, v_base, bias_base, mask_base, first_q, first,
    k_N, v_N, bias_N, Nq, Nk, scale,
    D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    ALIGN: tl.constexpr, BIAS_ALIGN: tl.constexpr, FULL: tl.constexpr, BIAS_FULL: tl.constexpr,
    HAS_BIAS: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr, ROUNDED: tl.constexpr,
):  # fmt: skip
    """Add the contribution of one block of keys to dq, to the sum of ds and to the mean key."""
    k = load_block(k_base, first, k_N, Nk, BLOCK_K, D, D_PAD, ALIGN, FULL)  # [BLOCK_K, D_PAD]
    v = load_block(v_base, first, v_N, Nk, BLOCK_K, D, D_PAD, ALIGN, FULL)  # [BLOCK_K, D_PAD]
    # [BLOCK_Q, BLOCK_K]
    x = logits(q, k, mask_base, first, Nk, BLOCK_Q, BLOCK_K, FULL, MASK, PRECISION) * scale
    dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)  # [BLOCK_Q, BLOCK_K]
    if HAS_BIAS:
        # [BLOCK_Q, BLOCK_K]
        x_bias = load_bias(
            bias_base, first_q, first, bias_N, Nq, Nk, BLOCK_Q, BLOCK_K, BIAS_ALIGN,
            BIAS_FULL, False,
        )  # fmt: skip
        x += x_bias * LOG2E - lse[:, None]
    else:
        x -= lse[:, None]
    x = mask_keys(x, mask_base, first, Nk, BLOCK_K, FULL, HAS_BIAS, MASK)
    p = tl.exp2(x)
    ds = p * (dp - delta[:, None])
    if ROUNDED:
        left += tl.sum(tl.reshape(ds, (BLOCK_Q, BLOCK_K // 8, 8)), 1)  # [BLOCK_Q, 8]
        # [BLOCK_Q, D_PAD]
        mean_k = tl.dot(p.to(k.dtype), k, mean_k, input_precision=PRECISION)
    # In place both take the registers of one: more programs fit an SM.
    dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)  # [BLOCK_Q, D_PAD]
    return dq, left, mean_k


@triton.jit(do_not_specialize=NUMBERS)
def dq_kernel(
    Q, K, V, Bias, Mask, Ends, Gate, Out, Lse, Dout, Dq, Dgate, Dgated, Stats,
    q_B, q_S, q_H, q_N, k_B, k_S, k_H, k_N, v_B, v_S, v_H, v_N,
    bias_B, bias_S, bias_H, bias_N, mask_B, mask_S, g_B, g_S, g_H, g_N, o_B, o_S, o_H, o_N,
    do_B, do_S, do_H, do_N, dq_B, dq_S, dq_H, dq_N,
    S, H, Nq, Nk, scale, scale_dq,
    D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    ALIGN: tl.constexpr, BIAS_ALIGN: tl.constexpr,
    FULL_Q: tl.constexpr, FULL_K: tl.constexpr, BIAS_FULL: tl.constexpr,
    HAS_BIAS: tl.constexpr, MASK: tl.constexpr, HAS_GATE: tl.constexpr,
    STATS_WIDTH: tl.constexpr, PRECISION: tl.constexpr,
    S_ALIKE: tl.constexpr, N_ALIKE: tl.constexpr,
):  # fmt: skip
    """Compute dq, delta and the gradients around the gate of one block of queries.

    Dgate has the strides of Dq, and Dgated (the gradient of the ungated output) those of Out; Stats
    takes the logsumexp and delta of each query, for the other kernels.
    """
    k_S, v_S, do_S = alike(q_S, k_S, v_S, do_S, S_ALIKE)
    k_N, v_N, do_N = alike(q_N, k_N, v_N, do_N, N_ALIKE)
    blocks = tl.cdiv(Nq, BLOCK_Q)
    pid = tl.program_id(0)
    first_q = (pid % blocks) * BLOCK_Q
    pid = pid // blocks
    h = (pid % H).to(tl.int64)
    pid = pid // H
    s = (pid % S).to(tl.int64)
    b = (pid // S).to(tl.int64)
    q_base = Q + (b * q_B + h * q_H) * ALIGN
    k_base = K + (b * k_B + h * k_H) * ALIGN
    v_base = V + (b * v_B + h * v_H) * ALIGN
    g_base = Gate + (b * g_B + h * g_H) * ALIGN
    do_base = Dout + (b * do_B + h * do_H) * ALIGN
    o_head = (b * o_B + h * o_H) * ALIGN
    mask_base = Mask + b * mask_B * MASK
    bias_base = Bias + (b * bias_B + s * bias_S + h * bias_H) * BIAS_ALIGN
    rows = tl.arange(0, BLOCK_Q) + first_q

    end = load_end(Ends, b * S + s, Nk, MASK)
    line = ((b * S + s) * H + h) * Nq
    o = o_head + s * o_S * ALIGN
    to = (b * dq_B + s * dq_S + h * dq_H) * ALIGN
    # [BLOCK_Q, D_PAD]
    q = load_block(
        q_base + s * q_S * ALIGN, first_q, q_N, Nq, BLOCK_Q, D, D_PAD, ALIGN, FULL_Q
    )  # fmt: skip
    # do [BLOCK_Q, D_PAD], delta [BLOCK_Q]
    do, delta = _gradient_past_gate(
        do_base + s * do_S * ALIGN, Out + o, g_base + s * g_S * ALIGN, Dgate + to, Dgated + o,
        first_q, do_N, o_N, g_N, dq_N, Nq,
        D, D_PAD, BLOCK_Q, ALIGN, FULL_Q, HAS_GATE,
    )  # fmt: skip
    lse = tl.load(Lse + line + rows, mask=rows < Nq, other=float("inf"))  # [BLOCK_Q]
    tl.store(Stats + (line + rows) * STATS_WIDTH, lse, mask=rows < Nq)
    ROUNDED: tl.constexpr = Q.dtype.element_ty != tl.float32 or PRECISION == "tf32"
    dq = tl.zeros([BLOCK_Q, D_PAD], tl.float32)
    mean_k = tl.zeros([BLOCK_Q, D_PAD], tl.float32)
    left = tl.zeros([BLOCK_Q, 8], tl.float32)
    for first in tl.range(0, end, BLOCK_K):
        dq, left, mean_k = _dq_step(
            q, do, lse, delta, dq, left, mean_k, k_base + s * k_S * ALIGN, v_base + s * v_S * ALIGN,
            bias_base, mask_base + s * mask_S * MASK, first_q, first, k_N, v_N, bias_N, Nq, Nk,
            scale, D, D_PAD, BLOCK_Q, BLOCK_K, ALIGN, BIAS_ALIGN, FULL_K, BIAS_FULL, HAS_BIAS, MASK,
            PRECISION, ROUNDED,
        )  # fmt: skip
    if ROUNDED:
        missed = tl.sum(left, 1)  # [BLOCK_Q]
        delta += missed
        dq -= missed[:, None] * mean_k
    tl.store(Stats + (line + rows) * STATS_WIDTH + 1, delta, mask=rows < Nq)
    store_block(Dq + to, first_q, dq_N, Nq, dq * scale_dq, BLOCK_Q, D, D_PAD, ALIGN)


@triton.jit
def _dkv_step(
    k, v, dk, dv, q_base, do_base, stats_base, bias_base, first, first_k, q_N, do_N, bias_N, Nq, Nk,
    scale,
    D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    ALIGN: tl.constexpr, BIAS_ALIGN: tl.constexpr, FULL: tl.constexpr, BIAS_FULL: tl.constexpr,
    HAS_BIAS: tl.constexpr, BIAS_TURNED: tl.constexpr, BIAS_FIRST: tl.constexpr,
    STATS_WIDTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the contribution of one block of queries to dk and dv."""
    q = load_block(q_base, first, q_N, Nq, BLOCK_Q, D, D_PAD, ALIGN, FULL)  # [BLOCK_Q, D_PAD]
    do = load_block(do_base, first, do_N, Nq, BLOCK_Q, D, D_PAD, ALIGN, FULL)  # [BLOCK_Q, D_PAD]
    # [BLOCK_Q]
    lse, delta = load_pairs(stats_base, first, Nq, 0.0, BLOCK_Q, STATS_WIDTH, FULL)
    if BIAS_FIRST:
        # If it is read after the matmul, Triton 3.6 does not swizzle this block in shared memory,
        # and reads of eight rows hit the same banks.
        # [BLOCK_K, BLOCK_Q]
        x_bias = load_bias(
            bias_base, first_k, first, bias_N, Nk, Nq, BLOCK_K, BLOCK_Q, BIAS_ALIGN, BIAS_FULL,
            False,
        )  # fmt: skip
    x = tl.dot(k, tl.trans(q), input_precision=PRECISION) * scale  # [BLOCK_K, BLOCK_Q]
    if HAS_BIAS:
        if not BIAS_FIRST:
            if BIAS_TURNED:
                # [BLOCK_K, BLOCK_Q]
                x_bias = load_bias(
                    bias_base, first_k, first, bias_N, Nk, Nq, BLOCK_K, BLOCK_Q, BIAS_ALIGN,
                    BIAS_FULL, False,
                )  # fmt: skip
            else:
                # [BLOCK_K, BLOCK_Q]
                x_bias = load_bias(
                    bias_base, first, first_k, bias_N, Nq, Nk, BLOCK_Q, BLOCK_K, BIAS_ALIGN,
                    BIAS_FULL, True,
                )  # fmt: skip
        x += x_bias * LOG2E - lse[None, :]
    else:
        x -= lse[None, :]
    p = tl.exp2(x)
    if BIAS_FIRST:
        # [BLOCK_K, D_PAD]
        dv = accumulate(dv, tl.dot(p.to(do.dtype), do, input_precision=PRECISION))
        dp = tl.dot(v, tl.trans(do), input_precision=PRECISION)  # [BLOCK_K, BLOCK_Q]
        ds = p * (dp - delta[None, :])
        # [BLOCK_K, D_PAD]
        dk = accumulate(dk, tl.dot(ds.to(q.dtype), q, input_precision=PRECISION))
    else:
        dp = tl.dot(v, tl.trans(do), input_precision=PRECISION)  # [BLOCK_K, BLOCK_Q]
        ds = p * (dp - delta[None, :])
        dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PRECISION)  # [BLOCK_K, D_PAD]
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)  # [BLOCK_K, D_PAD]
    return dk, dv


@triton.jit
def _store_dkv(
    dk_base, dv_base, mask_base, dk, dv, first, dk_N, Nk, scale,
    D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_K: tl.constexpr, ALIGN: tl.constexpr,
    MASK: tl.constexpr,
):  # fmt: skip
    """Store a block of dk and dv, zero for masked keys: the mask was not applied before."""
    if MASK > 0:
        keys = tl.arange(0, BLOCK_K) + first
        # [BLOCK_K]
        mask = tl.load(mask_base + keys * MASK, mask=keys < Nk, other=0.0).to(tl.float32)
        keep = (mask == 0.0)[:, None]
        dk = tl.where(keep, dk, 0.0)
        dv = tl.where(keep, dv, 0.0)
    store_block(dk_base, first, dk_N, Nk, dk * scale, BLOCK_K, D, D_PAD, ALIGN)
    store_block(dv_base, first, dk_N, Nk, dv, BLOCK_K, D, D_PAD, ALIGN)


@triton.jit(do_not_specialize=NUMBERS)
def dkv_kernel(
    Q, K, V, Bias, Mask, Ends, Stats, Dout, Dk, Dv,
    q_B, q_S, q_H, q_N, k_B, k_S, k_H, k_N, v_B, v_S, v_H, v_N,
    bias_B, bias_S, bias_H, bias_N, mask_B, mask_S, do_B, do_S, do_H, do_N,
    dk_B, dk_S, dk_H, dk_N,
    S, H, Nq, Nk, scale, scale_dk,
    D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    ALIGN: tl.constexpr, BIAS_ALIGN: tl.constexpr,
    FULL_Q: tl.constexpr, FULL_K: tl.constexpr, BIAS_FULL: tl.constexpr,
    BIAS_TURNED: tl.constexpr, BIAS_FIRST: tl.constexpr, HAS_BIAS: tl.constexpr,
    MASK: tl.constexpr, STATS_WIDTH: tl.constexpr, PRECISION: tl.constexpr,
    S_ALIKE: tl.constexpr, N_ALIKE: tl.constexpr,
):  # fmt: skip
    """Compute dk and dv of one block of keys of a head of a row.

    If BIAS_TURNED, Bias is transposed, [.., Nk, Nq], and its blocks are loaded as they are used.
    """
    k_S, v_S, do_S = alike(q_S, k_S, v_S, do_S, S_ALIKE)
    k_N, v_N, do_N = alike(q_N, k_N, v_N, do_N, N_ALIKE)
    blocks = tl.cdiv(Nk, BLOCK_K)
    pid = tl.program_id(0)
    first_k = (pid % blocks) * BLOCK_K
    pid = pid // blocks
    h = (pid % H).to(tl.int64)
    pid = pid // H
    s = (pid % S).to(tl.int64)
    b = (pid // S).to(tl.int64)
    q_base = Q + (b * q_B + h * q_H) * ALIGN
    k_base = K + (b * k_B + h * k_H) * ALIGN
    v_base = V + (b * v_B + h * v_H) * ALIGN
    do_base = Dout + (b * do_B + h * do_H) * ALIGN
    dk_head = (b * dk_B + h * dk_H) * ALIGN
    mask_base = Mask + b * mask_B * MASK
    bias_base = Bias + (b * bias_B + s * bias_S + h * bias_H) * BIAS_ALIGN

    line = ((b * S + s) * H + h) * Nq
    # [BLOCK_K, D_PAD]
    k = load_block(
        k_base + s * k_S * ALIGN, first_k, k_N, Nk, BLOCK_K, D, D_PAD, ALIGN, FULL_K
    )  # fmt: skip
    # [BLOCK_K, D_PAD]
    v = load_block(
        v_base + s * v_S * ALIGN, first_k, v_N, Nk, BLOCK_K, D, D_PAD, ALIGN, FULL_K
    )  # fmt: skip
    dk = tl.zeros([BLOCK_K, D_PAD], tl.float32)
    dv = tl.zeros([BLOCK_K, D_PAD], tl.float32)
    queries = tl.where(first_k < load_end(Ends, b * S + s, Nk, MASK), Nq, 0)
    for first in tl.range(0, queries, BLOCK_Q):
        dk, dv = _dkv_step(
            k, v, dk, dv, q_base + s * q_S * ALIGN, do_base + s * do_S * ALIGN,
            Stats + line * STATS_WIDTH, bias_base, first, first_k, q_N, do_N, bias_N, Nq, Nk, scale,
            D, D_PAD, BLOCK_Q, BLOCK_K, ALIGN, BIAS_ALIGN, FULL_Q, BIAS_FULL,
            HAS_BIAS, BIAS_TURNED, BIAS_FIRST, STATS_WIDTH, PRECISION,
        )  # fmt: skip
    dkv = dk_head + s * dk_S * ALIGN
    _store_dkv(
        Dk + dkv, Dv + dkv, mask_base + s * mask_S * MASK, dk, dv, first_k, dk_N, Nk, scale_dk,
        D, D_PAD, BLOCK_K, ALIGN, MASK,
    )  # fmt: skip


@triton.jit(do_not_specialize=NUMBERS)
def dbias_kernel(
    Q, K, V, Bias, Mask, Stats, Dout, Part,
    q_B, q_S, q_H, q_N, k_B, k_S, k_H, k_N, v_B, v_S, v_H, v_N,
    bias_B, bias_S, bias_H, bias_N, mask_B, mask_S, do_B, do_S, do_H, do_N,
    S, H, Nq, Nk, scale, bias_rows, rows_per_program, part_size,
    D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    ALIGN: tl.constexpr, BIAS_ALIGN: tl.constexpr, FULL_Q: tl.constexpr, FULL_K: tl.constexpr,
    BIAS_FULL: tl.constexpr, MASK: tl.constexpr, STATS_WIDTH: tl.constexpr,
    PRECISION: tl.constexpr, S_ALIKE: tl.constexpr, N_ALIKE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Sum the gradient of one block of the bias over rows; Part is [parts, B, rows, H, Nq, Nk].

    If every row has its own bias (bias_rows = S), the sum is over one row.
    """
    k_S, v_S, do_S = alike(q_S, k_S, v_S, do_S, S_ALIKE)
    k_N, v_N, do_N = alike(q_N, k_N, v_N, do_N, N_ALIKE)
    blocks_q = tl.cdiv(Nq, BLOCK_Q)
    blocks_k = tl.cdiv(Nk, BLOCK_K)
    pid = tl.program_id(0)
    first_k = (pid % blocks_k) * BLOCK_K
    pid = pid // blocks_k
    first_q = (pid % blocks_q) * BLOCK_Q
    pid = pid // blocks_q
    h = (pid % H).to(tl.int64)
    pid = pid // H
    row = (pid % bias_rows).to(tl.int64)
    pid = pid // bias_rows
    shared_by = S // bias_rows
    parts = tl.cdiv(shared_by, rows_per_program)
    part = (pid % parts).to(tl.int64)
    b = (pid // parts).to(tl.int64)
    q_base = Q + (b * q_B + h * q_H) * ALIGN
    k_base = K + (b * k_B + h * k_H) * ALIGN
    v_base = V + (b * v_B + h * v_H) * ALIGN
    do_base = Dout + (b * do_B + h * do_H) * ALIGN
    # [BLOCK_Q, BLOCK_K]
    x_bias = load_bias(
        Bias + (b * bias_B + row * bias_S + h * bias_H) * BIAS_ALIGN, first_q, first_k, bias_N,
        Nq, Nk, BLOCK_Q, BLOCK_K, BIAS_ALIGN, BIAS_FULL, False,
    )  # fmt: skip
    acc = tl.zeros([BLOCK_Q, BLOCK_K], tl.float32)
    start = row + part * rows_per_program
    last = tl.minimum(start + rows_per_program, row + shared_by)
    x_bias = x_bias * LOG2E
    stats_base = Stats + (b * S * H + h) * Nq * STATS_WIDTH
    mask_head = Mask + b * mask_B * MASK
    for number in tl.range(start.to(tl.int32), last.to(tl.int32), num_stages=STAGES):
        s = tl.cast(number, tl.int64)
        # [BLOCK_Q, D_PAD]
        q = load_block(q_base + s * q_S * ALIGN, first_q, q_N, Nq, BLOCK_Q, D, D_PAD, ALIGN, FULL_Q)
        # [BLOCK_K, D_PAD]
        k = load_block(k_base + s * k_S * ALIGN, first_k, k_N, Nk, BLOCK_K, D, D_PAD, ALIGN, FULL_K)
        mask_base = mask_head + s * mask_S * MASK
        # [BLOCK_Q, BLOCK_K]
        x = logits(q, k, mask_base, first_k, Nk, BLOCK_Q, BLOCK_K, FULL_K, MASK, PRECISION) * scale
        # [BLOCK_Q, D_PAD]
        do = load_block(
            do_base + s * do_S * ALIGN, first_q, do_N, Nq, BLOCK_Q, D, D_PAD, ALIGN, FULL_Q
        )  # fmt: skip
        # [BLOCK_K, D_PAD]
        v = load_block(v_base + s * v_S * ALIGN, first_k, v_N, Nk, BLOCK_K, D, D_PAD, ALIGN, FULL_K)
        dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)  # [BLOCK_Q, BLOCK_K]
        # [BLOCK_Q]
        lse, delta = load_pairs(
            stats_base + s * H * Nq * STATS_WIDTH, first_q, Nq, 0.0, BLOCK_Q, STATS_WIDTH, FULL_Q
        )  # fmt: skip
        x += x_bias - lse[:, None]
        x = mask_keys(x, mask_base, first_k, Nk, BLOCK_K, FULL_K, True, MASK)
        acc += tl.exp2(x) * (dp - delta[:, None])
    rows = tl.arange(0, BLOCK_Q) + first_q
    cols = tl.arange(0, BLOCK_K) + first_k
    line = ((b * bias_rows + row) * H + h) * Nq + first_q
    pointers = (
        Part + part * part_size + line * Nk + first_k
        + (tl.arange(0, BLOCK_Q).to(tl.int64)[:, None] * Nk + tl.arange(0, BLOCK_K)[None, :])
    )  # fmt: skip
    tl.store(
        pointers,
        acc.to(Part.dtype.element_ty),
        mask=(rows < Nq)[:, None] & (cols < Nk)[None, :],
    )


@triton.jit(do_not_specialize=NUMBERS)
def sum_kernel(Part, Out, size, parts, BLOCK: tl.constexpr):
    """Add the partial sums [parts, size] in their order."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < size
    total = tl.zeros([BLOCK], tl.float32)
    for part in tl.range(0, parts):
        # [BLOCK]
        total += tl.load(Part + tl.cast(part, tl.int64) * size + offsets, mask=inside, other=0.0)
    tl.store(Out + offsets, total.to(Out.dtype.element_ty), mask=inside)
