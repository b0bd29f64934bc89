"""The backward kernels of attention whose score takes all channels.

The score of every entry is computed again from the features of both ends. Rows fetch keys and
values, columns fetch queries and gradients; of a symmetric matrix that attends to itself, columns
have at hand what rows would fetch and give the whole gradient in one pass.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import triton
import triton.language as tl

from bevatron.kernels.graph.csr.triton_parts import head_key, is_kept, load_parts
from bevatron.kernels.graph.dot_attention.triton_kernels import fetch, load_rows, score_of
from bevatron.kernels.shared.triton_math import LOG2E


@triton.jit
def slope_of(score, factor, along, lse, delta, inside, SOFTMAX: tl.constexpr):
    """Return the weight of every entry and the gradient of its score."""
    if SOFTMAX:
        weight = tl.where(inside, tl.exp2(score * LOG2E - lse), 0.0)
        return weight * factor, weight * (factor * along - delta)
    return score * factor, factor * along


@triton.jit(do_not_specialize=["first", "count", "threshold"])
def rows_kernel(  # noqa: C901, PLR0912, PLR0915  a kernel is one piece
    index, part_row, part_start, part_length, part_slot, first, count, values,
    query, key, value, row_scale, col_scale, w_vector, seed, row_ids, col_ids, threshold,
    grad, lse, delta, dquery, dscale, dw, dvalues, share, share_scale, share_w,
    C: tl.constexpr, BLOCK_C: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    H: tl.constexpr, R: tl.constexpr, E: tl.constexpr, ACC: tl.constexpr,
    ADDITIVE: tl.constexpr, SOFTMAX: tl.constexpr, WANT_VALUES: tl.constexpr,
    HAS_VALUE: tl.constexpr, HAS_ROW_SCALE: tl.constexpr, HAS_COL_SCALE: tl.constexpr,
    HAS_VALUES: tl.constexpr, DROPOUT: tl.constexpr, HAS_IDS: tl.constexpr, CUT: tl.constexpr,
    SLOPE: tl.constexpr, INVERSE_KEEP: tl.constexpr,
):  # fmt: skip
    """Gather what queries, the rows' scales and GATv2's vector get from the entries of rows."""
    head = tl.program_id(1)
    c = tl.arange(0, BLOCK_C)
    d = tl.arange(0, BLOCK_D)
    row, start, length, slot, live = load_parts(
        part_row, part_start, part_length, part_slot, first, count, R
    )
    stat = row * H + head
    mine = load_rows(query, row, head, c, live, C, H, ACC)
    g = load_rows(grad, row, head, d, live, D, H, ACC)
    scale = tl.full([R], 1.0, ACC)
    if HAS_ROW_SCALE:
        scale = tl.load(row_scale + stat, mask=live, other=0.0).to(ACC)
    my_lse = scale
    my_delta = scale
    if SOFTMAX:
        my_lse = tl.load(lse + stat, mask=live, other=0.0)
        my_delta = tl.load(delta + stat, mask=live, other=0.0)
    w = tl.load(w_vector + head * C + c, mask=c < C, other=0.0).to(ACC) if ADDITIVE else c
    total = tl.zeros([R, BLOCK_C], ACC)
    total_w = tl.zeros([R, BLOCK_C], ACC)
    total_scale = tl.zeros([R], ACC)
    longest = tl.max(length)
    for begin in range(0, longest, E):
        entry = begin + tl.arange(0, E)
        inside = entry[None, :] < length[:, None]
        at = start[:, None] + entry[None, :]
        j = tl.load(index + at, mask=inside, other=0).to(tl.int64)
        theirs = fetch(key, j, head, c, inside, C, H, ACC)
        summed = fetch(value, j, head, d, inside, D, H, ACC) if HAS_VALUE else theirs
        along = tl.sum(g[:, None, :] * summed, 2)
        plain = score_of(mine, theirs, w, ADDITIVE, SLOPE)
        if HAS_COL_SCALE:
            plain *= tl.load(col_scale + j * H + head, mask=inside, other=0.0).to(ACC)
        factor = tl.full([R, E], 1.0, ACC)
        if DROPOUT:
            mask_key = head_key(seed, head)
            keep = is_kept(mask_key, row[:, None], j, row_ids, col_ids, threshold, HAS_IDS)
            factor = tl.where(keep, factor * INVERSE_KEEP, 0.0)
        if WANT_VALUES:
            bare, _unused = slope_of(
                plain * scale[:, None], factor, along, my_lse[:, None], my_delta[:, None], inside,
                SOFTMAX,
            )  # fmt: skip
            tl.store(dvalues + at * H + head, bare * along, mask=inside)
        if HAS_VALUES:
            factor *= tl.load(values + at, mask=inside, other=0.0).to(ACC)
        _weight, slope = slope_of(
            plain * scale[:, None], factor, along, my_lse[:, None], my_delta[:, None], inside,
            SOFTMAX,
        )  # fmt: skip
        if ADDITIVE:
            hidden = mine[:, None, :] + theirs
            positive = hidden > 0.0
            total += tl.sum(tl.where(positive, slope[:, :, None], SLOPE * slope[:, :, None]), 1)
            total_w += tl.sum(tl.where(positive, hidden, SLOPE * hidden) * slope[:, :, None], 1)
        else:
            total_scale += tl.sum(slope * plain, 1)
            if HAS_COL_SCALE:
                slope *= tl.load(col_scale + j * H + head, mask=inside, other=0.0).to(ACC)
            total += tl.sum((slope * scale[:, None])[:, :, None] * theirs, 1)
    if ADDITIVE:
        # Entries past the end of a row have no slope, so they added nothing.
        total *= w[None, :]
    whole = live & (slot < 0)
    mask = whole[:, None] & (c < C)[None, :]
    place = stat[:, None] * C + c[None, :]
    tl.store(dquery + place, total.to(dquery.dtype.element_ty), mask=mask)
    if ADDITIVE:
        tl.store(dw + place, total_w, mask=mask)
    else:
        tl.store(dscale + stat, total_scale, mask=whole)
    if CUT:
        cut = live & (slot >= 0)
        stat = slot * H + head
        mask = cut[:, None] & (c < C)[None, :]
        place = stat[:, None] * C + c[None, :]
        tl.store(share + place, total, mask=mask)
        if ADDITIVE:
            tl.store(share_w + place, total_w, mask=mask)
        else:
            tl.store(share_scale + stat, total_scale, mask=cut)


@triton.jit(do_not_specialize=["first", "count", "threshold"])
def columns_kernel(  # noqa: C901, PLR0912, PLR0915  a kernel is one piece
    index, part_row, part_start, part_length, part_slot, first, count, values,
    query, key, value, row_scale, col_scale, w_vector, seed, row_ids, col_ids, threshold,
    grad, lse, delta, dkey, dvalue, dcol_scale, drow_scale,
    share, share_value, share_col_scale, share_row_scale,
    C: tl.constexpr, BLOCK_C: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    H: tl.constexpr, R: tl.constexpr, E: tl.constexpr, ACC: tl.constexpr,
    ADDITIVE: tl.constexpr, SOFTMAX: tl.constexpr, SYMMETRIC: tl.constexpr,
    HAS_VALUE: tl.constexpr, HAS_ROW_SCALE: tl.constexpr, HAS_COL_SCALE: tl.constexpr,
    HAS_VALUES: tl.constexpr, DROPOUT: tl.constexpr, HAS_IDS: tl.constexpr, CUT: tl.constexpr,
    SLOPE: tl.constexpr, INVERSE_KEEP: tl.constexpr,
):  # fmt: skip
    """Gather what keys, values and the columns' scales get from the entries of columns."""
    head = tl.program_id(1)
    c = tl.arange(0, BLOCK_C)
    d = tl.arange(0, BLOCK_D)
    col, start, length, slot, live = load_parts(
        part_row, part_start, part_length, part_slot, first, count, R
    )
    stat = col * H + head
    mine = load_rows(key, col, head, c, live, C, H, ACC)
    summed = load_rows(value, col, head, d, live, D, H, ACC) if HAS_VALUE else mine
    scale = tl.full([R], 1.0, ACC)
    if HAS_COL_SCALE:
        scale = tl.load(col_scale + stat, mask=live, other=0.0).to(ACC)
    w = tl.load(w_vector + head * C + c, mask=c < C, other=0.0).to(ACC) if ADDITIVE else c
    my_row_scale = tl.full([R], 1.0, ACC)
    my_lse = scale
    my_delta = scale
    g_mine = mine
    if SYMMETRIC:
        g_mine = load_rows(grad, col, head, d, live, D, H, ACC)
        if HAS_ROW_SCALE:
            my_row_scale = tl.load(row_scale + stat, mask=live, other=0.0).to(ACC)
        if SOFTMAX:
            my_lse = tl.load(lse + stat, mask=live, other=0.0)
            my_delta = tl.load(delta + stat, mask=live, other=0.0)
    total = tl.zeros([R, BLOCK_C], ACC)
    total_value = tl.zeros([R, BLOCK_D], ACC)
    total_scale = tl.zeros([R], ACC)
    total_row_scale = tl.zeros([R], ACC)
    longest = tl.max(length)
    for begin in range(0, longest, E):
        entry = begin + tl.arange(0, E)
        inside = entry[None, :] < length[:, None]
        at = start[:, None] + entry[None, :]
        i = tl.load(index + at, mask=inside, other=0).to(tl.int64)
        other = i * H + head
        theirs = fetch(query, i, head, c, inside, C, H, ACC)
        g = fetch(grad, i, head, d, inside, D, H, ACC)
        along = tl.sum(summed[:, None, :] * g, 2)
        dot = score_of(mine, theirs, w, ADDITIVE, SLOPE)
        plain = dot
        their_scale = tl.full([R, E], 1.0, ACC)
        if HAS_ROW_SCALE:
            their_scale = tl.load(row_scale + other, mask=inside, other=0.0).to(ACC)
            plain = dot * their_scale
        their_lse = plain
        their_delta = plain
        if SOFTMAX:
            their_lse = tl.load(lse + other, mask=inside, other=0.0)
            their_delta = tl.load(delta + other, mask=inside, other=0.0)
        factor = tl.full([R, E], 1.0, ACC)
        if HAS_VALUES:
            factor = tl.load(values + at, mask=inside, other=0.0).to(ACC)
        if DROPOUT:
            mask_key = head_key(seed, head)
            keep = is_kept(mask_key, i, col[:, None], row_ids, col_ids, threshold, HAS_IDS)
            factor = tl.where(keep, factor * INVERSE_KEEP, 0.0)
        weight, slope = slope_of(
            plain * scale[:, None], factor, along, their_lse, their_delta, inside, SOFTMAX
        )
        if ADDITIVE:
            hidden = mine[:, None, :] + theirs
            sloped = tl.where(hidden > 0.0, slope[:, :, None], SLOPE * slope[:, :, None])
            total += tl.sum(sloped * w[None, None, :], 1)
        else:
            total_scale += tl.sum(slope * plain, 1)
            towards = slope * their_scale * scale[:, None]
            if SYMMETRIC:
                their_col_scale = tl.full([R, E], 1.0, ACC)
                if HAS_COL_SCALE:
                    their_col_scale = tl.load(col_scale + other, mask=inside, other=0.0).to(ACC)
                plain = dot * their_col_scale
                along = tl.sum(g_mine[:, None, :] * theirs, 2)
                _weight, back = slope_of(
                    plain * my_row_scale[:, None], factor, along, my_lse[:, None],
                    my_delta[:, None], inside, SOFTMAX,
                )  # fmt: skip
                total_row_scale += tl.sum(back * plain, 1)
                towards += back * my_row_scale[:, None] * their_col_scale
            total += tl.sum(towards[:, :, None] * theirs, 1)
        part = tl.sum(weight[:, :, None] * g, 1)
        if HAS_VALUE:
            total_value += part
        else:
            total += part
    whole = live & (slot < 0)
    mask = whole[:, None] & (c < C)[None, :]
    tl.store(dkey + stat[:, None] * C + c[None, :], total.to(dkey.dtype.element_ty), mask=mask)
    if HAS_VALUE:
        place = stat[:, None] * D + d[None, :]
        mask = whole[:, None] & (d < D)[None, :]
        tl.store(dvalue + place, total_value.to(dvalue.dtype.element_ty), mask=mask)
    if not ADDITIVE:
        tl.store(dcol_scale + stat, total_scale, mask=whole)
    if SYMMETRIC:
        tl.store(drow_scale + stat, total_row_scale, mask=whole)
    if CUT:
        cut = live & (slot >= 0)
        stat = slot * H + head
        mask = cut[:, None] & (c < C)[None, :]
        tl.store(share + stat[:, None] * C + c[None, :], total, mask=mask)
        if HAS_VALUE:
            mask = cut[:, None] & (d < D)[None, :]
            tl.store(share_value + stat[:, None] * D + d[None, :], total_value, mask=mask)
        if not ADDITIVE:
            tl.store(share_col_scale + stat, total_scale, mask=cut)
        if SYMMETRIC:
            tl.store(share_row_scale + stat, total_row_scale, mask=cut)
