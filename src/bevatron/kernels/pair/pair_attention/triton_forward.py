"""The forward kernel of attention with a shared bias.

A program owns a block of queries of one head of a row and walks the keys. What is subtracted from
the logits before the exponential need not be their maximum, only near enough for numbers to hold
the exponentials: it is the maximum over the first keys, so that no block of keys waits for another
and nothing is rescaled. Where a sum leaves `SMALLEST_SUM .. LARGEST_SUM` all the same, the block
is marked, and `careful_kernel` walks its keys again with a running maximum. Exponentials are in
base 2, ``2^(log2(e) x - log2(e) top)``, one fused operation before each; the logarithm that the
backward kernels read is in base 2 too.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import triton
import triton.language as tl

from bevatron.kernels.shared.triton_math import LOG2E

LEAST = tl.constexpr(-1e30)
"""Where the running maximum begins: finite, so that differences from it are never NaN."""
FIRST_KEYS = tl.constexpr(16)
"""Over so many keys is the maximum taken: the least that the matrix units multiply at once."""
SMALLEST_SUM = tl.constexpr(2.0**-60)
LARGEST_SUM = tl.constexpr(2.0**60)
"""Of exponentials: between these, none that matters was lost and no product can overflow."""
SMALLEST_SUM_FP16 = tl.constexpr(0.99)
LARGEST_SUM_FP16 = tl.constexpr(2.0**15)
"""The same where exponentials are rounded to float16."""
MASK_WIDTH = tl.constexpr(4)
"""So often is the mask written for each key; see `load_pairs`."""
MASK_COLUMNS = tl.constexpr(16)
"""Of a mask that a product adds: the least that the matrix units sum over; all but one are 0."""
NUMBERS = (
    *(
        f"{tensor}_{axis}"
        for tensor in ("q", "k", "v", "bias", "g", "o", "do", "dk")
        for axis in "BSHN"
    ),
    *("mask_B", "mask_S", "S", "H", "Nq", "Nk"),
    *("bias_rows", "rows_per_program", "part_size", "size", "parts", "programs"),
)
"""Arguments for whose values nothing is compiled anew."""


@triton.jit
def load_block(
    base, first, stride, count, BLOCK: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    ALIGN: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Load rows ``first .. first + BLOCK`` of a [count, D] matrix, zero outside.

    ``stride`` counts ALIGN elements, so that the compiler knows how rows are aligned.
    """
    step = stride * ALIGN
    rows = tl.arange(0, BLOCK)
    cols = tl.arange(0, D_PAD)
    start = base + tl.cast(first, tl.int64) * step
    pointers = start + (rows[:, None] * step + cols[None, :])
    if FULL and D == D_PAD:
        return tl.load(pointers)
    if FULL:
        return tl.load(pointers, mask=cols[None, :] < D, other=0.0)
    inside = (rows + first < count)[:, None]
    if D == D_PAD:
        return tl.load(pointers, mask=inside, other=0.0)
    return tl.load(pointers, mask=inside & (cols < D)[None, :], other=0.0)


@triton.jit
def store_block(
    base, first, stride, count, block, BLOCK: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    ALIGN: tl.constexpr,
):  # fmt: skip
    """Store what `load_block` would load."""
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
    """Load a [BLOCK_Q, BLOCK_K] block of the bias; outside it is minus infinity.

    Its rows have that up to a multiple of ALIGN, so loads stay wide at their end; where it is FULL
    it has been written around the bias as far as blocks reach.
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
        return tl.load(pointers).to(tl.float32)
    block = tl.load(pointers, mask=inside, other=float("-inf"))
    return block.to(tl.float32)


@triton.jit
def load_pairs(
    base, first, count, outside, BLOCK: tl.constexpr, WIDTH: tl.constexpr, FULL: tl.constexpr
):
    """Load the first two of the WIDTH numbers that each query or key of a block has.

    Triton 3.6 lets every thread load all of a vector that is shorter than a program has threads,
    and makes what it enters once more for each layout. So more is loaded, where blocks are small.
    """
    LOADED: tl.constexpr = 2 if BLOCK >= 64 else WIDTH
    rows = tl.arange(0, BLOCK) + first
    places = rows[:, None] * WIDTH + tl.arange(0, LOADED)[None, :]
    if FULL:
        block = tl.load(base + places).to(tl.float32)
    else:
        block = tl.load(base + places, mask=(rows < count)[:, None], other=outside).to(tl.float32)
    if LOADED == 2:
        one, other = tl.split(block)
    else:
        ones, others = tl.split(tl.reshape(block, (BLOCK, 2, 2)))
        one, _ = tl.split(ones)
        other, _ = tl.split(others)
    return one, other


@triton.jit
def logits(
    q, k, mask_base, first, Nk, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, FULL: tl.constexpr,
    MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Multiply queries by keys; a mask of MASK_COLUMNS (0, or minus infinity) is added on the way.

    The matrix units do it for nothing, and no thread has to load it.
    """
    if MASK == MASK_COLUMNS:
        added = load_block(
            mask_base, first, MASK_COLUMNS // 8, Nk, BLOCK_K, MASK_COLUMNS, MASK_COLUMNS, 8, FULL
        )  # fmt: skip
        unit = tl.broadcast_to((tl.arange(0, MASK_COLUMNS) == 0)[None, :], BLOCK_Q, MASK_COLUMNS)
        x = tl.dot(unit.to(q.dtype), tl.trans(added), input_precision=PRECISION)
        return tl.dot(q, tl.trans(k), x, input_precision=PRECISION)
    return tl.dot(q, tl.trans(k), input_precision=PRECISION)


