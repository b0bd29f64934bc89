"""The kernels of GAT's attention.

A program owns R rows (forward) or columns (backward), or one part of a long one, and BLOCK_C
channels of one head. It steps over their entries E at a time, gathers the features of the other
ends, [E, R, BLOCK_C], and accumulates them in registers with an online softmax; nothing is stored
per entry. A whole row is written once; the parts of a cut row write partial results, which a merge
kernel adds in order. Logits are scaled by log2(e), so exponentials are exp2. The sum of the two
scores is rounded in the same way forward and backward, so its sign agrees.

Tiles are [entries, rows, channels] so that the lanes of a warp go to channels and rows, and each
row's entries are summed within a thread, without shuffles.

Suffixes: ``p`` sums over entries with a positive score, ``n`` over the others; m is the running
maximum, s the sum of weights, z the weighted sum of features.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import triton
import triton.language as tl

from bevatron.kernels.graph.csr.triton_parts import (
    channel_offsets,
    channels_of,
    entries_of,
    head_key,
    is_kept,
    load_index,
    load_parts,
)
from bevatron.kernels.shared.triton_math import LN2, LOG2E

TRAINING, PARTIAL_INFERENCE, PARTIAL = tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
"""Odd modes save what a backward pass needs; modes from 2 compute a block; 0 is inference."""


@triton.jit
def sum_of_sides(zp, zn):
    """Add the sums over positive and over other entries.

    An infinite feature of one side met a weight of zero in the other side's sum, which became NaN.
    Selecting per entry would take half as many instructions again, so if both sides have infinite
    features the result is NaN.
    """
    number = tl.where(zn != zn, zp, zn)  # noqa: PLR0124  true of NaN only
    return tl.where(tl.abs(number) == float("inf"), number, zp + zn)


@triton.jit
def write_rows(
    m, sp, sn, zp, zn, row, live, head, c, z_out, first_out, second_out, third_out, side_out,
    C: tl.constexpr, H: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """Normalise rows and write what the mode requires.

    Training keeps the part of z, from positive or from other entries, with the smaller weight; if
    that weight is zero, the part is not written.
    """
    stat = row * H + head
    mask = live[:, None] & (c < C)[None, :]
    offsets = stat[:, None] * C + c[None, :]
    leader = live & (tl.min(c) == 0)  # [R]
    s = sp + sn
    z = zp if MODE % 2 == 0 else sum_of_sides(zp, zn)
    if MODE >= PARTIAL_INFERENCE:
        tl.store(first_out + stat, m * LN2, mask=leader)
        tl.store(second_out + stat, s, mask=leader)
        tl.store(z_out + offsets, z, mask=mask)
        if MODE == PARTIAL:
            tl.store(third_out + stat, sp, mask=leader)
            tl.store(side_out + offsets, zp, mask=mask)
    else:
        empty = s == 0.0
        inverse = 1.0 / tl.where(empty, 1.0, s)
        z = z * inverse[:, None]
        tl.store(z_out + offsets, z.to(z_out.dtype.element_ty), mask=mask)
        if MODE == TRAINING:
            lse = tl.where(empty, float("inf"), m + tl.log2(tl.where(empty, 1.0, s)))
            tl.store(first_out + stat, lse, mask=leader)
            flip = sp > sn
            share = tl.where(flip, -sn, sp) * inverse
            tl.store(second_out + stat, share, mask=leader)
            side = tl.where(flip[:, None], zn, zp) * inverse[:, None]
            tl.store(side_out + offsets, side, mask=mask & (share != 0.0)[:, None])


@triton.jit
def add_lanes(m, sp, sn, zp, zn):
    """Merge the softmax states of a dealt part's lanes; every lane gets the result."""
    top = tl.max(m, 0)  # []
    factor = tl.exp2(m - tl.where(top == float("-inf"), 0.0, top))
    zp = tl.sum(zp * factor[:, None], 0)[None, :] + tl.zeros_like(zp)  # [R, BLOCK_C]
    zn = tl.sum(zn * factor[:, None], 0)[None, :] + tl.zeros_like(zn)  # [R, BLOCK_C]
    sp = tl.sum(sp * factor, 0) + tl.zeros_like(sp)  # [R]
    sn = tl.sum(sn * factor, 0) + tl.zeros_like(sn)  # [R]
    return top + tl.zeros_like(m), sp, sn, zp, zn


