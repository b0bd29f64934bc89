"""Launches of the kernels of attention whose score takes all channels."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bevatron.kernels.graph.csr.launch import Mask, Tile, buckets
from bevatron.kernels.graph.csr.triton_merge import add_shares
from bevatron.kernels.graph.dot_attention.triton_backward import columns_kernel, rows_kernel
from bevatron.kernels.graph.dot_attention.triton_kernels import forward_kernel, merge_kernel
from bevatron.kernels.shared.dtypes import wide_type
from bevatron.kernels.shared.launch import on_device
from bevatron.kernels.shared.tiles import TileTable
from bevatron.kernels.shared.triton_math import accumulator

TILES = TileTable(forward=Tile(), rows=Tile(), columns=Tile(512))
"""Sizes of programs; the README lists the alternatives that were measured."""
MERGED_AT_ONCE = 16
NO_MASK = Mask([], None)


@dataclass(frozen=True)
class Problem:
    """Arguments shared by the kernels of one call.

    Attributes
    ----------
    query, key, value : [rows or columns, H, C or D]; value None: the key
    row_scale, col_scale : [rows, H], [columns, H] or None
    vector : GATv2's w, [H, C]; None: the score is a dot product
    softmax : whether scores are normalised
    mask : the random mask, and the slope of GATv2's LeakyReLU
    """

    query: Tensor
    key: Tensor
    value: Tensor | None = None
    row_scale: Tensor | None = None
    col_scale: Tensor | None = None
    vector: Tensor | None = None
    softmax: bool = False
    mask: Mask = NO_MASK

    @property
    def summed(self) -> Tensor:
        """The summed features: the value, or the key."""
        return self.key if self.value is None else self.value

    def arguments(self) -> tuple[Any, ...]:
        """Return the inputs of every kernel, contiguous; placeholders are never read."""
        key = self.key.contiguous()
        given = (self.query, key, self.value, self.row_scale, self.col_scale, self.vector)
        tensors = [key if tensor is None else tensor.contiguous() for tensor in given]
        return *tensors, *self.mask.arguments(key)

    def options(self) -> dict[str, Any]:
        """Return the compile-time constants of kernels."""
        channels, wide = self.key.shape[2], self.summed.shape[2]
        return {
            "C": channels,
            "BLOCK_C": _padded(channels),
            "D": wide,
            "BLOCK_D": _padded(wide),
            "H": self.key.shape[1],
            "ACC": accumulator(self.key),
            "ADDITIVE": self.vector is not None,
            "SOFTMAX": self.softmax,
            "HAS_VALUE": self.value is not None,
            "HAS_ROW_SCALE": self.row_scale is not None,
            "HAS_COL_SCALE": self.col_scale is not None,
            **self.mask.options(),
        }


def launch_forward(
    problem: Problem,
    values: Tensor | None,
    rows: list[Tensor],
    numbers: list[int],
    outputs: tuple[Tensor, Tensor, Tensor],
    partial: bool,
) -> None:
    """Write z and, with a softmax, L (for a block m and s)."""
    key, summed, num_slots = problem.key, problem.summed, numbers[0]
    if not outputs[0].numel():
        return
    wide, heads = wide_type(key), key.shape[1]
    share_stats = key.new_empty((2, num_slots, heads), dtype=wide)
    share_z = key.new_empty((num_slots, heads, summed.shape[2]), dtype=wide)
    options = problem.options()
    index, *parts, cut_row, cut_ptr = rows
    with on_device(key):
        for bucket, launch in _launches(numbers, options, "forward", heads):
            forward_kernel[launch.grid](
                *(index, *parts, bucket.first, bucket.count, key if values is None else values),
                *(*problem.arguments(), *outputs, share_stats, share_z, num_slots),
                **options, **launch.shape, PARTIAL=partial, HAS_VALUES=values is not None,
                CUT=num_slots > 0,
            )  # fmt: skip
        if num_slots:
            merge_kernel[(len(cut_row), heads)](
                *(cut_row, cut_ptr, *outputs, share_stats, share_z, num_slots),
                **{name: options[name] for name in ("D", "BLOCK_D", "H", "SOFTMAX", "ACC")},
                E=MERGED_AT_ONCE, PARTIAL=partial,
                num_warps=1,
            )  # fmt: skip


def launch_rows(
    problem: Problem,
    values: Tensor | None,
    rows: list[Tensor],
    numbers: list[int],
    grad: Tensor,
    lse: Tensor,
    delta: Tensor,
    outputs: tuple[Tensor, Tensor, Tensor],
    dvalues: Tensor | None,
) -> None:
    """Write the gradients of the query, the row scale and, per row, GATv2's vector.

    ``dvalues`` [nnz, H] receives the gradient of every entry's value.
    """
    key, num_slots = problem.key, numbers[0]
    if not grad.numel() or not key.numel():
        for output in outputs:
            output.zero_()
        return
    shares = [_shares(output, num_slots, wide_type(key)) for output in outputs]
    options = problem.options()
    index, *parts, cut_row, cut_ptr = rows
    with on_device(key):
        for bucket, launch in _launches(numbers, options, "rows", key.shape[1]):
            rows_kernel[launch.grid](
                *(index, *parts, bucket.first, bucket.count, key if values is None else values),
                *(*problem.arguments(), grad.contiguous(), lse, delta, *outputs),
                *(key if dvalues is None else dvalues, *shares),
                **options, **launch.shape, WANT_VALUES=dvalues is not None,
                HAS_VALUES=values is not None, CUT=num_slots > 0,
            )  # fmt: skip
        _add_all(cut_row, cut_ptr, shares, outputs)


def launch_columns(
    problem: Problem,
    values: Tensor | None,
    columns: list[Tensor],
    numbers: list[int],
    grad: Tensor,
    lse: Tensor,
    delta: Tensor,
    outputs: tuple[Tensor, Tensor, Tensor, Tensor],
    symmetric: bool,
) -> None:
    """Write the gradients of the key, the value, the column scale and the row scale.

    The last is written for self-attention on a symmetric matrix; then the first is the whole
    gradient of the features.
    """
    key, num_slots = problem.key, numbers[0]
    if not outputs[0].numel():
        for output in outputs:
            output.zero_()
        return
    shares = [_shares(output, num_slots, wide_type(key)) for output in outputs]
    options = problem.options()
    index, *parts, cut_row, cut_ptr = columns
    with on_device(key):
        for bucket, launch in _launches(numbers, options, "columns", key.shape[1]):
            columns_kernel[launch.grid](
                *(index, *parts, bucket.first, bucket.count, key if values is None else values),
                *(*problem.arguments(), grad.contiguous(), lse, delta, *outputs, *shares),
                **options, **launch.shape, SYMMETRIC=symmetric, HAS_VALUES=values is not None,
                CUT=num_slots > 0,
            )  # fmt: skip
        _add_all(cut_row, cut_ptr, shares, outputs)


@dataclass(frozen=True)
class _Launch:
    grid: tuple[int, int]
    shape: dict[str, int]


def _launches(
    numbers: list[int], options: dict[str, Any], name: str, heads: int
) -> Iterator[tuple[Any, _Launch]]:
    tile = TILES[name]
    for bucket in buckets(numbers, max(options["BLOCK_C"], options["BLOCK_D"]), tile):
        shape = {"R": bucket.rows, "E": bucket.entries, "num_warps": tile.num_warps}
        yield bucket, _Launch((bucket.programs, heads), shape)


def _shares(output: Tensor, num_slots: int, dtype: torch.dtype) -> Tensor:
    shape = (num_slots, *output.shape[1:]) if output.numel() else (0,)
    return output.new_empty(shape, dtype=dtype)


def _add_all(
    cut_row: Tensor, cut_ptr: Tensor, shares: list[Tensor], outputs: tuple[Tensor, ...]
) -> None:
    for share, output in zip(shares, outputs, strict=True):
        if share.numel():
            add_shares(cut_row, cut_ptr, share, output)


def _padded(channels: int) -> int:
    return 1 << (channels - 1).bit_length()
