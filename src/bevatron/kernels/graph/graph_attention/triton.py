"""GAT's attention in Triton: custom operators and their launches."""

import torch
from torch import Tensor

from bevatron.kernels.graph.csr import Csr
from bevatron.kernels.graph.csr.launch import (
    Mask,
    Tile,
    buckets,
    columns_of,
    ids_of,
    lane_buckets,
    rows_of,
    slices,
)
from bevatron.kernels.graph.graph_attention.triton_kernels import (
    backward_kernel,
    backward_merge_kernel,
    forward_kernel,
    merge_kernel,
    prepare_kernel,
    values_kernel,
)
from bevatron.kernels.shared.autograd import empty_gradients, needs_grad
from bevatron.kernels.shared.custom_op import custom_op
from bevatron.kernels.shared.dtypes import wide_type
from bevatron.kernels.shared.launch import on_device
from bevatron.kernels.shared.tiles import TileTable
from bevatron.kernels.shared.triton_math import accumulator

INFERENCE, TRAINING, PARTIAL_INFERENCE, PARTIAL = range(4)

TILES = TileTable(forward=Tile(1024, 32), backward=Tile(1024, 32), values=Tile(1024, 128))
"""Sizes of programs; the README lists the alternatives that were measured."""
MERGED_AT_ONCE = 16
PREPARED = 1024
"""Elements of a block of the kernel that prepares the backward pass."""
LOG2E = 1.4426950408889634


def graph_attention(
    csr: Csr,
    x: Tensor,
    row_score: Tensor,
    col_score: Tensor,
    negative_slope: float,
    dropout: float,
    seed: Tensor | None,
) -> Tensor:
    """Compute the same as the reference; see `bevatron.kernels.graph.graph_attention`."""
    rows, row_numbers = rows_of(csr)
    columns, column_numbers = columns_of(csr)
    training = needs_grad(x, row_score, col_score, csr.values)
    by_column = csr.values_by_column if training else None
    by_column = None if by_column is None else by_column.detach()
    z: Tensor = attend(
        *(x, row_score, col_score, csr.values, by_column, rows, row_numbers),
        *(columns, column_numbers, ids_of(csr) if seed is not None else [], seed),
        *(csr.shape[0], negative_slope, dropout, TRAINING if training else INFERENCE),
    )[0]
    return z


