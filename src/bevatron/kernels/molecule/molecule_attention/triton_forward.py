"""The forward kernel of attention within molecules.

A program owns HEADS neighbouring heads of one molecule, whose matmuls are batched over heads. A
molecule of up to WHOLE atoms is computed with its whole score matrix, [HEADS, BLOCK, BLOCK], in
registers; a larger one in blocks of BLOCK queries by BLOCK keys with an online softmax. A program
writes the output rows of its heads and the logarithm of each row's sum of exponentials, in base 2
like all exponentials, for the backward kernel.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import triton
import triton.language as tl

from bevatron.kernels.shared.triton_math import LOG2E


@triton.jit
def load_rows(
    base, first, step_N, step_H, count, heads, BLOCK: tl.constexpr, D: tl.constexpr,
    D_PAD: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Load atoms ``first .. first + BLOCK`` of HEADS heads, zero where masked."""
    rows = (first + tl.arange(0, BLOCK))[None, :, None]
    cols = tl.arange(0, D_PAD)[None, None, :]
    h = tl.arange(0, HEADS)[:, None, None]
    mask = (rows < count) & (cols < D) & (h < heads)
    block = base + (h * step_H + rows * step_N + cols)
    return tl.load(block, mask=mask, other=0.0)  # [HEADS, BLOCK, D_PAD]


