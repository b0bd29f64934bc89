"""The kernels of aggregation over the semirings sum, max and min.

A program owns R rows (or one part of a long row) and BLOCK_C channels, and steps over their
entries E at a time. It gathers the features of every entry's column, [R, E, BLOCK_C], and reduces
them in registers; nothing is stored per entry. A whole row is written once; the parts of a cut row
write partial results to ``partial``, which a second kernel merges in order.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import triton
import triton.language as tl

from bevatron.kernels.graph.csr.triton_parts import load_parts

NONE = tl.constexpr(2147483647)
"""No column: that of a row without entries."""


@triton.jit
def fetch(x, j, c, valid, other, C: tl.constexpr, ACC: tl.constexpr):
    """Gather channels of the other end of every entry."""
    offsets = j[:, :, None] * C + c[None, None, :]
    mask = valid[:, :, None] & (c < C)[None, None, :]
    return tl.load(x + offsets, mask=mask, other=other).to(ACC)  # [R, E, BLOCK_C]


@triton.jit(do_not_specialize=["first", "count"])
def sum_kernel(
    index, part_row, part_start, part_length, part_slot, first, count, values, x, out, partial,
    C: tl.constexpr, BLOCK_C: tl.constexpr, R: tl.constexpr, E: tl.constexpr,
    HAS_VALUES: tl.constexpr, CUT: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Sum the features of the entries of R rows."""
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    row, start, length, slot, live = load_parts(
        part_row, part_start, part_length, part_slot, first, count, R
    )
    total = tl.zeros([R, BLOCK_C], ACC)
    longest = tl.max(length)  # []
    step = tl.arange(0, E)
    next_j = tl.load(
        index + start[:, None] + step[None, :], mask=step[None, :] < length[:, None], other=0
    )  # [R, E]
    for begin in range(0, longest, E):
        entry = begin + step
        valid = entry[None, :] < length[:, None]
        j = next_j.to(tl.int64)
        next_entry = entry + E
        next_j = tl.load(
            index + start[:, None] + next_entry[None, :],
            mask=next_entry[None, :] < length[:, None],
            other=0,
        )  # [R, E]
        features = fetch(x, j, c, valid, 0.0, C, ACC)  # [R, E, BLOCK_C]
        if HAS_VALUES:
            position = start[:, None] + entry[None, :]
            a = tl.load(values + position, mask=valid, other=0.0).to(ACC)  # [R, E]
            features *= a[:, :, None]
        total += tl.sum(features, 1)  # [R, BLOCK_C]
    in_channels = (c < C)[None, :]
    offsets = row[:, None] * C + c[None, :]
    is_whole = live & (slot < 0)
    tl.store(out + offsets, total.to(out.dtype.element_ty), mask=is_whole[:, None] & in_channels)
    if CUT:
        is_cut = live & (slot >= 0)
        tl.store(
            partial + slot[:, None] * C + c[None, :], total, mask=is_cut[:, None] & in_channels
        )


@triton.jit
def better(value, column, best, arg):
    """Return the larger value, of equal ones the lower column; NaN is larger than every number."""
    nan, best_nan = value != value, best != best  # noqa: PLR0124  NaN alone differs from itself
    more = (value > best) | (nan & ~best_nan)
    same = (value == best) | (nan & best_nan)
    take = more | (same & (column < arg))
    return tl.where(take, value, best), tl.where(take, column, arg)


@triton.jit
def write_extreme(best, arg, offsets, mask, out, arg_out, SIGN: tl.constexpr):
    """Write a result and its column; a row without entries gives 0."""
    value = tl.where(arg == NONE, 0.0, best * SIGN)
    tl.store(out + offsets, value.to(out.dtype.element_ty), mask=mask)
    tl.store(arg_out + offsets, arg, mask=mask)


