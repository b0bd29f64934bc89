"""The kernels of aggregation over the semirings.

A program owns a few rows or a part of a long one, and a share of the channels.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import triton
import triton.language as tl

from bevatron.kernels.graph.csr.triton_parts import load_parts

NONE = tl.constexpr(2147483647)
"""No column: that of a row without entries."""


@triton.jit
def fetch(x, j, c, inside, other, C: tl.constexpr, ACC: tl.constexpr):
    """Fetch the channels of every entry's other end, [R, E, BLOCK]."""
    place = j[:, :, None] * C + c[None, None, :]
    mask = inside[:, :, None] & (c < C)[None, None, :]
    return tl.load(x + place, mask=mask, other=other).to(ACC)


@triton.jit(do_not_specialize=["first", "count"])
def sum_kernel(
    index, part_row, part_start, part_length, part_slot, first, count, values, x, out, share,
    C: tl.constexpr, BLOCK_C: tl.constexpr, R: tl.constexpr, E: tl.constexpr,
    HAS_VALUES: tl.constexpr, CUT: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Add up the features of the entries of some rows."""
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    row, start, length, slot, live = load_parts(
        part_row, part_start, part_length, part_slot, first, count, R
    )
    total = tl.zeros([R, BLOCK_C], ACC)
    longest = tl.max(length)
    step = tl.arange(0, E)
    ahead = tl.load(
        index + start[:, None] + step[None, :], mask=step[None, :] < length[:, None], other=0
    )
    for begin in range(0, longest, E):
        entry = begin + step
        inside = entry[None, :] < length[:, None]
        j = ahead.to(tl.int64)
        later = entry + E
        ahead = tl.load(
            index + start[:, None] + later[None, :], mask=later[None, :] < length[:, None], other=0
        )
        features = fetch(x, j, c, inside, 0.0, C, ACC)
        if HAS_VALUES:
            at = start[:, None] + entry[None, :]
            features *= tl.load(values + at, mask=inside, other=0.0).to(ACC)[:, :, None]
        total += tl.sum(features, 1)
    inner = (c < C)[None, :]
    place = row[:, None] * C + c[None, :]
    whole = live & (slot < 0)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=whole[:, None] & inner)
    if CUT:
        cut = live & (slot >= 0)
        tl.store(share + slot[:, None] * C + c[None, :], total, mask=cut[:, None] & inner)


@triton.jit
def better(value, column, best, arg):
    """Take the larger value, and of equal ones the lower column; NaN is larger than all."""
    nan, best_nan = value != value, best != best  # noqa: PLR0124  NaN alone differs from itself
    more = (value > best) | (nan & ~best_nan)
    same = (value == best) | (nan & best_nan)
    take = more | (same & (column < arg))
    return tl.where(take, value, best), tl.where(take, column, arg)


@triton.jit
def write_extreme(best, arg, place, mask, out, arg_out, SIGN: tl.constexpr):
    """Write a result, zero where there is no entry, and its column."""
    found = tl.where(arg == NONE, 0.0, best * SIGN)
    tl.store(out + place, found.to(out.dtype.element_ty), mask=mask)
    tl.store(arg_out + place, arg, mask=mask)


@triton.jit
def largest_of(candidate, column, axis: tl.constexpr):
    """Return the largest of some candidates along an axis, and the lowest column that has it."""
    nan = candidate != candidate  # noqa: PLR0124  NaN alone differs from itself
    top = tl.max(tl.where(nan, float("inf"), candidate), axis)
    has_nan = tl.max(nan.to(tl.int32), axis) > 0
    is_top = (candidate == tl.expand_dims(top, axis)) & ~tl.expand_dims(has_nan, axis)
    arg = tl.min(tl.where((nan | is_top) & (column < NONE), column, NONE), axis)
    return tl.where(has_nan, float("nan"), top), arg


@triton.jit(do_not_specialize=["first", "count"])
def extreme_kernel(
    index, part_row, part_start, part_length, part_slot, first, count, values, x, out, arg_out,
    share, arg_share,
    C: tl.constexpr, BLOCK_C: tl.constexpr, R: tl.constexpr, E: tl.constexpr,
    HAS_VALUES: tl.constexpr, CUT: tl.constexpr, ACC: tl.constexpr, SIGN: tl.constexpr,
):  # fmt: skip
    """Find the largest (SIGN 1) or smallest (-1) feature of the entries of some rows."""
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    row, start, length, slot, live = load_parts(
        part_row, part_start, part_length, part_slot, first, count, R
    )
    best = tl.full([R, BLOCK_C], float("-inf"), ACC)
    arg = tl.full([R, BLOCK_C], NONE, tl.int32)
    longest = tl.max(length)
    for begin in range(0, longest, E):
        entry = begin + tl.arange(0, E)
        inside = entry[None, :] < length[:, None]
        at = start[:, None] + entry[None, :]
        j = tl.load(index + at, mask=inside, other=0)
        features = fetch(x, j.to(tl.int64), c, inside, 0.0, C, ACC)
        if HAS_VALUES:
            features += tl.load(values + at, mask=inside, other=0.0).to(ACC)[:, :, None]
        candidate = tl.where(inside[:, :, None], features * SIGN, float("-inf"))
        column = tl.where(inside, j.to(tl.int32), NONE)
        top, top_arg = largest_of(candidate, column[:, :, None], 1)
        best, arg = better(top, top_arg, best, arg)
    inner = (c < C)[None, :]
    whole = live & (slot < 0)
    mask = whole[:, None] & inner
    write_extreme(best, arg, row[:, None] * C + c[None, :], mask, out, arg_out, SIGN)
    if CUT:
        cut = live & (slot >= 0)
        place = slot[:, None] * C + c[None, :]
        tl.store(share + place, best, mask=cut[:, None] & inner)
        tl.store(arg_share + place, arg, mask=cut[:, None] & inner)


@triton.jit
def extreme_merge_kernel(
    cut_row, cut_ptr, out, arg_out, share, arg_share,
    C: tl.constexpr, BLOCK_C: tl.constexpr, ACC: tl.constexpr, SIGN: tl.constexpr,
):  # fmt: skip
    """Merge the parts of one cut row."""
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    row = tl.load(cut_row + tl.program_id(0)).to(tl.int64)
    first = tl.load(cut_ptr + tl.program_id(0))
    last = tl.load(cut_ptr + tl.program_id(0) + 1)
    best = tl.full([BLOCK_C], float("-inf"), ACC)
    arg = tl.full([BLOCK_C], NONE, tl.int32)
    for slot in range(first, last):
        place = (slot + tl.zeros([BLOCK_C], tl.int64)) * C + c
        value = tl.load(share + place, mask=c < C, other=float("-inf"))
        column = tl.load(arg_share + place, mask=c < C, other=NONE)
        best, arg = better(value, column, best, arg)
    write_extreme(best, arg, row * C + c, c < C, out, arg_out, SIGN)


@triton.jit(do_not_specialize=["first", "count"])
def extreme_backward_kernel(
    index, part_row, part_start, part_length, part_slot, first, count, grad, arg, dx, share,
    C: tl.constexpr, BLOCK_C: tl.constexpr, R: tl.constexpr, E: tl.constexpr,
    CUT: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Add up, for some columns, the gradients of the rows that took them."""
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    col, start, length, slot, live = load_parts(
        part_row, part_start, part_length, part_slot, first, count, R
    )
    total = tl.zeros([R, BLOCK_C], ACC)
    longest = tl.max(length)
    for begin in range(0, longest, E):
        entry = begin + tl.arange(0, E)
        inside = entry[None, :] < length[:, None]
        i = tl.load(index + start[:, None] + entry[None, :], mask=inside, other=0).to(tl.int64)
        place = i[:, :, None] * C + c[None, None, :]
        mask = inside[:, :, None] & (c < C)[None, None, :]
        taken = tl.load(arg + place, mask=mask, other=NONE).to(tl.int64) == col[:, None, None]
        g = tl.load(grad + place, mask=mask & taken, other=0.0).to(ACC)
        total += tl.sum(g, 1)
    inner = (c < C)[None, :]
    whole = live & (slot < 0)
    place = col[:, None] * C + c[None, :]
    tl.store(dx + place, total.to(dx.dtype.element_ty), mask=whole[:, None] & inner)
    if CUT:
        cut = live & (slot >= 0)
        tl.store(share + slot[:, None] * C + c[None, :], total, mask=cut[:, None] & inner)


@triton.jit(do_not_specialize=["first", "count"])
def entries_kernel(
    index, part_row, part_start, part_length, part_slot, first, count, grad, x, arg, dvalues,
    C: tl.constexpr, BLOCK_C: tl.constexpr, R: tl.constexpr, E: tl.constexpr,
    EXTREME: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Compute every entry's gradient of its value: <G_i, x_j>, or the sum of G_i that it won."""
    row, start, length, _slot, live = load_parts(
        part_row, part_start, part_length, part_slot, first, count, R
    )
    longest = tl.max(length)
    for begin in range(0, longest, E):
        entry = begin + tl.arange(0, E)
        inside = entry[None, :] < length[:, None]
        at = start[:, None] + entry[None, :]
        j = tl.load(index + at, mask=inside, other=0)
        found = tl.zeros([R, E], ACC)
        for block in range(0, C, BLOCK_C):
            c = block + tl.arange(0, BLOCK_C)
            mine = row[:, None] * C + c[None, :]
            mask = live[:, None] & (c < C)[None, :]
            g = tl.load(grad + mine, mask=mask, other=0.0).to(ACC)[:, None, :]
            if EXTREME:
                taken = tl.load(arg + mine, mask=mask, other=NONE)
                won = taken[:, None, :] == j.to(tl.int32)[:, :, None]
                found += tl.sum(tl.where(won, g, 0.0), 2)
            else:
                found += tl.sum(g * fetch(x, j.to(tl.int64), c, inside, 0.0, C, ACC), 2)
        tl.store(dvalues + at, found.to(dvalues.dtype.element_ty), mask=inside)
