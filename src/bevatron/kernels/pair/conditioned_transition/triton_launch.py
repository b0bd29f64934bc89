"""Launches of the kernels between the matmuls of the conditioned transition."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from bevatron.kernels.pair.conditioned_transition.triton_kernels import (
    adapt_kernel,
    adapted_backward_kernel,
    output_gradients_kernel,
    output_product_kernel,
    statistics_kernel,
)
from bevatron.kernels.shared.launch import num_sms
from bevatron.kernels.shared.tiles import Tiles, TileTable
from bevatron.kernels.shared.triton_launch import launch
from bevatron.kernels.shared.triton_math import GROUPED_ROWS
from bevatron.kernels.shared.triton_partial_sums import (
    sum_partials,
    sum_weight_and_bias_partials,
)

TILES = TileTable(
    adapt=Tiles(128, 64, 4, 3, depth=64, per_sm=2, shared_memory=113 * 1024),
    output=Tiles(128, 64, 4, 3, depth=64, per_sm=2, shared_memory=89 * 1024),
)
ELEMENTS = 2048
"""Elements of a block of whole rows: few, for occupancy."""
PROGRAMS_PER_SM = 4


def fits(which: str, x: Tensor, *others: Tensor) -> bool:
    """Whether a matmul supports these matrices; its result has the columns of ``x`` [n, C]."""
    tiles = TILES[which]
    return x.shape[1] % tiles.columns == 0 and tiles.fits(x, *others)


def statistics(x: Tensor, mean: Tensor, rstd: Tensor, eps: float) -> None:
    """Write every row's mean and 1/sigma."""
    width, width_pad, block = _block(x)
    launch(
        statistics_kernel,
        (-(-len(x) // block),),
        (x, mean, rstd),
        (len(x), eps),
        C=width,
        C_PAD=width_pad,
        BLOCK=block,
        num_warps=1,
    )


def adapt(
    condition: Tensor,
    weight: Tensor,
    bias: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    scale: Tensor | None,
) -> Tensor:
    """Return ``sigmoid(condition W_s^T + bias) LayerNorm(x) + condition W_t^T``.

    Parameters
    ----------
    condition : [n, D]
    weight : [2 C, D], W_s before W_t
    bias : [C]
    x : [n, C] with mean and 1/sigma [n]
    scale : if given, [n, C] for ``condition W_s^T + bias``
    """
    tiles, normed = TILES["adapt"], x.new_empty(x.shape)
    kept = normed if scale is None else scale
    _product(
        adapt_kernel,
        tiles,
        (condition, weight.view(2, *x.shape[1:], -1)),
        (x, normed, kept),
        (bias, mean, rstd, x),
        KEEP=scale is not None,
    )
    return normed


def output(s: Tensor, weight: Tensor, bias: Tensor, narrow: Tensor, y: Tensor) -> None:
    """Write ``sigmoid(s weight^T + bias) narrow`` to ``y``."""
    halves = narrow, y, y, y
    _product(
        *(output_product_kernel, TILES["output"], (s, weight), halves, (bias, bias)), BACKWARD=False
    )


def output_product(
    s: Tensor, weight: Tensor, bias: Tensor, dy: Tensor, y: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return `output_gradients` of ``s weight^T + bias``: of the narrow rows, that and its sum."""
    tiles = TILES["output"]
    dnarrow, dout = torch.empty_like(dy), torch.empty_like(dy)
    parts = dy.new_empty((-(-len(dy) // tiles.rows), dy.shape[1]), dtype=torch.float32)
    halves = dnarrow, y, dy, dout
    _product(*(output_product_kernel, tiles, (s, weight), halves, (bias, parts)), BACKWARD=True)
    total = parts.new_empty(dy.shape[1])
    sum_partials(parts, total)
    return dnarrow, dout, total


def _product(
    kernel: Any,
    tiles: Tiles,
    factors: tuple[Tensor, Tensor],
    halves: Sequence[Tensor],
    others: Sequence[Tensor],
    **constants: bool,
) -> None:
    """Launch a persistent matmul of rows with a weight [..., C, D], and what follows it."""
    (rows, weight), width = factors, halves[0].shape[1]
    blocks = -(-len(rows) // tiles.rows) * (width // tiles.columns)
    kernel[(min(blocks, tiles.per_sm * num_sms(rows.device)),)](
        TensorDescriptor.from_tensor(rows, [tiles.rows, tiles.depth]),
        TensorDescriptor.from_tensor(weight, [*weight.shape[:-2], tiles.columns, tiles.depth]),
        *(TensorDescriptor.from_tensor(each, [tiles.rows, tiles.columns // 2]) for each in halves),
        *others,
        len(rows),
        D=rows.shape[1],
        C=width,
        BLOCK=tiles.rows,
        BLOCK_C=tiles.columns,
        BLOCK_K=tiles.depth,
        ROWS=GROUPED_ROWS,
        STAGES=tiles.stages,
        num_warps=tiles.warps,
        **constants,
    )


def output_gradients(dy: Tensor, y: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient of the narrow rows and the sum of ``out``'s, which overwrites ``out``."""
    width, width_pad, block = _block(dy)
    dnarrow, shares = torch.empty_like(dy), _shares(dy, block)
    launch(
        output_gradients_kernel,
        (len(shares),),
        (dy, y, out, dnarrow, shares),
        (len(dy),),
        C=width,
        C_PAD=width_pad,
        BLOCK=block,
    )
    return dnarrow, _sum(shares)


def adapted_backward(
    x: Tensor, scale: Tensor, mean: Tensor, rstd: Tensor, dx: Tensor, dadapted: Tensor
) -> Tensor:
    """Write dx and, in front of dshift, dscale; return the sum of dscale over rows."""
    width, width_pad, block = _block(x)
    shares = _shares(x, block)
    launch(
        adapted_backward_kernel,
        (len(shares),),
        (x, scale, mean, rstd, dx, dadapted, shares),
        (len(x), scale.stride(0)),
        C=width,
        C_PAD=width_pad,
        BLOCK=block,
    )
    return _sum(shares)


def _block(x: Tensor) -> tuple[int, int, int]:
    """Return the width of a row, the width padded to a power of two, and the rows of a block."""
    width = x.shape[1]
    width_pad = 1 << (width - 1).bit_length()
    return width, width_pad, max(1, ELEMENTS // width_pad)


def _shares(x: Tensor, block: int) -> Tensor:
    programs = min(-(-len(x) // block), PROGRAMS_PER_SM * num_sms(x.device))
    return x.new_empty((programs, 2, x.shape[1]), dtype=torch.float32)


def _sum(shares: Tensor) -> Tensor:
    """Add the first rows of all partial sums [programs, 2, C] in order."""
    total = shares.new_empty(shares.shape[2])
    sum_weight_and_bias_partials(shares, total, None, total, shares.new_empty(0))
    return total
