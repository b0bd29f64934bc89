"""LayerNorm and a linear layer: two custom operators.

A layer of a few channels has kernels of its own (`triton_narrow`). Others work a chunk of rows at a
time: its normalised rows come from the LayerNorm's kernel and go into the device library's product
while they are in its cache; the backward pass makes them again.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bevatron.kernels.pair.layer_norm.triton import NormedRows, TurnedRows, new_outputs
from bevatron.kernels.pair.layer_norm_linear import triton_narrow
from bevatron.kernels.shared.autograd import empty_gradients
from bevatron.kernels.shared.chunked_linear import Linear, chunk_of
from bevatron.kernels.shared.custom_op import custom_op
from bevatron.kernels.shared.rows import ROW_UNIT, aligned_rows, indexable_by_32_bits
from bevatron.kernels.shared.standing_weights import once


def layer_norm_linear(x: Tensor, *weights_and_eps: Any) -> Tensor:
    """Compute the same as the reference; see `bevatron.kernels.pair.layer_norm_linear`."""
    y: Tensor = project(x, *weights_and_eps)[0]
    return y


def _new_outputs(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate the outputs; rows of any length begin where a library's matmul wants them."""
    channels = weight.shape[0]
    if channels % ROW_UNIT == 0 or triton_narrow.is_narrow(x, weight):
        return new_outputs(x, channels)
    _, mean, rstd = new_outputs(x, 0)
    return aligned_rows(x, channels), mean, rstd


@custom_op(
    "layer_norm_linear",
    outputs="y mean rstd",
    fake=_new_outputs,
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
    y, mean, rstd = _new_outputs(x, weight)
    if triton_narrow.is_narrow(x, weight):
        given = x, norm_weight, norm_bias, weight, bias
        triton_narrow.project(*given, y, mean, rstd, eps)
        return y, mean, rstd
    rows = _rows_of(x, norm_weight, norm_bias, mean, rstd, eps)
    layer = _filled(x, weight, bias)
    # With what lies between the rows.
    width = len(layer.matrix)
    y_rows = y.as_strided((len(rows.mean), width), (width, 1))
    for part in rows.parts():
        layer(rows.make(part), out=chunk_of(y_rows, part))
    return y, mean, rstd


def _filled(x: Tensor, weight: Tensor, bias: Tensor | None) -> Linear:
    """Return the layer, with zeros for the channels that fill its rows up."""
    missing = -weight.shape[0] % ROW_UNIT
    if missing == 0:
        return Linear(x.dtype, [weight], [bias])
    full = once(lambda: F.pad(weight, (0, 0, 0, missing)), weight, to=missing)
    return Linear(x.dtype, [full], [None if bias is None else F.pad(bias, (0, missing))])


def _new_gradients(
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
) -> tuple[Tensor, ...]:
    """Allocate the gradients; that of a transposed pair lies as the pair does."""
    dx, *of_weights = empty_gradients(x, x, norm_weight, norm_bias, weight, bias)
    turned = TurnedRows.take(x) and not triton_narrow.is_narrow(x, weight)
    return torch.empty_like(x) if turned else dx, *of_weights


@project.backward(fake=_new_gradients)
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
    dnormed, dnorm_weight, dnorm_bias = empty_gradients(x, x, norm_weight, norm_bias)
    rows = _rows_of(x, norm_weight, norm_bias, mean, rstd, eps)
    dy, dnormed_rows = _readable(dy.reshape(-1, dy.shape[-1])), dnormed.view(-1, x.shape[-1])
    layer = Linear(x.dtype, [weight], [bias])
    for part in rows.parts():
        dy_part = chunk_of(dy, part)
        layer.keep(dy_part, rows.make(part))
        layer.backward(dy_part, out=chunk_of(dnormed_rows, part))
    # On the gradient of the normalised rows, unless that lies otherwise.
    turned = isinstance(rows, TurnedRows)
    dx = torch.empty_like(x) if turned else dnormed
    rows.backward(dnormed_rows, dx if turned else dnormed_rows, dnorm_weight, dnorm_bias)
    (dweight,), (dbias,) = layer.gradients()
    return dx, dnorm_weight, dnorm_bias, dweight, dbias


def _rows_of(
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    eps: float,
) -> NormedRows:
    if TurnedRows.take(x):
        return TurnedRows(x, norm_weight, norm_bias, mean.view(-1), rstd.view(-1), eps)
    return NormedRows.of(x, norm_weight, norm_bias, mean, rstd, eps)


def _readable(dy: Tensor) -> Tensor:
    """Copy a matrix that a library's matmul cannot read in place, or would read slowly."""
    apart = dy.stride(0)
    good = dy.stride(1) == 1 and apart >= dy.shape[1] and apart % ROW_UNIT == 0
    return indexable_by_32_bits(dy) if good else dy.contiguous()
