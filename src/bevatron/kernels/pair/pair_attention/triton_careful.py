"""Recomputes the blocks that `forward_kernel` flagged, with a running row maximum.

`forward_kernel` flags a block of queries if exponentials may have overflowed or vanished, because
its estimate was far from the row maximum: some logit is 40 (in float16 10) or more above those of
the first keys, or the first keys are masked and all logits are far from 0.
A program reads MARKS flags; nothing more is done where none is set.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import triton
import triton.language as tl

from bevatron.kernels.pair.pair_attention.triton_forward import (
    LEAST,
    NUMBERS,
    alike,
    biased_logits,
    finish,
    load_block,
    load_end,
)
from bevatron.kernels.shared.triton_math import LOG2E

MARKS = tl.constexpr(32)
"""Number of flags that one program reads."""


@triton.jit
def _step(
    q, k_base, v_base, bias_base, mask_base, row_max, total, acc, first_q, first, k_stride,
    v_stride, bias_stride, Nq, Nk, scale,
    D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    ALIGN: tl.constexpr, BIAS_ALIGN: tl.constexpr, FULL: tl.constexpr, BIAS_FULL: tl.constexpr,
    HAS_BIAS: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add one block of keys to the running maximum, sum of exponentials and weighted values."""
    k = load_block(k_base, first, k_stride, Nk, BLOCK_K, D, D_PAD, ALIGN, FULL)  # [BLOCK_K, D_PAD]
    # [BLOCK_Q, BLOCK_K]
    x = biased_logits(
        q, k, bias_base, mask_base, first_q, first, bias_stride, Nq, Nk, scale, BLOCK_Q, BLOCK_K,
        BIAS_ALIGN, FULL, BIAS_FULL, HAS_BIAS, MASK, PRECISION,
    )  # fmt: skip
    new_max = tl.maximum(row_max, tl.max(x, 1))  # [BLOCK_Q]
    p = tl.exp2(x * LOG2E - (new_max * LOG2E)[:, None])
    rescale = tl.exp2((row_max - new_max) * LOG2E)
    total = total * rescale + tl.sum(p, 1)  # [BLOCK_Q]
    v = load_block(v_base, first, v_stride, Nk, BLOCK_K, D, D_PAD, ALIGN, FULL)  # [BLOCK_K, D_PAD]
    pv = tl.dot(p.to(v.dtype), v, input_precision=PRECISION)  # [BLOCK_Q, D_PAD]
    return new_max, total, acc * rescale[:, None] + pv


@triton.jit
def _attend(
    pid, Q, K, V, Bias, Mask, Ends, Gate, Out, Lse,
    q_B, q_S, q_H, q_N, k_B, k_S, k_H, k_N, v_B, v_S, v_H, v_N,
    bias_B, bias_S, bias_H, bias_N, mask_B, mask_S, g_B, g_S, g_H, g_N, o_B, o_S, o_H, o_N,
    S, H, Nq, Nk, scale,
    D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    ALIGN: tl.constexpr, BIAS_ALIGN: tl.constexpr,
    FULL_Q: tl.constexpr, FULL_K: tl.constexpr, BIAS_FULL: tl.constexpr,
    HAS_BIAS: tl.constexpr, MASK: tl.constexpr, HAS_GATE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute one block of queries of a head of a row with an online softmax."""
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
    k_base += s * k_S * ALIGN
    v_base += s * v_S * ALIGN
    mask_base += s * mask_S * MASK
    end = load_end(Ends, b * S + s, Nk, MASK)

    # [BLOCK_Q, D_PAD]
    q = load_block(
        q_base + s * q_S * ALIGN, first_q, q_N, Nq, BLOCK_Q, D, D_PAD, ALIGN, FULL_Q
    )  # fmt: skip
    row_max = tl.full([BLOCK_Q], LEAST, tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    acc = tl.zeros([BLOCK_Q, D_PAD], tl.float32)
    for first in tl.range(0, end, BLOCK_K):
        row_max, total, acc = _step(
            q, k_base, v_base, bias_base, mask_base, row_max, total, acc, first_q, first, k_N, v_N,
            bias_N, Nq, Nk, scale,
            D, D_PAD, BLOCK_Q, BLOCK_K, ALIGN, BIAS_ALIGN, FULL_K, BIAS_FULL, HAS_BIAS, MASK,
            PRECISION,
        )  # fmt: skip
    finish(
        o_base + s * o_S * ALIGN, lse_base + s * H * Nq, g_base + s * g_S * ALIGN,
        row_max, total, acc, first_q, o_N, g_N, Nq, D, D_PAD, BLOCK_Q, ALIGN, HAS_GATE,
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
    """Read MARKS flags and recompute the blocks whose flag is set."""
    k_S, v_S, _ = alike(q_S, k_S, v_S, q_S, S_ALIKE)
    k_N, v_N, _ = alike(q_N, k_N, v_N, q_N, N_ALIKE)
    start = tl.program_id(0) * MARKS
    flags = start + tl.arange(0, MARKS)
    # [MARKS]
    if tl.max(tl.load(Again + flags, mask=flags < programs, other=0), 0) > 0:
        for pid in tl.range(start, tl.minimum(start + MARKS, programs), num_stages=1):
            if tl.load(Again + pid) > 0:  # []
                _attend(
                    pid, Q, K, V, Bias, Mask, Ends, Gate, Out, Lse,
                    q_B, q_S, q_H, q_N, k_B, k_S, k_H, k_N, v_B, v_S, v_H, v_N,
                    bias_B, bias_S, bias_H, bias_N, mask_B, mask_S, g_B, g_S, g_H, g_N,
                    o_B, o_S, o_H, o_N, S, H, Nq, Nk, scale,
                    D, D_PAD, BLOCK_Q, BLOCK_K, ALIGN, BIAS_ALIGN, FULL_Q, FULL_K, BIAS_FULL,
                    HAS_BIAS, MASK, HAS_GATE, PRECISION,
                )  # fmt: skip
