"""The kernels of attention whose score takes all channels: scalar products, and GATv2's.

Programs are those of GAT's kernels, but own all channels of a head: the score of an entry is a sum
over them, of the features that are fetched to be added. GATv2's score
``w . leaky_relu(q_i + k_j)`` is the other choice (ADDITIVE).
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import triton
import triton.language as tl

from bevatron.kernels.graph.csr.triton_parts import head_key, is_kept, load_parts
from bevatron.kernels.shared.triton_math import LN2, LOG2E


@triton.jit
def load_rows(x, row, head, c, mask, C: tl.constexpr, H: tl.constexpr, ACC: tl.constexpr):
    """Load a head's channels of some rows, [R, BLOCK]."""
    place = (row * H + head)[:, None] * C + c[None, :]
    return tl.load(x + place, mask=mask[:, None] & (c < C)[None, :], other=0.0).to(ACC)


@triton.jit
def fetch(x, j, head, c, inside, C: tl.constexpr, H: tl.constexpr, ACC: tl.constexpr):
    """Fetch a head's channels of every entry's other end, [R, E, BLOCK]."""
    place = j[:, :, None] * (H * C) + (head * C + c)[None, None, :]
    mask = inside[:, :, None] & (c < C)[None, None, :]
    return tl.load(x + place, mask=mask, other=0.0).to(ACC)


@triton.jit
def score_of(mine, theirs, w, ADDITIVE: tl.constexpr, SLOPE: tl.constexpr):
    """Compute the score of every entry, without scales."""
    if ADDITIVE:
        hidden = mine[:, None, :] + theirs
        return tl.sum(tl.where(hidden > 0.0, hidden, SLOPE * hidden) * w[None, None, :], 2)
    return tl.sum(mine[:, None, :] * theirs, 2)


