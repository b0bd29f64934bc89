"""What all kernels over the entries of a sparse matrix share."""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import triton
import triton.language as tl


@triton.jit
def load_parts(row, start, length, slot, first, count, R: tl.constexpr, DEAL: tl.constexpr = False):
    """Load this program's parts of rows: row, first entry, length, slot, and whether they are.

    Dealt out it is one part R times: lane r takes its entries r, r + R, ...
    """
    if DEAL:
        part = first + tl.program_id(0) + tl.arange(0, R) * 0
    else:
        part = first + tl.program_id(0) * R + tl.arange(0, R)
    live = part < first + count
    return (
        tl.load(row + part, mask=live, other=0).to(tl.int64),
        tl.load(start + part, mask=live, other=0),
        tl.load(length + part, mask=live, other=0),
        tl.load(slot + part, mask=live, other=-1).to(tl.int64),
        live,
    )


@triton.jit
def entries_of(begin, R: tl.constexpr, E: tl.constexpr, DEAL: tl.constexpr):
    """Return the places [E, R] of a step's entries within their parts, from step ``begin`` on."""
    step = begin + tl.arange(0, E)
    lane = tl.arange(0, R)
    return step[:, None] * R + lane[None, :] if DEAL else step[:, None] + lane[None, :] * 0


@triton.jit
def load_index(index, start, length, entry, FILLED: tl.constexpr):
    """Load the indices of a step's entries; past a row's end its last one, or 0.

    Its last one: what is fetched for it, and counts nothing, needs no mask.
    """
    if FILLED:
        within = tl.maximum(tl.minimum(entry, length[None, :] - 1), 0)
        found = tl.load(index + start[None, :] + within)
    else:
        found = tl.load(index + start[None, :] + entry, mask=entry < length[None, :], other=0)
    return found


@triton.jit
def places_of(
    index, head, c, C: tl.constexpr, H: tl.constexpr, R: tl.constexpr, BLOCK_C: tl.constexpr
):  # fmt: skip
    """Return where channels [entries, rows, channels] of a head lie, lanes on rows before entries.

    Triton 3.6 and 3.7 break the tie between the two axes differently. Lanes go to the axis that is
    more contiguous: what is said of rows is not true and serves this alone, since fetches are put
    together along channels, which are more contiguous still.
    """
    place = index[:, :, None] * (H * C) + (head * C + c)[None, None, :]
    if R > 1 and BLOCK_C > 2:
        place = tl.max_contiguous(place, [1, 2, BLOCK_C])
    return place


@triton.jit
def mix(word):
    """Scramble 32-bit words, as `bevatron.kernels.graph.csr.dropout.mix`."""
    word = word ^ (word >> 16)
    word = word * 0x85EBCA6B
    word = word ^ (word >> 13)
    word = word * 0xC2B2AE35
    return word ^ (word >> 16)


@triton.jit
def head_key(seed, head):
    """Return the key of a head's random mask, [1, 1]."""
    whole = tl.load(seed)
    low = (whole & 0xFFFFFFFF).to(tl.uint32)
    high = ((whole >> 32) & 0xFFFFFFFF).to(tl.uint32)
    spread = (tl.full([1, 1], 0x7F4A7C15, tl.int64) * head) & 0xFFFFFFFF
    return mix(low ^ mix(spread.to(tl.uint32) + high))


@triton.jit
def is_kept(key, row, col, row_ids, col_ids, threshold, HAS_IDS: tl.constexpr):
    """Say which entries the mask of attention dropout keeps."""
    if HAS_IDS:
        row = tl.load(row_ids + row)
        col = tl.load(col_ids + col)
    row_key = mix((row & 0xFFFFFFFF).to(tl.uint32) ^ key)
    col_key = mix((col & 0xFFFFFFFF).to(tl.uint32) + 0x9E3779B9)
    return mix(row_key ^ col_key).to(tl.int64) >= threshold


@triton.jit
def channels_of(BLOCK_C: tl.constexpr, SLICES: tl.constexpr):
    """Return this program's head and the channels of its share."""
    y = tl.program_id(1)
    return y // SLICES, (y % SLICES) * BLOCK_C + tl.arange(0, BLOCK_C)
