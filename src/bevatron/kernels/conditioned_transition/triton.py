"""The conditioned transition: two custom operators that work a chunk of rows at a time.

Matrix products are the device library's; kernels of the norm and the gated unit do what lies
between, in place. The backward pass makes a chunk's rows again.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bevatron.kernels.autograd import empty_gradients
from bevatron.kernels.layer_norm.triton import launch_backward as norm_backward
from bevatron.kernels.layer_norm.triton import launch_forward as norm_forward
from bevatron.kernels.layer_norm.triton_rows import NormedRows
from bevatron.kernels.products import BiasGradient, WeightGradient, chunks, linear
from bevatron.kernels.swiglu.triton import launch_backward as gate_backward
from bevatron.kernels.swiglu.triton import launch_forward as gate_forward

Nine = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


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
    matrices = [scale_weight, scale_bias, shift_weight, gate_weight, up_weight, down_weight]
    weights = Weights(norm_weight, *(w.to(x.dtype) for w in (*matrices, out_weight, out_bias)))
    x_rows, s_rows = x.reshape(-1, x.shape[-1]), s.reshape(-1, s.shape[-1])
    y_rows, numbers = y.view(x_rows.shape), statistics.view(4, -1)
    for part in chunks(len(x_rows), _bytes_per_row(x, s, up_weight, 2)):
        made = _make(x_rows[part], s_rows[part], weights, numbers[:, part], eps)
        gate_forward(made.gate, made.value, made.gate)
        out = linear(s_rows[part], weights.out, weights.out_bias)
        gate_forward(out, linear(made.gate, weights.down), y_rows[part], silu=False)
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
    given = (
        *(norm_weight, scale_weight, scale_bias, shift_weight, gate_weight, up_weight),
        *(down_weight, out_weight, out_bias),
    )
    weights = Weights(norm_weight, *(w.to(x.dtype) for w in given[1:]))
    totals = Gradients(given, x)
    x_rows, s_rows = x.reshape(-1, x.shape[-1]), s.reshape(-1, s.shape[-1])
    dy_rows, numbers = dy.reshape(x_rows.shape), statistics.view(4, -1)
    dx_rows, ds_rows = dx.view(x_rows.shape), ds.view(s_rows.shape)
    for part in chunks(len(x_rows), _bytes_per_row(x, s, up_weight, 4)):
        _chunk_backward(
            *(dy_rows[part], x_rows[part], s_rows[part], weights, numbers[:, part], eps),
            *(dx_rows[part], ds_rows[part], totals),
        )
    return dx, ds, *totals.results()


@condition_backward.register_fake
def _(dy: Tensor, x: Tensor, s: Tensor, *weights_and_rest: Any) -> tuple[Tensor, ...]:
    del dy
    return tuple(empty_gradients(x, x, s, *weights_and_rest[:9]))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:11], output[1])
    ctx.eps = inputs[11]
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dy: Tensor | None, dstatistics: Tensor | None) -> tuple[Tensor | None, ...]:
    del dstatistics  # nobody outside sees the statistics
    if dy is None:
        return (None,) * 12
    return *condition_backward(dy, *ctx.saved_tensors, ctx.eps), None


condition.register_autograd(_backward, setup_context=_save)


@dataclass(frozen=True)
class Weights:
    """All weights, in the type of the rows but for that of the norm."""

    norm: Tensor
    scale: Tensor
    scale_bias: Tensor
    shift: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    out: Tensor
    out_bias: Tensor


class Gradients:
    """The weights' gradients, summed in float32 over chunks."""

    def __init__(self, given: Sequence[Tensor], like: Tensor) -> None:
        norm, scale, scale_bias, shift, gate, up, down, out, out_bias = given
        self.norm, self.like = norm, like
        self.norm_parts: list[Tensor] = []
        self.scale, self.scale_bias = WeightGradient(scale), BiasGradient(scale_bias, like)
        self.shift, self.gate, self.up = (WeightGradient(weight) for weight in (shift, gate, up))
        self.down, self.out = WeightGradient(down), WeightGradient(out)
        self.out_bias = BiasGradient(out_bias, like)

    def results(self) -> Nine:
        """Return the sums in the types of the weights."""
        norm = torch.zeros(self.norm.shape, dtype=torch.float32, device=self.norm.device)
        for part in self.norm_parts:
            norm += part
        return (
            norm.to(self.norm.dtype),
            self.scale.result(),
            self.scale_bias.result(),
            self.shift.result(),
            self.gate.result(),
            self.up.result(),
            self.down.result(),
            self.out.result(),
            self.out_bias.result(),
        )


@dataclass(frozen=True)
class Made:
    """What a chunk's backward pass needs of its forward pass."""

    s_rows: NormedRows
    condition: Tensor
    scale: Tensor
    normed: Tensor
    gate: Tensor
    value: Tensor


def _make(x: Tensor, s: Tensor, weights: Weights, numbers: Tensor, eps: float) -> Made:
    s_rows = NormedRows(s, weights.norm, None, numbers[2], numbers[3], eps)
    condition = s_rows.make()
    scale = linear(condition, weights.scale, weights.scale_bias)
    normed = linear(condition, weights.shift)
    # In place: the shift becomes the normalised rows.
    norm_forward(x, None, None, scale, normed, normed, numbers[0], numbers[1], eps, sigmoid=True)
    gate, value = linear(normed, weights.gate), linear(normed, weights.up)
    return Made(s_rows, condition, scale, normed, gate, value)


def _chunk_backward(
    dy: Tensor,
    x: Tensor,
    s: Tensor,
    weights: Weights,
    numbers: Tensor,
    eps: float,
    dx: Tensor,
    ds: Tensor,
    totals: Gradients,
) -> None:
    made = _make(x, s, weights, numbers, eps)
    hidden = x.new_empty(made.gate.shape)
    gate_forward(made.gate, made.value, hidden)
    out, narrow = linear(s, weights.out, weights.out_bias), linear(hidden, weights.down)
    # In place from here on: a gradient lies where what it belongs to has been.
    gate_backward(dy, out, narrow, out, narrow, silu=False)
    totals.down.add(narrow, hidden)
    torch.mm(narrow, weights.down, out=hidden)
    gate_backward(hidden, made.gate, made.value, made.gate, made.value)
    totals.gate.add(made.gate, made.normed)
    totals.up.add(made.value, made.normed)
    dnormed = torch.mm(made.value, weights.up, out=made.normed)
    torch.addmm(dnormed, made.gate, weights.gate, out=dnormed)
    nothing, dscale = x.new_empty(0), made.scale
    norm_backward(
        *(dnormed, x, None, None, made.scale, numbers[0], numbers[1]),
        *(dx, nothing, nothing, dscale),
        sigmoid=True,
    )
    totals.scale.add(dscale, made.condition)
    totals.scale_bias.add(dscale)
    totals.shift.add(dnormed, made.condition)
    dcondition = torch.mm(dscale, weights.scale, out=made.condition)
    torch.addmm(dcondition, dnormed, weights.shift, out=dcondition)
    dnorm = torch.empty_like(weights.norm, dtype=torch.float32)
    made.s_rows.backward(dcondition, ds, dnorm, nothing)
    totals.norm_parts.append(dnorm)
    totals.out.add(out, s)
    totals.out_bias.add(out)
    torch.addmm(ds, out, weights.out, out=ds)


def _bytes_per_row(x: Tensor, s: Tensor, up_weight: Tensor, hidden_rows: int) -> int:
    numbers = hidden_rows * up_weight.shape[0] + 4 * x.shape[-1] + 2 * s.shape[-1]
    return numbers * x.element_size()
