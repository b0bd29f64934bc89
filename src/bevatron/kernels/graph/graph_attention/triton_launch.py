"""Launches of the kernels of GAT's attention."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from bevatron.kernels.graph.csr.dropout import threshold
from bevatron.kernels.graph.csr.launch import Tile, buckets, side_by_side, slices
from bevatron.kernels.graph.graph_attention.triton_kernels import (
    backward_kernel,
    backward_merge_kernel,
    forward_kernel,
    merge_kernel,
    prepare_kernel,
    values_kernel,
)
from bevatron.kernels.shared.dtypes import wide_type
from bevatron.kernels.shared.launch import on_device
from bevatron.kernels.shared.tiles import TileTable
from bevatron.kernels.shared.triton_math import accumulator

INFERENCE, TRAINING, PARTIAL_INFERENCE, PARTIAL = range(4)

TILES = TileTable(forward=Tile(1024, 32), backward=Tile(1024, 32), values=Tile(1024, 128))
"""Sizes of programs; the README says what they were chosen from."""
MERGED_AT_ONCE = 16
PREPARED = 1024
"""Numbers of a block of the kernel that goes before the backward pass."""


def launch_forward(
    x: Tensor,
    row_score: Tensor,
    col_score: Tensor,
    values: Tensor | None,
    rows: list[Tensor],
    numbers: list[int],
    ids: list[Tensor],
    seed: Tensor | None,
    outputs: tuple[Tensor, ...],
    slope: float,
    dropout: float,
    mode: int,
) -> None:
    """Write z and what the mode asks for; parts of cut rows go through shares."""
    x, row_score, col_score = x.contiguous(), row_score.contiguous(), col_score.contiguous()
    (_, num_heads, channels), num_slots = x.shape, numbers[0]
    if not outputs[0].numel():
        return
    tile = TILES["forward"]
    width, shares = slices(channels, tile)
    sides = 1 + mode % 2
    share_stats = x.new_empty((3, num_slots, num_heads), dtype=wide_type(x))
    share_z = x.new_empty((sides, num_slots, num_heads, channels), dtype=wide_type(x))
    sizes = {"C": channels, "H": num_heads, "BLOCK_C": width, "SLICES": shares}
    sizes |= {"ACC": accumulator(x), "MODE": mode}
    index, *parts, cut_row, cut_ptr = rows
    with on_device(x):
        for bucket in side_by_side(numbers, width, tile, x.element_size()):
            forward_kernel[(bucket.programs, num_heads * shares)](
                *(index, *parts, bucket.first, bucket.count, x if values is None else values),
                *(x, row_score, col_score, *mask_arguments(x, ids, seed, dropout)),
                *(*outputs, share_stats, share_z, num_slots),
                **sizes,
                R=bucket.rows,
                E=bucket.entries,
                DEAL=bucket.dealt,
                FILLED=bucket.filled,
                HAS_VALUES=values is not None,
                CUT=num_slots > 0,
                **mask_options(ids, seed, slope, dropout),
                num_warps=tile.num_warps,
            )
        if num_slots:
            merge_kernel[(len(cut_row), num_heads * shares)](
                *(cut_row, cut_ptr, *outputs, share_stats, share_z, num_slots),
                **sizes,
                E=MERGED_AT_ONCE,
                num_warps=1,
            )


def launch_prepare(
    grad: Tensor,
    z: Tensor,
    side: Tensor,
    lse: Tensor,
    share: Tensor,
    row_score: Tensor,
    info: Tensor,
    row_grad: Tensor,
    slope: float,
) -> None:
    """Write the gradient of the rows' scores, and what the columns fetch of every row."""
    num_rows, channels = z.shape[0] * z.shape[1], z.shape[2]
    if not num_rows:
        return
    width = min(128, 1 << (channels - 1).bit_length())
    block = PREPARED // width
    with on_device(z):
        prepare_kernel[(-(-num_rows // block),)](
            *(grad.contiguous(), z, side, lse, share, row_score.contiguous(), info, row_grad),
            num_rows,
            C=channels,
            BLOCK_C=width,
            BLOCK_N=block,
            ACC=accumulator(info),
            SLOPE=slope,
        )


def launch_columns(
    x: Tensor,
    col_score: Tensor,
    grad: Tensor,
    info: Tensor,
    values: Tensor | None,
    columns: list[Tensor],
    numbers: list[int],
    ids: list[Tensor],
    seed: Tensor | None,
    dx: Tensor,
    dscore: Tensor,
    slope: float,
    dropout: float,
) -> None:
    """Write the gradients of x and of the columns' scores."""
    x, col_score, grad = x.contiguous(), col_score.contiguous(), grad.contiguous()
    (num_columns, num_heads, channels), num_slots = x.shape, numbers[0]
    if not dscore.numel():
        return
    tile = TILES["backward"]
    width, shares = slices(channels, tile)
    wide = wide_type(x)
    share_stats = x.new_empty((num_slots, num_heads), dtype=wide)
    share_z = x.new_empty((2, num_slots, num_heads, channels), dtype=wide)
    # Every share of the channels adds to the gradient of a column's score.
    along = x.new_empty((shares, *dscore.shape), dtype=wide) if shares > 1 else dscore
    sizes = {"C": channels, "H": num_heads, "BLOCK_C": width, "SLICES": shares}
    sizes["ACC"] = accumulator(x)
    index, *parts, cut_row, cut_ptr = columns
    with on_device(x):
        for bucket in side_by_side(numbers, width, tile, grad.element_size()):
            backward_kernel[(bucket.programs, num_heads * shares)](
                *(index, *parts, bucket.first, bucket.count, x if values is None else values),
                *(x, grad, info, col_score, *mask_arguments(x, ids, seed, dropout)),
                *(dx, along, share_stats, share_z, num_slots, num_columns),
                **sizes,
                R=bucket.rows,
                E=bucket.entries,
                DEAL=bucket.dealt,
                FILLED=bucket.filled,
                HAS_VALUES=values is not None,
                CUT=num_slots > 0,
                PACKED=info.dtype == torch.float32,
                **mask_options(ids, seed, slope, dropout),
                num_warps=tile.num_warps,
            )
        if num_slots:
            backward_merge_kernel[(len(cut_row), num_heads * shares)](
                *(cut_row, cut_ptr, x, dx, along, share_stats, share_z, num_slots, num_columns),
                **sizes,
                E=MERGED_AT_ONCE,
                num_warps=1,
            )
    if shares > 1:
        dscore.copy_(along.sum(0))


def launch_values(
    grad: Tensor,
    x: Tensor,
    col_score: Tensor,
    info: Tensor,
    rows: list[Tensor],
    numbers: list[int],
    ids: list[Tensor],
    seed: Tensor | None,
    dvalues: Tensor,
    slope: float,
    dropout: float,
) -> None:
    """Write the gradient of the matrix's values."""
    x, col_score, grad = x.contiguous(), col_score.contiguous(), grad.contiguous()
    _, num_heads, channels = x.shape
    if not dvalues.numel():
        return
    tile = TILES["values"]
    width, _ = slices(channels, tile)
    index, *parts, _, _ = rows
    with on_device(x):
        for bucket in buckets(numbers, width, tile):
            values_kernel[(bucket.programs,)](
                *(index, *parts, bucket.first, bucket.count, x, grad, info, col_score),
                *(*mask_arguments(x, ids, seed, dropout), dvalues),
                C=channels,
                H=num_heads,
                BLOCK_C=width,
                R=bucket.rows,
                E=bucket.entries,
                ACC=accumulator(x),
                **mask_options(ids, seed, slope, dropout),
                num_warps=tile.num_warps,
            )


def mask_arguments(
    x: Tensor, ids: list[Tensor], seed: Tensor | None, dropout: float
) -> tuple[Any, ...]:
    """Return seed, numbers of rows and columns, and the bound of the random words."""
    row_ids, col_ids = ids or (x, x)
    return x if seed is None else seed, row_ids, col_ids, threshold(dropout)


def mask_options(
    ids: list[Tensor], seed: Tensor | None, slope: float, dropout: float
) -> Mapping[str, Any]:
    """Return the compile-time constants of slope and dropout."""
    return {
        "DROPOUT": seed is not None,
        "HAS_IDS": bool(ids),
        "SLOPE": slope,
        "INVERSE_KEEP": 1.0 / (1.0 - dropout),
    }
