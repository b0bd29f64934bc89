"""Attention with a shared bias, forward: ``sigmoid(gate) * softmax(scale q k^T + bias) v``.

A program owns BLOCK_Q queries of one head of one row and loops over the keys, BLOCK_K at a time;
logits and weights [BLOCK_Q, BLOCK_K] stay on chip. It writes the output and the logsumexp of each
query.

There is no online softmax. What is subtracted from the logits need not be the row maximum, only
close enough that the exponentials neither overflow nor vanish: it is the maximum over the first
FIRST_KEYS keys, so the accumulator is never rescaled and blocks of keys are independent. A block of
queries whose sum of exponentials leaves `SMALLEST_SUM .. LARGEST_SUM` is flagged, and
`careful_kernel` computes it again with a running maximum: some logit is 40 (in float16 10) or more
above those of the first keys, or these are masked and all logits are far from 0. Where each program
has an SM of its own, that launch would take longer than a running maximum: all are CAREFUL.
Exponentials are in base 2, ``2^(log2(e) x - log2(e) row_max)``, one FMA before each; so is the
logsumexp.

Dimensions: B samples, S rows, H heads, Nq queries, Nk keys, D channels of a head (D_PAD: padded to
a power of two). Strides are in units of ALIGN elements, those of the bias of BIAS_ALIGN.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import triton
import triton.language as tl

from bevatron.kernels.shared.triton_math import LOG2E

LEAST = tl.constexpr(-1e30)
"""Initial running maximum: finite, so that differences from it are never NaN."""
FIRST_KEYS = tl.constexpr(16)
"""Number of keys used to estimate the row maximum: the smallest tile of the tensor cores."""
SMALLEST_SUM = tl.constexpr(2.0**-60)
LARGEST_SUM = tl.constexpr(2.0**60)
"""Range of a sum of exponentials: none that matters has vanished, and no matmul overflows."""
SMALLEST_SUM_FP16 = tl.constexpr(0.99)
LARGEST_SUM_FP16 = tl.constexpr(2.0**15)
"""The same range if exponentials are rounded to float16."""
MARKS = tl.constexpr(32)
"""Number of flags that one program of `careful_kernel` reads."""
MASK_WIDTH = tl.constexpr(4)
"""Number of copies of the mask value of each key; see `load_pairs`."""
MASK_COLUMNS = tl.constexpr(16)
"""Columns of a mask that a matmul adds: the smallest K of the tensor cores; all but one are 0."""
NUMBERS = (
    *(
        f"{tensor}_{axis}"
        for tensor in ("q", "k", "v", "bias", "g", "o", "do", "dq", "dk")
        for axis in "BSHN"
    ),
    *("mask_B", "mask_S", "S", "H", "Nq", "Nk"),
    *("bias_rows", "rows_per_program", "part_size", "size", "parts", "programs"),
)
"""Arguments that the kernels are not specialised on: new values need no compilation."""


@triton.jit
def load_end(Ends, row, Nk, MASK: tl.constexpr):
    """Return where the keys of a row end: blocks of masked ones behind them need not be read."""
    if MASK > 0:
        return tl.load(Ends + row)  # []
    return Nk


@triton.jit
def alike(q, k, v, do, ALIKE: tl.constexpr):
    """Return the strides of k, v and the gradient: those of q that are said to equal them."""
    if ALIKE >= 1:
        k, v = q, q
    if ALIKE == 2:
        do = q
    return k, v, do


@triton.jit
def load_block(
    base, first, stride, count, BLOCK: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    ALIGN: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Load rows ``first .. first + BLOCK`` of a [count, D] matrix, zero outside of it.

    ``stride`` is in units of ALIGN elements, which tells the compiler how rows are aligned. FULL:
    all rows are inside.
    """
    step = stride * ALIGN
    rows = tl.arange(0, BLOCK)
    cols = tl.arange(0, D_PAD)
    start = base + tl.cast(first, tl.int64) * step
    pointers = start + (rows[:, None] * step + cols[None, :])
    if FULL and D == D_PAD:
        return tl.load(pointers)  # [BLOCK, D_PAD]
    if FULL:
        return tl.load(pointers, mask=cols[None, :] < D, other=0.0)  # [BLOCK, D_PAD]
    inside = (rows + first < count)[:, None]
    if D == D_PAD:
        return tl.load(pointers, mask=inside, other=0.0)  # [BLOCK, D_PAD]
    return tl.load(pointers, mask=inside & (cols < D)[None, :], other=0.0)  # [BLOCK, D_PAD]


