"""The backward kernel of attention within molecules: all four gradients, scores computed anew.

With p the softmax, m the dropout's factor, dp = m (do . v) and delta = sum_j p dp:
ds = p (dp - delta) is the bias's gradient, dq = c ds k, dk = c ds^T q, dv = (m p)^T do.
A molecule of up to 32 atoms is one block; a larger one is walked twice, once by queries and once by
keys, so nothing is added by two programs.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import triton
import triton.language as tl

from bevatron.kernels.molecule_attention.triton_forward import (
    LOG2E,
    kept,
    load_rows,
    load_seed,
    scores,
    store_rows,
    zero_rows,
)


@triton.jit
def _gradient_of_scores(
    q, k, v, do, lse, b_base, first_q, first_k, n, bias_P, scale, atom, head, low, high, threshold,
    rescale, BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr, DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Return the weights p, those after dropout, and dp."""
    x = scores(
        q, k, b_base, first_q, first_k, n, bias_P, scale, BLOCK, HAS_BIAS, PRECISION, WIDE
    )  # fmt: skip
    # Rows outside have the logarithm +infinity, so no weight.
    p = tl.exp2(x * LOG2E - lse[:, None])
    dropped = p
    dp = tl.dot(do, tl.trans(v), input_precision=PRECISION, out_dtype=WIDE)
    if DROPOUT:
        keep = kept(low, high, atom, head, first_q, first_k, threshold, BLOCK)
        dropped = tl.where(keep, p * rescale, 0.0)
        dp = tl.where(keep, dp * rescale, 0.0)
    return p, dropped, dp


@triton.jit
def _store_bias(base, ds, first_q, first_k, n, bias_P, BLOCK: tl.constexpr):
    rows = first_q + tl.arange(0, BLOCK)
    cols = first_k + tl.arange(0, BLOCK)
    at = base + (rows[:, None] * n + cols[None, :]) * bias_P
    inside = (rows < n)[:, None] & (cols < n)[None, :]
    tl.store(at, ds.to(base.dtype.element_ty), mask=inside)


