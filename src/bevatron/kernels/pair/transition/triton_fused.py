"""Launches of the fused kernels, for narrow rows of 16-bit types."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

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


class Ordered(NamedTuple):
    """Weights as the kernels read them, in the type of the rows.

    Attributes
    ----------
    up, down
        [2 H, C] or [H, C], as `forward_kernel` and `input_kernel` read it: gates before values in
        each of their blocks of hidden channels; [C, H].
    of_weight, down_t : as `weight_kernel` reads them: the first in its blocks, and [H, C]
    """

    up: Tensor
    down: Tensor
    of_weight: Tensor
    down_t: Tensor


def fits(x: Tensor, weights: Weights) -> bool:
    """Whether the fused kernels support these rows and weights."""
    width = x.shape[-1]
    return (
        x.element_size() == 2
        and width in WIDTHS
        and weights.down.shape[0] == width
        and weights.up.shape[0] % HIDDEN_MULTIPLE == 0
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

    order_forward: Launch
    forward: Launch
    order: Launch
    input: Launch
    weight: Launch
    add: Launch
    norm_shares: tuple[int, ...]
    weight_shares: tuple[int, int, int]
    bias_shares: tuple[int, ...]


def forward(rows: NormedRows, given: Weights, y: Tensor, *, residual: bool) -> None:
    """Write the result and the rows' statistics."""
    x = rows.rows.contiguous()
    run = _prepare(x, rows, given, residual)
    up, down = given.up, given.down
    if given.gate is not None or not up.dtype == down.dtype == x.dtype:
        up, down = _new_up(x, given), x.new_empty(down.shape)
        # Nothing is written in place of the last two.
        run.order_forward(*_matrices(given), up, down, up, down)
    biases = pointers(x, *_biases(x, given))
    norm = pointers(x, contiguous(rows.weight), contiguous(rows.bias))
    read = up.contiguous(), down.contiguous()
    run.forward(x, *norm, *read, *biases, y, rows.mean, rows.rstd)


def backward(
    dy: Tensor,
    rows: NormedRows,
    given: Weights,
    dx: Tensor,
    dnorm_weight: Tensor,
    dnorm_bias: Tensor,
    *,
    residual: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Write gradients of x and of the norm; return those of the weights and biases."""
    x = rows.rows.contiguous()
    run = _prepare(x, rows, given, residual)
    ordered = _ordered(x, run.order, given)
    normed, norm_shares = torch.empty_like(x), _shares(x, run.norm_shares)
    norm = pointers(x, contiguous(rows.weight), contiguous(rows.bias))
    (up_bias,) = pointers(x, _biases(x, given)[0])
    run.input(
        *(dy, x, *norm, ordered.up, ordered.down, up_bias),
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


def _prepare(x: Tensor, rows: NormedRows, weights: Weights, residual: bool) -> Launches:
    norm, biases = (rows.weight, rows.bias), (weights.up_bias, weights.down_bias)
    return _launches(x, *norm, weights.up, weights.gate, *biases, rows.eps, residual)


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
    residual: bool,
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

    def ordering(kernel: str, *, backward: bool) -> Launch:
        columns = TILES[kernel].columns
        return Launch(
            order_kernel,
            (H // columns,),
            C=C,
            H=H,
            NARROWER_H=columns,
            WIDER_H=TILES["weight"].columns,
            GATED=gate is not None,
            BACKWARD=backward,
        )

    blocks_of_rows, norm_parts = (-(-count // TILES[k].rows) for k in ("forward", "input"))
    tiles = TILES["weight"]
    blocks = H // tiles.columns
    rows_of_part = -(-count // max(1, tiles.per_sm * num_sms(x.device) // blocks))
    # With few rows, more parts would make the partial sums larger than everything else.
    rows_of_part = max(-(-rows_of_part // tiles.rows), FEWEST_BLOCKS) * tiles.rows
    parts = -(-count // rows_of_part)
    wants_vectors = norm_weight is not None or norm_bias is not None
    return Launches(
        order_forward=ordering("forward", backward=False),
        forward=Launch(
            forward_kernel,
            (blocks_of_rows,),
            (count, eps),
            HAS_DOWN_BIAS=down_bias is not None,
            RESIDUAL=residual,
            **has_norm,
            **constants("forward"),
        ),
        order=ordering("input", backward=True),
        input=Launch(
            input_kernel,
            (norm_parts,),
            (count,),
            RESIDUAL=residual,
            **has_norm,
            **constants("input"),
        ),
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


def _ordered(x: Tensor, order: Launch, given: Weights) -> Ordered:
    """Round and reorder the weights for the backward pass."""
    up = _new_up(x, given)
    of_weight = up if given.gate is None else torch.empty_like(up)
    ordered = Ordered(up, x.new_empty(given.down.shape), of_weight, x.new_empty(given.up.shape))
    order(*_matrices(given), *ordered)
    return ordered


def _new_up(x: Tensor, given: Weights) -> Tensor:
    H, C = given.up.shape
    return x.new_empty((H if given.gate is None else 2 * H, C))


def _matrices(given: Weights) -> list[Tensor]:
    return pointers(given.up, *map(contiguous, (given.up, given.gate, given.down)))


def _biases(x: Tensor, given: Weights) -> list[Tensor | None]:
    biases = given.up_bias, given.down_bias
    return [None if bias is None else bias.to(x.dtype).contiguous() for bias in biases]


def _shares(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    return x.new_empty(shape, dtype=torch.float32)


def _new_gradient(weight: Tensor) -> Tensor:
    return torch.empty_like(weight, memory_format=torch.contiguous_format)