@triton.jit
def write_rows(
    m, s, z, row, live, head, d, z_out, first_out, second_out,
    D: tl.constexpr, H: tl.constexpr, SOFTMAX: tl.constexpr, PARTIAL: tl.constexpr,
):  # fmt: skip
    """Normalise rows and write them with their L, or write the sums as they are."""
    stat = row * H + head
    place = stat[:, None] * D + d[None, :]
    mask = live[:, None] & (d < D)[None, :]
    if SOFTMAX:
        empty = s == 0.0
        filled = tl.where(empty, 1.0, s)
        if PARTIAL:
            tl.store(first_out + stat, m * LN2, mask=live)
            tl.store(second_out + stat, s, mask=live)
        else:
            z = z / filled[:, None]
            lse = tl.where(empty, float("inf"), m + tl.log2(filled))
            tl.store(first_out + stat, lse, mask=live)
    tl.store(z_out + place, z.to(z_out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["first", "count", "threshold", "num_slots"])
def forward_kernel(  # noqa: PLR0915  a kernel is one piece
    index, part_row, part_start, part_length, part_slot, first, count, values,
    query, key, value, row_scale, col_scale, w_vector, seed, row_ids, col_ids, threshold,
    z_out, first_out, second_out, share_stats, share_z, num_slots,
    C: tl.constexpr, BLOCK_C: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    H: tl.constexpr, R: tl.constexpr, E: tl.constexpr, ACC: tl.constexpr,
    ADDITIVE: tl.constexpr, SOFTMAX: tl.constexpr, PARTIAL: tl.constexpr,
    HAS_VALUE: tl.constexpr, HAS_ROW_SCALE: tl.constexpr, HAS_COL_SCALE: tl.constexpr,
    HAS_VALUES: tl.constexpr, DROPOUT: tl.constexpr, HAS_IDS: tl.constexpr, CUT: tl.constexpr,
    SLOPE: tl.constexpr, INVERSE_KEEP: tl.constexpr,
):  # fmt: skip
    """Score, softmax and sum in one pass over the entries of some rows."""
    head = tl.program_id(1)
    c = tl.arange(0, BLOCK_C)
    d = tl.arange(0, BLOCK_D)
    row, start, length, slot, live = load_parts(
        part_row, part_start, part_length, part_slot, first, count, R
    )
    mine = load_rows(query, row, head, c, live, C, H, ACC)
    if HAS_ROW_SCALE:
        scale = tl.load(row_scale + row * H + head, mask=live, other=0.0).to(ACC)
        mine = mine * scale[:, None]
    w = tl.load(w_vector + head * C + c, mask=c < C, other=0.0).to(ACC) if ADDITIVE else c
    # Three axes, those of the fetched features: with two, every thread would hold all of z.
    m = tl.full([R, 1, 1], float("-inf"), ACC)
    s = tl.zeros([R, 1, 1], ACC)
    z = tl.zeros([R, 1, BLOCK_D], ACC)
    longest = tl.max(length)
    step = tl.arange(0, E)
    for begin in range(0, longest, E):
        entry = begin + step
        inside = entry[None, :] < length[:, None]
        at = start[:, None] + entry[None, :]
        j = tl.load(index + at, mask=inside, other=0).to(tl.int64)
        theirs = fetch(key, j, head, c, inside, C, H, ACC)
        weight = score_of(mine, theirs, w, ADDITIVE, SLOPE)[:, :, None]
        if HAS_COL_SCALE:
            their_scale = tl.load(col_scale + j * H + head, mask=inside, other=0.0).to(ACC)
            weight *= their_scale[:, :, None]
        if SOFTMAX:
            logit = tl.where(inside[:, :, None], weight * LOG2E, float("-inf"))
            top = tl.maximum(m, tl.max(logit, 1, keep_dims=True))
            base = tl.where(top == float("-inf"), 0.0, top)
            rescale = tl.exp2(m - base)
            weight = tl.exp2(logit - base)
            m = top
            s = s * rescale + tl.sum(weight, 1, keep_dims=True)
            z = z * rescale
        if HAS_VALUES:
            weight *= tl.load(values + at, mask=inside, other=0.0).to(ACC)[:, :, None]
        if DROPOUT:
            mask_key = head_key(seed, head)
            keep = is_kept(mask_key, row[:, None], j, row_ids, col_ids, threshold, HAS_IDS)
            weight = tl.where(keep[:, :, None], weight * INVERSE_KEEP, 0.0)
        if HAS_VALUE:
            theirs = fetch(value, j, head, d, inside, D, H, ACC)
        z += tl.sum(weight * theirs, 1, keep_dims=True)
    m = tl.reshape(m, [R])
    s = tl.reshape(s, [R])
    z = tl.reshape(z, [R, BLOCK_D])
    write_rows(
        m, s, z, row, live & (slot < 0), head, d, z_out, first_out, second_out, D, H, SOFTMAX,
        PARTIAL,
    )  # fmt: skip
    if CUT:
        cut = live & (slot >= 0)
        stat = slot * H + head
        if SOFTMAX:
            tl.store(share_stats + stat, m, mask=cut)
            tl.store(share_stats + num_slots.to(tl.int64) * H + stat, s, mask=cut)
        place = stat[:, None] * D + d[None, :]
        tl.store(share_z + place, z, mask=cut[:, None] & (d < D)[None, :])


@triton.jit(do_not_specialize=["num_slots"])
def merge_kernel(
    cut_row, cut_ptr, z_out, first_out, second_out, share_stats, share_z, num_slots,
    D: tl.constexpr, BLOCK_D: tl.constexpr, H: tl.constexpr, E: tl.constexpr,
    SOFTMAX: tl.constexpr, PARTIAL: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Merge the parts of one cut row in their order."""
    head = tl.program_id(1)
    d = tl.arange(0, BLOCK_D)
    row = tl.load(cut_row + tl.program_id(0) + tl.arange(0, 1)).to(tl.int64)
    first = tl.load(cut_ptr + tl.program_id(0))
    last = tl.load(cut_ptr + tl.program_id(0) + 1)
    m = tl.full([1], float("-inf"), ACC)
    s = tl.zeros([1], ACC)
    z = tl.zeros([1, BLOCK_D], ACC)
    for begin in range(first, last, E):
        slot = (begin + tl.arange(0, E)).to(tl.int64)
        inside = slot < last
        stat = slot * H + head
        mask = inside[:, None] & (d < D)[None, :]
        part = tl.load(share_z + stat[:, None] * D + d[None, :], mask=mask, other=0.0)
        if SOFTMAX:
            part_m = tl.load(share_stats + stat, mask=inside, other=float("-inf"))
            total = num_slots.to(tl.int64) * H
            part_s = tl.load(share_stats + total + stat, mask=inside, other=0.0)
            top = tl.maximum(m, tl.max(part_m, 0))
            rescale = tl.exp2(m - top)
            factor = tl.exp2(part_m - top)
            m = top
            s = s * rescale + tl.sum(factor * part_s, 0)
            z = z * rescale[:, None]
            part = part * factor[:, None]
        z += tl.sum(part, 0)[None, :]
    write_rows(
        m, s, z, row, row >= 0, head, d, z_out, first_out, second_out, D, H, SOFTMAX, PARTIAL
    )
