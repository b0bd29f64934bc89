"""Tables of tiles whose rows share an element, for kernels over atoms sorted by element.

`tile_table_kernel` writes [num_tiles, 3] int32 on the device: group, first row and end row of each
tile; a program finds the group of BLOCK tiles by comparing with the cumulative number of tiles.
`sum_tiles_kernel` adds the partial sums of the tiles of one group in order.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

_tables = WeakTensorKeyDictionary()
"""Tables by where groups begin; a step cuts the same groups two dozen times, in few ways."""


def tile_table(ptr: Tensor, num_rows: int, rows: int, scale: int = 1) -> Tensor:
    """Cut the rows of each group into tiles of at most ``rows``; once for a ``ptr``.

    Parameters
    ----------
    ptr : [Z+1], offsets of the groups, on the device; never written to afterwards
    num_rows : rows in total, including those of no group
    scale : rows per unit of ``ptr``

    Returns
    -------
    Tensor
        int32 [tiles, 3]: group, first row, end of the tile's rows. There are as many tiles as
        groups of any sizes can need; surplus tiles are empty.
    """
    found: dict[tuple[int, int, int], Tensor] = _tables.setdefault(ptr, {})
    key = num_rows, rows, scale
    if key not in found:
        found[key] = _make_table(ptr, *key)
    return found[key]


def _make_table(ptr: Tensor, num_rows: int, rows: int, scale: int) -> Tensor:
    num_groups = ptr.shape[0] - 1
    num_tiles = num_rows // rows + min(num_groups, num_rows)
    table = torch.empty(num_tiles, 3, dtype=torch.int32, device=ptr.device)
    if num_tiles:
        block = 32 if ptr.is_cuda else triton.next_power_of_2(num_tiles)
        tile_table_kernel[(triton.cdiv(num_tiles, block),)](
            table, ptr, num_tiles, scale,
            NUM_GROUPS=num_groups, GROUPS=triton.next_power_of_2(num_groups), ROWS=rows,
            BLOCK=block,
        )  # fmt: skip
    return table


def sum_tiles(parts: Tensor, ptr: Tensor, rows: int, scale: int = 1) -> Tensor:
    """Add the sums of tiles, [tiles, ...], to one sum per group, [Z, ...].

    The order of additions is fixed, so the same input gives the same bits.
    """
    num_groups = ptr.shape[0] - 1
    out = parts.new_empty(num_groups, *parts.shape[1:])
    if out.numel() == 0:
        return out
    size = out[0].numel()
    block = 256 if parts.is_cuda else triton.next_power_of_2(size)
    sum_tiles_kernel[num_groups, triton.cdiv(size, block)](
        out, parts, ptr, scale,
        SIZE=size, NUM_GROUPS=num_groups, GROUPS=triton.next_power_of_2(num_groups), ROWS=rows,
        BLOCK=block,
        num_warps=4,
    )  # fmt: skip
    return out


# The type checks of the tests would wrap these functions, and Triton reads their source.
@triton.jit(do_not_specialize=["num_tiles", "scale"])
@no_type_check
def tile_table_kernel(
    table_ptr, ptr_ptr, num_tiles, scale,
    NUM_GROUPS: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Find the group of each tile as the number of groups whose last tile comes before it."""
    groups = tl.arange(0, GROUPS)
    valid = groups < NUM_GROUPS
    begin = tl.load(ptr_ptr + groups, mask=valid, other=0).to(tl.int32) * scale  # [GROUPS]
    end = tl.load(ptr_ptr + groups + 1, mask=valid, other=0).to(tl.int32) * scale  # [GROUPS]
    tiles = (end - begin + ROWS - 1) // ROWS
    last = tl.cumsum(tiles, 0)  # [GROUPS]
    tile = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    before = (last[None, :] <= tile[:, None]).to(tl.int32)  # [BLOCK, GROUPS]
    group = tl.minimum(tl.sum(before, 1), NUM_GROUPS - 1)  # [BLOCK]
    here = groups[None, :] == group[:, None]  # [BLOCK, GROUPS]
    first_tile = tl.sum(tl.where(here, (last - tiles)[None, :], 0), 1)  # [BLOCK]
    group_begin = tl.sum(tl.where(here, begin[None, :], 0), 1)  # [BLOCK]
    group_end = tl.sum(tl.where(here, end[None, :], 0), 1)  # [BLOCK]
    start = tl.minimum(group_begin + (tile - first_tile) * ROWS, group_end)
    mask = tile < num_tiles
    tl.store(table_ptr + tile * 3, group, mask=mask)
    tl.store(table_ptr + tile * 3 + 1, start, mask=mask)
    tl.store(table_ptr + tile * 3 + 2, tl.minimum(start + ROWS, group_end), mask=mask)


@triton.jit
@no_type_check
def sum_tiles_kernel(
    out_ptr, parts_ptr, ptr_ptr, scale,
    SIZE: tl.constexpr, NUM_GROUPS: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Add the tiles of one group in order: out[group] = sum of parts[tile]."""
    group = tl.program_id(0)
    groups = tl.arange(0, GROUPS)
    valid = groups < NUM_GROUPS
    begin = tl.load(ptr_ptr + groups, mask=valid, other=0).to(tl.int32) * scale  # [GROUPS]
    end = tl.load(ptr_ptr + groups + 1, mask=valid, other=0).to(tl.int32) * scale  # [GROUPS]
    tiles = (end - begin + ROWS - 1) // ROWS
    first = tl.sum(tl.where(groups < group, tiles, 0), 0)  # []
    count = tl.sum(tl.where(groups == group, tiles, 0), 0)  # []
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < SIZE
    total = tl.zeros([BLOCK], out_ptr.dtype.element_ty)
    part = parts_ptr + first.to(tl.int64) * SIZE + column
    for _ in range(count):
        # Partial sums already have the accumulator type.
        total += tl.load(part, mask=mask, other=0.0)  # [BLOCK]
        part += SIZE
    tl.store(out_ptr + group.to(tl.int64) * SIZE + column, total, mask=mask)
