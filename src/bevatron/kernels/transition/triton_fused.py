"""Launches of the fused kernels, for narrow rows of 16-bit types."""

import torch
from torch import Tensor

from bevatron.kernels.layer_norm.triton import on_device, sum_shares
from bevatron.kernels.rows import processors
from bevatron.kernels.transition.tiles import Tiles, choose
from bevatron.kernels.transition.triton_kernels import (
    forward_kernel,
    input_kernel,
    weight_kernel,
)

WIDTHS = (16, 32, 64, 128)
HIDDEN_MULTIPLE = 64


def fits(x: Tensor, up_weight: Tensor, down_weight: Tensor) -> bool:
    """Say whether the fused kernels take rows and weights like these."""
    width = x.shape[-1]
    return (
        x.element_size() == 2
        and width in WIDTHS
        and down_weight.shape[0] == width
        and up_weight.shape[0] % HIDDEN_MULTIPLE == 0
        and 0 < x.numel() // width < 2**31 - 1024
    )


def forward(
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    up_weight: Tensor,
    down_weight: Tensor,
    gate_weight: Tensor | None,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    y: Tensor,
    mean: Tensor,
    rstd: Tensor,
    eps: float,
) -> None:
    """Write the result and the rows' statistics; weights have the type of ``x``."""
    tiles = choose("forward")
    with on_device(x):
        forward_kernel[(-(-len(x) // tiles.rows),)](
            *(x, _or(norm_weight, x), _or(norm_bias, x)),
            *(_interleaved(up_weight, gate_weight, tiles.hidden), down_weight),
            *(_or(up_bias, x), _or(down_bias, x), y, mean, rstd),
            *(len(x), eps),
            C=x.shape[1],
            H=up_weight.shape[0],
            BLOCK=tiles.rows,
            BLOCK_H=tiles.hidden,
            HAS_WEIGHT=norm_weight is not None,
            HAS_BIAS=norm_bias is not None,
            GATED=gate_weight is not None,
            HAS_UP_BIAS=up_bias is not None,
            HAS_DOWN_BIAS=down_bias is not None,
            STAGES=tiles.stages,
            **_options(tiles, x),
        )


def backward(
    dy: Tensor,
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    up_weight: Tensor,
    down_weight: Tensor,
    gate_weight: Tensor | None,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    dx: Tensor,
    dnorm_weight: Tensor,
    dnorm_bias: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Write gradients of x and of the norm; return those of the weights and biases."""
    del eps
    up, down = up_weight.to(x.dtype).contiguous(), down_weight.to(x.dtype).contiguous()
    gate = None if gate_weight is None else gate_weight.to(x.dtype).contiguous()
    bias = None if up_bias is None else up_bias.to(x.dtype).contiguous()
    normed = torch.empty_like(x, memory_format=torch.contiguous_format)
    vectors = (norm_weight, norm_bias)
    _input(dy, x, vectors, up, down, gate, bias, mean, rstd, dx, normed, (dnorm_weight, dnorm_bias))
    totals, dup_bias = _weight(dy, normed, up, down, gate, bias)
    nothing = x.new_empty(0)
    return (
        totals[0].to(up_weight.dtype),
        totals[1].t().to(down_weight.dtype, memory_format=torch.contiguous_format),
        nothing if gate_weight is None else totals[2].to(gate_weight.dtype),
        x.new_empty(0) if up_bias is None else dup_bias.to(up_bias.dtype),
        x.new_empty(0) if down_bias is None else dy.sum(0, dtype=torch.float32).to(down_bias.dtype),
    )


def _input(
    dy: Tensor,
    x: Tensor,
    vectors: tuple[Tensor | None, Tensor | None],
    up: Tensor,
    down: Tensor,
    gate: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    dx: Tensor,
    normed: Tensor,
    dvectors: tuple[Tensor, Tensor],
) -> None:
    tiles = choose("input")
    programs = -(-len(x) // tiles.rows)
    wants_vectors = vectors[0] is not None or vectors[1] is not None
    shares = x.new_empty((programs, 2, x.shape[1]) if wants_vectors else 0, dtype=torch.float32)
    with on_device(x):
        input_kernel[(programs,)](
            *(dy, x, _or(vectors[0], x), _or(vectors[1], x)),
            *(_interleaved(up, gate, tiles.hidden), down),
            *(_or(bias, x), mean, rstd, dx, normed, shares, len(x)),
            C=x.shape[1],
            H=up.shape[0],
            BLOCK=tiles.rows,
            BLOCK_H=tiles.hidden,
            HAS_WEIGHT=vectors[0] is not None,
            HAS_BIAS=vectors[1] is not None,
            GATED=gate is not None,
            HAS_UP_BIAS=bias is not None,
            STAGES=tiles.stages,
            **_options(tiles, x),
        )
    sum_shares(shares, *vectors, *dvectors)


def _weight(
    dy: Tensor, normed: Tensor, up: Tensor, down: Tensor, gate: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return gradients of up, of down transposed and of gate, and of the bias, all float32."""
    tiles = choose("weight")
    (H, C), count = up.shape, len(normed)
    hidden = tiles.hidden if H % tiles.hidden == 0 else HIDDEN_MULTIPLE
    blocks = H // hidden
    parts = max(1, tiles.per_processor * processors(dy.device) // blocks)
    rows = -(-count // parts)
    rows = -(-rows // tiles.rows) * tiles.rows
    parts = -(-count // rows)
    shares = dy.new_empty((parts, 2 if gate is None else 3, H, C), dtype=torch.float32)
    bias_shares = dy.new_empty((parts, H) if bias is not None else 0, dtype=torch.float32)
    with on_device(dy):
        weight_kernel[(blocks, parts)](
            *(dy, normed, up, down.t().contiguous(), _or(gate, up), _or(bias, up)),
            *(shares, bias_shares, count, rows),
            C=C,
            H=H,
            BLOCK=tiles.rows,
            BLOCK_H=hidden,
            GATED=gate is not None,
            HAS_UP_BIAS=bias is not None,
            STAGES=tiles.stages,
            **_options(tiles, dy),
        )
    return shares.sum(0), bias_shares.sum(0)


def _interleaved(up: Tensor, gate: Tensor | None, block: int) -> Tensor:
    """Put the gates of every ``block`` hidden channels before their values."""
    if gate is None:
        return up
    blocks = (up.shape[0] // block, block, up.shape[1])
    return torch.cat([gate.view(blocks), up.view(blocks)], dim=1)


def _or(tensor: Tensor | None, stand_in: Tensor) -> Tensor:
    """Give a pointer to something for an argument that the kernel will not read."""
    return stand_in if tensor is None else tensor


def _options(tiles: Tiles, x: Tensor) -> dict[str, int]:
    options = {"num_warps": tiles.warps}
    if tiles.registers and x.device.type == "cuda" and torch.version.hip is None:
        options["maxnreg"] = tiles.registers
    return options
