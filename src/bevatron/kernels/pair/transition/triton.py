"""The transition in Triton: two custom operators, each fused or in chunks of rows.

Narrow rows of 16-bit types take kernels that keep the hidden layer in registers (`triton_fused`).
All others call cuBLAS for a chunk of rows at a time, with kernels in between; the backward pass
recomputes the hidden layer of a chunk.
"""

from typing import Any

import torch
from torch import Tensor

from bevatron.kernels.pair.layer_norm.triton import NormedRows, new_outputs
from bevatron.kernels.pair.swiglu.triton import hidden_gradients, hidden_rows
from bevatron.kernels.pair.transition import triton_fused as fused
from bevatron.kernels.pair.transition.weights import Weights
from bevatron.kernels.shared.autograd import empty_gradients
from bevatron.kernels.shared.chunked_linear import LARGE, Linear, chunks
from bevatron.kernels.shared.custom_op import custom_op


def transition(x: Tensor, *weights_and_eps: Any) -> Tensor:
    """Compute the same as the reference; see `bevatron.kernels.pair.transition`."""
    y: Tensor = widen(x, *weights_and_eps)[0]
    return y


@custom_op(
    "transition",
    outputs="y mean rstd",
    fake=lambda x, down_weight: new_outputs(x, down_weight.shape[0]),
)
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
    y, mean, rstd = new_outputs(x, down_weight.shape[0])
    rows = NormedRows.of(x, norm_weight, norm_bias, mean, rstd, eps)
    weights = Weights(up_weight, down_weight, gate_weight, up_bias, down_bias)
    run = fused.forward if fused.fits(x, weights) else _forward_in_chunks
    run(rows, weights, y.view(-1, y.shape[-1]))
    return y, mean, rstd


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
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return gradients of all tensors, without elements for those that are not given."""
    dx, dnorm_weight, dnorm_bias = empty_gradients(x, x, norm_weight, norm_bias)
    rows = NormedRows.of(x, norm_weight, norm_bias, mean, rstd, eps)
    weights = Weights(up_weight, down_weight, gate_weight, up_bias, down_bias)
    run = fused.backward if fused.fits(x, weights) else _backward_in_chunks
    dup, ddown, dgate, dup_bias, ddown_bias = run(
        *(dy.reshape(-1, dy.shape[-1]).contiguous(), rows, weights),
        *(dx.view(rows.rows.shape), dnorm_weight, dnorm_bias),
    )
    return dx, dnorm_weight, dnorm_bias, dup, ddown, dgate, dup_bias, ddown_bias


def _forward_in_chunks(rows: NormedRows, weights: Weights, y: Tensor) -> None:
    wide, narrow = _layers(weights, y.dtype)
    for part in chunks(len(y), _bytes_per_row(rows, weights), times=LARGE):
        normed = rows.make(part)
        if weights.gate is None:
            hidden = wide(normed).relu_()
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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    wide, narrow = _layers(weights, dy.dtype)
    for part in chunks(len(dy), _bytes_per_row(rows, weights), times=LARGE):
        normed = rows.make(part)
        dhidden = narrow.backward(dy[part])
        if weights.gate is None:
            hidden = wide(normed).relu_()
            dwider = torch.ops.aten.threshold_backward(dhidden, hidden, 0)
        else:
            hidden, dwider = dhidden, hidden_gradients(normed, wide.matrix, dhidden, wide.bias)
        narrow.keep(dy[part], hidden)
        wide.keep(dwider, normed)
        wide.backward(dwider, out=dx[part])
    # In place again: on the gradient of the normalised rows.
    rows.backward(dx, dx, dnorm_weight, dnorm_bias)
    (*dgate, dup), (*_, dup_bias) = wide.gradients()
    (ddown,), (ddown_bias,) = narrow.gradients()
    return dup, ddown, (dgate or [dx.new_empty(0)])[0], dup_bias, ddown_bias


def _layers(weights: Weights, dtype: torch.dtype) -> tuple[Linear, Linear]:
    """Return gates and values as one layer, and the one back."""
    narrow = Linear(dtype, [weights.down], [weights.down_bias])
    if weights.gate is None:
        return Linear(dtype, [weights.up], [weights.up_bias]), narrow
    return Linear(dtype, [weights.gate, weights.up], [None, weights.up_bias]), narrow


def _bytes_per_row(rows: NormedRows, weights: Weights) -> int:
    return (3 * len(weights.up) + rows.rows.shape[-1]) * rows.rows.element_size()
