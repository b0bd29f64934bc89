"""The forward kernels of attention whose score takes all channels: dot products and GATv2.

A program owns R rows (or one part of a long row) and all channels of one head, and steps over
their entries E at a time: it gathers the features of every entry's column, [R, E, BLOCK_C], scores
them against the row's query, and updates an online softmax and the weighted sum in registers. The
features gathered for the score are those that are summed. A whole row is written once; the parts
of a cut row write partial results, which `merge_kernel` merges in order.

GATv2's score ``w . leaky_relu(q_i + k_j)`` is the other choice (ADDITIVE).
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import triton
import triton.language as tl

from bevatron.kernels.graph.csr.triton_parts import head_key, is_kept, load_parts
from bevatron.kernels.shared.triton_math import LN2, LOG2E


@triton.jit
def load_rows(x, row, head, c, mask, C: tl.constexpr, H: tl.constexpr, ACC: tl.constexpr):
    """Load a head's channels of R rows."""
    offsets = (row * H + head)[:, None] * C + c[None, :]
    mask = mask[:, None] & (c < C)[None, :]
    return tl.load(x + offsets, mask=mask, other=0.0).to(ACC)  # [R, BLOCK_C]


@triton.jit
def fetch(x, j, head, c, valid, C: tl.constexpr, H: tl.constexpr, ACC: tl.constexpr):
    """Gather a head's channels of the other end of every entry."""
    offsets = j[:, :, None] * (H * C) + (head * C + c)[None, None, :]
    mask = valid[:, :, None] & (c < C)[None, None, :]
    return tl.load(x + offsets, mask=mask, other=0.0).to(ACC)  # [R, E, BLOCK_C]


@triton.jit
def score_of(own, fetched, w, ADDITIVE: tl.constexpr, SLOPE: tl.constexpr):
    """Compute the unscaled score of every entry, [R, E]."""
    if ADDITIVE:
        hidden = own[:, None, :] + fetched  # [R, E, BLOCK_C]
        terms = tl.where(hidden > 0.0, hidden, SLOPE * hidden) * w[None, None, :]
        return tl.sum(terms, 2)  # [R, E]
    return tl.sum(own[:, None, :] * fetched, 2)  # [R, E]


