"""The kernels of GAT's attention.

A program owns a few rows (forward) or columns (backward), or a part of a long one, and a share of
the channels of a head. Every step fetches the features of some entries of each and adds them up in
registers; nothing is kept for an entry. Exponentials are powers of two, of logits times log2(e).
The sum of the two scores is rounded alike forward and backward, so its sign is the same in both.

Tiles are [entries, rows, channels], and the lanes of a warp go to channels and rows, so that each
row's entries are added up within a thread, without a shuffle.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import triton
import triton.language as tl

from bevatron.kernels.graph.csr.triton_parts import (
    channels_of,
    entries_of,
    head_key,
    is_kept,
    load_index,
    load_parts,
    places_of,
)
from bevatron.kernels.shared.triton_math import LN2, LOG2E

TRAINING, PARTIAL_INFERENCE, PARTIAL = tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
"""Odd modes keep what a backward pass needs; those from 2 are of a block; 0 is inference."""


@triton.jit
def sum_of_sides(zp, zn):
    """Add the sums over positive and over other entries.

    An infinite feature of one side met a weight of nought, which made NaN, in the other's sum. To
    choose entry by entry would cost half as many instructions again, so where both sides have
    infinite features the result is NaN.
    """
    number = tl.where(zn != zn, zp, zn)  # noqa: PLR0124  is it NaN
    return tl.where(tl.abs(number) == float("inf"), number, zp + zn)


@triton.jit
def write_rows(
    m, sp, sn, zp, zn, row, live, head, c, z_out, first_out, second_out, third_out, side_out,
    C: tl.constexpr, H: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """Normalise rows and write what the mode asks for.

    Training keeps of Z the part, of positive or of other entries, that holds less of the weight;
    if it holds nothing, it is left unwritten.
    """
    stat = row * H + head
    mask = live[:, None] & (c < C)[None, :]
    place = stat[:, None] * C + c[None, :]
    leader = live & (tl.min(c) == 0)
    s = sp + sn
    z = zp if MODE % 2 == 0 else sum_of_sides(zp, zn)
    if MODE >= PARTIAL_INFERENCE:
        tl.store(first_out + stat, m * LN2, mask=leader)
        tl.store(second_out + stat, s, mask=leader)
        tl.store(z_out + place, z, mask=mask)
        if MODE == PARTIAL:
            tl.store(third_out + stat, sp, mask=leader)
            tl.store(side_out + place, zp, mask=mask)
    else:
        empty = s == 0.0
        inverse = 1.0 / tl.where(empty, 1.0, s)
        z = z * inverse[:, None]
        tl.store(z_out + place, z.to(z_out.dtype.element_ty), mask=mask)
        if MODE == TRAINING:
            lse = tl.where(empty, float("inf"), m + tl.log2(tl.where(empty, 1.0, s)))
            tl.store(first_out + stat, lse, mask=leader)
            flip = sp > sn
            share = tl.where(flip, -sn, sp) * inverse
            tl.store(second_out + stat, share, mask=leader)
            side = tl.where(flip[:, None], zn, zp) * inverse[:, None]
            tl.store(side_out + place, side, mask=mask & (share != 0.0)[:, None])


@triton.jit
def add_lanes(m, sp, sn, zp, zn):
    """Merge the shares of a part that was dealt out into every lane."""
    top = tl.max(m, 0)
    factor = tl.exp2(m - tl.where(top == float("-inf"), 0.0, top))
    zp = tl.sum(zp * factor[:, None], 0)[None, :] + tl.zeros_like(zp)
    zn = tl.sum(zn * factor[:, None], 0)[None, :] + tl.zeros_like(zn)
    sp = tl.sum(sp * factor, 0) + tl.zeros_like(sp)
    sn = tl.sum(sn * factor, 0) + tl.zeros_like(sn)
    return top + tl.zeros_like(m), sp, sn, zp, zn


@triton.jit(do_not_specialize=["first", "count", "threshold", "num_slots"])
def forward_kernel(  # noqa: C901, PLR0912, PLR0915  a kernel is one piece
    index, part_row, part_start, part_length, part_slot, first, count, values, x, row_score,
    col_score, seed, row_ids, col_ids, threshold,
    z_out, first_out, second_out, third_out, side_out, share_stats, share_z, num_slots,
    C: tl.constexpr, H: tl.constexpr, BLOCK_C: tl.constexpr, SLICES: tl.constexpr,
    R: tl.constexpr, E: tl.constexpr, MODE: tl.constexpr, HAS_VALUES: tl.constexpr,
    DROPOUT: tl.constexpr, HAS_IDS: tl.constexpr, ACC: tl.constexpr, CUT: tl.constexpr,
    SLOPE: tl.constexpr, INVERSE_KEEP: tl.constexpr, DEAL: tl.constexpr,
    FILLED: tl.constexpr,
):  # fmt: skip
    """Score, softmax and sum in one pass over the entries of some rows."""
    head, c = channels_of(BLOCK_C, SLICES)
    row, start, length, slot, live = load_parts(
        part_row, part_start, part_length, part_slot, first, count, R, DEAL
    )
    mine = tl.load(row_score + row * H + head, mask=live, other=0.0).to(ACC)
    if DROPOUT:
        key = head_key(seed, head)
    m = tl.full([R], float("-inf"), ACC)
    sp = tl.zeros([R], ACC)
    sn = tl.zeros([R], ACC)
    zp = tl.zeros([R, BLOCK_C], ACC)
    zn = tl.zeros([R, BLOCK_C], ACC)
    one = tl.full([1, 1], LOG2E, ACC)
    longest = tl.max(length)
    if DEAL:
        longest = tl.cdiv(longest, R)
    entry = entries_of(0, R, E, DEAL)
    ahead = load_index(index, start, length, entry, FILLED)
    for begin in range(0, longest, E):
        entry = entries_of(begin, R, E, DEAL)
        inside = entry < length[None, :]
        j = ahead.to(tl.int64)
        ahead = load_index(index, start, length, entries_of(begin + E, R, E, DEAL), FILLED)
        if FILLED:
            theirs = tl.load(col_score + j * H + head).to(ACC)
        else:
            theirs = tl.load(col_score + j * H + head, mask=inside, other=0.0).to(ACC)
        score = mine[None, :] + theirs
        positive = score > 0.0
        logit = tl.where(inside, score * tl.where(positive, one, SLOPE * one), float("-inf"))
        top = tl.maximum(m, tl.max(logit, 0))
        # A row without entries so far has no largest logit: any finite number does.
        base = tl.where(top == float("-inf"), 0.0, top)
        rescale = tl.exp2(m - base)
        weight = tl.exp2(logit - base[None, :])
        m = top
        sp = sp * rescale + tl.sum(tl.where(positive, weight, 0.0), 0)
        sn = sn * rescale + tl.sum(tl.where(positive, 0.0, weight), 0)
        if HAS_VALUES:
            weight *= tl.load(values + start[None, :] + entry, mask=inside, other=0.0).to(ACC)
        if DROPOUT:
            keep = is_kept(key, row[None, :], j, row_ids, col_ids, threshold, HAS_IDS)
            weight = tl.where(keep, weight * INVERSE_KEEP, 0.0)
        place = places_of(j, head, c, C, H, R, BLOCK_C)
        if FILLED and C % BLOCK_C == 0:
            features = tl.load(x + place).to(ACC)
        else:
            mask = inside[:, :, None]
            if C % BLOCK_C != 0:
                mask = mask & (c < C)[None, None, :]
            features = tl.load(x + place, mask=mask, other=0.0).to(ACC)
        if MODE % 2 == 0:
            zp = zp * rescale[:, None] + tl.sum(weight[:, :, None] * features, 0)
        else:
            wp = tl.where(positive, weight, 0.0)
            wn = tl.where(positive, 0.0, weight)
            zp = zp * rescale[:, None] + tl.sum(wp[:, :, None] * features, 0)
            zn = zn * rescale[:, None] + tl.sum(wn[:, :, None] * features, 0)
    if DEAL:
        m, sp, sn, zp, zn = add_lanes(m, sp, sn, zp, zn)
        live = live & (tl.arange(0, R) == 0)
    whole = live & (slot < 0)
    write_rows(
        m, sp, sn, zp, zn, row, whole, head, c, z_out, first_out, second_out, third_out, side_out,
        C, H, MODE,
    )  # fmt: skip
    if CUT:
        cut = live & (slot >= 0)
        stat = slot * H + head
        total = num_slots.to(tl.int64) * H
        leader = cut & (tl.min(c) == 0)
        tl.store(share_stats + stat, m, mask=leader)
        tl.store(share_stats + total + stat, sp, mask=leader)
        tl.store(share_stats + 2 * total + stat, sn, mask=leader)
        mask = cut[:, None] & (c < C)[None, :]
        place = stat[:, None] * C + c[None, :]
        tl.store(share_z + place, zp, mask=mask)
        if MODE % 2 == 1:
            tl.store(share_z + total * C + place, zn, mask=mask)


@triton.jit(do_not_specialize=["num_slots"])
def merge_kernel(
    cut_row, cut_ptr, z_out, first_out, second_out, third_out, side_out, share_stats, share_z,
    num_slots, C: tl.constexpr, H: tl.constexpr, BLOCK_C: tl.constexpr, SLICES: tl.constexpr,
    E: tl.constexpr, MODE: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Merge the parts of one cut row in their order."""
    head, c = channels_of(BLOCK_C, SLICES)
    one = tl.program_id(0) + tl.arange(0, 1)
    row = tl.load(cut_row + one).to(tl.int64)
    first = tl.load(cut_ptr + tl.program_id(0))
    last = tl.load(cut_ptr + tl.program_id(0) + 1)
    total = num_slots.to(tl.int64) * H
    step = tl.arange(0, E)
    m = tl.full([1], float("-inf"), ACC)
    sp = tl.zeros([1], ACC)
    sn = tl.zeros([1], ACC)
    zp = tl.zeros([1, BLOCK_C], ACC)
    zn = tl.zeros([1, BLOCK_C], ACC)
    for begin in range(first, last, E):
        slot = (begin + step).to(tl.int64)
        inside = slot < last
        stat = slot * H + head
        part_m = tl.load(share_stats + stat, mask=inside, other=float("-inf"))
        top = tl.maximum(m, tl.max(part_m, 0))
        rescale = tl.exp2(m - top)
        factor = tl.exp2(part_m - top)
        m = top
        part_sp = tl.load(share_stats + total + stat, mask=inside, other=0.0)
        part_sn = tl.load(share_stats + 2 * total + stat, mask=inside, other=0.0)
        sp = sp * rescale + tl.sum(factor * part_sp, 0)
        sn = sn * rescale + tl.sum(factor * part_sn, 0)
        mask = inside[:, None] & (c < C)[None, :]
        place = stat[:, None] * C + c[None, :]
        part = tl.load(share_z + place, mask=mask, other=0.0)
        zp = zp * rescale[:, None] + tl.sum(factor[:, None] * part, 0)[None, :]
        if MODE % 2 == 1:
            part = tl.load(share_z + total * C + place, mask=mask, other=0.0)
            zn = zn * rescale[:, None] + tl.sum(factor[:, None] * part, 0)[None, :]
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
    """Compute delta = <G, z> and the gradient of the rows' scores; pack what columns fetch."""
    place = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    live = place < num_rows
    part = tl.load(share + place, mask=live, other=0.0)
    one_sided = part == 0.0
    delta = tl.zeros([BLOCK_N], ACC)
    along = tl.zeros([BLOCK_N], ACC)
    for begin in range(0, C, BLOCK_C):
        c = begin + tl.arange(0, BLOCK_C)
        mask = live[:, None] & (c < C)[None, :]
        at = place[:, None] * C + c[None, :]
        g = tl.load(grad + at, mask=mask, other=0.0).to(ACC)
        delta += tl.sum(g * tl.load(z + at, mask=mask, other=0.0).to(ACC), 1)
        mask = mask & ~one_sided[:, None]
        along += tl.sum(g * tl.load(side + at, mask=mask, other=0.0).to(ACC), 1)
    by_score = (1.0 - SLOPE) * (along - delta * tl.abs(part))
    by_score = tl.where(part < 0.0, -by_score, by_score)
    tl.store(row_grad + place, by_score.to(row_grad.dtype.element_ty), mask=live)
    score = tl.load(row_score + place, mask=live, other=0.0).to(ACC)
    tl.store(info + 4 * place, score, mask=live)
    tl.store(info + 4 * place + 1, tl.load(lse + place, mask=live, other=0.0), mask=live)
    tl.store(info + 4 * place + 2, delta, mask=live)