def sums(
    csr: Csr,
    x: Tensor,
    row_score: Tensor,
    col_score: Tensor,
    negative_slope: float,
    dropout: float,
    seed: Tensor | None,
    backward: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute a block's m, s, positive part of s, Z and positive part of Z."""
    rows, numbers = rows_of(csr)
    with torch.no_grad():
        z, largest, total, positive, z_positive = attend(
            *(x, row_score, col_score, csr.values, None, rows, numbers, [], []),
            *(ids_of(csr) if seed is not None else [], seed, csr.shape[0]),
            *(negative_slope, dropout, PARTIAL if backward else PARTIAL_INFERENCE),
        )
    return largest, total, positive, z, z_positive


def gradients(
    csr: Csr,
    x: Tensor,
    row_score: Tensor,
    col_score: Tensor,
    grad: Tensor,
    lse: Tensor,
    delta: Tensor,
    negative_slope: float,
    dropout: float,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Compute a block's part of the gradients of x and of the column scores."""
    columns, numbers = columns_of(csr)
    dtype = wide_type(x)
    info = torch.stack([row_score.to(dtype), lse.to(dtype) * LOG2E, delta.to(dtype)], -1)
    info = torch.nn.functional.pad(info, (0, 1)).contiguous()
    values = csr.values_by_column
    dx, dscore = (
        x.new_empty(x.shape, dtype=dtype),
        col_score.new_empty(col_score.shape, dtype=dtype),
    )
    mask = Mask(ids_of(csr) if seed is not None else [], seed, negative_slope, dropout)
    values = None if values is None else values.detach()
    _launch_columns(x, col_score, grad, info, values, columns, numbers, mask, dx, dscore)
    return dx, dscore


def _outputs(x: Tensor, num_rows: int, mode: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    dtype, stat, whole = wide_type(x), (num_rows, x.shape[1]), (num_rows, *x.shape[1:])
    if mode == INFERENCE:
        none = [x.new_empty(0) for _ in range(4)]
        return x.new_empty(whole), none[0], none[1], none[2], none[3]
    if mode == TRAINING:
        first, second = (x.new_empty(stat, dtype=dtype) for _ in range(2))
        return x.new_empty(whole), first, second, x.new_empty(0), x.new_empty(whole, dtype=dtype)
    z = x.new_empty(whole, dtype=dtype)
    largest, total = (x.new_empty(stat, dtype=dtype) for _ in range(2))
    kept = mode == PARTIAL
    positive = x.new_empty(stat if kept else 0, dtype=dtype)
    return z, largest, total, positive, x.new_empty(whole if kept else 0, dtype=dtype)


@custom_op("graph_attention", outputs="z lse share unused side", fake=_outputs)
def attend(
    x: Tensor,
    row_score: Tensor,
    col_score: Tensor,
    values: Tensor | None,
    values_by_column: Tensor | None,
    rows: list[Tensor],
    row_numbers: list[int],
    columns: list[Tensor],
    column_numbers: list[int],
    ids: list[Tensor],
    seed: Tensor | None,
    num_rows: int,
    slope: float,
    dropout: float,
    mode: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return z and, in training, L, the weight of the smaller side, nothing, and that side of Z.

    For a block: Z, m, s and, if a backward pass follows, the positive parts of s and of Z.
    """
    del values_by_column, columns, column_numbers  # for the backward pass
    outputs = _outputs(x, num_rows, mode)
    if not outputs[0].numel():
        return outputs
    x, row_score, col_score = x.contiguous(), row_score.contiguous(), col_score.contiguous()
    (_, num_heads, channels), num_slots = x.shape, row_numbers[0]
    tile, mask = TILES["forward"], Mask(ids, seed, slope, dropout)
    width, shares = slices(channels, tile)
    share_stats = x.new_empty((3, num_slots, num_heads), dtype=wide_type(x))
    # Parts of cut rows write partial results of Z and, if requested, of its positive part.
    sides = 1 + mode % 2
    share_z = x.new_empty((sides, num_slots, num_heads, channels), dtype=wide_type(x))
    sizes = {"C": channels, "H": num_heads, "BLOCK_C": width, "SLICES": shares}
    sizes |= {"ACC": accumulator(x), "MODE": mode}
    index, *parts, cut_row, cut_ptr = rows
    for bucket in lane_buckets(row_numbers, width, tile, x.element_size()):
        forward_kernel[(bucket.programs, num_heads * shares)](
            *(index, *parts, bucket.first, bucket.count, x if values is None else values),
            *(x, row_score, col_score, *mask.arguments(x)),
            *(*outputs, share_stats, share_z, num_slots),
            **sizes, R=bucket.rows, E=bucket.entries, DEAL=bucket.dealt, FILLED=bucket.filled,
            HAS_VALUES=values is not None, CUT=num_slots > 0, **mask.options(),
            num_warps=tile.num_warps,
        )  # fmt: skip
    if num_slots:
        merge_kernel[(len(cut_row), num_heads * shares)](
            *(cut_row, cut_ptr, *outputs, share_stats, share_z, num_slots),
            **sizes, E=MERGED_AT_ONCE,
            num_warps=1,
        )  # fmt: skip
    return outputs


@custom_op(
    "graph_attention_backward",
    fake=lambda x, row_score, col_score, z: (
        *empty_gradients(x, x, row_score, col_score),
        _info(x, z),
    ),
)
def attend_backward(
    grad: Tensor,
    x: Tensor,
    row_score: Tensor,
    col_score: Tensor,
    z: Tensor,
    lse: Tensor,
    share: Tensor,
    side: Tensor,
    values_by_column: Tensor | None,
    columns: list[Tensor],
    column_numbers: list[int],
    ids: list[Tensor],
    seed: Tensor | None,
    slope: float,
    dropout: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of x and both scores, and (l, L, delta, unused) of every row."""
    info, row_grad = _info(x, z), row_score.new_empty(row_score.shape)
    num_rows, channels = z.shape[0] * z.shape[1], z.shape[2]
    if num_rows:
        width = min(128, 1 << (channels - 1).bit_length())
        block = PREPARED // width
        prepare_kernel[(-(-num_rows // block),)](
            *(grad.contiguous(), z, side, lse, share, row_score.contiguous(), info, row_grad),
            num_rows,
            C=channels, BLOCK_C=width, BLOCK_N=block, ACC=accumulator(info), SLOPE=slope,
        )  # fmt: skip
    dx, dscore = x.new_empty(x.shape), col_score.new_empty(col_score.shape)
    _launch_columns(
        *(x, col_score, grad, info, values_by_column, columns, column_numbers),
        *(Mask(ids, seed, slope, dropout), dx, dscore),
    )
    return dx, row_grad, dscore, info


@custom_op("graph_attention_backward_values", fake="values")
def attend_backward_values(
    grad: Tensor,
    x: Tensor,
    col_score: Tensor,
    info: Tensor,
    values: Tensor,
    rows: list[Tensor],
    row_numbers: list[int],
    ids: list[Tensor],
    seed: Tensor | None,
    slope: float,
    dropout: float,
) -> Tensor:
    """Return the gradient of the matrix's values."""
    dvalues = values.new_empty(values.shape)
    if not dvalues.numel():
        return dvalues
    x, col_score, grad = x.contiguous(), col_score.contiguous(), grad.contiguous()
    _, num_heads, channels = x.shape
    tile, mask = TILES["values"], Mask(ids, seed, slope, dropout)
    width, _ = slices(channels, tile)
    index, *parts, _, _ = rows
    for bucket in buckets(row_numbers, width, tile):
        values_kernel[(bucket.programs,)](
            *(index, *parts, bucket.first, bucket.count, x, grad, info, col_score),
            *(*mask.arguments(x), dvalues),
            C=channels, H=num_heads, BLOCK_C=width, R=bucket.rows, E=bucket.entries,
            ACC=accumulator(x), **mask.options(),
            num_warps=tile.num_warps,
        )  # fmt: skip
    return dvalues


def _gradients(
    grad: Tensor,
    x: Tensor,
    row_score: Tensor,
    col_score: Tensor,
    z: Tensor,
    lse: Tensor,
    share: Tensor,
    side: Tensor,
    values: Tensor | None,
    values_by_column: Tensor | None,
    rows: list[Tensor],
    row_numbers: list[int],
    columns: list[Tensor],
    column_numbers: list[int],
    ids: list[Tensor],
    seed: Tensor | None,
    slope: float,
    dropout: float,
    needs: list[bool],
) -> tuple[Tensor | None, ...]:
    dx, drow, dcol, info = attend_backward(
        *(grad, x, row_score, col_score, z, lse, share, side, values_by_column),
        *(columns, column_numbers, ids, seed, slope, dropout),
    )
    dvalues = None
    if needs[3]:
        dvalues = attend_backward_values(
            *(grad, x, col_score, info, values, rows, row_numbers, ids, seed, slope, dropout)
        )
    return dx, drow, dcol, dvalues


attend.gradients("x row_score col_score values", _gradients)


def _info(x: Tensor, rows_like: Tensor) -> Tensor:
    return x.new_empty((*rows_like.shape[:2], 4), dtype=wide_type(x))


def _launch_columns(
    x: Tensor,
    col_score: Tensor,
    grad: Tensor,
    info: Tensor,
    values: Tensor | None,
    columns: list[Tensor],
    numbers: list[int],
    mask: Mask,
    dx: Tensor,
    dscore: Tensor,
) -> None:
    """Write the gradients of x and of the column scores."""
    x, col_score, grad = x.contiguous(), col_score.contiguous(), grad.contiguous()
    (num_columns, num_heads, channels), num_slots = x.shape, numbers[0]
    if not dscore.numel():
        return
    tile = TILES["backward"]
    width, shares = slices(channels, tile)
    wide = wide_type(x)
    share_stats = x.new_empty((num_slots, num_heads), dtype=wide)
    share_z = x.new_empty((2, num_slots, num_heads, channels), dtype=wide)
    # Every block of channels adds to the gradient of a column's score.
    along = x.new_empty((shares, *dscore.shape), dtype=wide) if shares > 1 else dscore
    sizes = {"C": channels, "H": num_heads, "BLOCK_C": width, "SLICES": shares}
    sizes["ACC"] = accumulator(x)
    index, *parts, cut_row, cut_ptr = columns
    with on_device(x):
        for bucket in lane_buckets(numbers, width, tile, grad.element_size()):
            backward_kernel[(bucket.programs, num_heads * shares)](
                *(index, *parts, bucket.first, bucket.count, x if values is None else values),
                *(x, grad, info, col_score, *mask.arguments(x)),
                *(dx, along, share_stats, share_z, num_slots, num_columns),
                **sizes, R=bucket.rows, E=bucket.entries, DEAL=bucket.dealt, FILLED=bucket.filled,
                HAS_VALUES=values is not None, CUT=num_slots > 0,
                PACKED=info.dtype == torch.float32, **mask.options(),
                num_warps=tile.num_warps,
            )  # fmt: skip
        if num_slots:
            backward_merge_kernel[(len(cut_row), num_heads * shares)](
                *(cut_row, cut_ptr, x, dx, along, share_stats, share_z, num_slots, num_columns),
                **sizes, E=MERGED_AT_ONCE,
                num_warps=1,
            )  # fmt: skip
    if shares > 1:
        dscore.copy_(along.sum(0))
