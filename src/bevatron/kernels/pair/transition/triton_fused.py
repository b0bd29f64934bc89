"""Launches of the fused kernels, for narrow rows of 16-bit types."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bevatron.kernels.pair.gated import interleaved
from bevatron.kernels.pair.layer_norm.triton import NormedRows
from bevatron.kernels.pair.transition.tiles import TILES
from bevatron.kernels.pair.transition.triton_kernels import (
    add_kernel,
    forward_kernel,
    input_kernel,
    order_kernel,
    weight_kernel,
)
from bevatron.kernels.pair.transition.weights import Weights
from bevatron.kernels.shared.chunked_linear import BiasGradient
from bevatron.kernels.shared.launch import contiguous, num_sms, pointers
from bevatron.kernels.shared.tiles import Tiles
from bevatron.kernels.shared.triton_launch import launch

WIDTHS = (16, 32, 64, 128)
HIDDEN_MULTIPLE = 64
SHARES, SHARE_NUMBERS = 8, 512
"""Shares of matrices that are on their way at once, and numbers of each in a program."""
NORM_SHARES, NORM_CHANNELS = 1024, 8
"""The same of the norm's vectors."""


@dataclass(frozen=True)
class Ordered:
    """Weights as the backward pass reads them.

    Attributes
    ----------
    of_input, of_weight
        [2 H, C] or [H, C], of a block of hidden channels of `input_kernel`'s or `weight_kernel`'s
        the gates before the values.
    down_t
        [H, C].
    """

    of_input: Tensor
    of_weight: Tensor
    down_t: Tensor


def fits(x: Tensor, weights: Weights) -> bool:
    """Whether the fused kernels take rows and weights like these."""
    width = x.shape[-1]
    return (
        x.element_size() == 2
        and width in WIDTHS
        and len(weights.down) == width
        and len(weights.up) % HIDDEN_MULTIPLE == 0
        and 0 < x.numel() // width < 2**31 - 1024
    )