@triton.jit(do_not_specialize=["first", "count", "threshold", "num_slots"])
def forward_kernel(  # noqa: C901, PLR0912, PLR0915  a kernel is one piece
    index, part_row, part_start, part_length, part_slot, first, count, values, x, row_score,
    col_score, seed, row_ids, col_ids, threshold,
    z_out, first_out, second_out, third_out, side_out, partial_stats, partial_z, num_slots,
    C: tl.constexpr, H: tl.constexpr, BLOCK_C: tl.constexpr, SLICES: tl.constexpr,
    R: tl.constexpr, E: tl.constexpr, MODE: tl.constexpr, HAS_VALUES: tl.constexpr,
    DROPOUT: tl.constexpr, HAS_IDS: tl.constexpr, ACC: tl.constexpr, CUT: tl.constexpr,
    SLOPE: tl.constexpr, INVERSE_KEEP: tl.constexpr, DEAL: tl.constexpr,
    FILLED: tl.constexpr,
):  # fmt: skip
    """Compute scores, softmax and weighted sums in one pass over the entries of R rows."""
    head, c = channels_of(BLOCK_C, SLICES)
    row, start, length, slot, live = load_parts(
        part_row, part_start, part_length, part_slot, first, count, R, DEAL
    )
    own = tl.load(row_score + row * H + head, mask=live, other=0.0).to(ACC)  # [R]
    if DROPOUT:
        key = head_key(seed, head)
    m = tl.full([R], float("-inf"), ACC)
    sp = tl.zeros([R], ACC)
    sn = tl.zeros([R], ACC)
    zp = tl.zeros([R, BLOCK_C], ACC)
    zn = tl.zeros([R, BLOCK_C], ACC)
    log2e = tl.full([1, 1], LOG2E, ACC)
    longest = tl.max(length)  # []
    if DEAL:
        longest = tl.cdiv(longest, R)
    entry = entries_of(0, R, E, DEAL)  # [E, R]
    next_j = load_index(index, start, length, entry, FILLED)  # [E, R]
    for begin in range(0, longest, E):
        entry = entries_of(begin, R, E, DEAL)
        valid = entry < length[None, :]
        j = next_j.to(tl.int64)
        next_entry = entries_of(begin + E, R, E, DEAL)
        next_j = load_index(index, start, length, next_entry, FILLED)  # [E, R]
        if FILLED:
            other_score = tl.load(col_score + j * H + head).to(ACC)  # [E, R]
        else:
            other_score = tl.load(col_score + j * H + head, mask=valid, other=0.0).to(ACC)  # [E, R]
        score = own[None, :] + other_score
        positive = score > 0.0
        logit = tl.where(valid, score * tl.where(positive, log2e, SLOPE * log2e), float("-inf"))
        top = tl.maximum(m, tl.max(logit, 0))  # [R]
        # A row without entries so far has no maximum; any finite base does.
        base = tl.where(top == float("-inf"), 0.0, top)
        rescale = tl.exp2(m - base)
        weight = tl.exp2(logit - base[None, :])
        m = top
        sp = sp * rescale + tl.sum(tl.where(positive, weight, 0.0), 0)  # [R]
        sn = sn * rescale + tl.sum(tl.where(positive, 0.0, weight), 0)  # [R]
        if HAS_VALUES:
            value_ptr = values + start[None, :] + entry
            weight *= tl.load(value_ptr, mask=valid, other=0.0).to(ACC)  # [E, R]
        if DROPOUT:
            keep = is_kept(key, row[None, :], j, row_ids, col_ids, threshold, HAS_IDS)
            weight = tl.where(keep, weight * INVERSE_KEEP, 0.0)
        offsets = channel_offsets(j, head, c, C, H, R, BLOCK_C)
        if FILLED and C % BLOCK_C == 0:
            features = tl.load(x + offsets).to(ACC)  # [E, R, BLOCK_C]
        else:
            mask = valid[:, :, None]
            if C % BLOCK_C != 0:
                mask = mask & (c < C)[None, None, :]
            features = tl.load(x + offsets, mask=mask, other=0.0).to(ACC)  # [E, R, BLOCK_C]
        if MODE % 2 == 0:
            zp = zp * rescale[:, None] + tl.sum(weight[:, :, None] * features, 0)  # [R, BLOCK_C]
        else:
            wp = tl.where(positive, weight, 0.0)
            wn = tl.where(positive, 0.0, weight)
            zp = zp * rescale[:, None] + tl.sum(wp[:, :, None] * features, 0)  # [R, BLOCK_C]
            zn = zn * rescale[:, None] + tl.sum(wn[:, :, None] * features, 0)  # [R, BLOCK_C]
    if DEAL:
        m, sp, sn, zp, zn = add_lanes(m, sp, sn, zp, zn)
        live = live & (tl.arange(0, R) == 0)
    is_whole = live & (slot < 0)
    write_rows(
        m, sp, sn, zp, zn, row, is_whole, head, c, z_out, first_out, second_out, third_out,
        side_out, C, H, MODE,
    )  # fmt: skip
    if CUT:
        is_cut = live & (slot >= 0)
        stat = slot * H + head
        num_stats = num_slots.to(tl.int64) * H
        leader = is_cut & (tl.min(c) == 0)  # [R]
        tl.store(partial_stats + stat, m, mask=leader)
        tl.store(partial_stats + num_stats + stat, sp, mask=leader)
        tl.store(partial_stats + 2 * num_stats + stat, sn, mask=leader)
        mask = is_cut[:, None] & (c < C)[None, :]
        offsets = stat[:, None] * C + c[None, :]
        tl.store(partial_z + offsets, zp, mask=mask)
        if MODE % 2 == 1:
            tl.store(partial_z + num_stats * C + offsets, zn, mask=mask)


