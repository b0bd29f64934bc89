"""Launches of the fused kernels, for narrow rows of 16-bit types."""

from dataclasses import dataclass
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
from bevatron.kernels.shared.layouts import per_layout
from bevatron.kernels.shared.triton_launch import Launch

WIDTHS = (16, 32, 64, 128)
HIDDEN_MULTIPLE = 64
FEWEST_BLOCKS = 16
"""Fewest blocks of rows over which a program accumulates weight gradients."""
SHARES, SHARE_NUMBERS = 8, 512
"""Matrices: partial sums that a program loads at once, and elements of each."""
NORM_SHARES, NORM_CHANNELS = 1024, 8
"""The same for the norm's vectors."""


@dataclass(frozen=True)
class Ordered:
    """Weights as the backward pass reads them.

    Attributes
    ----------
    of_input, of_weight
        [2 H, C] or [H, C], as `input_kernel` and `weight_kernel` read them: gates before values in
        each of their blocks of hidden channels.
    down_t : [H, C]
    """

    of_input: Tensor
    of_weight: Tensor
    down_t: Tensor


def fits(x: Tensor, weights: Weights) -> bool:
    """Whether the fused kernels support these rows and weights."""
    width = x.shape[-1]
    return (
        x.element_size() == 2
        and width in WIDTHS
        and len(weights.down) == width
        and len(weights.up) % HIDDEN_MULTIPLE == 0
        and 0 < x.numel() // width < 2**31 - 1024
    )


@dataclass(frozen=True)
class Launches:
    """The launches of both passes, in order.

    Attributes
    ----------
    norm_shares
        Shape of the norm's partial gradients, [parts, 2, C]; empty without a norm.
    weight_shares : of the partial gradients of up, down transposed and gate, [parts, 2 or 3, H C]
    bias_shares : of the bias's partial gradients, [parts, H]; empty without a bias
    """

    forward: Launch
    order: Launch
    input: Launch
    weight: Launch
    add: Launch
    norm_shares: tuple[int, ...]
    weight_shares: tuple[int, int, int]
    bias_shares: tuple[int, ...]


def forward(rows: NormedRows, given: Weights, y: Tensor) -> None:
    """Write the result and the rows' statistics."""
    x, weights = rows.rows.contiguous(), given.cast(y.dtype)
    up = weights.up
    if weights.gate is not None:
        up = interleaved(weights.gate, up, TILES["forward"].columns)
    biases = pointers(x, weights.up_bias, weights.down_bias)
    norm = pointers(x, contiguous(rows.weight), contiguous(rows.bias))
    run = _prepare(x, rows, weights).forward
    run(x, *norm, up, weights.down, *biases, y, rows.mean, rows.rstd)