def forward(rows: NormedRows, given: Weights, y: Tensor) -> None:
    """Write the result and the rows' statistics."""
    x, tiles, weights = rows.rows.contiguous(), TILES["forward"], given.cast(y.dtype)
    up = _interleaved(weights.up, weights.gate, tiles.columns)
    biases = pointers(x, contiguous(weights.up_bias), contiguous(weights.down_bias))
    norm = pointers(x, contiguous(rows.weight), contiguous(rows.bias))
    launch(
        forward_kernel,
        (-(-len(x) // tiles.rows),),
        (x, *norm, up, weights.down, *biases, y, rows.mean, rows.rstd),
        (len(x), rows.eps),
        HAS_WEIGHT=rows.weight is not None,
        HAS_BIAS=rows.bias is not None,
        HAS_DOWN_BIAS=weights.down_bias is not None,
        **_constants(tiles, weights, x),
    )


def backward(
    dy: Tensor,
    rows: NormedRows,
    given: Weights,
    dx: Tensor,
    dnorm_weight: Tensor,
    dnorm_bias: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Write gradients of x and of the norm; return those of the weights and biases."""
    weights = given.cast(rows.rows.dtype)
    rows = replace(rows, rows=rows.rows.contiguous())
    ordered = _ordered(weights)
    normed = torch.empty_like(rows.rows)
    norm_shares = _input(dy, rows, weights, ordered, dx, normed)
    shares, bias_shares = _weight(dy, normed, weights, ordered)
    gradients = add_shares(shares, given, norm_shares, dnorm_weight, dnorm_bias)
    ddown_bias = BiasGradient(given.down_bias, dy)
    ddown_bias.add(dy)
    dup_bias = bias_shares
    if given.up_bias is not None:
        dup_bias = bias_shares.sum(0).to(given.up_bias.dtype)
    return *gradients, dup_bias, ddown_bias.result()


def _input(
    dy: Tensor,
    rows: NormedRows,
    weights: Weights,
    ordered: Ordered,
    dx: Tensor,
    normed: Tensor,
) -> Tensor:
    """Write the gradient of x and the normalised rows; return shares of the norm's gradients."""
    x, tiles = rows.rows, TILES["input"]
    programs = -(-len(x) // tiles.rows)
    wants_vectors = rows.weight is not None or rows.bias is not None
    shares = x.new_empty((programs, 2, x.shape[1]) if wants_vectors else 0, dtype=torch.float32)
    norm = pointers(x, contiguous(rows.weight), contiguous(rows.bias))
    (up_bias,) = pointers(x, contiguous(weights.up_bias))
    launch(
        input_kernel,
        (programs,),
        (
            *(dy, x, *norm, ordered.of_input, weights.down, up_bias),
            *(rows.mean, rows.rstd, dx, normed, shares),
        ),
        (len(x),),
        HAS_WEIGHT=rows.weight is not None,
        HAS_BIAS=rows.bias is not None,
        **_constants(tiles, weights, x),
    )
    return shares


def _weight(
    dy: Tensor, normed: Tensor, weights: Weights, ordered: Ordered
) -> tuple[Tensor, Tensor]:
    """Return float32 shares of the gradients of up, of down transposed and of gate; of the bias."""
    tiles, gate, bias = TILES["weight"], weights.gate, weights.up_bias
    (H, C), count = weights.up.shape, len(normed)
    blocks = H // tiles.columns
    parts = max(1, tiles.per_sm * num_sms(dy.device) // blocks)
    rows = -(-count // parts)
    rows = -(-rows // tiles.rows) * tiles.rows
    parts = -(-count // rows)
    shares = dy.new_empty((parts, 2 if gate is None else 3, H * C), dtype=torch.float32)
    bias_shares = dy.new_empty((parts, H) if bias is not None else 0, dtype=torch.float32)
    (up_bias,) = pointers(dy, contiguous(bias))
    launch(
        weight_kernel,
        (blocks, parts),
        (dy, normed, ordered.of_weight, ordered.down_t, up_bias, shares, bias_shares),
        (count, rows),
        **_constants(tiles, weights, dy),
    )
    return shares, bias_shares


def _ordered(weights: Weights) -> Ordered:
    """Reorder the weights for the backward pass."""
    up, gate = weights.up, weights.gate
    (H, C), block, wider = up.shape, TILES["input"].columns, TILES["weight"].columns
    both = (up, up) if gate is None else (up.new_empty((2 * H, C)), up.new_empty((2 * H, C)))
    ordered = Ordered(*both, up.new_empty((H, C)))
    launch(
        order_kernel,
        (H // block,),
        (up, *pointers(up, contiguous(gate)), weights.down, *both, ordered.down_t),
        C=C,
        H=H,
        NARROWER_H=block,
        WIDER_H=wider,
        GATED=gate is not None,
    )
    return ordered


def add_shares(
    shares: Tensor, given: Weights, norm_shares: Tensor, dnorm_weight: Tensor, dnorm_bias: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Add the parts' shares: gradients of up, down and gate in their types, and of the norm.

    Parameters
    ----------
    shares
        [part, 2 or 3, H C], as `weight_kernel` leaves them.
    given
        The weights.
    norm_shares
        [part, 2, C], of the norm's weight and bias.
    dnorm_weight, dnorm_bias
        [C] or without elements.
    """
    parts, matrices, numbers = shares.shape
    like = torch.contiguous_format
    dup = torch.empty_like(given.up, memory_format=like)
    ddown = torch.empty_like(given.down, memory_format=like)
    dgate = shares.new_empty(0)
    if given.gate is not None:
        dgate = torch.empty_like(given.gate, memory_format=like)
    wants_vectors = dnorm_weight.numel() + dnorm_bias.numel() > 0
    C = given.up.shape[1]
    blocks = max(-(-numbers // SHARE_NUMBERS), -(-2 * C // NORM_CHANNELS) * wants_vectors)
    launch(
        add_kernel,
        (blocks, matrices + wants_vectors),
        (shares, dup, ddown, dgate, norm_shares, dnorm_weight, dnorm_bias),
        (parts, len(norm_shares)),
        C=C,
        NUMBERS=numbers,
        BLOCK=SHARE_NUMBERS,
        AT_ONCE=SHARES,
        NORM_BLOCK=NORM_SHARES,
        NORM_BLOCK_C=NORM_CHANNELS,
        MATRICES=matrices,
        HAS_WEIGHT=dnorm_weight.numel() > 0,
        HAS_BIAS=dnorm_bias.numel() > 0,
    )
    return dup, ddown, dgate


def _interleaved(up: Tensor, gate: Tensor | None, block: int) -> Tensor:
    """Place the gates of every ``block`` hidden channels before their values."""
    return up if gate is None else interleaved(gate, up, block)


def _constants(tiles: Tiles, weights: Weights, x: Tensor) -> dict[str, Any]:
    """Return the compile-time constants and launch options of all three kernels."""
    return {
        "C": x.shape[1],
        "H": len(weights.up),
        "BLOCK": tiles.rows,
        "BLOCK_H": tiles.columns,
        "GATED": weights.gate is not None,
        "HAS_UP_BIAS": weights.up_bias is not None,
        "STAGES": tiles.stages,
        "num_warps": tiles.warps,
        **tiles.register_limit(x.device),
    }
