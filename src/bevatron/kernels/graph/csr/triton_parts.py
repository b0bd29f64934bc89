"""Device functions shared by all kernels over the entries of a sparse matrix.

A program owns R parts of rows (a part is a whole row, or a piece of a long one) and steps over
their entries E at a time. A cut row's parts write partial results to slots, which a second kernel
merges in order.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import triton
import triton.language as tl


@triton.jit
def load_parts(row, start, length, slot, first, count, R: tl.constexpr, DEAL: tl.constexpr = False):
    """Load this program's R parts: row, first entry, length, slot, and whether the part exists.

    With DEAL the program owns one part, R times over: lane r takes its entries r, r + R, ...
    """
    if DEAL:
        part = first + tl.program_id(0) + tl.arange(0, R) * 0
    else:
        part = first + tl.program_id(0) * R + tl.arange(0, R)
    exists = part < first + count
    return (
        tl.load(row + part, mask=exists, other=0).to(tl.int64),  # [R]
        tl.load(start + part, mask=exists, other=0),  # [R]
        tl.load(length + part, mask=exists, other=0),  # [R]
        tl.load(slot + part, mask=exists, other=-1).to(tl.int64),  # [R]
        exists,
    )


@triton.jit
def entries_of(begin, R: tl.constexpr, E: tl.constexpr, DEAL: tl.constexpr):
    """Return the positions [E, R] of a step's entries in their parts, from step ``begin`` on."""
    step = begin + tl.arange(0, E)
    lane = tl.arange(0, R)
    return step[:, None] * R + lane[None, :] if DEAL else step[:, None] + lane[None, :] * 0


@triton.jit
def load_index(index, start, length, entry, FILLED: tl.constexpr):
    """Load the indices [E, R] of a step's entries; past a row's end its last one, or 0.

    With FILLED, loads past the end repeat the last entry: it has no weight and needs no mask.
    """
    if FILLED:
        clamped = tl.maximum(tl.minimum(entry, length[None, :] - 1), 0)
        indices = tl.load(index + start[None, :] + clamped)  # [E, R]
    else:
        mask = entry < length[None, :]
        index_ptr = index + start[None, :] + entry
        indices = tl.load(index_ptr, mask=mask, other=0)  # [E, R]
    return indices


@triton.jit
def channel_offsets(
    index, head, c, C: tl.constexpr, H: tl.constexpr, R: tl.constexpr, BLOCK_C: tl.constexpr
):  # fmt: skip
    """Return the offsets [E, R, BLOCK_C] of a head's channels; lanes go to rows before entries.

    The compiler gives lanes to the more contiguous axis, and Triton 3.6 and 3.7 break the tie
    between entries and rows differently. The hint about rows is false and only breaks that tie:
    loads are vectorised along channels, which are more contiguous still.
    """
    offsets = index[:, :, None] * (H * C) + (head * C + c)[None, None, :]  # [E, R, BLOCK_C]
    if R > 1 and BLOCK_C > 2:
        offsets = tl.max_contiguous(offsets, [1, 2, BLOCK_C])
    return offsets


@triton.jit
def mix(bits):
    """Scramble 32-bit integers like `bevatron.kernels.graph.csr.dropout.mix`."""
    bits = bits ^ (bits >> 16)
    bits = bits * 0x85EBCA6B
    bits = bits ^ (bits >> 13)
    bits = bits * 0xC2B2AE35
    return bits ^ (bits >> 16)


@triton.jit
def head_key(seed, head):
    """Return the key of a head's dropout mask, [1, 1]."""
    whole = tl.load(seed)  # []
    low = (whole & 0xFFFFFFFF).to(tl.uint32)
    high = ((whole >> 32) & 0xFFFFFFFF).to(tl.uint32)
    spread = (tl.full([1, 1], 0x7F4A7C15, tl.int64) * head) & 0xFFFFFFFF
    return mix(low ^ mix(spread.to(tl.uint32) + high))


@triton.jit
def is_kept(key, row, col, row_ids, col_ids, threshold, HAS_IDS: tl.constexpr):
    """Return which entries the mask of attention dropout keeps."""
    if HAS_IDS:
        row = tl.load(row_ids + row)  # [*row.shape]
        col = tl.load(col_ids + col)  # [*col.shape]
    row_key = mix((row & 0xFFFFFFFF).to(tl.uint32) ^ key)
    col_key = mix((col & 0xFFFFFFFF).to(tl.uint32) + 0x9E3779B9)
    return mix(row_key ^ col_key).to(tl.int64) >= threshold


@triton.jit
def channels_of(BLOCK_C: tl.constexpr, SLICES: tl.constexpr):
    """Return this program's head and its block of the head's channels."""
    y = tl.program_id(1)
    return y // SLICES, (y % SLICES) * BLOCK_C + tl.arange(0, BLOCK_C)
