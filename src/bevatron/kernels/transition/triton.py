"""The transition in Triton: two custom operators, each fused or in chunks of rows.

Narrow rows of 16-bit types take kernels that keep the hidden layer in registers (`triton_fused`).
All others take the matrix products of the device's library a chunk of rows at a time, with kernels
for what lies between; the hidden layer of a chunk is computed again in the backward pass.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bevatron.kernels.autograd import empty_gradients, of_given
from bevatron.kernels.layer_norm.triton import launch_backward as norm_backward
from bevatron.kernels.layer_norm.triton import normalised
from bevatron.kernels.products import BiasGradient, WeightGradient, chunks, linear
from bevatron.kernels.swiglu.triton import launch_backward as swiglu_backward
from bevatron.kernels.swiglu.triton import launch_forward as swiglu_forward
from bevatron.kernels.transition import triton_fused as fused


def transition(
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    up_weight: Tensor,
    down_weight: Tensor,
    gate_weight: Tensor | None,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    eps: float,
) -> Tensor:
    """Compute what the reference computes; see `bevatron.kernels.transition`."""
    y: Tensor = widen(
        x, norm_weight, norm_bias, up_weight, down_weight, gate_weight, up_bias, down_bias, eps
    )[0]
    return y


@torch.library.custom_op("bevatron::transition", mutates_args=())
def widen(
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    up_weight: Tensor,
    down_weight: Tensor,
    gate_weight: Tensor | None,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the result and every row's mean and 1/sigma in float32."""
    y, mean, rstd = _new_outputs(x, down_weight)
    rows = x.reshape(-1, x.shape[-1])
    weights = [
        None if weight is None else weight.to(x.dtype).contiguous()
        for weight in (up_weight, down_weight, gate_weight, up_bias, down_bias)
    ]
    flat = (y.view(-1, y.shape[-1]), mean.view(-1), rstd.view(-1))
    run: Callable[..., None] = (
        fused.forward if fused.fits(x, up_weight, down_weight) else _forward_in_chunks
    )
    run(rows, norm_weight, norm_bias, *weights, *flat, eps)
    return y, mean, rstd


@widen.register_fake
def _(
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    up_weight: Tensor,
    down_weight: Tensor,
    gate_weight: Tensor | None,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    del norm_weight, norm_bias, up_weight, gate_weight, up_bias, down_bias, eps
    return _new_outputs(x, down_weight)


@torch.library.custom_op("bevatron::transition_backward", mutates_args=())
def widen_backward(
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
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return gradients of all tensors, without elements for those that are not given."""
    dx, dnorm_weight, dnorm_bias = empty_gradients(x, x, norm_weight, norm_bias)
    rows, dy = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1]).contiguous()
    run: Callable[..., Any] = (
        fused.backward if fused.fits(x, up_weight, down_weight) else _backward_in_chunks
    )
    dup, ddown, dgate, dup_bias, ddown_bias = run(
        *(dy, rows, norm_weight, norm_bias),
        *(up_weight, down_weight, gate_weight, up_bias, down_bias),
        *(mean.view(-1), rstd.view(-1), dx.view(rows.shape), dnorm_weight, dnorm_bias, eps),
    )
    return dx, dnorm_weight, dnorm_bias, dup, ddown, dgate, dup_bias, ddown_bias


@widen_backward.register_fake
def _(
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
    eps: float,
) -> tuple[Tensor, ...]:
    del dy, mean, rstd, eps
    given = (norm_weight, norm_bias, up_weight, down_weight, gate_weight, up_bias, down_bias)
    return tuple(empty_gradients(x, x, *given))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:8], *output[1:])
    ctx.eps = inputs[8]
    ctx.set_materialize_grads(False)


def _backward(
    ctx: Any, dy: Tensor | None, dmean: Tensor | None, drstd: Tensor | None
) -> tuple[Tensor | None, ...]:
    del dmean, drstd  # nobody outside sees the statistics
    if dy is None:
        return (None,) * 9
    found = widen_backward(dy, *ctx.saved_tensors, ctx.eps)
    return *of_given(ctx.saved_tensors[:8], found), None


widen.register_autograd(_backward, setup_context=_save)


def _forward_in_chunks(
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
    for part in chunks(len(x), _bytes_per_row(x, up_weight, 2)):
        normed = normalised(x[part], norm_weight, norm_bias, mean[part], rstd[part], eps)
        hidden, _ = _hidden(normed, up_weight, gate_weight, up_bias)
        linear(hidden, down_weight, down_bias, out=y[part])


def _backward_in_chunks(
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
    up, down = up_weight.to(x.dtype), down_weight.to(x.dtype)
    gate = None if gate_weight is None else gate_weight.to(x.dtype)
    bias = None if up_bias is None else up_bias.to(x.dtype)
    dup, ddown = WeightGradient(up_weight), WeightGradient(down_weight)
    dgate = WeightGradient(up_weight if gate_weight is None else gate_weight)
    dup_bias, ddown_bias = BiasGradient(up_bias, x), BiasGradient(down_bias, x)
    for part in chunks(len(x), _bytes_per_row(x, up_weight, 3)):
        normed = normalised(x[part], norm_weight, norm_bias, mean[part], rstd[part], eps)
        dhidden = torch.mm(dy[part], down)
        ddown_bias.add(dy[part])
        if gate is None:
            dvalue = linear(normed, up, bias).relu_()
            ddown.add(dy[part], dvalue)
            dvalue = torch.ops.aten.threshold_backward(dhidden, dvalue, 0)
            torch.mm(dvalue, up, out=dx[part])
        else:
            dvalue, dgates = linear(normed, up, bias), linear(normed, gate)
            # In place: gradients on gates and values, the hidden rows on their gradient.
            swiglu_backward(dhidden, dgates, dvalue, dgates, dvalue, dhidden)
            ddown.add(dy[part], dhidden)
            dgate.add(dgates, normed)
            torch.mm(dvalue, up, out=dx[part])
            torch.addmm(dx[part], dgates, gate, out=dx[part])
        dup.add(dvalue, normed)
        dup_bias.add(dvalue)
    nothing = x.new_empty(0)
    # In place again: on the gradient of the normalised rows.
    norm_backward(
        dx, x, norm_weight, norm_bias, None, mean, rstd, dx, dnorm_weight, dnorm_bias, nothing
    )
    return (
        dup.result(),
        ddown.result(),
        nothing if gate is None else dgate.result(),
        dup_bias.result(),
        ddown_bias.result(),
    )


def _hidden(
    normed: Tensor, up_weight: Tensor, gate_weight: Tensor | None, up_bias: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    value = linear(normed, up_weight, up_bias)
    if gate_weight is None:
        return value.relu_(), None
    gate = linear(normed, gate_weight)
    swiglu_forward(gate, value, gate)
    return gate, value


def _bytes_per_row(x: Tensor, up_weight: Tensor, hidden_rows: int) -> int:
    return (hidden_rows * up_weight.shape[0] + x.shape[-1]) * x.element_size()


def _new_outputs(x: Tensor, down_weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    y = x.new_empty((*x.shape[:-1], down_weight.shape[0]))
    mean = x.new_empty(x.shape[:-1], dtype=torch.float32)
    return y, mean, torch.empty_like(mean)
