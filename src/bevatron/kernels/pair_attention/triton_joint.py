"""The gradients of queries, keys and values of attention with a shared bias in one loop.

A program owns a head of one row. It walks blocks of keys and, within, blocks of queries, and makes
the logits and their gradient once for all three: sums of dk and dv stay in registers, that of dq
lies in a float32 buffer that only this program reads and writes, so no atomic addition is needed.
That takes five matrix products and one exponential per logit where `triton_backward`'s loops for
dq and for dk and dv take seven and two; it wants many rows and heads, one program each.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import triton
import triton.language as tl

from bevatron.kernels.pair_attention.triton_backward import gradient_past_gate, store_kept
from bevatron.kernels.pair_attention.triton_forward import (
    LOG2E,
    NUMBERS,
    load_bias,
    load_block,
    load_line,
    store_block,
)


@triton.jit
def _joint_step(
    k, v, dk, dv, q_base, do_base, lse_base, delta_base, bias_base, dq_places,
    first, first_k, q_N, do_N, bias_N, Nq, Nk, scale,
    D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    ALIGN: tl.constexpr, BIAS_ALIGN: tl.constexpr, FULL_Q: tl.constexpr, FULL_K: tl.constexpr,
    BIAS_FULL: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_MASK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Take one block of queries into the sums of dk and dv, and one of keys into that of dq."""
    q = load_block(q_base, first, q_N, Nq, BLOCK_Q, D, D_PAD, ALIGN, FULL_Q)
    do = load_block(do_base, first, do_N, Nq, BLOCK_Q, D, D_PAD, ALIGN, FULL_Q)
    lse = load_line(lse_base, first, Nq, float("inf"), BLOCK_Q, FULL_Q)
    delta = load_line(delta_base, first, Nq, 0.0, BLOCK_Q, FULL_Q)
    # The bias is loaded before the product: after it, Triton 3.6 makes every exponential twice.
    if HAS_BIAS:
        x_bias = load_bias(
            bias_base, first, first_k, bias_N, Nq, Nk, BLOCK_Q, BLOCK_K, BIAS_ALIGN,
            BIAS_FULL, False,
        )  # fmt: skip
    x = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    if HAS_BIAS:
        x += x_bias * LOG2E - lse[:, None]
    else:
        x -= lse[:, None]
    if HAS_MASK or not (FULL_K or HAS_BIAS):
        x = tl.minimum(x, 1.0)  # anything of a masked key, but finite; at most 0 of others
    p = tl.exp2(x)
    dv = tl.dot(tl.trans(p.to(do.dtype)), do, dv, input_precision=PRECISION)
    dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
    ds = (p * (dp - delta[:, None])).to(q.dtype)
    dk = tl.dot(tl.trans(ds), q, dk, input_precision=PRECISION)
    dq = tl.load(dq_places, mask=tl.full(dq_places.shape, first_k, tl.int32) > 0, other=0.0)
    tl.store(dq_places, tl.dot(ds, k, dq, input_precision=PRECISION))
    return dk, dv