def backward(
    dy: Tensor,
    rows: NormedRows,
    given: Weights,
    dx: Tensor,
    dnorm_weight: Tensor,
    dnorm_bias: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Write gradients of x and of the norm; return those of the weights and biases."""
    x, weights = rows.rows.contiguous(), given.cast(rows.rows.dtype)
    run = _prepare(x, rows, weights)
    ordered = _ordered(run, weights)
    normed, norm_shares = torch.empty_like(x), _shares(x, run.norm_shares)
    norm = pointers(x, contiguous(rows.weight), contiguous(rows.bias))
    (up_bias,) = pointers(x, weights.up_bias)
    run.input(
        *(dy, x, *norm, ordered.of_input, weights.down, up_bias),
        *(rows.mean, rows.rstd, dx, normed, norm_shares),
    )
    shares, bias_shares = _shares(x, run.weight_shares), _shares(x, run.bias_shares)
    run.weight(dy, normed, ordered.of_weight, ordered.down_t, up_bias, shares, bias_shares)
    dup, ddown = _new_gradient(given.up), _new_gradient(given.down)
    dgate = x.new_empty(0) if given.gate is None else _new_gradient(given.gate)
    run.add(shares, dup, ddown, dgate, norm_shares, dnorm_weight, dnorm_bias)
    ddown_bias = BiasGradient(given.down_bias, dy)
    ddown_bias.add(dy)
    dup_bias = bias_shares
    if given.up_bias is not None:
        dup_bias = bias_shares.sum(0).to(given.up_bias.dtype)
    return dup, ddown, dgate, dup_bias, ddown_bias.result()


def _prepare(x: Tensor, rows: NormedRows, weights: Weights) -> Launches:
    biases = weights.up_bias, weights.down_bias
    return _launches(x, rows.weight, rows.bias, weights.up, weights.gate, *biases, rows.eps)


@per_layout
def _launches(
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    up: Tensor,
    gate: Tensor | None,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    eps: float,
) -> Launches:
    """Prepare all launches."""
    has_norm: dict[str, Any] = {
        "HAS_WEIGHT": norm_weight is not None,
        "HAS_BIAS": norm_bias is not None,
    }
    count, (H, C), matrices = len(x), up.shape, 2 if gate is None else 3

    def constants(kernel: str) -> dict[str, Any]:
        tiles = TILES[kernel]
        return {
            "C": C,
            "H": H,
            "BLOCK": tiles.rows,
            "BLOCK_H": tiles.columns,
            "GATED": gate is not None,
            "HAS_UP_BIAS": up_bias is not None,
            "STAGES": tiles.stages,
            "num_warps": tiles.warps,
            **tiles.register_limit(x.device),
        }

    blocks_of_rows, norm_parts = (-(-count // TILES[k].rows) for k in ("forward", "input"))
    tiles = TILES["weight"]
    blocks = H // tiles.columns
    rows_of_part = -(-count // max(1, tiles.per_sm * num_sms(x.device) // blocks))
    # With few rows, more parts would make the partial sums larger than everything else.
    rows_of_part = max(-(-rows_of_part // tiles.rows), FEWEST_BLOCKS) * tiles.rows
    parts = -(-count // rows_of_part)
    wants_vectors = norm_weight is not None or norm_bias is not None
    return Launches(
        forward=Launch(
            forward_kernel,
            (blocks_of_rows,),
            (count, eps),
            HAS_DOWN_BIAS=down_bias is not None,
            **has_norm,
            **constants("forward"),
        ),
        order=Launch(
            order_kernel,
            (H // TILES["input"].columns,),
            C=C,
            H=H,
            NARROWER_H=TILES["input"].columns,
            WIDER_H=tiles.columns,
            GATED=gate is not None,
        ),
        input=Launch(input_kernel, (norm_parts,), (count,), **has_norm, **constants("input")),
        weight=Launch(weight_kernel, (blocks, parts), (count, rows_of_part), **constants("weight")),
        add=sum_of_shares(C, H * C, matrices, parts, norm_parts if wants_vectors else 0, has_norm),
        norm_shares=(norm_parts, 2, C) if wants_vectors else (0,),
        weight_shares=(parts, matrices, H * C),
        bias_shares=(0,) if up_bias is None else (parts, H),
    )


def sum_of_shares(
    C: int, numbers: int, matrices: int, parts: int, norm_parts: int, has_norm: dict[str, Any]
) -> Launch:
    """Prepare the launch that adds all partial sums and casts the weight gradients."""
    of_norm = -(-2 * C // NORM_CHANNELS) if norm_parts else 0
    return Launch(
        add_kernel,
        (max(-(-numbers // SHARE_NUMBERS), of_norm), matrices + (norm_parts > 0)),
        (parts, norm_parts),
        C=C,
        NUMBERS=numbers,
        BLOCK=SHARE_NUMBERS,
        AT_ONCE=SHARES,
        NORM_BLOCK=NORM_SHARES,
        NORM_BLOCK_C=NORM_CHANNELS,
        MATRICES=matrices,
        **has_norm,
    )


def _ordered(run: Launches, weights: Weights) -> Ordered:
    """Reorder the weights for the backward pass."""
    up, gate = weights.up, weights.gate
    H, C = up.shape
    both = (up, up) if gate is None else (up.new_empty((2 * H, C)), up.new_empty((2 * H, C)))
    ordered = Ordered(*both, up.new_empty((H, C)))
    run.order(up, *pointers(up, gate), weights.down, *both, ordered.down_t)
    return ordered


def _shares(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    return x.new_empty(shape, dtype=torch.float32)


def _new_gradient(weight: Tensor) -> Tensor:
    return torch.empty_like(weight, memory_format=torch.contiguous_format)