@triton.jit
def store_rows(
    base, block, first, step_N, count, heads, BLOCK: tl.constexpr, D: tl.constexpr,
    D_PAD: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Store the rows that `load_rows` would load; heads are contiguous."""
    rows = (first + tl.arange(0, BLOCK))[None, :, None]
    cols = tl.arange(0, D_PAD)[None, None, :]
    h = tl.arange(0, HEADS)[:, None, None]
    mask = (rows < count) & (cols < D) & (h < heads)
    tl.store(base + (h * D + rows * step_N + cols), block.to(base.dtype.element_ty), mask=mask)


@triton.jit
def scores(
    q, k, bias, first_q, first_k, n, heads, bias_P, bias_H, scale, BLOCK: tl.constexpr,
    HEADS: tl.constexpr, HAS_BIAS: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Compute a block of scaled scores plus bias, times log2(e); keys past the end get -infinity.

    The bias is the initial accumulator of the matmul, so it arrives in the matmul's layout. In its
    own layout, with a row's keys spread over many threads, the maximum and sum of a row would cost
    several times as much.
    """
    rows = (first_q + tl.arange(0, BLOCK))[None, :, None]
    cols = (first_k + tl.arange(0, BLOCK))[None, None, :]
    k_t = tl.permute(k, (0, 2, 1))  # [HEADS, D_PAD, BLOCK]
    if HAS_BIAS:
        h = tl.arange(0, HEADS)[:, None, None]
        mask = (rows < n) & (cols < n) & (h < heads)
        bias_ptr = (bias + h.to(tl.int64) * bias_H) + (rows * n + cols) * bias_P
        scaled_bias = tl.load(bias_ptr, mask=mask, other=0.0).to(WIDE)  # [HEADS, BLOCK, BLOCK]
        scaled_bias = scaled_bias * (1.0 / scale)
        # [HEADS, BLOCK, D_PAD] @ [HEADS, D_PAD, BLOCK] -> [HEADS, BLOCK, BLOCK]
        x = tl.dot(q, k_t, scaled_bias, input_precision=PRECISION, out_dtype=WIDE)
    else:
        x = tl.dot(q, k_t, input_precision=PRECISION, out_dtype=WIDE)  # [HEADS, BLOCK, BLOCK]
    return tl.where(cols < n, x * (scale * LOG2E), float("-inf"))


@triton.jit
def mix(x):
    """Scramble a 32-bit integer with Wellons' lowbias32."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def kept(
    low, high, atom, head, first_q, first_k, threshold, BLOCK: tl.constexpr, HEADS: tl.constexpr
):
    """Return which weights of a block dropout keeps; see the reference."""
    query = (atom + first_q + tl.arange(0, BLOCK)).to(tl.uint32)
    key = (atom + first_k + tl.arange(0, BLOCK)).to(tl.uint32)
    head_bits = (head + tl.arange(0, HEADS)).to(tl.uint32) * 0x85EBCA6B + high
    row = mix(mix(query * 0x9E3779B9 + low)[None, :] + head_bits[:, None])  # [HEADS, BLOCK]
    pair = row[:, :, None] + (key * 0xC2B2AE35)[None, None, :]  # [HEADS, BLOCK, BLOCK]
    return mix(pair) >= threshold


@triton.jit
def load_seed(Seed, DROPOUT: tl.constexpr):
    """Load the low and high 32 bits of the seed."""
    if DROPOUT:
        seed = tl.load(Seed)  # []
        return (seed & 0xFFFFFFFF).to(tl.uint32), ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    return tl.full([], 0, tl.uint32), tl.full([], 0, tl.uint32)


@triton.jit
def bounds(GraphPtr, PairPtr, g, G):
    """Load the offsets of a molecule's atoms and pairs together: everything waits for them."""
    end = tl.minimum(g + 1, G)
    first = tl.load(GraphPtr + g).to(tl.int64)  # []
    last = tl.load(GraphPtr + end).to(tl.int64)  # []
    pair = tl.load(PairPtr + g).to(tl.int64)  # []
    last_pair = tl.load(PairPtr + end).to(tl.int64)  # []
    return first, last, pair, last_pair


@triton.jit
def zero_rows(
    base, first, last, step_N, heads, D: tl.constexpr, D_PAD: tl.constexpr, HEADS: tl.constexpr
):
    """Write zeros for atoms without pairs."""
    zeros = tl.zeros([HEADS, 16, D_PAD], tl.float32)
    for start in range(first, last, 16):
        store_rows(base, zeros, start, step_N, last, heads, 16, D, D_PAD, HEADS)


@triton.jit
def store_numbers(base, numbers, first, n, H, heads, BLOCK: tl.constexpr, HEADS: tl.constexpr):
    """Store one element per head and row of a block, [HEADS, BLOCK]."""
    rows = (first + tl.arange(0, BLOCK))[None, :]
    h = tl.arange(0, HEADS)[:, None]
    tl.store(base + (rows * H + h), numbers, mask=(rows < n) & (h < heads))


@triton.jit
def _whole(
    q_base, k_base, v_base, b_base, o_base, l_base, q_N, q_H, k_N, k_H, v_N, v_H, bias_P, bias_H,
    H, n, heads, atom, head, low, high, threshold, rescale, scale, BLOCK: tl.constexpr,
    D: tl.constexpr, D_PAD: tl.constexpr, HEADS: tl.constexpr, HAS_BIAS: tl.constexpr,
    DROPOUT: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Compute attention with all keys at once."""
    q = load_rows(q_base, 0, q_N, q_H, n, heads, BLOCK, D, D_PAD, HEADS)  # [HEADS, BLOCK, D_PAD]
    k = load_rows(k_base, 0, k_N, k_H, n, heads, BLOCK, D, D_PAD, HEADS)  # [HEADS, BLOCK, D_PAD]
    v = load_rows(v_base, 0, v_N, v_H, n, heads, BLOCK, D, D_PAD, HEADS)  # [HEADS, BLOCK, D_PAD]
    x = scores(
        q, k, b_base, 0, 0, n, heads, bias_P, bias_H, scale, BLOCK, HEADS, HAS_BIAS, PRECISION,
        WIDE,
    )  # fmt: skip
    top = tl.max(x, 2)  # [HEADS, BLOCK]
    p = tl.exp2(x - top[:, :, None])
    total = tl.sum(p, 2)  # [HEADS, BLOCK]
    if DROPOUT:
        keep = kept(low, high, atom, head, 0, 0, threshold, BLOCK, HEADS)
        p = tl.where(keep, p, 0.0)
    # [HEADS, BLOCK, D_PAD]
    out = tl.dot(p.to(v.dtype), v, input_precision=PRECISION, out_dtype=WIDE)
    out = out * (rescale / total)[:, :, None]
    store_rows(o_base, out, 0, H * D, n, heads, BLOCK, D, D_PAD, HEADS)
    store_numbers(l_base, top + tl.log2(total), 0, n, H, heads, BLOCK, HEADS)


@triton.jit
def _blocks(
    q_base, k_base, v_base, b_base, o_base, l_base, q_N, q_H, k_N, k_H, v_N, v_H, bias_P, bias_H,
    H, n, heads, atom, head, low, high, threshold, rescale, scale, BLOCK: tl.constexpr,
    D: tl.constexpr, D_PAD: tl.constexpr, HEADS: tl.constexpr, HAS_BIAS: tl.constexpr,
    DROPOUT: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Compute attention block by block with an online softmax."""
    for first_q in range(0, n, BLOCK):
        # [HEADS, BLOCK, D_PAD]
        q = load_rows(q_base, first_q, q_N, q_H, n, heads, BLOCK, D, D_PAD, HEADS)
        top = tl.full([HEADS, BLOCK], float("-inf"), WIDE)
        total = tl.zeros([HEADS, BLOCK], WIDE)
        out = tl.zeros([HEADS, BLOCK, D_PAD], WIDE)
        for first_k in range(0, n, BLOCK):
            # [HEADS, BLOCK, D_PAD]
            k = load_rows(k_base, first_k, k_N, k_H, n, heads, BLOCK, D, D_PAD, HEADS)
            # [HEADS, BLOCK, D_PAD]
            v = load_rows(v_base, first_k, v_N, v_H, n, heads, BLOCK, D, D_PAD, HEADS)
            x = scores(
                q, k, b_base, first_q, first_k, n, heads, bias_P, bias_H, scale, BLOCK, HEADS,
                HAS_BIAS, PRECISION, WIDE,
            )  # fmt: skip
            new_top = tl.maximum(top, tl.max(x, 2))  # [HEADS, BLOCK]
            p = tl.exp2(x - new_top[:, :, None])
            rescale_old = tl.exp2(top - new_top)
            total = total * rescale_old + tl.sum(p, 2)  # [HEADS, BLOCK]
            if DROPOUT:
                keep = kept(low, high, atom, head, first_q, first_k, threshold, BLOCK, HEADS)
                p = tl.where(keep, p * rescale, 0.0)
            out = out * rescale_old[:, :, None]
            # [HEADS, BLOCK, D_PAD]
            out += tl.dot(p.to(v.dtype), v, input_precision=PRECISION, out_dtype=WIDE)
            top = new_top
        out = out / total[:, :, None]
        store_rows(o_base, out, first_q, H * D, n, heads, BLOCK, D, D_PAD, HEADS)
        store_numbers(l_base, top + tl.log2(total), first_q, n, H, heads, BLOCK, HEADS)


@triton.jit(do_not_specialize=["N", "G", "H", "threshold"])
def molecule_attention_forward(
    Q, K, V, Bias, GraphPtr, PairPtr, Seed, Out, Lse,
    q_N, q_H, k_N, k_H, v_N, v_H, bias_P, bias_H, N, G, H, scale, threshold, rescale,
    D: tl.constexpr, D_PAD: tl.constexpr, HEADS: tl.constexpr, LEAST: tl.constexpr,
    WHOLE: tl.constexpr, BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr,
    DROPOUT: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Compute attention for HEADS heads of one molecule, the last molecules first.

    A launch serves molecules of more than LEAST atoms: up to WHOLE in one block, larger ones in
    blocks of BLOCK, or not at all if BLOCK is 0. The launch with LEAST 0 also zeroes the padding,
    in its first program, so that it does not delay the end of the launch.
    """
    head = tl.program_id(1) * HEADS
    heads = tl.minimum(H - head, HEADS)
    g = G - tl.program_id(0)
    first, last, pair, last_pair = bounds(GraphPtr, PairPtr, g, G)
    if g == G:
        if LEAST == 0:
            zero_rows(Out + head * D, first, N, H * D, heads, D, D_PAD, HEADS)
    else:
        n = (last - first).to(tl.int32)
        if last_pair == pair:
            if LEAST == 0:
                zero_rows(Out + head * D, first, last, H * D, heads, D, D_PAD, HEADS)
        elif (n > LEAST) & ((BLOCK > 0) | (n <= WHOLE)):
            low, high = load_seed(Seed, DROPOUT)
            q_base = Q + first * q_N + head * q_H
            k_base = K + first * k_N + head * k_H
            v_base = V + first * v_N + head * v_H
            b_base = Bias + pair * bias_P + head.to(tl.int64) * bias_H
            o_base = Out + first * (H * D) + head * D
            l_base = Lse + first * H + head
            if n <= WHOLE:
                _whole(
                    q_base, k_base, v_base, b_base, o_base, l_base, q_N, q_H, k_N, k_H, v_N,
                    v_H, bias_P, bias_H, H, n, heads, first, head, low, high, threshold,
                    rescale, scale, WHOLE, D, D_PAD, HEADS, HAS_BIAS, DROPOUT, PRECISION,
                    WIDE,
                )  # fmt: skip
            elif BLOCK > 0:
                _blocks(
                    q_base, k_base, v_base, b_base, o_base, l_base, q_N, q_H, k_N, k_H, v_N,
                    v_H, bias_P, bias_H, H, n, heads, first, head, low, high, threshold,
                    rescale, scale, BLOCK, D, D_PAD, HEADS, HAS_BIAS, DROPOUT, PRECISION,
                    WIDE,
                )  # fmt: skip
