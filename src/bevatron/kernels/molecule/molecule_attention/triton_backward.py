"""The backward kernel of attention within molecules: all four gradients, scores recomputed.

With p the softmax, m the dropout factor, dp = m (do . v) and delta = sum_j p dp:
ds = p (dp - delta) is the gradient of the bias, dq = c ds k, dk = c ds^T q, dv = (m p)^T do.

A program owns HEADS heads of one molecule. A small molecule is one [HEADS, BLOCK, BLOCK] block in
registers; a larger one takes three passes over its blocks, two by queries (delta; dq and the bias)
and one by keys (dk and dv), so every result is written by one program: no atomics. Computed from
rounded results, delta would be off, always with the same sign, and give a gradient to what all
keys share.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import triton
import triton.language as tl

from bevatron.kernels.molecule.molecule_attention.triton_forward import (
    bounds,
    kept,
    load_rows,
    load_seed,
    scores,
    store_numbers,
    store_rows,
    zero_rows,
)


@triton.jit
def _weights(
    q, k, v, do, lse, b_base, first_q, first_k, n, heads, bias_P, bias_H, scale, atom, head, low,
    high, threshold, rescale, BLOCK: tl.constexpr, HEADS: tl.constexpr, HAS_BIAS: tl.constexpr,
    DROPOUT: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Return p, p after dropout but without its factor, and dp, each [HEADS, BLOCK, BLOCK]."""
    x = scores(
        q, k, b_base, first_q, first_k, n, heads, bias_P, bias_H, scale, BLOCK, HEADS, HAS_BIAS,
        PRECISION, WIDE,
    )  # fmt: skip
    # Rows past the end have the logarithm +infinity, so zero weight.
    p = tl.exp2(x - lse[:, :, None])
    dropped = p
    # [HEADS, BLOCK, BLOCK]
    dp = tl.dot(do, tl.permute(v, (0, 2, 1)), input_precision=PRECISION, out_dtype=WIDE)
    if DROPOUT:
        keep = kept(low, high, atom, head, first_q, first_k, threshold, BLOCK, HEADS)
        dropped = tl.where(keep, p, 0.0)
        dp = tl.where(keep, dp * rescale, 0.0)
    return p, dropped, dp


