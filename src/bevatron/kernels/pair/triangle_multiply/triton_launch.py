"""Launches of the triangle multiplication's kernels."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bevatron.kernels.pair.triangle_multiply.tiles import choose
from bevatron.kernels.pair.triangle_multiply.triton_output import (
    output_input_kernel,
    output_kernel,
)
from bevatron.kernels.pair.triangle_multiply.triton_project import (
    project_input_kernel,
    project_kernel,
)
from bevatron.kernels.pair.triangle_multiply.triton_weights import finish_kernel, weight_kernel
from bevatron.kernels.shared.launch import num_sms
from bevatron.kernels.shared.rows import as_rows
from bevatron.kernels.shared.tiles import Tiles
from bevatron.kernels.shared.triton_math import allows_tf32

LARGEST_WIDTH = 256
FINISHED = 16
"""Channels of a norm whose gradients a program finishes."""
ALIGNED, WELL_ALIGNED = 8, 16
"""Elements: rows of the matrices that are multiplied begin at multiples. Where lines are padded at
all, to the second: Triton knows of multiples of 16 alone, and loads eight elements at a time."""


@dataclass(frozen=True)
class Pair:
    """The pair as rows, and how rows lie in tensors with channels outermost.

    Attributes
    ----------
    z
        The pair as given, or a copy whose channels follow each other.
    mask
        One number per row, of the pair's type.
    count, C, H
        Rows, channels of the pair and of the contraction.
    geometry
        Sizes and strides of the axes of rows.
    axes
        How many of these axes there are.
    length, padded
        N, and N rounded up to what is aligned.
    """

    z: Tensor
    mask: Tensor | None
    count: int
    C: int
    H: int
    geometry: tuple[int, int, int, int, int]
    axes: int
    length: int
    padded: int

    @classmethod
    def of(cls, z: Tensor, mask: Tensor | None, norm_out_weight: Tensor) -> "Pair":
        """Describe a pair."""
        z = z if z.stride(-1) == 1 else z.contiguous()
        rows = as_rows(z)
        N = z.shape[-2]
        s0, s1, s2, _ = rows.strides[0]
        return cls(
            z=rows.tensors[0],
            mask=None if mask is None else mask.contiguous(),
            count=rows.count,
            C=z.shape[-1],
            H=len(norm_out_weight),
            geometry=(*rows.sizes, s0, s1, s2),
            axes=rows.axes,
            length=N,
            padded=padded(N),
        )

    @staticmethod
    def planes(z: Tensor, channels: int) -> tuple[int, ...]:
        """Return the shape of a tensor with channels outermost."""
        N = z.shape[-2]
        return channels, z.shape[:-3].numel(), N, padded(N)

    def matrices(self, planes: Tensor) -> Tensor:
        """View a tensor with channels outermost as [channels batch, N, N]."""
        return planes.flatten(0, 1)[:, :, : self.length]

    @property
    def places(self) -> tuple[int, int, int]:
        """N, N padded and the elements of a channel."""
        return self.length, self.padded, self.count // max(self.length, 1) * self.padded

    def tiles(self, kernel: str) -> Tiles:
        """Look up the tiles of a kernel."""
        return choose(kernel, max(pad(self.C), pad(self.H)), self.z.element_size())

    def constants(self, tiles: Tiles) -> dict[str, Any]:
        """Return the compile-time constants of all kernels."""
        single = self.z.dtype == torch.float32
        tf32 = single and allows_tf32()
        return tiles.register_limit(self.z.device) | {
            "C": self.C,
            "C_PAD": pad(self.C),
            "BLOCK": tiles.rows,
            "BLOCK_H": tiles.columns,
            "AXES": self.axes,
            "PADDED": self.length != self.padded,
            "STAGES": tiles.stages,
            "PRECISION": "tf32" if tf32 else "ieee",
            "num_warps": tiles.warps,
        }

    def programs(self, tiles: Tiles) -> int:
        """Count programs that take a block of columns each."""
        return -(-self.places[2] // tiles.rows)

    def part(self, tiles: Tiles, blocks: int) -> int:
        """Deal columns to programs for the weights' gradients: how many each takes."""
        most = max(1, tiles.per_sm * num_sms(self.z.device) // blocks)
        return -(-self.places[2] // (most * tiles.rows)) * tiles.rows


@dataclass(frozen=True)
class Weights:
    """All weights; matrices and biases in the type of the rows, contiguous."""

    norm_in: tuple[Tensor, Tensor]
    joint: Tensor
    joint_bias: Tensor | None
    norm_out: tuple[Tensor, Tensor]
    out: Tensor
    gate: Tensor
    out_bias: Tensor | None

    @classmethod
    def of(
        cls,
        z: Tensor,
        norm_in_weight: Tensor,
        norm_in_bias: Tensor,
        joint: Tensor,
        joint_bias: Tensor | None,
        norm_out_weight: Tensor,
        norm_out_bias: Tensor,
        out: Tensor,
        gate: Tensor,
        out_bias: Tensor | None,
    ) -> "Weights":
        """Prepare weights for rows like ``z``."""

        def like_rows(tensor: Tensor) -> Tensor:
            return tensor.to(z.dtype).contiguous()

        return cls(
            (norm_in_weight.contiguous(), norm_in_bias.contiguous()),
            like_rows(joint),
            None if joint_bias is None else like_rows(joint_bias),
            (norm_out_weight.contiguous(), norm_out_bias.contiguous()),
            like_rows(out),
            like_rows(gate),
            None if out_bias is None else like_rows(out_bias),
        )

    def output(self, C: int) -> tuple[Tensor, ...]:
        """Return what the output's kernels take."""
        bias = self.out if self.out_bias is None else self.out_bias
        gate_bias = bias if self.out_bias is None else bias[C:]
        return *self.norm_out, *self.norm_in, self.out, self.gate, bias, gate_bias


def padded(length: int) -> int:
    """Round the length of a line of columns up to what is aligned."""
    return length if length % ALIGNED == 0 else -(-length // WELL_ALIGNED) * WELL_ALIGNED


def pad(width: int) -> int:
    """Round channels up to a power of two that products take."""
    return max(16, 1 << (width - 1).bit_length())


def project(pair: Pair, weights: Weights, ab: Tensor, statistics: Tensor, eps: float) -> None:
    """Write a and b and the statistics of the pair's rows."""
    tiles = pair.tiles("project")
    mask = pair.z if pair.mask is None else pair.mask
    bias = weights.joint if weights.joint_bias is None else weights.joint_bias
    project_kernel[(pair.programs(tiles),)](
        *(pair.z, *weights.norm_in, weights.joint, bias, mask, ab),
        *(statistics[0], statistics[1], *pair.geometry, eps, *pair.places),
        H=pair.H,
        HAS_BIAS=weights.joint_bias is not None,
        HAS_MASK=pair.mask is not None,
        **pair.constants(tiles),
    )


def project_backward(
    pair: Pair,
    weights: Weights,
    d: Tensor,
    statistics: Tensor,
    dz: Tensor,
    before: Tensor,
    gradients: Sequence[Tensor],
) -> None:
    """Turn the gate's part of the normalised rows' gradient in ``dz`` into dz; write the others.

    ``d`` [4 H, ...] holds the gradients of a (first quarter) and b (third); ``before`` is the
    gate's part of the norm's. ``gradients``: of the norm's weight and bias, the joint weight and
    bias.
    """
    dnorm_weight, dnorm_bias, djoint, djoint_bias = gradients
    mask = pair.z if pair.mask is None else pair.mask
    tiles, H = pair.tiles("project_input"), pair.H
    bias = weights.joint if weights.joint_bias is None else weights.joint_bias
    project_input_kernel[(pair.programs(tiles),)](
        *(d, pair.z, *weights.norm_in, weights.joint, bias, mask, *statistics[:2], dz),
        *(*pair.geometry, *pair.places),
        H=H,
        HAS_BIAS=weights.joint_bias is not None,
        HAS_MASK=pair.mask is not None,
        HOLD=tiles.hold,
        **pair.constants(tiles),
    )
    total = sums_over_rows(pair, d, None, statistics[:2])
    norm = (*weights.norm_in, before)
    _finish(total, weights.joint, norm, (djoint, djoint_bias, dnorm_weight, dnorm_bias))


def output(
    pair: Pair, weights: Weights, x: Tensor, y: Tensor, statistics: Tensor, eps: float
) -> None:
    """Write the result and the statistics of the contraction's rows, the last two."""
    tiles = pair.tiles("output")
    output_kernel[(pair.programs(tiles),)](
        *(x, pair.z, *weights.output(pair.C), statistics[2], statistics[3]),
        *(statistics[0], statistics[1], y, *pair.geometry, eps, *pair.places),
        H=pair.H,
        H_PAD=pad(pair.H),
        HAS_BIAS=weights.out_bias is not None,
        HOLD=tiles.hold,
        **pair.constants(tiles),
    )


def output_backward(
    pair: Pair,
    weights: Weights,
    dy: Tensor,
    x: Tensor,
    statistics: Tensor,
    dx: Tensor,
    dn: Tensor,
    spare: Tensor,
    gradients: Sequence[Tensor],
) -> Tensor:
    """Write dx, the gate's part of the normalised pair's gradient, and those of the weights.

    ``spare`` [2 C, ...] is overwritten. ``gradients``: of the norm's weight and bias, the output's
    and the gate's weight, the biases. Returns the gate's part of the gradients of the pair's norm.
    """
    dnorm_weight, dnorm_bias, dout, dgate, dbias = gradients
    C, H = pair.C, pair.H
    tiles = pair.tiles("output_input")
    output_input_kernel[(pair.programs(tiles),)](
        *(dy, x, pair.z, *weights.output(C), *statistics[2:], *statistics[:2]),
        *(dx, dn, spare, *pair.geometry, *pair.places),
        H=H,
        H_PAD=pad(H),
        HAS_BIAS=weights.out_bias is not None,
        HOLD=tiles.hold,
        **pair.constants(tiles),
    )
    total = sums_over_rows(pair, spare[:C], x, statistics[2:])
    norm = (*weights.norm_out, None)
    _finish(total, weights.out, norm, (dout, dbias[:C], dnorm_weight, dnorm_bias))
    total = sums_over_rows(pair, spare[C:], None, statistics[:2])
    before = dx.new_empty(2, C, dtype=torch.float32)
    _finish(total, weights.gate, (*weights.norm_in, None), (dgate, dbias[C:], *before))
    return before


def sums_over_rows(pair: Pair, d: Tensor, x: Tensor | None, statistics: Tensor) -> Tensor:
    """Return sums over rows: of d xhat^T [channels C], and of d [channels].

    xhat are rows of x, or of the pair, normalised, without the norm's weight and bias.
    """
    tiles, channels = pair.tiles("weight"), len(d)
    C = pair.C if x is None else pair.H
    blocks = -(-channels // tiles.columns)
    columns = pair.part(tiles, blocks)
    parts = -(-pair.places[2] // columns)
    shares = d.new_empty((parts, channels * (C + 1)), dtype=torch.float32)
    weight_kernel[(blocks, parts)](
        *(d, pair.z if x is None else x, *statistics, shares),
        *(channels, columns, *pair.geometry, *pair.places),
        FULL=channels % tiles.columns == 0,
        FROM_CHANNELS=x is not None,
        **(pair.constants(tiles) | {"C": C, "C_PAD": pad(C)}),
    )
    return shares.sum(0)


def _finish(
    total: Tensor,
    weight: Tensor,
    norm: tuple[Tensor, Tensor, Tensor | None],
    gradients: tuple[Tensor, Tensor, Tensor, Tensor],
) -> None:
    """Write gradients of a layer's weight and bias (unless it has no elements), and of the norm."""
    norm_weight, norm_bias, before = norm
    channels, C = weight.shape
    finish_kernel[(-(-C // FINISHED),)](
        *(total, weight, norm_weight, norm_bias, total if before is None else before),
        *gradients,
        C=C,
        CHANNELS=channels,
        BLOCK=min(512, pad(channels)),
        BLOCK_C=FINISHED,
        HAS_BIAS=gradients[1].numel() > 0,
        HAS_BEFORE=before is not None,
    )
