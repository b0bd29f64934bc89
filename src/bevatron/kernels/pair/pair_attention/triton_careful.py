"""The kernel that walks the keys of marked blocks again, with a running maximum.

`forward_kernel` marks a block of queries where what it subtracted was so far from the maximum that
numbers may not have held the exponentials: where some logit lies 40 (in float16 10) and more above
those of the first keys, or the first keys are hidden and all logits lie far from 0. Rows without
keys are marked too, and need nothing more.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import triton
import triton.language as tl

from bevatron.kernels.pair.pair_attention.triton_forward import (
    LEAST,
    NUMBERS,
    biased_logits,
    finish,
    load_block,
)
from bevatron.kernels.shared.triton_math import LOG2E

MARKS = tl.constexpr(32)
"""Marks that one program looks at."""


@triton.jit
def _has_keys(mask_base, Nk, MASK: tl.constexpr):
    """Say whether a row keeps any key."""
    kept = tl.zeros([128], tl.int32)
    for first in tl.range(0, Nk, 128):
        keys = tl.arange(0, 128) + first
        added = tl.load(mask_base + keys * MASK, mask=keys < Nk, other=float("-inf"))
        kept = tl.maximum(kept, (added.to(tl.float32) == 0.0).to(tl.int32))
    return tl.max(kept, 0) > 0


@triton.jit
def _step(
    q, k_base, v_base, bias_base, mask_base, top, total, acc, first_q, first, k_stride, v_stride,
    bias_stride, Nq, Nk, scale,
    D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    ALIGN: tl.constexpr, BIAS_ALIGN: tl.constexpr, FULL: tl.constexpr, BIAS_FULL: tl.constexpr,
    HAS_BIAS: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Take one block of keys into the running maximum, sum and weighted values of a row."""
    k = load_block(k_base, first, k_stride, Nk, BLOCK_K, D, D_PAD, ALIGN, FULL)
    x = biased_logits(
        q, k, bias_base, mask_base, first_q, first, bias_stride, Nq, Nk, scale, BLOCK_Q, BLOCK_K,
        BIAS_ALIGN, FULL, BIAS_FULL, HAS_BIAS, MASK, PRECISION,
    )  # fmt: skip
    new_top = tl.maximum(top, tl.max(x, 1))
    p = tl.exp2(x * LOG2E - (new_top * LOG2E)[:, None])
    shrink = tl.exp2((top - new_top) * LOG2E)
    total = total * shrink + tl.sum(p, 1)
    v = load_block(v_base, first, v_stride, Nk, BLOCK_K, D, D_PAD, ALIGN, FULL)
    product = tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
    return new_top, total, acc * shrink[:, None] + product


@triton.jit
def _walk(
    pid, Q, K, V, Bias, Mask, Gate, Out, Lse,
    q_B, q_S, q_H, q_N, k_B, k_S, k_H, k_N, v_B, v_S, v_H, v_N,
    bias_B, bias_S, bias_H, bias_N, mask_B, mask_S, g_B, g_S, g_H, g_N, o_B, o_S, o_H, o_N,
    S, H, Nq, Nk, scale,
    D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    ALIGN: tl.constexpr, BIAS_ALIGN: tl.constexpr,
    FULL_Q: tl.constexpr, FULL_K: tl.constexpr, BIAS_FULL: tl.constexpr,
    HAS_BIAS: tl.constexpr, MASK: tl.constexpr, HAS_GATE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute one block of queries of a head of a row."""
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
    end = Nk
    if MASK > 0:
        end = tl.where(_has_keys(mask_base, Nk, MASK), Nk, 0)

    q = load_block(
        q_base + s * q_S * ALIGN, first_q, q_N, Nq, BLOCK_Q, D, D_PAD, ALIGN, FULL_Q
    )  # fmt: skip
    top = tl.full([BLOCK_Q], LEAST, tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    acc = tl.zeros([BLOCK_Q, D_PAD], tl.float32)
    for first in tl.range(0, end, BLOCK_K):
        top, total, acc = _step(
            q, k_base, v_base, bias_base, mask_base, top, total, acc, first_q, first, k_N, v_N,
            bias_N, Nq, Nk, scale,
            D, D_PAD, BLOCK_Q, BLOCK_K, ALIGN, BIAS_ALIGN, FULL_K, BIAS_FULL, HAS_BIAS, MASK,
            PRECISION,
        )  # fmt: skip
    finish(
        o_base + s * o_S * ALIGN, lse_base + s * H * Nq, g_base + s * g_S * ALIGN,
        top, total, acc, first_q, o_N, g_N, Nq, D, D_PAD, BLOCK_Q, ALIGN, HAS_GATE,
    )  # fmt: skip


@triton.jit(do_not_specialize=NUMBERS)
def careful_kernel(
    Q, K, V, Bias, Mask, Gate, Out, Lse, Again,
    q_B, q_S, q_H, q_N, k_B, k_S, k_H, k_N, v_B, v_S, v_H, v_N,
    bias_B, bias_S, bias_H, bias_N, mask_B, mask_S, g_B, g_S, g_H, g_N, o_B, o_S, o_H, o_N,
    S, H, Nq, Nk, scale, programs,
    D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    ALIGN: tl.constexpr, BIAS_ALIGN: tl.constexpr,
    FULL_Q: tl.constexpr, FULL_K: tl.constexpr, BIAS_FULL: tl.constexpr,
    HAS_BIAS: tl.constexpr, MASK: tl.constexpr, HAS_GATE: tl.constexpr,
    PRECISION: tl.constexpr, ONE_STRIDE: tl.constexpr,
):  # fmt: skip
    """Look at `MARKS` marks and compute the blocks that are marked."""
    if ONE_STRIDE:
        k_N = q_N
        v_N = q_N
    place = tl.program_id(0) * MARKS
    marks = place + tl.arange(0, MARKS)
    if tl.max(tl.load(Again + marks, mask=marks < programs, other=0), 0) > 0:
        for pid in tl.range(place, tl.minimum(place + MARKS, programs), num_stages=1):
            if tl.load(Again + pid) > 0:
                _walk(
                    pid, Q, K, V, Bias, Mask, Gate, Out, Lse,
                    q_B, q_S, q_H, q_N, k_B, k_S, k_H, k_N, v_B, v_S, v_H, v_N,
                    bias_B, bias_S, bias_H, bias_N, mask_B, mask_S, g_B, g_S, g_H, g_N,
                    o_B, o_S, o_H, o_N, S, H, Nq, Nk, scale,
                    D, D_PAD, BLOCK_Q, BLOCK_K, ALIGN, BIAS_ALIGN, FULL_Q, FULL_K, BIAS_FULL,
                    HAS_BIAS, MASK, HAS_GATE, PRECISION,
                )  # fmt: skip