@triton.jit
def hide(
    x, mask_base, first, Nk, BLOCK_K: tl.constexpr, FULL: tl.constexpr, HAS_BIAS: tl.constexpr,
    MASK: tl.constexpr,
):  # fmt: skip
    """Take out keys that are masked, where no product did, and those beyond the last."""
    if MASK == MASK_WIDTH:
        added, _ = load_pairs(mask_base, first, Nk, float("-inf"), BLOCK_K, MASK_WIDTH, FULL)
        return x + added[None, :]
    if FULL or HAS_BIAS:  # a bias is minus infinity beyond the last key
        return x
    return tl.where((tl.arange(0, BLOCK_K) + first < Nk)[None, :], x, float("-inf"))


@triton.jit
def plus_product(total, product):
    """Add a product to a sum that a loop carries.

    As a third argument of ``tl.dot`` the sum would be under way from one turn to the next, and
    ptxas would let all products of the loop run one by one.
    """
    return tl.fma(product, tl.full(product.shape, 1.0, tl.float32), total)


@triton.jit
def biased_logits(
    q, k, bias_base, mask_base, first_q, first, bias_stride, Nq, Nk, scale,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BIAS_ALIGN: tl.constexpr, FULL: tl.constexpr,
    BIAS_FULL: tl.constexpr, HAS_BIAS: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Make the logits of a block, minus infinity where there is no key."""
    x = logits(q, k, mask_base, first, Nk, BLOCK_Q, BLOCK_K, FULL, MASK, PRECISION) * scale
    if HAS_BIAS:
        x += load_bias(
            bias_base, first_q, first, bias_stride, Nq, Nk, BLOCK_Q, BLOCK_K, BIAS_ALIGN,
            BIAS_FULL, False,
        )  # fmt: skip
    return hide(x, mask_base, first, Nk, BLOCK_K, FULL, HAS_BIAS, MASK)


@triton.jit
def _highest(
    q, k_base, bias_base, mask_base, first_q, k_stride, bias_stride, Nq, Nk, scale,
    D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_Q: tl.constexpr, ALIGN: tl.constexpr,
    BIAS_ALIGN: tl.constexpr, FULL: tl.constexpr, BIAS_FULL: tl.constexpr, HAS_BIAS: tl.constexpr,
    MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Find each query's largest logit among the first keys; 0 where all of them are hidden."""
    k = load_block(k_base, 0, k_stride, Nk, FIRST_KEYS, D, D_PAD, ALIGN, FULL)
    x = biased_logits(
        q, k, bias_base, mask_base, first_q, 0, bias_stride, Nq, Nk, scale, BLOCK_Q, FIRST_KEYS,
        BIAS_ALIGN, FULL, BIAS_FULL, HAS_BIAS, MASK, PRECISION,
    )  # fmt: skip
    top = tl.max(x, 1)
    return tl.where(top > LEAST, top, 0.0)


@triton.jit
def _step(
    q, k_base, v_base, bias_base, mask_base, top, total, acc, first_q, first, k_stride, v_stride,
    bias_stride, Nq, Nk, scale,
    D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    ALIGN: tl.constexpr, BIAS_ALIGN: tl.constexpr, FULL: tl.constexpr, BIAS_FULL: tl.constexpr,
    HAS_BIAS: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Take one block of keys into the sum and the weighted values of a row."""
    k = load_block(k_base, first, k_stride, Nk, BLOCK_K, D, D_PAD, ALIGN, FULL)
    x = biased_logits(
        q, k, bias_base, mask_base, first_q, first, bias_stride, Nq, Nk, scale, BLOCK_Q, BLOCK_K,
        BIAS_ALIGN, FULL, BIAS_FULL, HAS_BIAS, MASK, PRECISION,
    )  # fmt: skip
    p = tl.exp2(x * LOG2E - (top * LOG2E)[:, None])
    # Eight sums for a query: what one thread of a matrix unit's layout adds without the others.
    total += tl.sum(tl.reshape(p, (BLOCK_Q, BLOCK_K // 8, 8)), 1)
    v = load_block(v_base, first, v_stride, Nk, BLOCK_K, D, D_PAD, ALIGN, FULL)
    return total, plus_product(acc, tl.dot(p.to(v.dtype), v, input_precision=PRECISION))


@triton.jit
def finish(
    out_base, lse_base, gate_base, top, total, acc, first, out_stride, gate_stride, Nq,
    D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_Q: tl.constexpr, ALIGN: tl.constexpr,
    HAS_GATE: tl.constexpr,
):  # fmt: skip
    """Normalise, gate and store a block of results; the logarithm is infinite where no key was."""
    some = total > 0
    out = acc / tl.where(some, total, 1.0)[:, None]
    if HAS_GATE:
        g = load_block(
            gate_base, first, gate_stride, Nq, BLOCK_Q, D, D_PAD, ALIGN, False
        ).to(tl.float32)  # fmt: skip
        out = out / (1.0 + tl.exp2(-g * LOG2E))
    store_block(out_base, first, out_stride, Nq, out, BLOCK_Q, D, D_PAD, ALIGN)
    rows = tl.arange(0, BLOCK_Q) + first
    lse = tl.where(some, top * LOG2E + tl.log2(tl.where(some, total, 1.0)), float("inf"))
    tl.store(lse_base + rows, lse, mask=rows < Nq)


@triton.jit(do_not_specialize=NUMBERS)
def forward_kernel(
    Q, K, V, Bias, Mask, Gate, Out, Lse, Again,
    q_B, q_S, q_H, q_N, k_B, k_S, k_H, k_N, v_B, v_S, v_H, v_N,
    bias_B, bias_S, bias_H, bias_N, mask_B, mask_S, g_B, g_S, g_H, g_N, o_B, o_S, o_H, o_N,
    S, H, Nq, Nk, scale,
    D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    ALIGN: tl.constexpr, BIAS_ALIGN: tl.constexpr,
    FULL_Q: tl.constexpr, FULL_K: tl.constexpr, BIAS_FULL: tl.constexpr,
    HAS_BIAS: tl.constexpr, MASK: tl.constexpr, HAS_GATE: tl.constexpr,
    PRECISION: tl.constexpr, ONE_STRIDE: tl.constexpr,
):  # fmt: skip
    """Compute one block of queries of a head of a row; Again is 1 for blocks to be walked anew."""
    if ONE_STRIDE:
        k_N = q_N
        v_N = q_N
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
    o_base = Out + (b * o_B + h * o_H) * ALIGN
    mask_base = Mask + b * mask_B * MASK
    lse_base = Lse + (b * S * H + h) * Nq
    bias_base = Bias + (b * bias_B + s * bias_S + h * bias_H) * BIAS_ALIGN

    q = load_block(
        q_base + s * q_S * ALIGN, first_q, q_N, Nq, BLOCK_Q, D, D_PAD, ALIGN, FULL_Q
    )  # fmt: skip
    k_base += s * k_S * ALIGN
    v_base += s * v_S * ALIGN
    mask_base += s * mask_S * MASK
    top = _highest(
        q, k_base, bias_base, mask_base, first_q, k_N, bias_N, Nq, Nk, scale,
        D, D_PAD, BLOCK_Q, ALIGN, BIAS_ALIGN, FULL_K, BIAS_FULL, HAS_BIAS, MASK, PRECISION,
    )  # fmt: skip
    sums = tl.zeros([BLOCK_Q, 8], tl.float32)
    acc = tl.zeros([BLOCK_Q, D_PAD], tl.float32)
    for first in tl.range(0, Nk, BLOCK_K):
        sums, acc = _step(
            q, k_base, v_base, bias_base, mask_base, top, sums, acc, first_q, first, k_N, v_N,
            bias_N, Nq, Nk, scale,
            D, D_PAD, BLOCK_Q, BLOCK_K, ALIGN, BIAS_ALIGN, FULL_K, BIAS_FULL, HAS_BIAS, MASK,
            PRECISION,
        )  # fmt: skip
    total = tl.sum(sums, 1)
    outside = tl.arange(0, BLOCK_Q) + first_q >= Nq
    if q.dtype == tl.float16:
        held = outside | ((total > SMALLEST_SUM_FP16) & (total < LARGEST_SUM_FP16))
    else:
        held = outside | ((total > SMALLEST_SUM) & (total < LARGEST_SUM))
    tl.store(Again + tl.program_id(0), 1 - tl.min(held.to(tl.int32), 0))
    finish(
        o_base + s * o_S * ALIGN, lse_base + s * H * Nq, g_base + s * g_S * ALIGN,
        top, total, acc, first_q, o_N, g_N, Nq, D, D_PAD, BLOCK_Q, ALIGN, HAS_GATE,
    )  # fmt: skip