@triton.jit
def store_block(
    base, first, stride, count, block, BLOCK: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    ALIGN: tl.constexpr,
):  # fmt: skip
    """Store a block [BLOCK, D_PAD] where `load_block` loads it."""
    step = stride * ALIGN
    rows = tl.arange(0, BLOCK)
    cols = tl.arange(0, D_PAD)
    start = base + tl.cast(first, tl.int64) * step
    pointers = start + (rows[:, None] * step + cols[None, :])
    inside = (rows + first < count)[:, None] & (cols < D)[None, :]
    tl.store(pointers, block.to(base.dtype.element_ty), mask=inside)


@triton.jit
def load_bias(
    base, first_q, first_k, stride, Nq, Nk, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    ALIGN: tl.constexpr, FULL: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Load a [BLOCK_Q, BLOCK_K] block of the bias, or its transpose; minus infinity outside.

    Rows are padded with minus infinity to a multiple of ALIGN, so loads stay wide at their end.
    FULL: the padding reaches as far as the blocks do.
    """
    step = stride * ALIGN
    end = tl.cdiv(Nk, ALIGN) * ALIGN
    rows = tl.arange(0, BLOCK_Q)
    cols = tl.arange(0, BLOCK_K)
    start = base + tl.cast(first_q, tl.int64) * step + first_k
    if TRANSPOSED:
        pointers = start + (rows[None, :] * step + cols[:, None])
        inside = (rows + first_q < Nq)[None, :] & (cols + first_k < end)[:, None]
    else:
        pointers = start + (rows[:, None] * step + cols[None, :])
        inside = (rows + first_q < Nq)[:, None] & (cols + first_k < end)[None, :]
    if FULL:
        return tl.load(pointers).to(tl.float32)  # [BLOCK_Q, BLOCK_K], transposed if TRANSPOSED
    # [BLOCK_Q, BLOCK_K], transposed if TRANSPOSED
    block = tl.load(pointers, mask=inside, other=float("-inf"))
    return block.to(tl.float32)


@triton.jit
def load_pairs(
    base, first, count, outside, BLOCK: tl.constexpr, WIDTH: tl.constexpr, FULL: tl.constexpr
):
    """Load the first two of the WIDTH values of each query or key of a block, [BLOCK] each.

    If a vector has fewer elements than a program has threads, Triton 3.6 lets every thread load all
    of it, and computes what depends on it once per layout. So small blocks load more columns.
    """
    LOADED: tl.constexpr = 2 if BLOCK >= 64 else WIDTH
    rows = tl.arange(0, BLOCK) + first
    offsets = rows[:, None] * WIDTH + tl.arange(0, LOADED)[None, :]
    if FULL:
        block = tl.load(base + offsets).to(tl.float32)  # [BLOCK, LOADED]
    else:
        # [BLOCK, LOADED]
        block = tl.load(base + offsets, mask=(rows < count)[:, None], other=outside).to(tl.float32)
    if LOADED == 2:
        first_column, second_column = tl.split(block)  # [BLOCK]
    else:
        even, odd = tl.split(tl.reshape(block, (BLOCK, 2, 2)))  # [BLOCK, 2]
        first_column, _ = tl.split(even)  # [BLOCK]
        second_column, _ = tl.split(odd)  # [BLOCK]
    return first_column, second_column


@triton.jit
def logits(
    q, k, mask_base, first, Nk, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, FULL: tl.constexpr,
    MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Multiply queries by keys; if it has MASK_COLUMNS, add the mask (0 or minus infinity) too.

    A second matmul adds it at no cost on the tensor cores, and no thread has to load it.
    """
    if MASK == MASK_COLUMNS:
        # [BLOCK_K, MASK_COLUMNS]
        mask = load_block(
            mask_base, first, MASK_COLUMNS // 8, Nk, BLOCK_K, MASK_COLUMNS, MASK_COLUMNS, 8, FULL
        )  # fmt: skip
        # [BLOCK_Q, MASK_COLUMNS]
        unit = tl.broadcast_to((tl.arange(0, MASK_COLUMNS) == 0)[None, :], BLOCK_Q, MASK_COLUMNS)
        # [BLOCK_Q, BLOCK_K]
        x = tl.dot(unit.to(q.dtype), tl.trans(mask), input_precision=PRECISION)
        return tl.dot(q, tl.trans(k), x, input_precision=PRECISION)  # [BLOCK_Q, BLOCK_K]
    return tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [BLOCK_Q, BLOCK_K]


@triton.jit
def mask_keys(
    x, mask_base, first, Nk, BLOCK_K: tl.constexpr, FULL: tl.constexpr, HAS_BIAS: tl.constexpr,
    MASK: tl.constexpr,
):  # fmt: skip
    """Set the logits of keys past Nk, and of masked keys unless `logits` did, to -inf."""
    if MASK == MASK_WIDTH:
        # [BLOCK_K]
        mask, _ = load_pairs(mask_base, first, Nk, float("-inf"), BLOCK_K, MASK_WIDTH, FULL)
        return x + mask[None, :]
    if FULL or HAS_BIAS:  # the bias is minus infinity past the last key
        return x
    return tl.where((tl.arange(0, BLOCK_K) + first < Nk)[None, :], x, float("-inf"))


@triton.jit
def accumulate(total, term):
    """Add a matmul result, `term`, to a loop-carried accumulator outside of the tensor cores.

    As the third argument of ``tl.dot`` the accumulator would be in flight from one iteration to the
    next, and ptxas would serialise all matmuls of the loop.
    """
    return tl.fma(term, tl.full(term.shape, 1.0, tl.float32), total)


@triton.jit
def biased_logits(
    q, k, bias_base, mask_base, first_q, first, bias_stride, Nq, Nk, scale,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BIAS_ALIGN: tl.constexpr, FULL: tl.constexpr,
    BIAS_FULL: tl.constexpr, HAS_BIAS: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the logits [BLOCK_Q, BLOCK_K] of a block, minus infinity where there is no key."""
    # [BLOCK_Q, BLOCK_K]
    x = logits(q, k, mask_base, first, Nk, BLOCK_Q, BLOCK_K, FULL, MASK, PRECISION) * scale
    if HAS_BIAS:
        # [BLOCK_Q, BLOCK_K]
        x += load_bias(
            bias_base, first_q, first, bias_stride, Nq, Nk, BLOCK_Q, BLOCK_K, BIAS_ALIGN,
            BIAS_FULL, False,
        )  # fmt: skip
    return mask_keys(x, mask_base, first, Nk, BLOCK_K, FULL, HAS_BIAS, MASK)


@triton.jit
def _estimate_max(
    q, k_base, bias_base, mask_base, first_q, k_stride, bias_stride, Nq, Nk, scale,
    D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_Q: tl.constexpr, ALIGN: tl.constexpr,
    BIAS_ALIGN: tl.constexpr, FULL: tl.constexpr, BIAS_FULL: tl.constexpr, HAS_BIAS: tl.constexpr,
    MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return each query's largest logit among the first keys, 0 if all of them are masked."""
    # [FIRST_KEYS, D_PAD]
    k = load_block(k_base, 0, k_stride, Nk, FIRST_KEYS, D, D_PAD, ALIGN, FULL)
    # [BLOCK_Q, FIRST_KEYS]
    x = biased_logits(
        q, k, bias_base, mask_base, first_q, 0, bias_stride, Nq, Nk, scale, BLOCK_Q, FIRST_KEYS,
        BIAS_ALIGN, FULL, BIAS_FULL, HAS_BIAS, MASK, PRECISION,
    )  # fmt: skip
    row_max = tl.max(x, 1)  # [BLOCK_Q]
    return tl.where(row_max > LEAST, row_max, 0.0)


@triton.jit
def _step(
    q, k_base, v_base, bias_base, mask_base, row_max, total, acc, first_q, first, k_stride,
    v_stride, bias_stride, Nq, Nk, scale,
    D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    ALIGN: tl.constexpr, BIAS_ALIGN: tl.constexpr, FULL: tl.constexpr, BIAS_FULL: tl.constexpr,
    HAS_BIAS: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr, CAREFUL: tl.constexpr,
):  # fmt: skip
    """Add one block of keys to the maximum if CAREFUL, the exponentials and the weighted values."""
    k = load_block(k_base, first, k_stride, Nk, BLOCK_K, D, D_PAD, ALIGN, FULL)  # [BLOCK_K, D_PAD]
    # [BLOCK_Q, BLOCK_K]
    x = biased_logits(
        q, k, bias_base, mask_base, first_q, first, bias_stride, Nq, Nk, scale, BLOCK_Q, BLOCK_K,
        BIAS_ALIGN, FULL, BIAS_FULL, HAS_BIAS, MASK, PRECISION,
    )  # fmt: skip
    if CAREFUL:
        new_max = tl.maximum(row_max, tl.max(x, 1))  # [BLOCK_Q]
        p = tl.exp2(x * LOG2E - (new_max * LOG2E)[:, None])
        rescale = tl.exp2((row_max - new_max) * LOG2E)
        total = total * rescale + tl.sum(p, 1)  # [BLOCK_Q]
    else:
        p = tl.exp2(x * LOG2E - (row_max * LOG2E)[:, None])
        # Eight partial sums per query: in the layout of a dot result a thread adds its own
        # elements, without shuffles.
        total += tl.sum(tl.reshape(p, (BLOCK_Q, BLOCK_K // 8, 8)), 1)  # [BLOCK_Q, 8]
    v = load_block(v_base, first, v_stride, Nk, BLOCK_K, D, D_PAD, ALIGN, FULL)  # [BLOCK_K, D_PAD]
    pv = tl.dot(p.to(v.dtype), v, input_precision=PRECISION)  # [BLOCK_Q, D_PAD]
    if CAREFUL:
        return new_max, total, acc * rescale[:, None] + pv
    return row_max, total, accumulate(acc, pv)


@triton.jit
def _finish(
    out_base, lse_base, gate_base, row_max, total, acc, first, out_stride, gate_stride, Nq,
    D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_Q: tl.constexpr, ALIGN: tl.constexpr,
    HAS_GATE: tl.constexpr,
):  # fmt: skip
    """Normalise, gate and store a block of outputs; the logsumexp is +inf without any key."""
    some = total > 0
    out = acc / tl.where(some, total, 1.0)[:, None]
    if HAS_GATE:
        # [BLOCK_Q, D_PAD]
        g = load_block(
            gate_base, first, gate_stride, Nq, BLOCK_Q, D, D_PAD, ALIGN, False
        ).to(tl.float32)  # fmt: skip
        out = out / (1.0 + tl.exp2(-g * LOG2E))
    store_block(out_base, first, out_stride, Nq, out, BLOCK_Q, D, D_PAD, ALIGN)
    rows = tl.arange(0, BLOCK_Q) + first
    lse = tl.where(some, row_max * LOG2E + tl.log2(tl.where(some, total, 1.0)), float("inf"))
    tl.store(lse_base + rows, lse, mask=rows < Nq)


@triton.jit
def _attend(
    pid,Q, K, V, Bias, Mask, Ends, Gate, Out, Lse, Again,
    q_B, q_S, q_H, q_N, k_B, k_S, k_H, k_N, v_B, v_S, v_H, v_N,
    bias_B, bias_S, bias_H, bias_N, mask_B, mask_S, g_B, g_S, g_H, g_N, o_B, o_S, o_H, o_N,
    S, H, Nq, Nk, scale,
    D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    ALIGN: tl.constexpr, BIAS_ALIGN: tl.constexpr,
    FULL_Q: tl.constexpr, FULL_K: tl.constexpr, BIAS_FULL: tl.constexpr,
    HAS_BIAS: tl.constexpr, MASK: tl.constexpr, HAS_GATE: tl.constexpr,
    PRECISION: tl.constexpr, S_ALIKE: tl.constexpr, N_ALIKE: tl.constexpr, CAREFUL: tl.constexpr,
):  # fmt: skip
    """Compute one block of queries of a head of a row, with a running maximum if CAREFUL.

    Otherwise write 1 to Again to have it recomputed.
    """
    k_S, v_S, _ = alike(q_S, k_S, v_S, q_S, S_ALIKE)
    k_N, v_N, _ = alike(q_N, k_N, v_N, q_N, N_ALIKE)
    program = pid
    blocks = tl.cdiv(Nq, BLOCK_Q)
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
    o_base = Out + (b * o_B + h * o_H) * ALIGN
    mask_base = Mask + b * mask_B * MASK
    lse_base = Lse + (b * S * H + h) * Nq
    bias_base = Bias + (b * bias_B + s * bias_S + h * bias_H) * BIAS_ALIGN

    end = load_end(Ends, b * S + s, Nk, MASK)
    # [BLOCK_Q, D_PAD]
    q = load_block(
        q_base + s * q_S * ALIGN, first_q, q_N, Nq, BLOCK_Q, D, D_PAD, ALIGN, FULL_Q
    )  # fmt: skip
    k_base += s * k_S * ALIGN
    v_base += s * v_S * ALIGN
    mask_base += s * mask_S * MASK
    if CAREFUL:
        row_max = tl.full([BLOCK_Q], LEAST, tl.float32)
        total = tl.zeros([BLOCK_Q], tl.float32)
    else:
        # [BLOCK_Q]
        row_max = _estimate_max(
            q, k_base, bias_base, mask_base, first_q, k_N, bias_N, Nq, Nk, scale,
            D, D_PAD, BLOCK_Q, ALIGN, BIAS_ALIGN, FULL_K, BIAS_FULL, HAS_BIAS, MASK, PRECISION,
        )  # fmt: skip
        total = tl.zeros([BLOCK_Q, 8], tl.float32)
    acc = tl.zeros([BLOCK_Q, D_PAD], tl.float32)
    for first in tl.range(0, end, BLOCK_K):
        row_max, total, acc = _step(
            q, k_base, v_base, bias_base, mask_base, row_max, total, acc, first_q, first, k_N, v_N,
            bias_N, Nq, Nk, scale,
            D, D_PAD, BLOCK_Q, BLOCK_K, ALIGN, BIAS_ALIGN, FULL_K, BIAS_FULL, HAS_BIAS, MASK,
            PRECISION, CAREFUL,
        )  # fmt: skip
    if not CAREFUL:
        total = tl.sum(total, 1)  # [BLOCK_Q]
        # Where there are no keys, zeros are right.
        outside = (tl.arange(0, BLOCK_Q) + first_q >= Nq) | (end == 0)
        if q.dtype == tl.float16:
            in_range = outside | ((total > SMALLEST_SUM_FP16) & (total < LARGEST_SUM_FP16))
        else:
            in_range = outside | ((total > SMALLEST_SUM) & (total < LARGEST_SUM))
        tl.store(Again + program, 1 - tl.min(in_range.to(tl.int32), 0))  # []
    _finish(
        o_base + s * o_S * ALIGN, lse_base + s * H * Nq, g_base + s * g_S * ALIGN,
        row_max, total, acc, first_q, o_N, g_N, Nq, D, D_PAD, BLOCK_Q, ALIGN, HAS_GATE,
    )  # fmt: skip


@triton.jit(do_not_specialize=NUMBERS)
def forward_kernel(
    Q, K, V, Bias, Mask, Ends, Gate, Out, Lse, Again,
    q_B, q_S, q_H, q_N, k_B, k_S, k_H, k_N, v_B, v_S, v_H, v_N,
    bias_B, bias_S, bias_H, bias_N, mask_B, mask_S, g_B, g_S, g_H, g_N, o_B, o_S, o_H, o_N,
    S, H, Nq, Nk, scale,
    D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    ALIGN: tl.constexpr, BIAS_ALIGN: tl.constexpr,
    FULL_Q: tl.constexpr, FULL_K: tl.constexpr, BIAS_FULL: tl.constexpr,
    HAS_BIAS: tl.constexpr, MASK: tl.constexpr, HAS_GATE: tl.constexpr,
    PRECISION: tl.constexpr, S_ALIKE: tl.constexpr, N_ALIKE: tl.constexpr, CAREFUL: tl.constexpr,
):  # fmt: skip
    """Compute one block of queries of a head of a row; see `_attend`."""
    _attend(
        tl.program_id(0), Q, K, V, Bias, Mask, Ends, Gate, Out, Lse, Again,
        q_B, q_S, q_H, q_N, k_B, k_S, k_H, k_N, v_B, v_S, v_H, v_N,
        bias_B, bias_S, bias_H, bias_N, mask_B, mask_S, g_B, g_S, g_H, g_N, o_B, o_S, o_H, o_N,
        S, H, Nq, Nk, scale, D, D_PAD, BLOCK_Q, BLOCK_K, ALIGN, BIAS_ALIGN, FULL_Q, FULL_K,
        BIAS_FULL, HAS_BIAS, MASK, HAS_GATE, PRECISION, S_ALIKE, N_ALIKE, CAREFUL,
    )  # fmt: skip


@triton.jit(do_not_specialize=NUMBERS)
def careful_kernel(
    Q, K, V, Bias, Mask, Ends, Gate, Out, Lse, Again,
    q_B, q_S, q_H, q_N, k_B, k_S, k_H, k_N, v_B, v_S, v_H, v_N,
    bias_B, bias_S, bias_H, bias_N, mask_B, mask_S, g_B, g_S, g_H, g_N, o_B, o_S, o_H, o_N,
    S, H, Nq, Nk, scale, programs,
    D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    ALIGN: tl.constexpr, BIAS_ALIGN: tl.constexpr,
    FULL_Q: tl.constexpr, FULL_K: tl.constexpr, BIAS_FULL: tl.constexpr,
    HAS_BIAS: tl.constexpr, MASK: tl.constexpr, HAS_GATE: tl.constexpr,
    PRECISION: tl.constexpr, S_ALIKE: tl.constexpr, N_ALIKE: tl.constexpr,
):  # fmt: skip
    """Read MARKS flags and recompute the blocks whose flag is set; nothing more if none is."""
    start = tl.program_id(0) * MARKS
    flags = start + tl.arange(0, MARKS)
    # [MARKS]
    if tl.max(tl.load(Again + flags, mask=flags < programs, other=0), 0) > 0:
        for pid in tl.range(start, tl.minimum(start + MARKS, programs), num_stages=1):
            if tl.load(Again + pid) > 0:  # []
                _attend(
                    pid, Q, K, V, Bias, Mask, Ends, Gate, Out, Lse, Again,
                    q_B, q_S, q_H, q_N, k_B, k_S, k_H, k_N, v_B, v_S, v_H, v_N,
                    bias_B, bias_S, bias_H, bias_N, mask_B, mask_S, g_B, g_S, g_H, g_N,
                    o_B, o_S, o_H, o_N, S, H, Nq, Nk, scale,
                    D, D_PAD, BLOCK_Q, BLOCK_K, ALIGN, BIAS_ALIGN, FULL_Q, FULL_K, BIAS_FULL,
                    HAS_BIAS, MASK, HAS_GATE, PRECISION, S_ALIKE, N_ALIKE, True,
                )  # fmt: skip
