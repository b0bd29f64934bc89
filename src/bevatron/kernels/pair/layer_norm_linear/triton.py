"""LayerNorm and a linear layer: two custom operators.

A layer of a few channels has kernels of its own (`triton_narrow`). Others run chunk by chunk: the
LayerNorm kernel writes a chunk's normalised rows and cuBLAS multiplies them while they are in L2;
the backward pass recomputes them.
"""

from typing import Any

import torch
from torch import Tensor

from bevatron.kernels.pair.layer_norm.triton import NormedRows, new_outputs
from bevatron.kernels.pair.layer_norm_linear import triton_narrow
from bevatron.kernels.shared.autograd import empty_gradients
from bevatron.kernels.shared.chunked_linear import (
    BiasGradient,
    Linear,
    WeightGradient,
    chunk_of,
    chunks,
    weight_gradient,
)
from bevatron.kernels.shared.custom_op import custom_op
from bevatron.kernels.shared.rows import indexable_by_32_bits

__all__ = ["in_chunks", "in_chunks_backward", "layer_norm_linear", "project_narrow"]
"""Names that other operators may use."""

project_narrow = triton_narrow.project

Norm = tuple[Tensor | None, Tensor | None]


def layer_norm_linear(x: Tensor, *weights_and_eps: Any) -> Tensor:
    """Compute the same as the reference; see `bevatron.kernels.pair.layer_norm_linear`."""
    y: Tensor = project(x, *weights_and_eps)[0]
    return y


@custom_op(
    "layer_norm_linear",
    outputs="y mean rstd",
    fake=lambda x, weight: new_outputs(x, weight.shape[0]),
)
def project(
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the result and every row's mean and 1/sigma in float32."""
    if triton_narrow.is_narrow(x, weight):
        y, mean, rstd = new_outputs(x, weight.shape[0])
        given = x, norm_weight, norm_bias, weight, bias
        triton_narrow.project(*given, y, mean, rstd, eps)
        return y, mean, rstd
    return in_chunks(x, (norm_weight, norm_bias), Linear(x.dtype, [weight], [bias]), eps)


@project.backward()
def project_backward(
    dy: Tensor,
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return gradients of all tensors, without elements for those that are not given."""
    if triton_narrow.is_narrow(x, weight):
        dx, *of_weights = empty_gradients(x, x, norm_weight, norm_bias, weight, bias)
        given = dy, x, norm_weight, norm_bias, weight, mean, rstd
        dnorm_weight, dnorm_bias, dweight, dbias = of_weights
        found = dx, dnorm_weight, dnorm_bias, dweight, dbias
        triton_narrow.project_backward(*given, found)
        return found
    matrix, norm = Linear(x.dtype, [weight]).matrix, (norm_weight, norm_bias)
    return in_chunks_backward(dy, x, norm, matrix, weight, bias, mean, rstd, eps)


def in_chunks(x: Tensor, norm: Norm, layer: Linear, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the layer of normalised rows, and every row's mean and 1/sigma in float32."""
    channels = layer.matrix.shape[0]
    y, mean, rstd = new_outputs(x, channels)
    rows, y_rows = NormedRows.of(x, *norm, mean, rstd, eps), y.view(-1, channels)
    for part in chunks(rows.rows.shape[0], x.shape[-1] * x.element_size()):
        layer(rows.make(part), out=chunk_of(y_rows, part))
    return y, mean, rstd


def in_chunks_backward(
    dy: Tensor,
    x: Tensor,
    norm: Norm,
    matrix: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return gradients of x, the norm's weight and bias, the matrix and the bias.

    ``matrix`` is in the type of the products; the last two gradients have the types of ``weight``
    and ``bias``, and the last has no elements without a bias.
    """
    dx, dnorm_weight, dnorm_bias = empty_gradients(x, x, *norm)
    rows = NormedRows.of(x, *norm, mean, rstd, eps)
    dy, dx_rows = dy.reshape(-1, dy.shape[-1]).contiguous(), dx.view(rows.rows.shape)
    parts = list(chunks(dy.shape[0], x.shape[-1] * x.element_size()))
    total, dbias = WeightGradient(matrix), BiasGradient(bias, dy)
    for part in parts:
        normed, dy_part = rows.make(part), chunk_of(dy, part)
        if len(parts) == 1:
            dweight = weight_gradient(dy_part, normed, weight)
        else:
            total.add(dy_part, normed)
        dbias.add(dy_part)
        torch.mm(indexable_by_32_bits(dy_part), matrix, out=chunk_of(dx_rows, part))
    # In place of the gradient of the normalised rows.
    rows.backward(dx_rows, dx_rows, dnorm_weight, dnorm_bias)
    if len(parts) != 1:
        dweight = total.total().to(weight.dtype)
    return dx, dnorm_weight, dnorm_bias, dweight, dbias.result()
