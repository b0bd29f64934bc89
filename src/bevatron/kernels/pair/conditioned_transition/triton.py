"""The conditioned transition: two custom operators that work a chunk of rows at a time.

cuBLAS computes the matmuls; the kernels of the norm and the gated unit run between them, in place.
The backward pass recomputes a chunk's rows.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bevatron.kernels.pair.conditioned_transition import triton_launch as launch
from bevatron.kernels.pair.gated import gate_and_value
from bevatron.kernels.pair.layer_norm.triton import NormedRows
from bevatron.kernels.pair.layer_norm.triton import launch_forward as norm_forward
from bevatron.kernels.pair.swiglu.triton import hidden_gradients, hidden_rows
from bevatron.kernels.pair.swiglu.triton import launch_forward as gate_forward
from bevatron.kernels.shared.chunked_linear import LARGE, BiasGradient, Linear, chunks
from bevatron.kernels.shared.custom_op import custom_op

WIDE = 256
"""From this width on, a usual chunk would hold too few rows: tokens have 768, atoms 128."""

Eight = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def conditioned_transition(x: Tensor, s: Tensor, *weights_and_eps: Any) -> Tensor:
    """Compute the same as the reference; see `bevatron.kernels.pair.conditioned_transition`."""
    y: Tensor = condition(x, s.to(x.dtype), *weights_and_eps)[0]
    return y


def _new_outputs(x: Tensor) -> tuple[Tensor, Tensor]:
    """Allocate the result, and mean and 1/sigma of the rows of x and of s as [4, ...]."""
    return x.new_empty(x.shape), x.new_empty((4, *x.shape[:-1]), dtype=torch.float32)


@custom_op("conditioned_transition", outputs="y statistics", fake=_new_outputs)
def condition(
    x: Tensor,
    s: Tensor,
    norm_weight: Tensor,
    scale_weight: Tensor,
    scale_bias: Tensor,
    shift_weight: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    down_weight: Tensor,
    out_weight: Tensor,
    out_bias: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Return the result, and mean and 1/sigma of the rows of x and of s as [4, ...] in float32."""
    y, statistics = _new_outputs(x)
    rows = Rows.of(x, s, statistics, norm_weight, eps)
    layers = Layers.of(
        *(x.dtype, scale_weight, scale_bias, shift_weight, gate_weight, up_weight),
        *(down_weight, out_weight, out_bias),
    )
    y_rows = y.view(rows.x.shape)
    for part in chunks(len(y_rows), layers.bytes_per_row(rows), times=layers.times):
        chunk = rows.part(part)
        condition = chunk.conditions.make()
        narrow = layers.narrow(hidden_rows(chunk.adapt(layers, condition), layers.wide.matrix))
        out, to = layers.out, y_rows[part]
        if out.bias is not None and launch.fits("output", narrow, to, chunk.s, out.matrix):
            launch.output(chunk.s, out.matrix, out.bias, narrow, to)
        else:
            gate_forward(out(chunk.s), narrow, to, silu=False)
    return y, statistics