@triton.jit
def largest_of(candidate, column, axis: tl.constexpr):
    """Return the largest candidate along an axis and the lowest column that attains it."""
    nan = candidate != candidate  # noqa: PLR0124  NaN alone differs from itself
    top = tl.max(tl.where(nan, float("inf"), candidate), axis)  # [R, BLOCK_C]
    has_nan = tl.max(nan.to(tl.int32), axis) > 0  # [R, BLOCK_C]
    is_top = (candidate == tl.expand_dims(top, axis)) & ~tl.expand_dims(has_nan, axis)
    candidates = tl.where((nan | is_top) & (column < NONE), column, NONE)  # [R, E, BLOCK_C]
    arg = tl.min(candidates, axis)  # [R, BLOCK_C]
    return tl.where(has_nan, float("nan"), top), arg


@triton.jit(do_not_specialize=["first", "count"])
def extreme_kernel(
    index, part_row, part_start, part_length, part_slot, first, count, values, x, out, arg_out,
    partial, partial_arg,
    C: tl.constexpr, BLOCK_C: tl.constexpr, R: tl.constexpr, E: tl.constexpr,
    HAS_VALUES: tl.constexpr, CUT: tl.constexpr, ACC: tl.constexpr, SIGN: tl.constexpr,
):  # fmt: skip
    """Find the largest (SIGN 1) or smallest (-1) feature of the entries of R rows."""
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    row, start, length, slot, live = load_parts(
        part_row, part_start, part_length, part_slot, first, count, R
    )
    best = tl.full([R, BLOCK_C], float("-inf"), ACC)
    arg = tl.full([R, BLOCK_C], NONE, tl.int32)
    longest = tl.max(length)  # []
    for begin in range(0, longest, E):
        entry = begin + tl.arange(0, E)
        valid = entry[None, :] < length[:, None]
        position = start[:, None] + entry[None, :]
        j = tl.load(index + position, mask=valid, other=0)  # [R, E]
        features = fetch(x, j.to(tl.int64), c, valid, 0.0, C, ACC)  # [R, E, BLOCK_C]
        if HAS_VALUES:
            a = tl.load(values + position, mask=valid, other=0.0).to(ACC)  # [R, E]
            features += a[:, :, None]
        candidate = tl.where(valid[:, :, None], features * SIGN, float("-inf"))
        column = tl.where(valid, j.to(tl.int32), NONE)
        top, top_arg = largest_of(candidate, column[:, :, None], 1)  # [R, BLOCK_C]
        best, arg = better(top, top_arg, best, arg)
    in_channels = (c < C)[None, :]
    is_whole = live & (slot < 0)
    mask = is_whole[:, None] & in_channels
    write_extreme(best, arg, row[:, None] * C + c[None, :], mask, out, arg_out, SIGN)
    if CUT:
        is_cut = live & (slot >= 0)
        offsets = slot[:, None] * C + c[None, :]
        tl.store(partial + offsets, best, mask=is_cut[:, None] & in_channels)
        tl.store(partial_arg + offsets, arg, mask=is_cut[:, None] & in_channels)


@triton.jit
def extreme_merge_kernel(
    cut_row, cut_ptr, out, arg_out, partial, partial_arg,
    C: tl.constexpr, BLOCK_C: tl.constexpr, ACC: tl.constexpr, SIGN: tl.constexpr,
):  # fmt: skip
    """Merge the parts of one cut row in order."""
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    row = tl.load(cut_row + tl.program_id(0)).to(tl.int64)  # []
    first = tl.load(cut_ptr + tl.program_id(0))  # []
    last = tl.load(cut_ptr + tl.program_id(0) + 1)  # []
    best = tl.full([BLOCK_C], float("-inf"), ACC)
    arg = tl.full([BLOCK_C], NONE, tl.int32)
    for slot in range(first, last):
        offsets = (slot + tl.zeros([BLOCK_C], tl.int64)) * C + c
        value = tl.load(partial + offsets, mask=c < C, other=float("-inf"))  # [BLOCK_C]
        column = tl.load(partial_arg + offsets, mask=c < C, other=NONE)  # [BLOCK_C]
        best, arg = better(value, column, best, arg)
    write_extreme(best, arg, row * C + c, c < C, out, arg_out, SIGN)


