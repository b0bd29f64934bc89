"""The conditioned transition: two custom operators that work a chunk of rows at a time.

Matrix products are the device library's; kernels of the norm and the gated unit do what lies
between, in place. The backward pass makes a chunk's rows again.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bevatron.kernels.layer_norm.triton import launch_backward as norm_backward
from bevatron.kernels.layer_norm.triton import launch_forward as norm_forward
from bevatron.kernels.layer_norm.triton_rows import NormedRows
from bevatron.kernels.products import Linear, chunks
from bevatron.kernels.rows import register_gradients
from bevatron.kernels.swiglu import halves
from bevatron.kernels.swiglu.triton import launch_backward as gate_backward
from bevatron.kernels.swiglu.triton import launch_forward as gate_forward

Eight = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def conditioned_transition(x: Tensor, s: Tensor, *weights_and_eps: Any) -> Tensor:
    """Compute what the reference computes; see `bevatron.kernels.conditioned_transition`."""
    y: Tensor = condition(x, s.to(x.dtype), *weights_and_eps)[0]
    return y


@torch.library.custom_op("bevatron::conditioned_transition", mutates_args=())
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
    y = x.new_empty(x.shape)
    statistics = x.new_empty((4, *x.shape[:-1]), dtype=torch.float32)
    rows = Rows.of(x, s, statistics, norm_weight, eps)
    layers = Layers.of(
        *(x.dtype, scale_weight, scale_bias, shift_weight, gate_weight, up_weight),
        *(down_weight, out_weight, out_bias),
    )
    y_rows = y.view(rows.x.shape)
    for part in chunks(len(y_rows), layers.bytes_per_row(rows)):
        made = rows.part(part).make(layers)
        gate, value = halves(made.both)
        # In place: the hidden rows on their gates.
        gate_forward(gate, value, gate)
        gate_forward(layers.out(made.rows.s), layers.narrow(gate), y_rows[part], silu=False)
    return y, statistics


@condition.register_fake
def _(x: Tensor, s: Tensor, *weights_and_eps: Any) -> tuple[Tensor, Tensor]:
    del s, weights_and_eps
    return x.new_empty(x.shape), x.new_empty((4, *x.shape[:-1]), dtype=torch.float32)


@torch.library.custom_op("bevatron::conditioned_transition_backward", mutates_args=())
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
    dy_rows, dx_rows, ds_rows = (t.view(-1, t.shape[-1]) for t in (dy.contiguous(), dx, ds))
    dnorm = torch.zeros_like(norm_weight, dtype=torch.float32)
    for part in chunks(len(dy_rows), layers.bytes_per_row(rows)):
        made = rows.part(part).make(layers)
        dnorm += _chunk_backward(dy_rows[part], made, layers, dx_rows[part], ds_rows[part])
    return dx, ds, dnorm.to(norm_weight.dtype), *layers.gradients()


register_gradients(condition, condition_backward, 11)


@dataclass(frozen=True)
class Layers:
    """The linear layers: those of the same rows as one."""

    adapt: Linear
    """From the normalised condition to scale and shift."""
    wide: Linear
    """From the normalised rows to gates and values."""
    narrow: Linear
    out: Linear
    hidden: int

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
        """Join the weights."""
        return cls(
            Linear(dtype, [scale, shift], [scale_bias, None]),
            Linear(dtype, [gate, up]),
            Linear(dtype, [down]),
            Linear(dtype, [out], [out_bias]),
            len(up),
        )

    def bytes_per_row(self, rows: "Rows") -> int:
        """Say what a row takes in the buffers of a chunk's backward pass."""
        numbers = 3 * self.hidden + 5 * rows.x.shape[1] + rows.s.shape[1]
        return numbers * rows.x.element_size()

    def gradients(self) -> Eight:
        """Return those of all weights and biases, in the order of the operator's arguments."""
        (scale, shift), (scale_bias, _) = self.adapt.gradients()
        (gate, up), _ = self.wide.gradients()
        (down,), _ = self.narrow.gradients()
        (out,), (out_bias,) = self.out.gradients()
        return scale, scale_bias, shift, gate, up, down, out, out_bias


@dataclass(frozen=True)
class Rows:
    """Rows of the activations and of their conditions, or a chunk of them.

    Attributes
    ----------
    x, s
        [n, C] and [n, D].
    statistics
        [4, n], mean and 1/sigma of the rows of x, then of s.
    """

    x: Tensor
    s: Tensor
    statistics: Tensor
    norm_weight: Tensor
    eps: float

    @classmethod
    def of(cls, x: Tensor, s: Tensor, statistics: Tensor, weight: Tensor, eps: float) -> "Rows":
        """Take tensors of any shape [..., C]."""
        rows, conditions = (tensor.reshape(-1, tensor.shape[-1]) for tensor in (x, s))
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

    def make(self, layers: Layers) -> "Made":
        """Go as far as gates and values; write the statistics."""
        condition = self.conditions.make()
        adapted, normed = layers.adapt(condition), torch.empty_like(self.x)
        scale, shift = halves(adapted)
        norm_forward(
            *(self.x, None, None, scale, shift, normed),
            *(self.statistics[0], self.statistics[1], self.eps),
            sigmoid=True,
        )
        return Made(self, condition, adapted, normed, layers.wide(normed))


@dataclass(frozen=True)
class Made:
    """What is made of a chunk, again in its backward pass.

    Attributes
    ----------
    condition
        [n, D], normalised.
    adapted
        [n, 2 C], scales, then shifts.
    normed
        [n, C].
    both
        [n, 2 H], gates, then values.
    """

    rows: Rows
    condition: Tensor
    adapted: Tensor
    normed: Tensor
    both: Tensor


def _chunk_backward(dy: Tensor, made: Made, layers: Layers, dx: Tensor, ds: Tensor) -> Tensor:
    """Write gradients of a chunk's rows, keep those of the layers; return the norm's weight's."""
    rows, gates = made.rows, halves(made.both)
    hidden = dy.new_empty(gates[0].shape)
    gate_forward(*gates, hidden)
    out, narrow = layers.out(rows.s), layers.narrow(hidden)
    # In place from here on: a gradient lies where what it belongs to has been.
    gate_backward(dy, out, narrow, out, narrow, silu=False)
    layers.out.keep(out, rows.s)
    layers.narrow.keep(narrow, hidden)
    gate_backward(layers.narrow.backward(narrow, out=hidden), *gates, *gates)
    layers.wide.keep(made.both, made.normed)
    scale, dshift = halves(made.adapted)
    layers.wide.backward(made.both, out=dshift)
    nothing, numbers = dy.new_empty(0), rows.statistics
    norm_backward(
        *(dshift, rows.x, None, None, scale, numbers[0], numbers[1]),
        *(dx, nothing, nothing, scale),
        sigmoid=True,
    )
    layers.adapt.keep(made.adapted, made.condition)
    layers.adapt.backward(made.adapted, out=made.condition)
    dnorm = torch.empty_like(rows.norm_weight, dtype=torch.float32)
    rows.conditions.backward(made.condition, ds, dnorm, nothing)
    layers.out.backward(out, out=ds, add=True)
    return dnorm
