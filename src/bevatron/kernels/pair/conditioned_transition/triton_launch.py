"""Launches of the kernels between the matmuls of the conditioned transition."""

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from bevatron.kernels.pair.conditioned_transition.triton_kernels import (
    adapt_kernel,
    adapted_backward_kernel,
    output_gradients_kernel,
    statistics_kernel,
)
from bevatron.kernels.shared.launch import num_sms
from bevatron.kernels.shared.tiles import Tiles
from bevatron.kernels.shared.triton_launch import launch
from bevatron.kernels.shared.triton_math import GROUPED_ROWS
from bevatron.kernels.shared.triton_partial_sums import sum_weight_and_bias_partials

TILES = Tiles(128, 64, 8, 3, depth=64, shared_memory=97 * 1024)
ELEMENTS = 2048
"""Elements of a block of whole rows: few, for occupancy."""
PROGRAMS_PER_SM = 4


def adapt_fits(condition: Tensor, weight: Tensor) -> bool:
    """Whether `adapt` supports these conditions [n, D] and weights [2 C, D]."""
    return len(weight) // 2 % TILES.columns == 0 and TILES.fits(condition, weight)


def statistics(x: Tensor, mean: Tensor, rstd: Tensor, eps: float) -> None:
    """Write every row's mean and 1/sigma."""
    width, width_pad, block = _block(x)
    launch(
        statistics_kernel,
        (-(-len(x) // block),),
        (x, mean, rstd),
        (len(x), *x.stride(), eps),
        C=width,
        C_PAD=width_pad,
        BLOCK=block,
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
    (n, width), tiles = x.shape, TILES
    normed = x.new_empty(x.shape)
    adapt_kernel[(-(-n // tiles.rows) * (width // tiles.columns),)](
        TensorDescriptor.from_tensor(condition, [tiles.rows, tiles.depth]),
        TensorDescriptor.from_tensor(weight, [tiles.columns, tiles.depth]),
        *(bias, x, mean, rstd, normed, normed if scale is None else scale),
        *(n, *x.stride()),
        D=condition.shape[1],
        C=width,
        BLOCK=tiles.rows,
        BLOCK_C=tiles.columns,
        BLOCK_K=tiles.depth,
        ROWS=GROUPED_ROWS,
        KEEP=scale is not None,
        STAGES=tiles.stages,
        num_warps=tiles.warps,
    )
    return normed


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
        (len(x), *x.stride(), scale.stride(0)),
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