@triton.jit(do_not_specialize=NUMBERS)
def joint_kernel(
    Q, K, V, Bias, Mask, Gate, Out, Lse, Dout, Dq, Dk, Dv, Dgate, Dgated, Delta, Sums,
    q_B, q_S, q_H, q_N, k_B, k_S, k_H, k_N, v_B, v_S, v_H, v_N,
    bias_B, bias_S, bias_H, bias_N, mask_B, mask_S, g_B, g_S, g_H, g_N, o_B, o_S, o_H, o_N,
    do_B, do_S, do_H, do_N, dk_B, dk_S, dk_H, dk_N,
    S, H, Nq, Nk, scale, scale_dq, first_item,
    D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    ALIGN: tl.constexpr, BIAS_ALIGN: tl.constexpr, FULL_Q: tl.constexpr, FULL_K: tl.constexpr,
    BIAS_FULL: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_MASK: tl.constexpr,
    HAS_GATE: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute dq, dk, dv and what the gate takes for one head of a row.

    Dq, Dgate and Dgated have the strides of Out; Sums has the float32 sums of dq of every program.
    """
    slot = tl.program_id(0)
    item = slot + first_item
    h = (item % H).to(tl.int64)
    s = ((item // H) % S).to(tl.int64)
    b = (item // H // S).to(tl.int64)
    line = ((b * S + s) * H + h) * Nq
    q_base = Q + (b * q_B + s * q_S + h * q_H) * ALIGN
    k_base = K + (b * k_B + s * k_S + h * k_H) * ALIGN
    v_base = V + (b * v_B + s * v_S + h * v_H) * ALIGN
    g_base = Gate + (b * g_B + s * g_S + h * g_H) * ALIGN
    do_base = Dout + (b * do_B + s * do_S + h * do_H) * ALIGN
    bias_base = Bias + (b * bias_B + s * bias_S + h * bias_H) * BIAS_ALIGN
    mask_base = Mask + b * mask_B + s * mask_S
    o_head = (b * o_B + s * o_S + h * o_H) * ALIGN
    dk_head = (b * dk_B + s * dk_S + h * dk_H) * ALIGN
    sums = Sums + slot.to(tl.int64) * tl.cdiv(Nq, BLOCK_Q) * (BLOCK_Q * D_PAD)
    place = tl.arange(0, BLOCK_Q)[:, None] * D_PAD + tl.arange(0, D_PAD)[None, :]

    for first in tl.range(0, Nq, BLOCK_Q):
        gradient_past_gate(
            do_base, Out + o_head, g_base, Dgate + o_head, Dgated + o_head, Delta + line, first,
            do_N, o_N, g_N, o_N, Nq, D, D_PAD, BLOCK_Q, ALIGN, FULL_Q, HAS_GATE,
        )  # fmt: skip
    tl.debug_barrier()  # other threads read what this one wrote
    do_step = do_N
    if HAS_GATE:
        do_base = Dgated + o_head
        do_step = o_N
    for first_k in tl.range(0, Nk, BLOCK_K):
        k = load_block(k_base, first_k, k_N, Nk, BLOCK_K, D, D_PAD, ALIGN, FULL_K)
        v = load_block(v_base, first_k, v_N, Nk, BLOCK_K, D, D_PAD, ALIGN, FULL_K)
        if HAS_MASK:
            # A masked key adds ds * 0 to dq, and its own dk and dv are not stored.
            keep = load_line(mask_base, first_k, Nk, float("-inf"), BLOCK_K, FULL_K)
            k = tl.where((keep == 0.0)[:, None], k, 0.0)
        dk = tl.zeros([BLOCK_K, D_PAD], tl.float32)
        dv = tl.zeros([BLOCK_K, D_PAD], tl.float32)
        for first in tl.range(0, Nq, BLOCK_Q, num_stages=STAGES):
            dk, dv = _joint_step(
                k, v, dk, dv, q_base, do_base, Lse + line, Delta + line, bias_base,
                sums + first * D_PAD + place, first, first_k, q_N, do_step, bias_N, Nq, Nk, scale,
                D, D_PAD, BLOCK_Q, BLOCK_K, ALIGN, BIAS_ALIGN, FULL_Q, FULL_K, BIAS_FULL, HAS_BIAS,
                HAS_MASK, PRECISION,
            )  # fmt: skip
        store_kept(
            Dk + dk_head, Dv + dk_head, mask_base, dk, dv, first_k, dk_N, Nk, scale_dq,
            D, D_PAD, BLOCK_K, ALIGN, HAS_MASK,
        )  # fmt: skip
        tl.debug_barrier()
    for first in tl.range(0, Nq, BLOCK_Q):
        dq = tl.load(
            sums + first * D_PAD + place, mask=tl.full(place.shape, Nk, tl.int32) > 0, other=0.0
        )
        store_block(Dq + o_head, first, o_N, Nq, dq * scale_dq, BLOCK_Q, D, D_PAD, ALIGN)