@triton.jit
def _load_lse(base, first, n, H, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    rows = first + tl.arange(0, BLOCK)
    return tl.load(base + rows * H, mask=rows < n, other=float("inf")).to(WIDE)


@triton.jit
def _whole(
    q_base, k_base, v_base, b_base, do_base, l_base, dq_base, dk_base, dv_base, db_base,
    q_N, k_N, v_N, do_N, d_N, bias_P, db_P, H, n, atom, head, low, high, threshold,
    rescale, scale, BLOCK: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    HAS_BIAS: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Compute all gradients of one head with the whole matrix in registers."""
    q = load_rows(q_base, 0, q_N, n, BLOCK, D, D_PAD)
    k = load_rows(k_base, 0, k_N, n, BLOCK, D, D_PAD)
    v = load_rows(v_base, 0, v_N, n, BLOCK, D, D_PAD)
    do = load_rows(do_base, 0, do_N, n, BLOCK, D, D_PAD)
    lse = _load_lse(l_base, 0, n, H, BLOCK, WIDE)
    p, dropped, dp = _gradient_of_scores(
        q, k, v, do, lse, b_base, 0, 0, n, bias_P, scale, atom, head, low, high, threshold,
        rescale, BLOCK, HAS_BIAS, DROPOUT, PRECISION, WIDE,
    )  # fmt: skip
    ds = p * (dp - tl.sum(p * dp, 1)[:, None])
    if HAS_BIAS:
        _store_bias(db_base, ds, 0, 0, n, db_P, BLOCK)
    narrow = ds.to(q.dtype)
    dv = tl.dot(tl.trans(dropped.to(q.dtype)), do, input_precision=PRECISION, out_dtype=WIDE)
    store_rows(dv_base, dv, 0, d_N, n, BLOCK, D, D_PAD)
    dq = tl.dot(narrow, k, input_precision=PRECISION, out_dtype=WIDE) * scale
    store_rows(dq_base, dq, 0, d_N, n, BLOCK, D, D_PAD)
    dk = tl.dot(tl.trans(narrow), q, input_precision=PRECISION, out_dtype=WIDE) * scale
    store_rows(dk_base, dk, 0, d_N, n, BLOCK, D, D_PAD)


@triton.jit
def _blocks(
    q_base, k_base, v_base, b_base, o_base, do_base, l_base, dq_base, dk_base, dv_base, db_base,
    q_N, k_N, v_N, o_N, do_N, d_N, bias_P, db_P, H, n, atom, head, low, high, threshold,
    rescale, scale, BLOCK: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    HAS_BIAS: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Compute the gradients by queries and by bias, then those by keys and values."""
    for first_q in range(0, n, BLOCK):
        q = load_rows(q_base, first_q, q_N, n, BLOCK, D, D_PAD)
        do = load_rows(do_base, first_q, do_N, n, BLOCK, D, D_PAD)
        o = load_rows(o_base, first_q, o_N, n, BLOCK, D, D_PAD)
        delta = tl.sum(o.to(WIDE) * do.to(WIDE), 1)
        lse = _load_lse(l_base, first_q, n, H, BLOCK, WIDE)
        dq = tl.zeros([BLOCK, D_PAD], WIDE)
        for first_k in range(0, n, BLOCK):
            k = load_rows(k_base, first_k, k_N, n, BLOCK, D, D_PAD)
            v = load_rows(v_base, first_k, v_N, n, BLOCK, D, D_PAD)
            p, dropped, dp = _gradient_of_scores(
                q, k, v, do, lse, b_base, first_q, first_k, n, bias_P, scale, atom, head, low,
                high, threshold, rescale, BLOCK, HAS_BIAS, DROPOUT, PRECISION, WIDE,
            )  # fmt: skip
            ds = p * (dp - delta[:, None])
            if HAS_BIAS:
                _store_bias(db_base, ds, first_q, first_k, n, db_P, BLOCK)
            dq += tl.dot(ds.to(q.dtype), k, input_precision=PRECISION, out_dtype=WIDE)
        store_rows(dq_base, dq * scale, first_q, d_N, n, BLOCK, D, D_PAD)
    for first_k in range(0, n, BLOCK):
        k = load_rows(k_base, first_k, k_N, n, BLOCK, D, D_PAD)
        v = load_rows(v_base, first_k, v_N, n, BLOCK, D, D_PAD)
        dk = tl.zeros([BLOCK, D_PAD], WIDE)
        dv = tl.zeros([BLOCK, D_PAD], WIDE)
        for first_q in range(0, n, BLOCK):
            q = load_rows(q_base, first_q, q_N, n, BLOCK, D, D_PAD)
            do = load_rows(do_base, first_q, do_N, n, BLOCK, D, D_PAD)
            o = load_rows(o_base, first_q, o_N, n, BLOCK, D, D_PAD)
            delta = tl.sum(o.to(WIDE) * do.to(WIDE), 1)
            lse = _load_lse(l_base, first_q, n, H, BLOCK, WIDE)
            p, dropped, dp = _gradient_of_scores(
                q, k, v, do, lse, b_base, first_q, first_k, n, bias_P, scale, atom, head, low,
                high, threshold, rescale, BLOCK, HAS_BIAS, DROPOUT, PRECISION, WIDE,
            )  # fmt: skip
            ds = (p * (dp - delta[:, None])).to(q.dtype)
            dk += tl.dot(tl.trans(ds), q, input_precision=PRECISION, out_dtype=WIDE)
            dv += tl.dot(
                tl.trans(dropped.to(q.dtype)), do, input_precision=PRECISION, out_dtype=WIDE
            )
        store_rows(dk_base, dk * scale, first_k, d_N, n, BLOCK, D, D_PAD)
        store_rows(dv_base, dv, first_k, d_N, n, BLOCK, D, D_PAD)


@triton.jit
def _zero_pairs(base, first, last, head, heads, bias_P, bias_H):
    zeros = tl.zeros([1024], tl.float32)
    for h in range(head, heads):
        for start in range(first, last, 1024):
            pair = start + tl.arange(0, 1024)
            at = base + pair * bias_P + tl.cast(h, tl.int64) * bias_H
            tl.store(at, zeros.to(base.dtype.element_ty), mask=pair < last)


@triton.jit
def _zero_three(DQ, DK, DV, first, last, d_N, head, heads, D: tl.constexpr, D_PAD: tl.constexpr):
    zero_rows(DQ, first, last, d_N, head, heads, D, D_PAD)
    zero_rows(DK, first, last, d_N, head, heads, D, D_PAD)
    zero_rows(DV, first, last, d_N, head, heads, D, D_PAD)


@triton.jit(do_not_specialize=["N", "P", "G", "H", "threshold"])
def molecule_attention_backward(
    Q, K, V, Bias, GraphPtr, PairPtr, Seed, Out, Lse, DOut, DQ, DK, DV, DBias,
    q_N, q_H, k_N, k_H, v_N, v_H, do_N, d_N, bias_P, bias_H, db_P, db_H, N, P, G, H,
    scale, threshold, rescale,
    D: tl.constexpr, D_PAD: tl.constexpr, HEADS: tl.constexpr, HAS_BIAS: tl.constexpr,
    DROPOUT: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Write the gradients of HEADS heads of a molecule; the last program clears the rest."""
    g = tl.program_id(0)
    head = tl.program_id(1) * HEADS
    heads = tl.minimum(head + HEADS, H)
    o_N = H * D
    first = tl.load(GraphPtr + g).to(tl.int64)
    pair = tl.load(PairPtr + g).to(tl.int64)
    if g == G:
        _zero_three(DQ, DK, DV, first, N, d_N, head, heads, D, D_PAD)
        if HAS_BIAS:
            _zero_pairs(DBias, pair, P, head, heads, db_P, db_H)
    else:
        last = tl.load(GraphPtr + g + 1).to(tl.int64)
        n = (last - first).to(tl.int32)
        if tl.load(PairPtr + g + 1).to(tl.int64) == pair:
            _zero_three(DQ, DK, DV, first, last, d_N, head, heads, D, D_PAD)
        else:
            low, high = load_seed(Seed, DROPOUT)
            for h in range(head, heads):
                q_base = Q + first * q_N + h * q_H
                k_base = K + first * k_N + h * k_H
                v_base = V + first * v_N + h * v_H
                b_base = Bias + pair * bias_P + tl.cast(h, tl.int64) * bias_H
                db_base = DBias + pair * db_P + tl.cast(h, tl.int64) * db_H
                o_base = Out + first * o_N + h * D
                do_base = DOut + first * do_N + h * D
                l_base = Lse + first * H + h
                dq_base = DQ + first * d_N + h * D
                dk_base = DK + first * d_N + h * D
                dv_base = DV + first * d_N + h * D
                if n <= 16:
                    _whole(
                        q_base, k_base, v_base, b_base, do_base, l_base, dq_base, dk_base, dv_base,
                        db_base, q_N, k_N, v_N, do_N, d_N, bias_P, db_P, H, n, first, h, low, high,
                        threshold, rescale, scale, 16, D, D_PAD, HAS_BIAS, DROPOUT, PRECISION,
                        WIDE,
                    )  # fmt: skip
                elif n <= 32:
                    _whole(
                        q_base, k_base, v_base, b_base, do_base, l_base, dq_base, dk_base, dv_base,
                        db_base, q_N, k_N, v_N, do_N, d_N, bias_P, db_P, H, n, first, h, low, high,
                        threshold, rescale, scale, 32, D, D_PAD, HAS_BIAS, DROPOUT, PRECISION,
                        WIDE,
                    )  # fmt: skip
                else:
                    _blocks(
                        q_base, k_base, v_base, b_base, o_base, do_base, l_base, dq_base, dk_base,
                        dv_base, db_base, q_N, k_N, v_N, o_N, do_N, d_N, bias_P, db_P, H, n,
                        first, h, low, high, threshold, rescale, scale, 32, D, D_PAD, HAS_BIAS,
                        DROPOUT, PRECISION, WIDE,
                    )  # fmt: skip