@triton.jit
def _store_bias(
    base, more, ds, first_q, first_k, n, heads, db_P, db_H, m_P, m_H, BLOCK: tl.constexpr,
    HEADS: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Store the gradient of the bias of a block of pairs, plus More if ADD."""
    rows = (first_q + tl.arange(0, BLOCK))[None, :, None]
    cols = (first_k + tl.arange(0, BLOCK))[None, None, :]
    h = tl.arange(0, HEADS)[:, None, None]
    dbias_ptr = (base + h.to(tl.int64) * db_H) + (rows * n + cols) * db_P
    mask = (rows < n) & (cols < n) & (h < heads)
    if ADD:
        more_ptr = (more + h.to(tl.int64) * m_H) + (rows * n + cols) * m_P
        ds += tl.load(more_ptr, mask=mask, other=0.0).to(ds.dtype)  # [HEADS, BLOCK, BLOCK]
    tl.store(dbias_ptr, ds.to(base.dtype.element_ty), mask=mask)


@triton.jit
def _load_numbers(
    base, first, n, H, heads, outside, BLOCK: tl.constexpr, HEADS: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """Load one element per head and row of a block; past the end it is ``outside``."""
    rows = (first + tl.arange(0, BLOCK))[None, :]
    h = tl.arange(0, HEADS)[:, None]
    mask = (rows < n) & (h < heads)
    return tl.load(base + (rows * H + h), mask=mask, other=outside).to(WIDE)  # [HEADS, BLOCK]


@triton.jit
def _transposed_dot(x, y, PRECISION: tl.constexpr, WIDE: tl.constexpr):
    """Multiply the transpose of x, [HEADS, BLOCK, BLOCK], by y, [HEADS, BLOCK, D_PAD]."""
    # [HEADS, BLOCK, D_PAD]
    return tl.dot(tl.permute(x, (0, 2, 1)), y, input_precision=PRECISION, out_dtype=WIDE)


@triton.jit
def _whole(
    q_base, k_base, v_base, b_base, do_base, l_base, dq_base, dk_base, dv_base, db_base, m_base,
    q_N, q_H, k_N, k_H, v_N, v_H, d_N, bias_P, bias_H, db_P, db_H, m_P, m_H, H, n, heads, atom,
    head, low, high, threshold, rescale, scale, BLOCK: tl.constexpr, D: tl.constexpr,
    D_PAD: tl.constexpr, HEADS: tl.constexpr, HAS_BIAS: tl.constexpr, ADD: tl.constexpr,
    DROPOUT: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Compute all gradients with the whole score matrix in registers."""
    q = load_rows(q_base, 0, q_N, q_H, n, heads, BLOCK, D, D_PAD, HEADS)  # [HEADS, BLOCK, D_PAD]
    k = load_rows(k_base, 0, k_N, k_H, n, heads, BLOCK, D, D_PAD, HEADS)  # [HEADS, BLOCK, D_PAD]
    v = load_rows(v_base, 0, v_N, v_H, n, heads, BLOCK, D, D_PAD, HEADS)  # [HEADS, BLOCK, D_PAD]
    do = load_rows(do_base, 0, H * D, D, n, heads, BLOCK, D, D_PAD, HEADS)  # [HEADS, BLOCK, D_PAD]
    # [HEADS, BLOCK]
    lse = _load_numbers(l_base, 0, n, H, heads, float("inf"), BLOCK, HEADS, WIDE)
    p, dropped, dp = _weights(
        q, k, v, do, lse, b_base, 0, 0, n, heads, bias_P, bias_H, scale, atom, head, low, high,
        threshold, rescale, BLOCK, HEADS, HAS_BIAS, DROPOUT, PRECISION, WIDE,
    )  # fmt: skip
    # [HEADS, BLOCK, D_PAD]
    dv = _transposed_dot(dropped.to(q.dtype), do, PRECISION, WIDE) * rescale
    store_rows(dv_base, dv, 0, d_N, n, heads, BLOCK, D, D_PAD, HEADS)
    ds = p * (dp - tl.sum(p * dp, 2)[:, :, None])  # [HEADS, BLOCK, BLOCK]
    if HAS_BIAS:
        _store_bias(db_base, m_base, ds, 0, 0, n, heads, db_P, db_H, m_P, m_H, BLOCK, HEADS, ADD)
    narrow = ds.to(q.dtype)
    # [HEADS, BLOCK, D_PAD]
    dq = tl.dot(narrow, k, input_precision=PRECISION, out_dtype=WIDE) * scale
    store_rows(dq_base, dq, 0, d_N, n, heads, BLOCK, D, D_PAD, HEADS)
    dk = _transposed_dot(narrow, q, PRECISION, WIDE) * scale  # [HEADS, BLOCK, D_PAD]
    store_rows(dk_base, dk, 0, d_N, n, heads, BLOCK, D, D_PAD, HEADS)


@triton.jit
def _load_queries(
    q_base, do_base, l_base, first, q_N, q_H, H, n, heads, BLOCK: tl.constexpr, D: tl.constexpr,
    D_PAD: tl.constexpr, HEADS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Load q, do and the logarithm of a block of queries."""
    # q and do: [HEADS, BLOCK, D_PAD]
    q = load_rows(q_base, first, q_N, q_H, n, heads, BLOCK, D, D_PAD, HEADS)
    do = load_rows(do_base, first, H * D, D, n, heads, BLOCK, D, D_PAD, HEADS)
    # [HEADS, BLOCK]
    lse = _load_numbers(l_base, first, n, H, heads, float("inf"), BLOCK, HEADS, WIDE)
    return q, do, lse


@triton.jit
def _blocks(
    q_base, k_base, v_base, b_base, do_base, l_base, delta_base, dq_base, dk_base, dv_base, db_base,
    m_base, q_N, q_H, k_N, k_H, v_N, v_H, d_N, bias_P, bias_H, db_P, db_H, m_P, m_H, H, n, heads,
    atom, head, low, high, threshold, rescale, scale, BLOCK: tl.constexpr, D: tl.constexpr,
    D_PAD: tl.constexpr, HEADS: tl.constexpr, HAS_BIAS: tl.constexpr, ADD: tl.constexpr,
    DROPOUT: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of queries and bias, then those of keys and values."""
    for first_q in range(0, n, BLOCK):
        q, do, lse = _load_queries(
            q_base, do_base, l_base, first_q, q_N, q_H, H, n, heads, BLOCK, D, D_PAD, HEADS, WIDE
        )  # fmt: skip
        delta = tl.zeros([HEADS, BLOCK], WIDE)
        for first_k in range(0, n, BLOCK):
            # [HEADS, BLOCK, D_PAD]
            k = load_rows(k_base, first_k, k_N, k_H, n, heads, BLOCK, D, D_PAD, HEADS)
            # [HEADS, BLOCK, D_PAD]
            v = load_rows(v_base, first_k, v_N, v_H, n, heads, BLOCK, D, D_PAD, HEADS)
            p, dropped, dp = _weights(
                q, k, v, do, lse, b_base, first_q, first_k, n, heads, bias_P, bias_H, scale, atom,
                head, low, high, threshold, rescale, BLOCK, HEADS, HAS_BIAS, DROPOUT, PRECISION,
                WIDE,
            )  # fmt: skip
            delta += tl.sum(p * dp, 2)  # [HEADS, BLOCK]
        store_numbers(delta_base, delta, first_q, n, H, heads, BLOCK, HEADS)
        dq = tl.zeros([HEADS, BLOCK, D_PAD], WIDE)
        for first_k in range(0, n, BLOCK):
            # [HEADS, BLOCK, D_PAD]
            k = load_rows(k_base, first_k, k_N, k_H, n, heads, BLOCK, D, D_PAD, HEADS)
            # [HEADS, BLOCK, D_PAD]
            v = load_rows(v_base, first_k, v_N, v_H, n, heads, BLOCK, D, D_PAD, HEADS)
            p, dropped, dp = _weights(
                q, k, v, do, lse, b_base, first_q, first_k, n, heads, bias_P, bias_H, scale, atom,
                head, low, high, threshold, rescale, BLOCK, HEADS, HAS_BIAS, DROPOUT, PRECISION,
                WIDE,
            )  # fmt: skip
            ds = p * (dp - delta[:, :, None])
            if HAS_BIAS:
                _store_bias(
                    db_base, m_base, ds, first_q, first_k, n, heads, db_P, db_H, m_P, m_H, BLOCK,
                    HEADS, ADD,
                )  # fmt: skip
            # [HEADS, BLOCK, D_PAD]
            dq += tl.dot(ds.to(q.dtype), k, input_precision=PRECISION, out_dtype=WIDE)
        store_rows(dq_base, dq * scale, first_q, d_N, n, heads, BLOCK, D, D_PAD, HEADS)
    tl.debug_barrier()  # other threads read the stored delta
    for first_k in range(0, n, BLOCK):
        # [HEADS, BLOCK, D_PAD]
        k = load_rows(k_base, first_k, k_N, k_H, n, heads, BLOCK, D, D_PAD, HEADS)
        # [HEADS, BLOCK, D_PAD]
        v = load_rows(v_base, first_k, v_N, v_H, n, heads, BLOCK, D, D_PAD, HEADS)
        dk = tl.zeros([HEADS, BLOCK, D_PAD], WIDE)
        dv = tl.zeros([HEADS, BLOCK, D_PAD], WIDE)
        for first_q in range(0, n, BLOCK):
            q, do, lse = _load_queries(
                q_base, do_base, l_base, first_q, q_N, q_H, H, n, heads, BLOCK, D, D_PAD, HEADS,
                WIDE,
            )  # fmt: skip
            # [HEADS, BLOCK]
            delta = _load_numbers(delta_base, first_q, n, H, heads, 0.0, BLOCK, HEADS, WIDE)
            p, dropped, dp = _weights(
                q, k, v, do, lse, b_base, first_q, first_k, n, heads, bias_P, bias_H, scale, atom,
                head, low, high, threshold, rescale, BLOCK, HEADS, HAS_BIAS, DROPOUT, PRECISION,
                WIDE,
            )  # fmt: skip
            ds = (p * (dp - delta[:, :, None])).to(q.dtype)  # [HEADS, BLOCK, BLOCK]
            dk += _transposed_dot(ds, q, PRECISION, WIDE)  # [HEADS, BLOCK, D_PAD]
            # [HEADS, BLOCK, D_PAD]
            dv += _transposed_dot(dropped.to(q.dtype), do, PRECISION, WIDE)
        store_rows(dk_base, dk * scale, first_k, d_N, n, heads, BLOCK, D, D_PAD, HEADS)
        store_rows(dv_base, dv * rescale, first_k, d_N, n, heads, BLOCK, D, D_PAD, HEADS)


@triton.jit
def _spare_pairs(
    base, more, first, last, heads, db_P, db_H, m_P, m_H, HEADS: tl.constexpr, ADD: tl.constexpr
):
    """Write the gradient of the biases outside all molecules: zero, or More if ADD.

    One element per thread: more would cost all programs registers.
    """
    h = tl.arange(0, HEADS)[:, None]
    for start in range(first + tl.program_id(0) * 32, last, tl.num_programs(0) * 32):
        pair = start + tl.arange(0, 32)[None, :]
        mask = (pair < last) & (h < heads)
        value = tl.zeros([HEADS, 32], base.dtype.element_ty)
        if ADD:
            more_ptr = more + (pair * m_P + h.to(tl.int64) * m_H)
            value = tl.load(more_ptr, mask=mask, other=0.0)  # [HEADS, 32]
        tl.store(base + (pair * db_P + h.to(tl.int64) * db_H), value, mask=mask)


@triton.jit
def _zero_three(
    DQ, DK, DV, first, last, d_N, heads, D: tl.constexpr, D_PAD: tl.constexpr, HEADS: tl.constexpr
):
    """Write zeros to dq, dk and dv of atoms without pairs."""
    zero_rows(DQ, first, last, d_N, heads, D, D_PAD, HEADS)
    zero_rows(DK, first, last, d_N, heads, D, D_PAD, HEADS)
    zero_rows(DV, first, last, d_N, heads, D, D_PAD, HEADS)


@triton.jit(do_not_specialize=["N", "P", "G", "H", "threshold"])
def molecule_attention_backward(
    Q, K, V, Bias, GraphPtr, PairPtr, Seed, Lse, DOut, More, Delta, DQ, DK, DV, DBias,
    q_N, q_H, k_N, k_H, v_N, v_H, d_N, bias_P, bias_H, db_P, db_H, m_P, m_H, N, P, G, H,
    scale, threshold, rescale,
    D: tl.constexpr, D_PAD: tl.constexpr, HEADS: tl.constexpr, LEAST: tl.constexpr,
    WHOLE: tl.constexpr, BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr, ADD: tl.constexpr,
    DROPOUT: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Write the gradients of HEADS heads of a molecule; LEAST, WHOLE and BLOCK as in the forward.

    With ADD, More is added to the gradient of the bias. Delta is used by programs that take BLOCK
    atoms at a time.
    """
    head = tl.program_id(1) * HEADS
    heads = tl.minimum(H - head, HEADS)
    DQ += head * D
    DK += head * D
    DV += head * D
    DBias += head.to(tl.int64) * db_H
    More += head.to(tl.int64) * m_H
    g = G - tl.program_id(0)
    first, last, pair, last_pair = bounds(GraphPtr, PairPtr, g, G)
    if LEAST == 0:
        spare = tl.load(PairPtr + G).to(tl.int64)  # []
        if HAS_BIAS:
            _spare_pairs(DBias, More, spare, P, heads, db_P, db_H, m_P, m_H, HEADS, ADD)
    if g == G:
        if LEAST == 0:
            _zero_three(DQ, DK, DV, first, N, d_N, heads, D, D_PAD, HEADS)
    else:
        n = (last - first).to(tl.int32)
        if last_pair == pair:
            if LEAST == 0:
                _zero_three(DQ, DK, DV, first, last, d_N, heads, D, D_PAD, HEADS)
        elif (n > LEAST) & ((BLOCK > 0) | (n <= WHOLE)):
            low, high = load_seed(Seed, DROPOUT)
            q_base = Q + first * q_N + head * q_H
            k_base = K + first * k_N + head * k_H
            v_base = V + first * v_N + head * v_H
            b_base = Bias + pair * bias_P + head.to(tl.int64) * bias_H
            db_base = DBias + pair * db_P
            m_base = More + pair * m_P
            do_base = DOut + first * (H * D) + head * D
            l_base = Lse + first * H + head
            delta_base = Delta + first * H + head
            dq_base = DQ + first * d_N
            dk_base = DK + first * d_N
            dv_base = DV + first * d_N
            if n <= WHOLE:
                _whole(
                    q_base, k_base, v_base, b_base, do_base, l_base, dq_base, dk_base, dv_base,
                    db_base, m_base, q_N, q_H, k_N, k_H, v_N, v_H, d_N, bias_P, bias_H, db_P,
                    db_H, m_P, m_H, H, n, heads, first, head, low, high, threshold, rescale,
                    scale, WHOLE, D, D_PAD, HEADS, HAS_BIAS, ADD, DROPOUT, PRECISION, WIDE,
                )  # fmt: skip
            elif BLOCK > 0:
                _blocks(
                    q_base, k_base, v_base, b_base, do_base, l_base, delta_base, dq_base, dk_base,
                    dv_base, db_base, m_base, q_N, q_H, k_N, k_H, v_N, v_H, d_N, bias_P,
                    bias_H, db_P, db_H, m_P, m_H, H, n, heads, first, head, low, high,
                    threshold, rescale, scale, BLOCK, D, D_PAD, HEADS, HAS_BIAS, ADD, DROPOUT,
                    PRECISION, WIDE,
                )  # fmt: skip
