"""The backward kernels of attention whose score takes all channels.

Scores are recomputed from the features of both ends; nothing per entry is read from memory.
`rows_kernel`: a program owns R rows, gathers keys and values of their entries, [R, E, BLOCK_C],
and writes the gradients of queries, row scales and GATv2's vector. `columns_kernel`: a program
owns R columns, gathers queries and output gradients, and writes the gradients of keys, values and
column scales. For self-attention on a symmetric matrix a column already holds what its row would
gather, so one pass over columns computes the whole gradient (SYMMETRIC).
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import triton
import triton.language as tl

from bevatron.kernels.graph.csr.triton_parts import head_key, is_kept, load_parts
from bevatron.kernels.graph.dot_attention.triton_kernels import fetch, load_rows, score_of
from bevatron.kernels.shared.triton_math import LOG2E


@triton.jit
def weight_and_dscore(score, factor, dweight, lse, delta, valid, SOFTMAX: tl.constexpr):
    """Return the weight of every entry and the gradient of its score, each [R, E].

    ``dweight`` is the gradient of the weight, <g_i, v_j>; ``factor`` the entry's value and dropout.
    """
    if SOFTMAX:
        weight = tl.where(valid, tl.exp2(score * LOG2E - lse), 0.0)
        return weight * factor, weight * (factor * dweight - delta)
    return score * factor, factor * dweight


@triton.jit(do_not_specialize=["first", "count", "threshold"])
def rows_kernel(  # noqa: C901, PLR0912, PLR0915  a kernel is one piece
    index, part_row, part_start, part_length, part_slot, first, count, values,
    query, key, value, row_scale, col_scale, w_vector, seed, row_ids, col_ids, threshold,
    grad, lse, delta, dquery, dscale, dw, dvalues, partial, partial_scale, partial_w,
    C: tl.constexpr, BLOCK_C: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    H: tl.constexpr, R: tl.constexpr, E: tl.constexpr, ACC: tl.constexpr,
    ADDITIVE: tl.constexpr, SOFTMAX: tl.constexpr, WANT_VALUES: tl.constexpr,
    HAS_VALUE: tl.constexpr, HAS_ROW_SCALE: tl.constexpr, HAS_COL_SCALE: tl.constexpr,
    HAS_VALUES: tl.constexpr, DROPOUT: tl.constexpr, HAS_IDS: tl.constexpr, CUT: tl.constexpr,
    SLOPE: tl.constexpr, INVERSE_KEEP: tl.constexpr,
):  # fmt: skip
    """Sum the gradients of queries, row scales and GATv2's vector over the entries of R rows."""
    head = tl.program_id(1)
    c = tl.arange(0, BLOCK_C)
    d = tl.arange(0, BLOCK_D)
    row, start, length, slot, live = load_parts(
        part_row, part_start, part_length, part_slot, first, count, R
    )
    stat = row * H + head
    own = load_rows(query, row, head, c, live, C, H, ACC)  # [R, BLOCK_C]
    g = load_rows(grad, row, head, d, live, D, H, ACC)  # [R, BLOCK_D]
    scale = tl.full([R], 1.0, ACC)
    if HAS_ROW_SCALE:
        scale = tl.load(row_scale + stat, mask=live, other=0.0).to(ACC)  # [R]
    own_lse = scale
    own_delta = scale
    if SOFTMAX:
        own_lse = tl.load(lse + stat, mask=live, other=0.0)  # [R]
        own_delta = tl.load(delta + stat, mask=live, other=0.0)  # [R]
    w = c
    if ADDITIVE:
        w = tl.load(w_vector + head * C + c, mask=c < C, other=0.0).to(ACC)  # [BLOCK_C]
    total = tl.zeros([R, BLOCK_C], ACC)
    total_w = tl.zeros([R, BLOCK_C], ACC)
    total_scale = tl.zeros([R], ACC)
    longest = tl.max(length)  # []
    for begin in range(0, longest, E):
        entry = begin + tl.arange(0, E)
        valid = entry[None, :] < length[:, None]
        position = start[:, None] + entry[None, :]
        j = tl.load(index + position, mask=valid, other=0).to(tl.int64)  # [R, E]
        fetched = fetch(key, j, head, c, valid, C, H, ACC)  # [R, E, BLOCK_C]
        summed = fetched
        if HAS_VALUE:
            summed = fetch(value, j, head, d, valid, D, H, ACC)  # [R, E, BLOCK_D]
        dweight = tl.sum(g[:, None, :] * summed, 2)  # [R, E]
        raw_score = score_of(own, fetched, w, ADDITIVE, SLOPE)  # [R, E]
        if HAS_COL_SCALE:
            raw_score *= tl.load(col_scale + j * H + head, mask=valid, other=0.0).to(ACC)  # [R, E]
        factor = tl.full([R, E], 1.0, ACC)
        if DROPOUT:
            mask_key = head_key(seed, head)
            keep = is_kept(mask_key, row[:, None], j, row_ids, col_ids, threshold, HAS_IDS)
            factor = tl.where(keep, factor * INVERSE_KEEP, 0.0)
        if WANT_VALUES:
            weight, _unused = weight_and_dscore(
                raw_score * scale[:, None], factor, dweight, own_lse[:, None],
                own_delta[:, None], valid, SOFTMAX,
            )  # fmt: skip
            tl.store(dvalues + position * H + head, weight * dweight, mask=valid)
        if HAS_VALUES:
            factor *= tl.load(values + position, mask=valid, other=0.0).to(ACC)  # [R, E]
        _weight, dscore = weight_and_dscore(
            raw_score * scale[:, None], factor, dweight, own_lse[:, None],
            own_delta[:, None], valid, SOFTMAX,
        )  # fmt: skip
        if ADDITIVE:
            hidden = own[:, None, :] + fetched
            positive = hidden > 0.0
            dhidden = tl.where(positive, dscore[:, :, None], SLOPE * dscore[:, :, None])
            total += tl.sum(dhidden, 1)  # [R, BLOCK_C]
            activated = tl.where(positive, hidden, SLOPE * hidden)
            total_w += tl.sum(activated * dscore[:, :, None], 1)  # [R, BLOCK_C]
        else:
            total_scale += tl.sum(dscore * raw_score, 1)  # [R]
            if HAS_COL_SCALE:
                dscore *= tl.load(col_scale + j * H + head, mask=valid, other=0.0).to(ACC)  # [R, E]
            ddot = dscore * scale[:, None]
            total += tl.sum(ddot[:, :, None] * fetched, 1)  # [R, BLOCK_C]
    if ADDITIVE:
        # Entries past the end of a row have a zero score gradient, so they added nothing.
        total *= w[None, :]
    is_whole = live & (slot < 0)
    mask = is_whole[:, None] & (c < C)[None, :]
    offsets = stat[:, None] * C + c[None, :]
    tl.store(dquery + offsets, total.to(dquery.dtype.element_ty), mask=mask)
    if ADDITIVE:
        tl.store(dw + offsets, total_w, mask=mask)
    else:
        tl.store(dscale + stat, total_scale, mask=is_whole)
    if CUT:
        is_cut = live & (slot >= 0)
        stat = slot * H + head
        mask = is_cut[:, None] & (c < C)[None, :]
        offsets = stat[:, None] * C + c[None, :]
        tl.store(partial + offsets, total, mask=mask)
        if ADDITIVE:
            tl.store(partial_w + offsets, total_w, mask=mask)
        else:
            tl.store(partial_scale + stat, total_scale, mask=is_cut)