@triton.jit
def write_rows(
    m, s, z, row, live, head, d, z_out, first_out, second_out,
    D: tl.constexpr, H: tl.constexpr, SOFTMAX: tl.constexpr, PARTIAL: tl.constexpr,
):  # fmt: skip
    """Normalise rows and write them with L = log(sum of exponentials), or write the raw sums."""
    stat = row * H + head
    offsets = stat[:, None] * D + d[None, :]
    mask = live[:, None] & (d < D)[None, :]
    if SOFTMAX:
        empty = s == 0.0
        nonzero = tl.where(empty, 1.0, s)
        if PARTIAL:
            tl.store(first_out + stat, m * LN2, mask=live)
            tl.store(second_out + stat, s, mask=live)
        else:
            z = z / nonzero[:, None]
            lse = tl.where(empty, float("inf"), m + tl.log2(nonzero))
            tl.store(first_out + stat, lse, mask=live)
    tl.store(z_out + offsets, z.to(z_out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["first", "count", "threshold", "num_slots"])
def forward_kernel(  # noqa: PLR0915  a kernel is one piece
    index, part_row, part_start, part_length, part_slot, first, count, values,
    query, key, value, row_scale, col_scale, w_vector, seed, row_ids, col_ids, threshold,
    z_out, first_out, second_out, partial_stats, partial_z, num_slots,
    C: tl.constexpr, BLOCK_C: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    H: tl.constexpr, R: tl.constexpr, E: tl.constexpr, ACC: tl.constexpr,
    ADDITIVE: tl.constexpr, SOFTMAX: tl.constexpr, PARTIAL: tl.constexpr,
    HAS_VALUE: tl.constexpr, HAS_ROW_SCALE: tl.constexpr, HAS_COL_SCALE: tl.constexpr,
    HAS_VALUES: tl.constexpr, DROPOUT: tl.constexpr, HAS_IDS: tl.constexpr, CUT: tl.constexpr,
    SLOPE: tl.constexpr, INVERSE_KEEP: tl.constexpr,
):  # fmt: skip
    """Compute scores, softmax and weighted sums in one pass over the entries of R rows."""
    head = tl.program_id(1)
    c = tl.arange(0, BLOCK_C)
    d = tl.arange(0, BLOCK_D)
    row, start, length, slot, live = load_parts(
        part_row, part_start, part_length, part_slot, first, count, R
    )
    own = load_rows(query, row, head, c, live, C, H, ACC)  # [R, BLOCK_C]
    if HAS_ROW_SCALE:
        scale = tl.load(row_scale + row * H + head, mask=live, other=0.0).to(ACC)  # [R]
        own = own * scale[:, None]
    w = c
    if ADDITIVE:
        w = tl.load(w_vector + head * C + c, mask=c < C, other=0.0).to(ACC)  # [BLOCK_C]
    # Three axes, like the gathered features: with two, every thread would hold all of z.
    m = tl.full([R, 1, 1], float("-inf"), ACC)
    s = tl.zeros([R, 1, 1], ACC)
    z = tl.zeros([R, 1, BLOCK_D], ACC)
    longest = tl.max(length)  # []
    step = tl.arange(0, E)
    for begin in range(0, longest, E):
        entry = begin + step
        valid = entry[None, :] < length[:, None]
        position = start[:, None] + entry[None, :]
        j = tl.load(index + position, mask=valid, other=0).to(tl.int64)  # [R, E]
        fetched = fetch(key, j, head, c, valid, C, H, ACC)  # [R, E, BLOCK_C]
        weight = score_of(own, fetched, w, ADDITIVE, SLOPE)[:, :, None]  # [R, E, 1]
        if HAS_COL_SCALE:
            other_scale = tl.load(col_scale + j * H + head, mask=valid, other=0.0).to(ACC)  # [R, E]
            weight *= other_scale[:, :, None]
        if SOFTMAX:
            logit = tl.where(valid[:, :, None], weight * LOG2E, float("-inf"))
            top = tl.maximum(m, tl.max(logit, 1, keep_dims=True))  # [R, 1, 1]
            base = tl.where(top == float("-inf"), 0.0, top)
            rescale = tl.exp2(m - base)
            weight = tl.exp2(logit - base)
            m = top
            s = s * rescale + tl.sum(weight, 1, keep_dims=True)  # [R, 1, 1]
            z = z * rescale
        if HAS_VALUES:
            a = tl.load(values + position, mask=valid, other=0.0).to(ACC)  # [R, E]
            weight *= a[:, :, None]
        if DROPOUT:
            mask_key = head_key(seed, head)
            keep = is_kept(mask_key, row[:, None], j, row_ids, col_ids, threshold, HAS_IDS)
            weight = tl.where(keep[:, :, None], weight * INVERSE_KEEP, 0.0)
        if HAS_VALUE:
            fetched = fetch(value, j, head, d, valid, D, H, ACC)  # [R, E, BLOCK_D]
        z += tl.sum(weight * fetched, 1, keep_dims=True)  # [R, 1, BLOCK_D]
    m = tl.reshape(m, [R])  # [R]
    s = tl.reshape(s, [R])  # [R]
    z = tl.reshape(z, [R, BLOCK_D])  # [R, BLOCK_D]
    write_rows(
        m, s, z, row, live & (slot < 0), head, d, z_out, first_out, second_out, D, H, SOFTMAX,
        PARTIAL,
    )  # fmt: skip
    if CUT:
        is_cut = live & (slot >= 0)
        stat = slot * H + head
        if SOFTMAX:
            tl.store(partial_stats + stat, m, mask=is_cut)
            tl.store(partial_stats + num_slots.to(tl.int64) * H + stat, s, mask=is_cut)
        offsets = stat[:, None] * D + d[None, :]
        tl.store(partial_z + offsets, z, mask=is_cut[:, None] & (d < D)[None, :])


@triton.jit(do_not_specialize=["num_slots"])
def merge_kernel(
    cut_row, cut_ptr, z_out, first_out, second_out, partial_stats, partial_z, num_slots,
    D: tl.constexpr, BLOCK_D: tl.constexpr, H: tl.constexpr, E: tl.constexpr,
    SOFTMAX: tl.constexpr, PARTIAL: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Merge the parts of one cut row in order."""
    head = tl.program_id(1)
    d = tl.arange(0, BLOCK_D)
    row = tl.load(cut_row + tl.program_id(0) + tl.arange(0, 1)).to(tl.int64)  # [1]
    first = tl.load(cut_ptr + tl.program_id(0))  # []
    last = tl.load(cut_ptr + tl.program_id(0) + 1)  # []
    m = tl.full([1], float("-inf"), ACC)
    s = tl.zeros([1], ACC)
    z = tl.zeros([1, BLOCK_D], ACC)
    for begin in range(first, last, E):
        slot = (begin + tl.arange(0, E)).to(tl.int64)
        valid = slot < last
        stat = slot * H + head
        mask = valid[:, None] & (d < D)[None, :]
        part_ptr = partial_z + stat[:, None] * D + d[None, :]
        part = tl.load(part_ptr, mask=mask, other=0.0)  # [E, BLOCK_D]
        if SOFTMAX:
            part_m = tl.load(partial_stats + stat, mask=valid, other=float("-inf"))  # [E]
            num_stats = num_slots.to(tl.int64) * H
            part_s = tl.load(partial_stats + num_stats + stat, mask=valid, other=0.0)  # [E]
            top = tl.maximum(m, tl.max(part_m, 0))  # [1]
            rescale = tl.exp2(m - top)
            factor = tl.exp2(part_m - top)
            m = top
            s = s * rescale + tl.sum(factor * part_s, 0)  # [1]
            z = z * rescale[:, None]
            part = part * factor[:, None]
        z += tl.sum(part, 0)[None, :]  # [1, BLOCK_D]
    write_rows(
        m, s, z, row, row >= 0, head, d, z_out, first_out, second_out, D, H, SOFTMAX, PARTIAL
    )