@triton.jit
def write_columns(
    q, qs, ds, row, live, filled, head, c, x, dx, dscore, num_columns,
    C: tl.constexpr, H: tl.constexpr, BLOCK_C: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Write the gradients of x and of this share of channels' part of the column's score."""
    stat = row * H + head
    mask = live[:, None] & (c < C)[None, :]
    place = stat[:, None] * C + c[None, :]
    tl.store(dx + place, q.to(dx.dtype.element_ty), mask=mask)
    mine = tl.load(x + place, mask=mask & filled[:, None], other=0.0).to(ACC)
    leads = tl.min(c) == 0
    along = tl.sum(mine * qs, 1) - tl.where(leads, ds, 0.0)
    share = (tl.min(c) // BLOCK_C).to(tl.int64) * num_columns * H
    tl.store(dscore + share + stat, along, mask=live)


@triton.jit(do_not_specialize=["first", "count", "threshold", "num_slots", "num_columns"])
def backward_kernel(  # noqa: PLR0915  a kernel is one piece
    index, part_row, part_start, part_length, part_slot, first, count, values, x, grad, info,
    col_score, seed, row_ids, col_ids, threshold,
    dx, dscore, share_stats, share_z, num_slots, num_columns,
    C: tl.constexpr, H: tl.constexpr, BLOCK_C: tl.constexpr, SLICES: tl.constexpr,
    R: tl.constexpr, E: tl.constexpr, HAS_VALUES: tl.constexpr,
    DROPOUT: tl.constexpr, HAS_IDS: tl.constexpr, ACC: tl.constexpr, CUT: tl.constexpr,
    SLOPE: tl.constexpr, INVERSE_KEEP: tl.constexpr,
    PACKED: tl.constexpr, DEAL: tl.constexpr, FILLED: tl.constexpr,
):  # fmt: skip
    """Gather gradients of rows into some columns; no scalar product of an entry is needed."""
    head, c = channels_of(BLOCK_C, SLICES)
    col, start, length, slot, live = load_parts(
        part_row, part_start, part_length, part_slot, first, count, R, DEAL
    )
    mine = tl.load(col_score + col * H + head, mask=live, other=0.0).to(ACC)
    if DROPOUT:
        key = head_key(seed, head)
    ds = tl.zeros([R], ACC)
    q = tl.zeros([R, BLOCK_C], ACC)
    qs = tl.zeros([R, BLOCK_C], ACC)
    one = tl.full([1, 1], LOG2E, ACC)
    longest = tl.max(length)
    if DEAL:
        longest = tl.cdiv(longest, R)
    entry = entries_of(0, R, E, DEAL)
    ahead = load_index(index, start, length, entry, FILLED)
    for begin in range(0, longest, E):
        entry = entries_of(begin, R, E, DEAL)
        inside = entry < length[None, :]
        i = ahead.to(tl.int64)
        ahead = load_index(index, start, length, entries_of(begin + E, R, E, DEAL), FILLED)
        at = (i * H + head) * 4
        if PACKED:
            pair = tl.load((info + at).to(tl.pointer_type(tl.int64)), mask=inside, other=0)
            theirs = (pair & 0xFFFFFFFF).to(tl.int32).to(tl.float32, bitcast=True)
            lse = (pair >> 32).to(tl.int32).to(tl.float32, bitcast=True)
        else:
            theirs = tl.load(info + at, mask=inside, other=0.0)
            lse = tl.load(info + at + 1, mask=inside, other=0.0)
        delta = tl.load(info + at + 2, mask=inside, other=0.0)
        score = mine[None, :] + theirs
        positive = score > 0.0
        logit = tl.where(inside, score * tl.where(positive, one, SLOPE * one) - lse, float("-inf"))
        weight = tl.exp2(logit)
        sloped = tl.where(positive, weight, SLOPE * weight)
        ds += tl.sum(sloped * delta, 0)
        if HAS_VALUES:
            factor = tl.load(values + start[None, :] + entry, mask=inside, other=0.0).to(ACC)
            weight *= factor
            sloped *= factor
        if DROPOUT:
            keep = is_kept(key, i, col[None, :], row_ids, col_ids, threshold, HAS_IDS)
            weight = tl.where(keep, weight * INVERSE_KEEP, 0.0)
            sloped = tl.where(keep, sloped * INVERSE_KEEP, 0.0)
        place = places_of(i, head, c, C, H, R, BLOCK_C)
        if FILLED and C % BLOCK_C == 0:
            features = tl.load(grad + place).to(ACC)
        else:
            mask = inside[:, :, None]
            if C % BLOCK_C != 0:
                mask = mask & (c < C)[None, None, :]
            features = tl.load(grad + place, mask=mask, other=0.0).to(ACC)
        q += tl.sum(weight[:, :, None] * features, 0)
        qs += tl.sum(sloped[:, :, None] * features, 0)
    if DEAL:
        q = tl.sum(q, 0)[None, :] + tl.zeros_like(q)
        qs = tl.sum(qs, 0)[None, :] + tl.zeros_like(qs)
        ds = tl.sum(ds, 0) + tl.zeros_like(ds)
        live = live & (tl.arange(0, R) == 0)
    whole = live & (slot < 0)
    write_columns(
        q, qs, ds, col, whole, length > 0, head, c, x, dx, dscore, num_columns, C, H, BLOCK_C, ACC
    )
    if CUT:
        cut = live & (slot >= 0)
        stat = slot * H + head
        total = num_slots.to(tl.int64) * H
        tl.store(share_stats + stat, ds, mask=cut & (tl.min(c) == 0))
        mask = cut[:, None] & (c < C)[None, :]
        place = stat[:, None] * C + c[None, :]
        tl.store(share_z + place, q, mask=mask)
        tl.store(share_z + total * C + place, qs, mask=mask)


@triton.jit(do_not_specialize=["num_slots", "num_columns"])
def backward_merge_kernel(
    cut_row, cut_ptr, x, dx, dscore, share_stats, share_z, num_slots, num_columns,
    C: tl.constexpr, H: tl.constexpr, BLOCK_C: tl.constexpr, SLICES: tl.constexpr,
    E: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Add the parts of one cut column in their order."""
    head, c = channels_of(BLOCK_C, SLICES)
    one = tl.program_id(0) + tl.arange(0, 1)
    col = tl.load(cut_row + one).to(tl.int64)
    first = tl.load(cut_ptr + tl.program_id(0))
    last = tl.load(cut_ptr + tl.program_id(0) + 1)
    total = num_slots.to(tl.int64) * H
    step = tl.arange(0, E)
    ds = tl.zeros([1], ACC)
    q = tl.zeros([1, BLOCK_C], ACC)
    qs = tl.zeros([1, BLOCK_C], ACC)
    for begin in range(first, last, E):
        slot = (begin + step).to(tl.int64)
        inside = slot < last
        stat = slot * H + head
        ds += tl.sum(tl.load(share_stats + stat, mask=inside, other=0.0), 0)
        mask = inside[:, None] & (c < C)[None, :]
        place = stat[:, None] * C + c[None, :]
        q += tl.sum(tl.load(share_z + place, mask=mask, other=0.0), 0)[None, :]
        qs += tl.sum(tl.load(share_z + total * C + place, mask=mask, other=0.0), 0)[None, :]
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
    one = tl.full([1, 1], LOG2E, ACC)
    longest = tl.max(length)
    for begin in range(0, longest, E):
        entry = begin + tl.arange(0, E)
        inside = entry[None, :] < length[:, None]
        at = start[:, None] + entry[None, :]
        j = tl.load(index + at, mask=inside, other=0).to(tl.int64)
        found = tl.zeros([R, E], ACC)
        for head in range(H):
            dot = tl.zeros([R, E], ACC)
            for block in range(0, C, BLOCK_C):
                c = block + tl.arange(0, BLOCK_C)
                mask = live[:, None] & (c < C)[None, :]
                place = (row * H + head)[:, None] * C + c[None, :]
                g = tl.load(grad + place, mask=mask, other=0.0).to(ACC)
                place = j[:, :, None] * (H * C) + (head * C + c)[None, None, :]
                mask = inside[:, :, None] & (c < C)[None, None, :]
                features = tl.load(x + place, mask=mask, other=0.0).to(ACC)
                dot += tl.sum(g[:, None, :] * features, 2)
            stat = (row * H + head) * 4
            mine = tl.load(info + stat, mask=live, other=0.0)
            lse = tl.load(info + stat + 1, mask=live, other=0.0)
            theirs = tl.load(col_score + j * H + head, mask=inside, other=0.0).to(ACC)
            score = mine[:, None] + theirs
            weight = tl.exp2(score * tl.where(score > 0.0, one, SLOPE * one) - lse[:, None])
            if DROPOUT:
                key = head_key(seed, head)
                keep = is_kept(key, row[:, None], j, row_ids, col_ids, threshold, HAS_IDS)
                weight = tl.where(keep, weight * INVERSE_KEEP, 0.0)
            found += weight * dot
        tl.store(dvalues + at, found.to(dvalues.dtype.element_ty), mask=inside)