@triton.jit(do_not_specialize=["num_slots"])
def merge_kernel(
    cut_row, cut_ptr, z_out, first_out, second_out, third_out, side_out, partial_stats, partial_z,
    num_slots, C: tl.constexpr, H: tl.constexpr, BLOCK_C: tl.constexpr, SLICES: tl.constexpr,
    E: tl.constexpr, MODE: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Merge the parts of one cut row in order."""
    head, c = channels_of(BLOCK_C, SLICES)
    cut = tl.program_id(0) + tl.arange(0, 1)
    row = tl.load(cut_row + cut).to(tl.int64)  # [1]
    first = tl.load(cut_ptr + tl.program_id(0))  # []
    last = tl.load(cut_ptr + tl.program_id(0) + 1)  # []
    num_stats = num_slots.to(tl.int64) * H
    step = tl.arange(0, E)
    m = tl.full([1], float("-inf"), ACC)
    sp = tl.zeros([1], ACC)
    sn = tl.zeros([1], ACC)
    zp = tl.zeros([1, BLOCK_C], ACC)
    zn = tl.zeros([1, BLOCK_C], ACC)
    for begin in range(first, last, E):
        slot = (begin + step).to(tl.int64)
        valid = slot < last
        stat = slot * H + head
        part_m = tl.load(partial_stats + stat, mask=valid, other=float("-inf"))  # [E]
        top = tl.maximum(m, tl.max(part_m, 0))  # [1]
        rescale = tl.exp2(m - top)
        factor = tl.exp2(part_m - top)
        m = top
        part_sp = tl.load(partial_stats + num_stats + stat, mask=valid, other=0.0)  # [E]
        part_sn = tl.load(partial_stats + 2 * num_stats + stat, mask=valid, other=0.0)  # [E]
        sp = sp * rescale + tl.sum(factor * part_sp, 0)  # [1]
        sn = sn * rescale + tl.sum(factor * part_sn, 0)  # [1]
        mask = valid[:, None] & (c < C)[None, :]
        offsets = stat[:, None] * C + c[None, :]
        part = tl.load(partial_z + offsets, mask=mask, other=0.0)  # [E, BLOCK_C]
        zp = zp * rescale[:, None] + tl.sum(factor[:, None] * part, 0)[None, :]  # [1, BLOCK_C]
        if MODE % 2 == 1:
            part_ptr = partial_z + num_stats * C + offsets
            part = tl.load(part_ptr, mask=mask, other=0.0)  # [E, BLOCK_C]
            zn = zn * rescale[:, None] + tl.sum(factor[:, None] * part, 0)[None, :]  # [1, BLOCK_C]
    write_rows(
        m, sp, sn, zp, zn, row, row >= 0, head, c, z_out, first_out, second_out, third_out,
        side_out, C, H, MODE,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])
def prepare_kernel(
    grad, z, side, lse, share, row_score, info, row_grad, num_rows,
    C: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr,
    ACC: tl.constexpr, SLOPE: tl.constexpr,
):  # fmt: skip
    """Compute delta = <G, z> and the row scores' gradient; pack the statistics columns gather."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    valid = row < num_rows
    weight_part = tl.load(share + row, mask=valid, other=0.0)  # [BLOCK_N]
    one_sided = weight_part == 0.0
    delta = tl.zeros([BLOCK_N], ACC)
    dside = tl.zeros([BLOCK_N], ACC)
    for begin in range(0, C, BLOCK_C):
        c = begin + tl.arange(0, BLOCK_C)
        mask = valid[:, None] & (c < C)[None, :]
        offsets = row[:, None] * C + c[None, :]
        g = tl.load(grad + offsets, mask=mask, other=0.0).to(ACC)  # [BLOCK_N, BLOCK_C]
        z_row = tl.load(z + offsets, mask=mask, other=0.0).to(ACC)  # [BLOCK_N, BLOCK_C]
        delta += tl.sum(g * z_row, 1)  # [BLOCK_N]
        mask = mask & ~one_sided[:, None]
        side_row = tl.load(side + offsets, mask=mask, other=0.0).to(ACC)  # [BLOCK_N, BLOCK_C]
        dside += tl.sum(g * side_row, 1)  # [BLOCK_N]
    dscore = (1.0 - SLOPE) * (dside - delta * tl.abs(weight_part))
    dscore = tl.where(weight_part < 0.0, -dscore, dscore)
    tl.store(row_grad + row, dscore.to(row_grad.dtype.element_ty), mask=valid)
    score = tl.load(row_score + row, mask=valid, other=0.0).to(ACC)  # [BLOCK_N]
    tl.store(info + 4 * row, score, mask=valid)
    tl.store(info + 4 * row + 1, tl.load(lse + row, mask=valid, other=0.0), mask=valid)  # [BLOCK_N]
    tl.store(info + 4 * row + 2, delta, mask=valid)


@triton.jit
def write_columns(
    q, qs, ds, row, live, filled, head, c, x, dx, dscore, num_columns,
    C: tl.constexpr, H: tl.constexpr, BLOCK_C: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Write the gradients of x and these channels' part of the gradient of the column scores."""
    stat = row * H + head
    mask = live[:, None] & (c < C)[None, :]
    offsets = stat[:, None] * C + c[None, :]
    tl.store(dx + offsets, q.to(dx.dtype.element_ty), mask=mask)
    own = tl.load(x + offsets, mask=mask & filled[:, None], other=0.0).to(ACC)  # [R, BLOCK_C]
    leads = tl.min(c) == 0
    dscore_part = tl.sum(own * qs, 1) - tl.where(leads, ds, 0.0)  # [R]
    share = (tl.min(c) // BLOCK_C).to(tl.int64) * num_columns * H
    tl.store(dscore + share + stat, dscore_part, mask=live)


@triton.jit(do_not_specialize=["first", "count", "threshold", "num_slots", "num_columns"])
def backward_kernel(  # noqa: PLR0915  a kernel is one piece
    index, part_row, part_start, part_length, part_slot, first, count, values, x, grad, info,
    col_score, seed, row_ids, col_ids, threshold,
    dx, dscore, partial_stats, partial_z, num_slots, num_columns,
    C: tl.constexpr, H: tl.constexpr, BLOCK_C: tl.constexpr, SLICES: tl.constexpr,
    R: tl.constexpr, E: tl.constexpr, HAS_VALUES: tl.constexpr,
    DROPOUT: tl.constexpr, HAS_IDS: tl.constexpr, ACC: tl.constexpr, CUT: tl.constexpr,
    SLOPE: tl.constexpr, INVERSE_KEEP: tl.constexpr,
    PACKED: tl.constexpr, DEAL: tl.constexpr, FILLED: tl.constexpr,
):  # fmt: skip
    """Sum the gradients of rows over the entries of R columns, without a dot product per entry."""
    head, c = channels_of(BLOCK_C, SLICES)
    col, start, length, slot, live = load_parts(
        part_row, part_start, part_length, part_slot, first, count, R, DEAL
    )
    own = tl.load(col_score + col * H + head, mask=live, other=0.0).to(ACC)  # [R]
    if DROPOUT:
        key = head_key(seed, head)
    ds = tl.zeros([R], ACC)
    q = tl.zeros([R, BLOCK_C], ACC)
    qs = tl.zeros([R, BLOCK_C], ACC)
    log2e = tl.full([1, 1], LOG2E, ACC)
    longest = tl.max(length)  # []
    if DEAL:
        longest = tl.cdiv(longest, R)
    entry = entries_of(0, R, E, DEAL)  # [E, R]
    next_i = load_index(index, start, length, entry, FILLED)  # [E, R]
    for begin in range(0, longest, E):
        entry = entries_of(begin, R, E, DEAL)
        valid = entry < length[None, :]
        i = next_i.to(tl.int64)
        next_entry = entries_of(begin + E, R, E, DEAL)
        next_i = load_index(index, start, length, next_entry, FILLED)  # [E, R]
        info_offset = (i * H + head) * 4
        if PACKED:
            pair_ptr = (info + info_offset).to(tl.pointer_type(tl.int64))
            pair = tl.load(pair_ptr, mask=valid, other=0)  # [E, R]
            other_score = (pair & 0xFFFFFFFF).to(tl.int32).to(tl.float32, bitcast=True)
            lse = (pair >> 32).to(tl.int32).to(tl.float32, bitcast=True)
        else:
            other_score = tl.load(info + info_offset, mask=valid, other=0.0)  # [E, R]
            lse = tl.load(info + info_offset + 1, mask=valid, other=0.0)  # [E, R]
        delta = tl.load(info + info_offset + 2, mask=valid, other=0.0)  # [E, R]
        score = own[None, :] + other_score
        positive = score > 0.0
        logit = tl.where(
            valid, score * tl.where(positive, log2e, SLOPE * log2e) - lse, float("-inf")
        )
        weight = tl.exp2(logit)
        sloped = tl.where(positive, weight, SLOPE * weight)
        ds += tl.sum(sloped * delta, 0)  # [R]
        if HAS_VALUES:
            value_ptr = values + start[None, :] + entry
            factor = tl.load(value_ptr, mask=valid, other=0.0).to(ACC)  # [E, R]
            weight *= factor
            sloped *= factor
        if DROPOUT:
            keep = is_kept(key, i, col[None, :], row_ids, col_ids, threshold, HAS_IDS)
            weight = tl.where(keep, weight * INVERSE_KEEP, 0.0)
            sloped = tl.where(keep, sloped * INVERSE_KEEP, 0.0)
        offsets = channel_offsets(i, head, c, C, H, R, BLOCK_C)
        if FILLED and C % BLOCK_C == 0:
            features = tl.load(grad + offsets).to(ACC)  # [E, R, BLOCK_C]
        else:
            mask = valid[:, :, None]
            if C % BLOCK_C != 0:
                mask = mask & (c < C)[None, None, :]
            features = tl.load(grad + offsets, mask=mask, other=0.0).to(ACC)  # [E, R, BLOCK_C]
        q += tl.sum(weight[:, :, None] * features, 0)  # [R, BLOCK_C]
        qs += tl.sum(sloped[:, :, None] * features, 0)  # [R, BLOCK_C]
    if DEAL:
        q = tl.sum(q, 0)[None, :] + tl.zeros_like(q)  # [R, BLOCK_C]
        qs = tl.sum(qs, 0)[None, :] + tl.zeros_like(qs)  # [R, BLOCK_C]
        ds = tl.sum(ds, 0) + tl.zeros_like(ds)  # [R]
        live = live & (tl.arange(0, R) == 0)
    is_whole = live & (slot < 0)
    write_columns(
        q, qs, ds, col, is_whole, length > 0, head, c, x, dx, dscore, num_columns, C, H, BLOCK_C,
        ACC,
    )  # fmt: skip
    if CUT:
        is_cut = live & (slot >= 0)
        stat = slot * H + head
        num_stats = num_slots.to(tl.int64) * H
        tl.store(partial_stats + stat, ds, mask=is_cut & (tl.min(c) == 0))  # [R]
        mask = is_cut[:, None] & (c < C)[None, :]
        offsets = stat[:, None] * C + c[None, :]
        tl.store(partial_z + offsets, q, mask=mask)
        tl.store(partial_z + num_stats * C + offsets, qs, mask=mask)


@triton.jit(do_not_specialize=["num_slots", "num_columns"])
def backward_merge_kernel(
    cut_row, cut_ptr, x, dx, dscore, partial_stats, partial_z, num_slots, num_columns,
    C: tl.constexpr, H: tl.constexpr, BLOCK_C: tl.constexpr, SLICES: tl.constexpr,
    E: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Add the parts of one cut column in order."""
    head, c = channels_of(BLOCK_C, SLICES)
    cut = tl.program_id(0) + tl.arange(0, 1)
    col = tl.load(cut_row + cut).to(tl.int64)  # [1]
    first = tl.load(cut_ptr + tl.program_id(0))  # []
    last = tl.load(cut_ptr + tl.program_id(0) + 1)  # []
    num_stats = num_slots.to(tl.int64) * H
    step = tl.arange(0, E)
    ds = tl.zeros([1], ACC)
    q = tl.zeros([1, BLOCK_C], ACC)
    qs = tl.zeros([1, BLOCK_C], ACC)
    for begin in range(first, last, E):
        slot = (begin + step).to(tl.int64)
        valid = slot < last
        stat = slot * H + head
        ds += tl.sum(tl.load(partial_stats + stat, mask=valid, other=0.0), 0)  # [1]
        mask = valid[:, None] & (c < C)[None, :]
        offsets = stat[:, None] * C + c[None, :]
        part = tl.load(partial_z + offsets, mask=mask, other=0.0)  # [E, BLOCK_C]
        q += tl.sum(part, 0)[None, :]  # [1, BLOCK_C]
        part = tl.load(partial_z + num_stats * C + offsets, mask=mask, other=0.0)  # [E, BLOCK_C]
        qs += tl.sum(part, 0)[None, :]  # [1, BLOCK_C]
    live = col >= 0
    write_columns(
        q, qs, ds, col, live, live, head, c, x, dx, dscore, num_columns, C, H, BLOCK_C, ACC
    )


@triton.jit(do_not_specialize=["first", "count", "threshold"])
def values_kernel(
    index, part_row, part_start, part_length, part_slot, first, count, x, grad, info,
    col_score, seed, row_ids, col_ids, threshold, dvalues,
    C: tl.constexpr, H: tl.constexpr, BLOCK_C: tl.constexpr,
    R: tl.constexpr, E: tl.constexpr,
    DROPOUT: tl.constexpr, HAS_IDS: tl.constexpr, ACC: tl.constexpr,
    SLOPE: tl.constexpr, INVERSE_KEEP: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of every entry's value: its attention times <G_i, x_j>."""
    row, start, length, _slot, live = load_parts(
        part_row, part_start, part_length, part_slot, first, count, R
    )
    log2e = tl.full([1, 1], LOG2E, ACC)
    longest = tl.max(length)  # []
    for begin in range(0, longest, E):
        entry = begin + tl.arange(0, E)
        valid = entry[None, :] < length[:, None]
        position = start[:, None] + entry[None, :]
        j = tl.load(index + position, mask=valid, other=0).to(tl.int64)  # [R, E]
        dvalue = tl.zeros([R, E], ACC)
        for head in range(H):
            dot = tl.zeros([R, E], ACC)
            for block in range(0, C, BLOCK_C):
                c = block + tl.arange(0, BLOCK_C)
                mask = live[:, None] & (c < C)[None, :]
                offsets = (row * H + head)[:, None] * C + c[None, :]
                g = tl.load(grad + offsets, mask=mask, other=0.0).to(ACC)  # [R, BLOCK_C]
                offsets = j[:, :, None] * (H * C) + (head * C + c)[None, None, :]
                mask = valid[:, :, None] & (c < C)[None, None, :]
                features = tl.load(x + offsets, mask=mask, other=0.0).to(ACC)  # [R, E, BLOCK_C]
                dot += tl.sum(g[:, None, :] * features, 2)  # [R, E]
            stat = (row * H + head) * 4
            own = tl.load(info + stat, mask=live, other=0.0)  # [R]
            lse = tl.load(info + stat + 1, mask=live, other=0.0)  # [R]
            other_score = tl.load(col_score + j * H + head, mask=valid, other=0.0).to(ACC)  # [R, E]
            score = own[:, None] + other_score
            weight = tl.exp2(score * tl.where(score > 0.0, log2e, SLOPE * log2e) - lse[:, None])
            if DROPOUT:
                key = head_key(seed, head)
                keep = is_kept(key, row[:, None], j, row_ids, col_ids, threshold, HAS_IDS)
                weight = tl.where(keep, weight * INVERSE_KEEP, 0.0)
            dvalue += weight * dot
        tl.store(dvalues + position, dvalue.to(dvalues.dtype.element_ty), mask=valid)
