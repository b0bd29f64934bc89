"""Launches of the triangle multiplication's kernels, prepared once for each layout of the pair."""

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
from bevatron.kernels.pair.triangle_multiply.triton_weights import round_kernel, weight_kernel
from bevatron.kernels.shared.launch import contiguous, num_sms
from bevatron.kernels.shared.layouts import per_layout
from bevatron.kernels.shared.rows import as_rows
from bevatron.kernels.shared.tiles import Tiles
from bevatron.kernels.shared.triton_launch import Launch, launch
from bevatron.kernels.shared.triton_math import allows_tf32
from bevatron.kernels.shared.triton_partial_sums import (
    finish_normed_layer,
    sum_weight_and_bias_partials,
)

LARGEST_WIDTH = 256
ROUNDED = 1024
"""Weights that a program rounds."""
ALIGNED, WELL_ALIGNED = 8, 16
"""Elements: rows of the matrices that are multiplied begin at multiples. Where lines are padded at
all, to the second: Triton knows of multiples of 16 alone, and loads eight elements at a time."""


def padded(length: int) -> int:
    """Round the length of a line of columns up to what is aligned."""
    return length if length % ALIGNED == 0 else -(-length // WELL_ALIGNED) * WELL_ALIGNED


def pad(width: int) -> int:
    """Round channels up to a power of two that products take."""
    return max(16, 1 << (width - 1).bit_length())


@dataclass(frozen=True)
class Pair:
    """How the rows of a pair lie, in its own memory and in tensors with channels outermost.

    Attributes
    ----------
    is_readable
        Whether kernels read the pair in place; they need a copy otherwise.
    device, dtype
        Of the pair.
    count, batch, C, H
        Rows, pairs, channels of the pair and of the contraction.
    geometry
        Sizes and strides of the axes of rows.
    axes
        How many of these axes there are.
    lines, length, padded
        R, N, and N rounded up to what is aligned.
    tf32
        Whether products of float32 numbers are rounded to TF32.
    """

    is_readable: bool
    device: torch.device
    dtype: torch.dtype
    count: int
    batch: int
    C: int
    H: int
    geometry: tuple[int, int, int, int, int]
    axes: int
    lines: int
    length: int
    padded: int
    tf32: bool

    @classmethod
    def of(cls, z: Tensor, norm_out_weight: Tensor, tf32: bool = False) -> "Pair":
        """Describe a pair."""
        given, N = z, z.shape[-2]
        z = z if z.stride(-1) == 1 else z.contiguous()
        rows = as_rows(z)
        s0, s1, s2, _ = rows.strides[0]
        return cls(
            is_readable=rows.tensors[0] is given,
            device=z.device,
            dtype=z.dtype,
            count=rows.count,
            batch=z.shape[:-3].numel(),
            C=z.shape[-1],
            H=len(norm_out_weight),
            geometry=(*rows.sizes, s0, s1, s2),
            axes=rows.axes,
            lines=z.shape[-3],
            length=N,
            padded=padded(N),
            tf32=tf32,
        )

    def planes(self, z: Tensor, channels: int) -> Tensor:
        """Allocate a tensor with channels outermost, as matrices [channels batch, R, N padded]."""
        return z.new_empty((channels * self.batch, self.lines, self.padded))

    def matrices(self, planes: Tensor) -> Tensor:
        """View a tensor with channels outermost as [channels batch, R, N]."""
        return planes if self.length == self.padded else planes[:, :, : self.length]

    @property
    def places(self) -> tuple[int, int, int]:
        """N, N padded and the elements of a channel."""
        return self.length, self.padded, self.batch * self.lines * self.padded

    def tiles(self, kernel: str) -> Tiles:
        """Look up the tiles of a kernel."""
        return choose(kernel, max(pad(self.C), pad(self.H)), self.dtype.itemsize)

    def launch(self, kernel: Any, name: str, numbers: Sequence[float], **constants: Any) -> Launch:
        """Prepare a launch of programs that take a block of columns each."""
        tiles = self.tiles(name)
        programs = -(-self.places[2] // tiles.rows)
        return Launch(kernel, (programs,), numbers, **constants, **self.constants(tiles))

    def constants(self, tiles: Tiles) -> dict[str, Any]:
        """Return the compile-time constants of all kernels."""
        return tiles.register_limit(self.device) | {
            "C": self.C,
            "C_PAD": pad(self.C),
            "BLOCK": tiles.rows,
            "BLOCK_H": tiles.columns,
            "AXES": self.axes,
            "PADDED": self.length != self.padded,
            "STAGES": tiles.stages,
            "PRECISION": "tf32" if self.tf32 else "ieee",
            "num_warps": tiles.warps,
        }


@dataclass(frozen=True)
class LayerSums:
    """What computes the sums over rows from which the gradients of a linear layer follow.

    Attributes
    ----------
    shares
        Shape of the partial sums over rows that ``weigh`` leaves: of d xhat^T [channels C], and of
        d [channels]. xhat are the rows normalised, without the norm's weight and bias.
    weigh
        The launch.
    """

    shares: tuple[int, int]
    weigh: Launch

    @classmethod
    def of(
        cls,
        pair: Pair,
        channels: int,
        *,
        of_x: bool = False,
        d_rows: bool = False,
    ) -> "LayerSums":
        """Prepare it for a layer of the contraction (``of_x``) or of the pair.

        ``d_rows``: the gradient of its result has rows like the pair.
        """
        tiles, C = pair.tiles("weight"), pair.H if of_x else pair.C
        blocks = -(-channels // tiles.columns)
        # Columns are dealt to as many programs as run at a time.
        most = max(1, tiles.per_sm * num_sms(pair.device) // blocks)
        columns = -(-pair.places[2] // (most * tiles.rows)) * tiles.rows
        parts = -(-pair.places[2] // columns) if columns else 0
        weigh = Launch(
            weight_kernel,
            (blocks, parts),
            (channels, columns, *pair.geometry, *pair.places),
            FULL=channels % tiles.columns == 0,
            FROM_CHANNELS=of_x,
            D_ROWS=d_rows,
            **(pair.constants(tiles) | {"C": C, "C_PAD": pad(C)}),
        )
        return cls((parts, channels * (C + 1)), weigh)

    def __call__(self, d: Tensor, rows: Tensor, statistics: Sequence[Tensor]) -> Tensor:
        """Return partial sums over rows of the contraction or of the pair."""
        shares = d.new_empty(self.shares, dtype=torch.float32)
        self.weigh(d, rows, *statistics, shares)
        return shares


@dataclass(frozen=True)
class Launches:
    """All launches for a pair, in the order of the passes."""

    project: Launch
    output: Launch
    output_input: Launch
    of_output: LayerSums
    of_gate: LayerSums
    project_input: Launch
    of_joint: LayerSums


@per_layout
def prepare(
    z: Tensor,
    mask: Tensor | None,
    norm_out_weight: Tensor,
    joint_bias: Tensor | None,
    out_bias: Tensor | None,
    eps: float,
    tf32: bool,
) -> tuple[Pair, Launches]:
    """Describe a pair and prepare its launches."""
    pair = Pair.of(z, norm_out_weight, tf32)
    numbers, C, H = (*pair.geometry, *pair.places), pair.C, pair.H
    with_eps = (*pair.geometry, eps, *pair.places)
    masked = {"HAS_BIAS": joint_bias is not None, "HAS_MASK": mask is not None, "H": H}
    of_out = {"HAS_BIAS": out_bias is not None, "H": H, "H_PAD": pad(H)}

    def held(name: str) -> dict[str, bool]:
        return {"HOLD": pair.tiles(name).hold}

    return pair, Launches(
        project=pair.launch(project_kernel, "project", with_eps, **masked),
        output=pair.launch(output_kernel, "output", with_eps, **of_out, **held("output")),
        output_input=pair.launch(
            output_input_kernel, "output_input", numbers, **of_out, **held("output_input")
        ),
        of_output=LayerSums.of(pair, C, of_x=True),
        of_gate=LayerSums.of(pair, C, d_rows=True),
        project_input=pair.launch(
            project_input_kernel, "project_input", numbers, **masked, **held("project_input")
        ),
        of_joint=LayerSums.of(pair, 4 * H),
    )


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
        rounded: Tensor,
    ) -> "Weights":
        """Prepare weights for rows like ``z``; ``rounded`` is of `round_weights`."""
        matrices = [joint, out, gate]
        if rounded.numel():
            parts = rounded.split([matrix.numel() for matrix in matrices])
            matrices = [a.view(b.shape) for a, b in zip(parts, matrices, strict=True)]
        joint, out, gate = (matrix.contiguous() for matrix in matrices)
        biases = (
            None if bias is None else bias.to(z.dtype).contiguous()
            for bias in (joint_bias, out_bias)
        )
        joint_bias, out_bias = biases
        return cls(
            (norm_in_weight.contiguous(), norm_in_bias.contiguous()),
            joint,
            joint_bias,
            (norm_out_weight.contiguous(), norm_out_bias.contiguous()),
            out,
            gate,
            out_bias,
        )

    def output(self, C: int) -> tuple[Tensor, ...]:
        """Return what the output's kernels take."""
        bias = self.out if self.out_bias is None else self.out_bias
        gate_bias = bias if self.out_bias is None else bias[C:]
        return *self.norm_out, *self.norm_in, self.out, self.gate, bias, gate_bias


def rounds(z: Tensor, *matrices: Tensor) -> bool:
    """Whether matrices are of another type than the rows."""
    return any(matrix.dtype != z.dtype for matrix in matrices)


def round_weights(joint: Tensor, out: Tensor, gate: Tensor, rounded: Tensor) -> None:
    """Write the matrices one after another, in the type of ``rounded``; nothing if it is empty."""
    if rounded.numel():
        matrices = joint.contiguous(), out.contiguous(), gate.contiguous()
        ends = joint.numel(), joint.numel() + out.numel(), rounded.numel()
        grid = (-(-rounded.numel() // ROUNDED),)
        launch(round_kernel, grid, (*matrices, rounded), ends, BLOCK=ROUNDED)


class Multiplication:
    """A pair with its weights, and the launches of both passes.

    The order of arguments is that of the operator; see `triton.multiply`.
    """

    def __init__(
        self,
        z: Tensor,
        mask: Tensor | None,
        norm_in_weight: Tensor,
        norm_in_bias: Tensor,
        joint: Tensor,
        joint_bias: Tensor | None,
        norm_out_weight: Tensor,
        norm_out_bias: Tensor,
        out: Tensor,
        gate: Tensor,
        out_bias: Tensor | None,
        rounded: Tensor,
        eps: float,
    ) -> None:
        tf32 = z.dtype == torch.float32 and allows_tf32()
        self.pair, self.launches = prepare(
            z, mask, norm_out_weight, joint_bias, out_bias, eps, tf32
        )
        self.z = z if self.pair.is_readable else z.contiguous()
        self.weights = Weights.of(
            *(z, norm_in_weight, norm_in_bias, joint, joint_bias, norm_out_weight),
            *(norm_out_bias, out, gate, out_bias, rounded),
        )
        self.mask = contiguous(mask)

    def project(self, ab: Tensor, statistics: Sequence[Tensor]) -> None:
        """Write a and b and the statistics of the pair's rows."""
        self.launches.project(*self._projection(), ab, *statistics)

    def output(self, x: Tensor, y: Tensor, statistics: Sequence[Tensor]) -> None:
        """Write the result and the statistics of the contraction's rows, the last two."""
        weights = self.weights.output(self.pair.C)
        self.launches.output(x, self.z, *weights, *statistics[2:], *statistics[:2], y)

    def output_input_backward(
        self,
        dy: Tensor,
        x: Tensor,
        statistics: Sequence[Tensor],
        dx: Tensor,
        dgate: Tensor,
        spare: Tensor,
    ) -> None:
        """Write dx and the gradient of the gate's linear layer as rows.

        ``spare`` [C, ...] gets that of the output's linear layer.
        """
        weights = self.weights.output(self.pair.C)
        given = (dy, x, self.z, *weights, *statistics[2:], *statistics[:2])
        self.launches.output_input(*given, dx, dgate, spare)

    def weigh_output(
        self,
        x: Tensor,
        statistics: Sequence[Tensor],
        dgate: Tensor,
        spare: Tensor,
        gradients: Sequence[Tensor],
    ) -> Tensor:
        """Write the gradients of the weights behind the contraction.

        ``gradients``: of the norm's weight and bias, the output's and the gate's weight, the
        biases. Returns shares in the gradients of the pair's norm, the first C of which, the
        gate's, are written.
        """
        *dnorm, dout, dgate_weight, dbias = gradients
        C, weights, launches = self.pair.C, self.weights, self.launches
        parts, norm = launches.of_output(spare, x, statistics[2:]), weights.norm_out
        shares = parts.new_empty(C, 2, self.pair.H)
        finish_normed_layer(parts, weights.out, *norm, dout, dbias[:C], shares)
        sum_weight_and_bias_partials(shares, *norm, *dnorm)
        parts, norm = launches.of_gate(dgate, self.z, statistics[:2]), weights.norm_in
        shares = parts.new_empty(C + len(weights.joint), 2, C)
        finish_normed_layer(parts, weights.gate, *norm, dgate_weight, dbias[C:], shares)
        return shares

    def project_backward(
        self,
        d: Tensor,
        statistics: Sequence[Tensor],
        dz: Tensor,
        shares: Tensor,
        gradients: Sequence[Tensor],
    ) -> None:
        """Turn the gradient of the gate's linear layer in ``dz`` into dz.

        Write the other gradients too: of the norm's weight and bias, the joint weight and bias.
        ``d`` [4 H, ...] holds the gradients of a (first quarter) and b (third); ``shares`` is what
        `weigh_output` returned.
        """
        *dnorm, djoint, djoint_bias = gradients
        weights = self.weights
        self.launches.project_input(d, *self._projection(), weights.gate, *statistics, dz)
        parts, norm = self.launches.of_joint(d, self.z, statistics), weights.norm_in
        rest = shares[self.pair.C :]
        finish_normed_layer(parts, weights.joint, *norm, djoint, djoint_bias, rest)
        sum_weight_and_bias_partials(shares, *norm, *dnorm)

    def _projection(self) -> tuple[Tensor, ...]:
        joint, bias = self.weights.joint, self.weights.joint_bias
        mask = self.z if self.mask is None else self.mask
        return self.z, *self.weights.norm_in, joint, joint if bias is None else bias, mask
