"""The transition in Triton: two custom operators, each fused or in chunks of rows.

Narrow rows of 16-bit types run kernels that keep the hidden layer in registers (`triton_fused`).
All others call cuBLAS on one chunk of rows at a time, with kernels in between; the backward pass
recomputes the hidden layer of a chunk, unless there are few rows.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from bevatron.kernels.pair.gated import gate_and_value
from bevatron.kernels.pair.layer_norm.triton import NormedRows, new_outputs
from bevatron.kernels.pair.swiglu.triton import (
    hidden_gradients,
    hidden_rows,
    launch_backward,
    launch_forward,
)
from bevatron.kernels.pair.transition import triton_fused as fused
from bevatron.kernels.pair.transition.weights import Weights
from bevatron.kernels.shared import chunked_linear
from bevatron.kernels.shared.autograd import empty_gradients, needs_grad
from bevatron.kernels.shared.chunked_linear import LARGE, Linear, chunks
from bevatron.kernels.shared.custom_op import custom_op

Five = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def transition(x: Tensor, *weights_and_eps: Any) -> Tensor:
    """Compute the same as the reference; see `bevatron.kernels.pair.transition`."""
    *given, eps, residual = weights_and_eps
    # With few rows launches dominate, so nothing is recomputed.
    is_short = x.shape[:-1].numel() < chunked_linear.CHUNK_MULTIPLE
    keeps = is_short and needs_grad(x, *given) and not fused.fits(x, Weights(*given[2:]))
    y: Tensor = widen(x, *given, eps, residual, keeps)[0]
    return y


def _new_outputs(
    x: Tensor, up_weight: Tensor, down_weight: Tensor, gate_weight: Tensor | None, keeps: bool
) -> Five:
    rows = x.shape[:-1].numel() if keeps else 0
    width = up_weight.shape[0] * (1 if gate_weight is None else 2)
    y, mean, rstd = new_outputs(x, down_weight.shape[0])
    return y, mean, rstd, x.new_empty((rows, x.shape[-1])), x.new_empty((rows, width))


@custom_op("transition", outputs="y mean rstd normed wide", fake=_new_outputs)
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
    residual: bool,
    keeps: bool,
) -> Five:
    """Return the result, every row's mean and 1/sigma in float32, and what the backward pass reads.

    If ``keeps``: the normalised rows, and gates and values (without a gate the hidden rows).
    """
    y, mean, rstd, normed, wide = _new_outputs(x, up_weight, down_weight, gate_weight, keeps=False)
    rows = NormedRows.of(x, norm_weight, norm_bias, mean, rstd, eps)
    weights = Weights(up_weight, down_weight, gate_weight, up_bias, down_bias)
    y_rows = y.view(-1, y.shape[-1])
    if fused.fits(x, weights):
        fused.forward(rows, weights, y_rows, residual=residual)
        return y, mean, rstd, normed, wide
    if keeps:
        normed, wide = _forward_at_once(rows, weights, y_rows)
    else:
        _forward_in_chunks(rows, weights, y_rows)
    if residual:
        y_rows += rows.rows
    return y, mean, rstd, normed, wide


@widen.backward()
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
    normed: Tensor,
    wide: Tensor,
    eps: float,
    residual: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return gradients of all tensors, empty for those that are not given."""
    dx, dnorm_weight, dnorm_bias = empty_gradients(x, x, norm_weight, norm_bias)
    rows = NormedRows.of(x, norm_weight, norm_bias, mean, rstd, eps)
    weights = Weights(up_weight, down_weight, gate_weight, up_bias, down_bias)
    kept = (normed, wide) if wide.numel() else None
    run: Any = partial(_backward_in_chunks, kept=kept)
    if fused.fits(x, weights):
        run = partial(fused.backward, residual=residual)
    dup, ddown, dgate, dup_bias, ddown_bias = run(
        *(dy.reshape(-1, dy.shape[-1]).contiguous(), rows, weights),
        *(dx.view(rows.rows.shape), dnorm_weight, dnorm_bias),
    )
    if residual and not fused.fits(x, weights):
        dx += dy
    return dx, dnorm_weight, dnorm_bias, dup, ddown, dgate, dup_bias, ddown_bias


def _forward_at_once(rows: NormedRows, weights: Weights, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the normalised rows, and gates and values (without a gate the hidden rows)."""
    layer, narrow = _layers(weights, y.dtype)
    normed = rows.make()
    if weights.gate is None:
        wide = hidden = layer.rectified(normed)
    else:
        wide = layer(normed)
        gates, values = gate_and_value(wide)
        hidden = normed.new_empty(gates.shape)
        launch_forward(gates, values, hidden)
    narrow(hidden, out=y)
    return normed, wide


def _forward_in_chunks(rows: NormedRows, weights: Weights, y: Tensor) -> None:
    wide, narrow = _layers(weights, y.dtype)
    for part in chunks(len(y), _bytes_per_row(rows, weights), times=LARGE):
        normed = rows.make(part)
        if weights.gate is None:
            hidden = wide.rectified(normed)
        else:
            hidden = hidden_rows(normed, wide.matrix, wide.bias)
        narrow(hidden, out=y[part])


def _backward_in_chunks(
    dy: Tensor,
    rows: NormedRows,
    weights: Weights,
    dx: Tensor,
    dnorm_weight: Tensor,
    dnorm_bias: Tensor,
    kept: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    wide, narrow = _layers(weights, dy.dtype)
    parts = list(chunks(len(dy), _bytes_per_row(rows, weights), times=LARGE))
    for part in parts:
        normed = rows.make(part) if kept is None else kept[0]
        dhidden = narrow.backward(dy[part])
        if weights.gate is None:
            hidden = wide.rectified(normed) if kept is None else kept[1]
            dwider = torch.ops.aten.threshold_backward(dhidden, hidden, 0)
        elif kept is not None:
            hidden, dwider = dhidden, torch.empty_like(kept[1])
            gated = *gate_and_value(kept[1]), *gate_and_value(dwider)
            launch_backward(dhidden, *gated, hidden)
        else:
            hidden, dwider = dhidden, hidden_gradients(normed, wide.matrix, dhidden, wide.bias)
        narrow.keep(dy[part], hidden, only=len(parts) == 1)
        wide.keep(dwider, normed, only=len(parts) == 1)
        wide.backward(dwider, out=dx[part])
    # In place again, of the gradient of the normalised rows.
    rows.backward(dx, dx, dnorm_weight, dnorm_bias)
    (*dgate, dup), (*_, dup_bias) = wide.gradients()
    (ddown,), (ddown_bias,) = narrow.gradients()
    return dup, ddown, (dgate or [dx.new_empty(0)])[0], dup_bias, ddown_bias


def _layers(weights: Weights, dtype: torch.dtype) -> tuple[Linear, Linear]:
    """Return gates and values as one layer, and the layer back."""
    narrow = Linear(dtype, [weights.down], [weights.down_bias])
    if weights.gate is None:
        return Linear(dtype, [weights.up], [weights.up_bias]), narrow
    return Linear(dtype, [weights.gate, weights.up], [None, weights.up_bias]), narrow


def _bytes_per_row(rows: NormedRows, weights: Weights) -> int:
    return (3 * len(weights.up) + rows.rows.shape[-1]) * rows.rows.element_size()