@condition.backward()
def condition_backward(
    dy: Tensor,
    x: Tensor,
    s: Tensor,
    norm_weight: Tensor,
    scale_weight: Tensor,
    scale_bias: Tensor,
    shift_weight: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    down_weight: Tensor,
    out_weight: Tensor,
    out_bias: Tensor,
    y: Tensor,
    statistics: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return gradients of all tensors, in their order."""
    dx, ds = x.new_empty(x.shape), x.new_empty(s.shape)
    rows = Rows.of(x, s, statistics, norm_weight, eps)
    layers = Layers.of(
        *(x.dtype, scale_weight, scale_bias, shift_weight, gate_weight, up_weight),
        *(down_weight, out_weight, out_bias),
    )
    dy_rows, y_rows, dx_rows, ds_rows = (
        t.view(-1, t.shape[-1]) for t in (dy.contiguous(), y.contiguous(), dx, ds)
    )
    dnorm = BiasGradient(norm_weight, norm_weight)
    parts = list(chunks(len(dy_rows), layers.bytes_per_row(rows), times=layers.times))
    for part in parts:
        outside = (dy_rows[part], y_rows[part], dx_rows[part], ds_rows[part])
        dnorm.add_part(_chunk_backward(rows.part(part), layers, *outside, only=len(parts) == 1))
    return dx, ds, dnorm.result(), *layers.gradients()


@dataclass(frozen=True)
class Layers:
    """The linear layers; layers on the same rows are joined into one."""

    adapt: Linear
    """From the normalised condition to scale and shift."""
    wide: Linear
    """From the normalised rows to gates and values."""
    narrow: Linear
    out: Linear
    scale_bias: Tensor

    @classmethod
    def of(
        cls,
        dtype: torch.dtype,
        scale: Tensor,
        scale_bias: Tensor,
        shift: Tensor,
        gate: Tensor,
        up: Tensor,
        down: Tensor,
        out: Tensor,
        out_bias: Tensor,
    ) -> "Layers":
        """Join weights of layers on the same rows."""
        return cls(
            Linear(dtype, [scale, shift], [scale_bias, None]),
            Linear(dtype, [gate, up]),
            Linear(dtype, [down]),
            Linear(dtype, [out], [out_bias]),
            scale_bias.contiguous(),
        )

    def bytes_per_row(self, rows: "Rows") -> int:
        """Return the bytes that a row takes in the buffers of a chunk's backward pass."""
        C, H = self.narrow.matrix.shape
        return (3 * H + 3 * C + rows.s.shape[1]) * rows.x.element_size()

    @property
    def times(self) -> int:
        """Return how many times `CHUNK_BYTES` a chunk may take; narrow rows need no larger one."""
        return LARGE if len(self.narrow.matrix) >= WIDE else 1

    def adapt_rows(self, condition: Tensor, rows: "Rows", scale: Tensor | None) -> Tensor:
        """Return the normalised rows, from known statistics; write the scales."""
        numbers = rows.statistics
        return launch.adapt(
            *(condition, self.adapt.matrix, self.scale_bias, rows.x, numbers[0], numbers[1], scale)
        )

    def gradients(self) -> Eight:
        """Return the gradients of all weights and biases, in the operator's order of arguments."""
        (scale, shift), (scale_bias, _) = self.adapt.gradients()
        (gate, up), _ = self.wide.gradients()
        (down,), _ = self.narrow.gradients()
        (out,), (out_bias,) = self.out.gradients()
        return scale, scale_bias, shift, gate, up, down, out, out_bias


@dataclass(frozen=True)
class Rows:
    """Rows of the activations and of their conditions: all of them, or a chunk.

    Attributes
    ----------
    x, s : [n, C] and [n, D]
    statistics : [4, n], mean and 1/sigma of the rows of x, then of s
    """

    x: Tensor
    s: Tensor
    statistics: Tensor
    norm_weight: Tensor
    eps: float

    @classmethod
    def of(cls, x: Tensor, s: Tensor, statistics: Tensor, weight: Tensor, eps: float) -> "Rows":
        """Take tensors of any shape [..., C]."""
        rows, conditions = (t.reshape(-1, t.shape[-1]).contiguous() for t in (x, s))
        return cls(rows, conditions, statistics.view(4, -1), weight, eps)

    def part(self, part: slice) -> "Rows":
        """Return a chunk."""
        numbers = self.statistics[:, part]
        return Rows(self.x[part], self.s[part], numbers, self.norm_weight, self.eps)

    @property
    def conditions(self) -> NormedRows:
        """The rows of s with their norm."""
        numbers = self.statistics
        return NormedRows(self.s, self.norm_weight, None, numbers[2], numbers[3], self.eps)

    def adapt(self, layers: Layers, condition: Tensor) -> Tensor:
        """Return the normalised rows; write their statistics."""
        numbers = self.statistics
        if launch.fits("adapt", self.x, condition, layers.adapt.matrix):
            launch.statistics(self.x, numbers[0], numbers[1], self.eps)
            return layers.adapt_rows(condition, self, None)
        normed, _ = self._adapted(layers, condition)
        return normed

    def adapt_again(
        self, layers: Layers, condition: Tensor, buffer: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the normalised rows, their scales, and the tensor that holds both with the shifts.

        ``buffer`` [n, C] may receive the scales.
        """
        if launch.fits("adapt", self.x, condition, layers.adapt.matrix):
            return layers.adapt_rows(condition, self, buffer), buffer, None
        normed, adapted = self._adapted(layers, condition)
        return normed, gate_and_value(adapted)[0], adapted

    def _adapted(self, layers: Layers, condition: Tensor) -> tuple[Tensor, Tensor]:
        adapted, normed = layers.adapt(condition), torch.empty_like(self.x)
        scale, shift = gate_and_value(adapted)
        norm_forward(
            *(self.x, None, None, scale, shift, normed),
            *(self.statistics[0], self.statistics[1], self.eps),
            sigmoid=True,
        )
        return normed, adapted


def _chunk_backward(
    rows: Rows, layers: Layers, dy: Tensor, y: Tensor, dx: Tensor, ds: Tensor, *, only: bool
) -> Tensor:
    """Write the gradients of a chunk's rows, accumulate the layers'; return the norm weight's."""
    dnarrow, dout, dout_sum = _output_gradients(rows.s, layers.out, dy, y)
    layers.out.keep(dout, rows.s, dout_sum, only=only)
    condition, mean, rstd = rows.conditions.make(), rows.statistics[0], rows.statistics[1]
    # dx_rows holds the scales until the gradient of x overwrites them.
    normed, scale, dadapted = rows.adapt_again(layers, condition, dx)
    hidden = layers.narrow.backward(dnarrow)
    both = hidden_gradients(normed, layers.wide.matrix, hidden)
    layers.narrow.keep(dnarrow, hidden, only=only)
    del hidden, dnarrow
    layers.wide.keep(both, normed, only=only)
    if dadapted is None:
        dadapted = dy.new_empty((len(dy), 2 * dy.shape[1]))
    layers.wide.backward(both, out=gate_and_value(dadapted)[1])
    del both, normed
    dscale_sum = launch.adapted_backward(rows.x, scale, mean, rstd, dx, dadapted)
    layers.adapt.keep(dadapted, condition, dscale_sum, only=only)
    layers.adapt.backward(dadapted, out=condition)
    dnorm = torch.empty_like(rows.norm_weight, dtype=torch.float32)
    rows.conditions.backward(condition, ds, dnorm, dy.new_empty(0))
    layers.out.backward(dout, out=ds, add=True)
    return dnorm


def _output_gradients(
    s: Tensor, layer: Linear, dy: Tensor, y: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return gradients of the narrow rows and of the output's layer, and the latter's sum."""
    if layer.bias is not None and launch.fits("output", dy, y, s, layer.matrix):
        return launch.output_product(s, layer.matrix, layer.bias, dy, y)
    dout = layer(s)
    dnarrow, total = launch.output_gradients(dy, y, dout)
    return dnarrow, dout, total
