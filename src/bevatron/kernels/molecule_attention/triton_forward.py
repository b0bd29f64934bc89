"""The forward kernel of attention within molecules.

A program owns a few heads of one molecule and takes them one after the other. Up to 32 atoms the
whole matrix of scores lies in registers; a larger molecule is walked in blocks of 32 with a running
maximum. Exponentials are in base 2, and so is the logarithm that the backward kernel reads.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def load_rows(
    base, first, stride, count, BLOCK: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr
):
    """Load atoms ``first .. first + BLOCK`` of one head as [BLOCK, D_PAD], zero outside."""
    rows = first + tl.arange(0, BLOCK)
    cols = tl.arange(0, D_PAD)
    inside = (rows < count)[:, None] & (cols < D)[None, :]
    return tl.load(base + rows[:, None] * stride + cols[None, :], mask=inside, other=0.0)


@triton.jit
def store_rows(
    base, block, first, stride, count, BLOCK: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr
):
    """Store what `load_rows` would load."""
    rows = first + tl.arange(0, BLOCK)
    cols = tl.arange(0, D_PAD)
    inside = (rows < count)[:, None] & (cols < D)[None, :]
    at = base + rows[:, None] * stride + cols[None, :]
    tl.store(at, block.to(base.dtype.element_ty), mask=inside)


@triton.jit
def scores(
    q, k, bias, first_q, first_k, n, bias_P, scale, BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Compute a block of scaled products plus bias; keys outside get minus infinity."""
    x = tl.dot(q, tl.trans(k), input_precision=PRECISION, out_dtype=WIDE) * scale
    rows = first_q + tl.arange(0, BLOCK)
    cols = first_k + tl.arange(0, BLOCK)
    if HAS_BIAS:
        inside = (rows < n)[:, None] & (cols < n)[None, :]
        at = bias + (rows[:, None] * n + cols[None, :]) * bias_P
        x += tl.load(at, mask=inside, other=0.0).to(WIDE)
    return tl.where((cols < n)[None, :], x, float("-inf"))


@triton.jit
def mix(x):
    """Spread the bits of a 32-bit number: Wellons' lowbias32."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def kept(low, high, atom, head, first_q, first_k, threshold, BLOCK: tl.constexpr):
    """Say which weights of a block the dropout keeps; see the reference."""
    query = (atom + first_q + tl.arange(0, BLOCK)).to(tl.uint32)
    key = (atom + first_k + tl.arange(0, BLOCK)).to(tl.uint32)
    of_head = tl.cast(head, tl.uint32) * 0x85EBCA6B + high
    row = mix(mix(query * 0x9E3779B9 + low) + of_head)
    return mix(row[:, None] + (key * 0xC2B2AE35)[None, :]) >= threshold


@triton.jit
def load_seed(Seed, DROPOUT: tl.constexpr):
    """Load both halves of the seed."""
    if DROPOUT:
        seed = tl.load(Seed)
        return (seed & 0xFFFFFFFF).to(tl.uint32), ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    return tl.full([], 0, tl.uint32), tl.full([], 0, tl.uint32)


@triton.jit
def zero_rows(base, first, last, stride, head, heads, D: tl.constexpr, D_PAD: tl.constexpr):
    """Write zeros for atoms that attend to nothing."""
    zeros = tl.zeros([32, D_PAD], tl.float32)
    for h in range(head, heads):
        for start in range(first, last, 32):
            store_rows(base + h * D, zeros, start, stride, last, 32, D, D_PAD)


@triton.jit
def _whole(
    q_base, k_base, v_base, b_base, o_base, l_base, q_N, k_N, v_N, o_N, bias_P, H, n, atom, head,
    low, high, threshold, rescale, scale, BLOCK: tl.constexpr, D: tl.constexpr,
    D_PAD: tl.constexpr, HAS_BIAS: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Attend with all keys at once."""
    q = load_rows(q_base, 0, q_N, n, BLOCK, D, D_PAD)
    k = load_rows(k_base, 0, k_N, n, BLOCK, D, D_PAD)
    v = load_rows(v_base, 0, v_N, n, BLOCK, D, D_PAD)
    x = scores(q, k, b_base, 0, 0, n, bias_P, scale, BLOCK, HAS_BIAS, PRECISION, WIDE) * LOG2E
    top = tl.max(x, 1)
    p = tl.exp2(x - top[:, None])
    total = tl.sum(p, 1)
    if DROPOUT:
        p = tl.where(kept(low, high, atom, head, 0, 0, threshold, BLOCK), p * rescale, 0.0)
    p = p / total[:, None]
    out = tl.dot(p.to(v.dtype), v, input_precision=PRECISION, out_dtype=WIDE)
    store_rows(o_base, out, 0, o_N, n, BLOCK, D, D_PAD)
    rows = tl.arange(0, BLOCK)
    tl.store(l_base + rows * H, top + tl.log2(total), mask=rows < n)