@triton.jit(do_not_specialize=["first", "count", "threshold"])
def columns_kernel(  # noqa: C901, PLR0912, PLR0915  a kernel is one piece
    index, part_row, part_start, part_length, part_slot, first, count, values,
    query, key, value, row_scale, col_scale, w_vector, seed, row_ids, col_ids, threshold,
    grad, lse, delta, dkey, dvalue, dcol_scale, drow_scale,
    partial, partial_value, partial_col_scale, partial_row_scale,
    C: tl.constexpr, BLOCK_C: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    H: tl.constexpr, R: tl.constexpr, E: tl.constexpr, ACC: tl.constexpr,
    ADDITIVE: tl.constexpr, SOFTMAX: tl.constexpr, SYMMETRIC: tl.constexpr,
    HAS_VALUE: tl.constexpr, HAS_ROW_SCALE: tl.constexpr, HAS_COL_SCALE: tl.constexpr,
    HAS_VALUES: tl.constexpr, DROPOUT: tl.constexpr, HAS_IDS: tl.constexpr, CUT: tl.constexpr,
    SLOPE: tl.constexpr, INVERSE_KEEP: tl.constexpr,
):  # fmt: skip
    """Sum the gradients of keys, values and column scales over the entries of R columns."""
    head = tl.program_id(1)
    c = tl.arange(0, BLOCK_C)
    d = tl.arange(0, BLOCK_D)
    col, start, length, slot, live = load_parts(
        part_row, part_start, part_length, part_slot, first, count, R
    )
    stat = col * H + head
    own = load_rows(key, col, head, c, live, C, H, ACC)  # [R, BLOCK_C]
    summed = load_rows(value, col, head, d, live, D, H, ACC) if HAS_VALUE else own  # [R, BLOCK_D]
    scale = tl.full([R], 1.0, ACC)
    if HAS_COL_SCALE:
        scale = tl.load(col_scale + stat, mask=live, other=0.0).to(ACC)  # [R]
    w = c
    if ADDITIVE:
        w = tl.load(w_vector + head * C + c, mask=c < C, other=0.0).to(ACC)  # [BLOCK_C]
    own_row_scale = tl.full([R], 1.0, ACC)
    own_lse = scale
    own_delta = scale
    own_g = own
    if SYMMETRIC:
        own_g = load_rows(grad, col, head, d, live, D, H, ACC)  # [R, BLOCK_D]
        if HAS_ROW_SCALE:
            own_row_scale = tl.load(row_scale + stat, mask=live, other=0.0).to(ACC)  # [R]
        if SOFTMAX:
            own_lse = tl.load(lse + stat, mask=live, other=0.0)  # [R]
            own_delta = tl.load(delta + stat, mask=live, other=0.0)  # [R]
    total = tl.zeros([R, BLOCK_C], ACC)
    total_value = tl.zeros([R, BLOCK_D], ACC)
    total_scale = tl.zeros([R], ACC)
    total_row_scale = tl.zeros([R], ACC)
    longest = tl.max(length)  # []
    for begin in range(0, longest, E):
        entry = begin + tl.arange(0, E)
        valid = entry[None, :] < length[:, None]
        position = start[:, None] + entry[None, :]
        i = tl.load(index + position, mask=valid, other=0).to(tl.int64)  # [R, E]
        other_stat = i * H + head
        fetched = fetch(query, i, head, c, valid, C, H, ACC)  # [R, E, BLOCK_C]
        g = fetch(grad, i, head, d, valid, D, H, ACC)  # [R, E, BLOCK_D]
        dweight = tl.sum(summed[:, None, :] * g, 2)  # [R, E]
        dot = score_of(own, fetched, w, ADDITIVE, SLOPE)  # [R, E]
        raw_score = dot
        other_scale = tl.full([R, E], 1.0, ACC)
        if HAS_ROW_SCALE:
            other_scale = tl.load(row_scale + other_stat, mask=valid, other=0.0).to(ACC)  # [R, E]
            raw_score = dot * other_scale
        other_lse = raw_score
        other_delta = raw_score
        if SOFTMAX:
            other_lse = tl.load(lse + other_stat, mask=valid, other=0.0)  # [R, E]
            other_delta = tl.load(delta + other_stat, mask=valid, other=0.0)  # [R, E]
        factor = tl.full([R, E], 1.0, ACC)
        if HAS_VALUES:
            factor = tl.load(values + position, mask=valid, other=0.0).to(ACC)  # [R, E]
        if DROPOUT:
            mask_key = head_key(seed, head)
            keep = is_kept(mask_key, i, col[:, None], row_ids, col_ids, threshold, HAS_IDS)
            factor = tl.where(keep, factor * INVERSE_KEEP, 0.0)
        weight, dscore = weight_and_dscore(
            raw_score * scale[:, None], factor, dweight, other_lse, other_delta, valid, SOFTMAX
        )
        if ADDITIVE:
            hidden = own[:, None, :] + fetched
            dhidden = tl.where(hidden > 0.0, dscore[:, :, None], SLOPE * dscore[:, :, None])
            total += tl.sum(dhidden * w[None, None, :], 1)  # [R, BLOCK_C]
        else:
            total_scale += tl.sum(dscore * raw_score, 1)  # [R]
            ddot = dscore * other_scale * scale[:, None]
            if SYMMETRIC:
                other_col_scale = tl.full([R, E], 1.0, ACC)
                if HAS_COL_SCALE:
                    scale_ptr = col_scale + other_stat
                    other_col_scale = tl.load(scale_ptr, mask=valid, other=0.0).to(ACC)  # [R, E]
                raw_score = dot * other_col_scale
                dweight = tl.sum(own_g[:, None, :] * fetched, 2)  # [R, E]
                _weight, own_dscore = weight_and_dscore(
                    raw_score * own_row_scale[:, None], factor, dweight, own_lse[:, None],
                    own_delta[:, None], valid, SOFTMAX,
                )  # fmt: skip
                total_row_scale += tl.sum(own_dscore * raw_score, 1)  # [R]
                ddot += own_dscore * own_row_scale[:, None] * other_col_scale
            total += tl.sum(ddot[:, :, None] * fetched, 1)  # [R, BLOCK_C]
        value_part = tl.sum(weight[:, :, None] * g, 1)  # [R, BLOCK_D]
        if HAS_VALUE:
            total_value += value_part
        else:
            total += value_part
    is_whole = live & (slot < 0)
    mask = is_whole[:, None] & (c < C)[None, :]
    tl.store(dkey + stat[:, None] * C + c[None, :], total.to(dkey.dtype.element_ty), mask=mask)
    if HAS_VALUE:
        offsets = stat[:, None] * D + d[None, :]
        mask = is_whole[:, None] & (d < D)[None, :]
        tl.store(dvalue + offsets, total_value.to(dvalue.dtype.element_ty), mask=mask)
    if not ADDITIVE:
        tl.store(dcol_scale + stat, total_scale, mask=is_whole)
    if SYMMETRIC:
        tl.store(drow_scale + stat, total_row_scale, mask=is_whole)
    if CUT:
        is_cut = live & (slot >= 0)
        stat = slot * H + head
        mask = is_cut[:, None] & (c < C)[None, :]
        tl.store(partial + stat[:, None] * C + c[None, :], total, mask=mask)
        if HAS_VALUE:
            mask = is_cut[:, None] & (d < D)[None, :]
            tl.store(partial_value + stat[:, None] * D + d[None, :], total_value, mask=mask)
        if not ADDITIVE:
            tl.store(partial_col_scale + stat, total_scale, mask=is_cut)
        if SYMMETRIC:
            tl.store(partial_row_scale + stat, total_row_scale, mask=is_cut)