@triton.jit(do_not_specialize=["first", "count"])
def extreme_backward_kernel(
    index, part_row, part_start, part_length, part_slot, first, count, grad, arg, dx, partial,
    C: tl.constexpr, BLOCK_C: tl.constexpr, R: tl.constexpr, E: tl.constexpr,
    CUT: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Sum, for R columns, the gradients of the rows whose extreme they attained."""
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    col, start, length, slot, live = load_parts(
        part_row, part_start, part_length, part_slot, first, count, R
    )
    total = tl.zeros([R, BLOCK_C], ACC)
    longest = tl.max(length)  # []
    for begin in range(0, longest, E):
        entry = begin + tl.arange(0, E)
        valid = entry[None, :] < length[:, None]
        entry_ptr = index + start[:, None] + entry[None, :]
        i = tl.load(entry_ptr, mask=valid, other=0).to(tl.int64)  # [R, E]
        offsets = i[:, :, None] * C + c[None, None, :]
        mask = valid[:, :, None] & (c < C)[None, None, :]
        best = tl.load(arg + offsets, mask=mask, other=NONE).to(tl.int64)  # [R, E, BLOCK_C]
        attained = best == col[:, None, None]
        g = tl.load(grad + offsets, mask=mask & attained, other=0.0).to(ACC)  # [R, E, BLOCK_C]
        total += tl.sum(g, 1)  # [R, BLOCK_C]
    in_channels = (c < C)[None, :]
    is_whole = live & (slot < 0)
    offsets = col[:, None] * C + c[None, :]
    tl.store(dx + offsets, total.to(dx.dtype.element_ty), mask=is_whole[:, None] & in_channels)
    if CUT:
        is_cut = live & (slot >= 0)
        tl.store(
            partial + slot[:, None] * C + c[None, :], total, mask=is_cut[:, None] & in_channels
        )


@triton.jit(do_not_specialize=["first", "count"])
def entries_kernel(
    index, part_row, part_start, part_length, part_slot, first, count, grad, x, arg, dvalues,
    C: tl.constexpr, BLOCK_C: tl.constexpr, R: tl.constexpr, E: tl.constexpr,
    EXTREME: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of every entry's value: <G_i, x_j>, or the sum of G_i where it won."""
    row, start, length, _slot, live = load_parts(
        part_row, part_start, part_length, part_slot, first, count, R
    )
    longest = tl.max(length)  # []
    for begin in range(0, longest, E):
        entry = begin + tl.arange(0, E)
        valid = entry[None, :] < length[:, None]
        position = start[:, None] + entry[None, :]
        j = tl.load(index + position, mask=valid, other=0)  # [R, E]
        total = tl.zeros([R, E], ACC)
        for block in range(0, C, BLOCK_C):
            c = block + tl.arange(0, BLOCK_C)
            offsets = row[:, None] * C + c[None, :]
            mask = live[:, None] & (c < C)[None, :]
            g = tl.load(grad + offsets, mask=mask, other=0.0).to(ACC)[:, None, :]  # [R, 1, BLOCK_C]
            if EXTREME:
                taken = tl.load(arg + offsets, mask=mask, other=NONE)  # [R, BLOCK_C]
                won = taken[:, None, :] == j.to(tl.int32)[:, :, None]
                total += tl.sum(tl.where(won, g, 0.0), 2)  # [R, E]
            else:
                features = fetch(x, j.to(tl.int64), c, valid, 0.0, C, ACC)  # [R, E, BLOCK_C]
                total += tl.sum(g * features, 2)  # [R, E]
        tl.store(dvalues + position, total.to(dvalues.dtype.element_ty), mask=valid)