@triton.jit
def _blocks(
    q_base, k_base, v_base, b_base, o_base, l_base, q_N, k_N, v_N, o_N, bias_P, H, n, atom, head,
    low, high, threshold, rescale, scale, BLOCK: tl.constexpr, D: tl.constexpr,
    D_PAD: tl.constexpr, HAS_BIAS: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Attend block by block."""
    for first_q in range(0, n, BLOCK):
        q = load_rows(q_base, first_q, q_N, n, BLOCK, D, D_PAD)
        top = tl.full([BLOCK], float("-inf"), WIDE)
        total = tl.zeros([BLOCK], WIDE)
        out = tl.zeros([BLOCK, D_PAD], WIDE)
        for first_k in range(0, n, BLOCK):
            k = load_rows(k_base, first_k, k_N, n, BLOCK, D, D_PAD)
            v = load_rows(v_base, first_k, v_N, n, BLOCK, D, D_PAD)
            x = scores(
                q, k, b_base, first_q, first_k, n, bias_P, scale, BLOCK, HAS_BIAS, PRECISION, WIDE
            ) * LOG2E  # fmt: skip
            new_top = tl.maximum(top, tl.max(x, 1))
            p = tl.exp2(x - new_top[:, None])
            shrink = tl.exp2(top - new_top)
            total = total * shrink + tl.sum(p, 1)
            if DROPOUT:
                keep = kept(low, high, atom, head, first_q, first_k, threshold, BLOCK)
                p = tl.where(keep, p * rescale, 0.0)
            out = out * shrink[:, None]
            out += tl.dot(p.to(v.dtype), v, input_precision=PRECISION, out_dtype=WIDE)
            top = new_top
        store_rows(o_base, out / total[:, None], first_q, o_N, n, BLOCK, D, D_PAD)
        rows = first_q + tl.arange(0, BLOCK)
        tl.store(l_base + rows * H, top + tl.log2(total), mask=rows < n)


@triton.jit(do_not_specialize=["N", "G", "H", "threshold"])
def molecule_attention_forward(
    Q, K, V, Bias, GraphPtr, PairPtr, Seed, Out, Lse,
    q_N, q_H, k_N, k_H, v_N, v_H, bias_P, bias_H, N, G, H, scale, threshold, rescale,
    D: tl.constexpr, D_PAD: tl.constexpr, HEADS: tl.constexpr, HAS_BIAS: tl.constexpr,
    DROPOUT: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Attend with HEADS heads of molecule ``program_id(0)``; the last program clears the rest."""
    g = tl.program_id(0)
    head = tl.program_id(1) * HEADS
    heads = tl.minimum(head + HEADS, H)
    o_N = H * D
    first = tl.load(GraphPtr + g).to(tl.int64)
    if g == G:
        zero_rows(Out, first, N, o_N, head, heads, D, D_PAD)
    else:
        last = tl.load(GraphPtr + g + 1).to(tl.int64)
        pair = tl.load(PairPtr + g).to(tl.int64)
        n = (last - first).to(tl.int32)
        if tl.load(PairPtr + g + 1).to(tl.int64) == pair:
            zero_rows(Out, first, last, o_N, head, heads, D, D_PAD)
        else:
            low, high = load_seed(Seed, DROPOUT)
            for h in range(head, heads):
                q_base = Q + first * q_N + h * q_H
                k_base = K + first * k_N + h * k_H
                v_base = V + first * v_N + h * v_H
                b_base = Bias + pair * bias_P + tl.cast(h, tl.int64) * bias_H
                o_base = Out + first * o_N + h * D
                l_base = Lse + first * H + h
                if n <= 16:
                    _whole(
                        q_base, k_base, v_base, b_base, o_base, l_base, q_N, k_N, v_N, o_N, bias_P,
                        H, n, first, h, low, high, threshold, rescale, scale, 16, D, D_PAD,
                        HAS_BIAS, DROPOUT, PRECISION, WIDE,
                    )  # fmt: skip
                elif n <= 32:
                    _whole(
                        q_base, k_base, v_base, b_base, o_base, l_base, q_N, k_N, v_N, o_N, bias_P,
                        H, n, first, h, low, high, threshold, rescale, scale, 32, D, D_PAD,
                        HAS_BIAS, DROPOUT, PRECISION, WIDE,
                    )  # fmt: skip
                else:
                    _blocks(
                        q_base, k_base, v_base, b_base, o_base, l_base, q_N, k_N, v_N, o_N, bias_P,
                        H, n, first, h, low, high, threshold, rescale, scale, 32, D, D_PAD,
                        HAS_BIAS, DROPOUT, PRECISION, WIDE,
                    )  # fmt: skip
