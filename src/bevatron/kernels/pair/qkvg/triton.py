"""Queries, keys, values and gate as one matmul, after the LayerNorm kernel."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from bevatron.kernels.pair.layer_norm.triton import new_outputs
from bevatron.kernels.pair.layer_norm_linear.triton import (
    in_chunks,
    in_chunks_backward,
    layer_norm_linear,
    project_narrow,
)
from bevatron.kernels.pair.qkvg import triton_input
from bevatron.kernels.shared.autograd import empty_gradients
from bevatron.kernels.shared.chunked_linear import (
    BiasGradient,
    Linear,
    concatenated,
    weight_gradient,
)
from bevatron.kernels.shared.custom_op import custom_op, is_watched, unwatched
from bevatron.kernels.shared.launch import on_device
from bevatron.kernels.shared.parts import split
from bevatron.kernels.shared.rows import indexable_by_32_bits
from bevatron.kernels.shared.standing_weights import once

Four = tuple[Tensor, Tensor, Tensor, Tensor]
Six = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def qkvg(
    x: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    v_weight: Tensor,
    gate_weight: Tensor,
    gate_bias: Tensor | None,
    q_bias: Tensor | None,
    has_norm: bool,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    bias_weight: Tensor | None,
    eps: float,
    head_width: int | None,
) -> tuple[Tensor, ...]:
    """Compute the same as the reference; see `bevatron.kernels.pair.qkvg`."""
    weights = [q_weight, k_weight, v_weight, gate_weight]
    sizes = [weight.shape[0] for weight in weights]
    others: list[Tensor] = []  # Dynamo cannot trace list[Tensor]()
    if has_norm:
        if len({weight.dtype for weight in weights}) > 1:  # their gradients lie in one tensor
            weights = [weight.float() for weight in weights]
        given = x, norm_weight, norm_bias, *weights, q_bias, gate_bias
        if bias_weight is None:
            made = project(*given, eps)[0]
        elif triton_input.fits(x, sum(sizes), bias_weight) and not is_watched(given):
            made, *others = unwatched(_WithBias)(eps, bias_weight, *given)
        else:
            made = project(*given, eps)[0]
            others = [layer_norm_linear(x, norm_weight, norm_bias, bias_weight, None, eps), x]
    else:
        joint = once(lambda: concatenated(weights, x.dtype), *weights, to=x.dtype)
        made = F.linear(indexable_by_32_bits(x), joint, _joint_bias(weights, gate_bias, q_bias, x))
    return *split(made, sizes, head_width), *others


def _new_outputs(
    x: Tensor, q_weight: Tensor, k_weight: Tensor, v_weight: Tensor, gate_weight: Tensor
) -> Four:
    weights = q_weight, k_weight, v_weight, gate_weight
    channels = sum(weight.shape[0] for weight in weights)
    return *new_outputs(x, channels), x.new_empty((channels, x.shape[-1]))


@custom_op("qkvg", outputs="y mean rstd rounded", fake=_new_outputs)
def project(
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    q_weight: Tensor,
    k_weight: Tensor,
    v_weight: Tensor,
    gate_weight: Tensor,
    q_bias: Tensor | None,
    gate_bias: Tensor | None,
    eps: float,
) -> Four:
    """Return all results side by side, and what the backward pass reads.

    That is every row's mean and 1/sigma in float32, and the joint weight in the type of ``x``.
    """
    weights = [q_weight, k_weight, v_weight, gate_weight]
    layer = Linear(x.dtype, weights, [q_bias, None, None, gate_bias])
    return *in_chunks(x, (norm_weight, norm_bias), layer, eps), layer.matrix


def _new_gradients(
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    q_weight: Tensor,
    q_bias: Tensor | None,
    gate_bias: Tensor | None,
    rounded: Tensor,
) -> Six:
    dx, dnorm_weight, dnorm_bias, *dbiases = empty_gradients(
        x, x, norm_weight, norm_bias, q_bias, gate_bias
    )
    dweight = q_weight.new_empty(rounded.shape)
    return dx, dnorm_weight, dnorm_bias, dweight, dbiases[0], dbiases[1]


@custom_op("qkvg_backward", fake=_new_gradients)
def project_backward(
    dy: Tensor,
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    q_weight: Tensor,
    q_bias: Tensor | None,
    gate_bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    rounded: Tensor,
    eps: float,
) -> Six:
    """Return gradients of x, the norm, the joint weight, the bias of queries and of the gate."""
    norm, bias = (norm_weight, norm_bias), None
    if q_bias is not None or gate_bias is not None:
        # Of all four layers, in float32: the two biases may differ in length and type.
        bias = dy.new_empty(dy.shape[-1], dtype=torch.float32)
    dx, dnorm_weight, dnorm_bias, dweight, dbias = in_chunks_backward(
        dy, x, norm, rounded, q_weight, bias, mean, rstd, eps
    )
    dq_bias, dgate_bias = x.new_empty(0), x.new_empty(0)
    if q_bias is not None:
        dq_bias = dbias[: q_bias.shape[0]].to(q_bias.dtype, copy=True)
    if gate_bias is not None:
        dgate_bias = dbias[-gate_bias.shape[0] :].to(gate_bias.dtype, copy=True)
    return dx, dnorm_weight, dnorm_bias, dweight, dq_bias, dgate_bias


def _gradients(
    dy: Tensor,
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    q_weight: Tensor,
    k_weight: Tensor,
    v_weight: Tensor,
    gate_weight: Tensor,
    q_bias: Tensor | None,
    gate_bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    rounded: Tensor,
    eps: float,
) -> tuple[Tensor, ...]:
    biases = q_bias, gate_bias
    *of_rows, dweight, dq_bias, dgate_bias = project_backward(
        dy, x, norm_weight, norm_bias, q_weight, *biases, mean, rstd, rounded, eps
    )
    sizes = [weight.shape[0] for weight in (q_weight, k_weight, v_weight, gate_weight)]
    return *of_rows, *dweight.split_with_sizes(sizes), dq_bias, dgate_bias


project.gradients(
    "x norm_weight norm_bias q_weight k_weight v_weight gate_weight q_bias gate_bias", _gradients
)


class _WithBias(torch.autograd.Function):
    """The layers and the bias of the attention; the rows, passed on, get all their gradients here.

    One kernel normalises the rows, in any strides, and projects the bias. This is no custom
    operator: what one returns must not be one of its arguments.
    """

    @staticmethod
    def forward(
        ctx: Any,
        eps: float,
        bias_weight: Tensor,
        x: Tensor,
        norm_weight: Tensor | None,
        norm_bias: Tensor | None,
        q_weight: Tensor,
        k_weight: Tensor,
        v_weight: Tensor,
        gate_weight: Tensor,
        q_bias: Tensor | None,
        gate_bias: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        weights = [q_weight, k_weight, v_weight, gate_weight]
        norm = norm_weight, norm_bias
        with on_device(x):
            layer = Linear(x.dtype, weights, [q_bias, None, None, gate_bias])
            made, mean, rstd = new_outputs(x, len(layer.matrix))
            # Heads first, as attention reads it.
            bias = x.new_empty((*x.shape[:-3], len(bias_weight), *x.shape[-3:-1])).movedim(-3, -1)
            normed = torch.empty_like(x, memory_format=torch.contiguous_format)
            project_narrow(x, *norm, bias_weight, None, bias, mean, rstd, eps, normed)
            layer(normed.view(mean.numel(), -1), out=made.view(mean.numel(), -1))
        ctx.save_for_backward(x, *norm, bias_weight, layer.matrix, mean, rstd)
        ctx.sizes, ctx.dtype = [weight.shape[0] for weight in weights], q_weight.dtype
        ctx.of_biases = [None if bias is None else bias.dtype for bias in (q_bias, gate_bias)]
        ctx.set_materialize_grads(False)
        return made, bias, x

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dy: Tensor | None, dbias: Tensor | None, dresidual: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        x, norm_weight, norm_bias, bias_weight, matrix, mean, rstd = ctx.saved_tensors
        norm, K = (norm_weight, norm_bias), len(matrix)
        dy = x.new_zeros((*x.shape[:-1], K)) if dy is None else dy.contiguous()
        dbias = x.new_zeros((*x.shape[:-1], len(bias_weight))) if dbias is None else dbias
        with on_device(x):
            rows = dy.view(-1, K)
            dx, *dnorm, dbias_weight, normed = triton_input.gradients(
                rows, dbias, dresidual, x, norm, matrix, bias_weight, mean, rstd
            )
            dweight = weight_gradient(rows, normed, matrix.new_empty(0, dtype=ctx.dtype))
            # Of all four layers, in float32: the two biases may differ in length and type.
            has_bias = any(dtype is not None for dtype in ctx.of_biases)
            total = BiasGradient(dy.new_empty(K, dtype=torch.float32) if has_bias else None, dy)
            total.add(rows)
        dbiases: list[Tensor | None] = [None, None]
        if has_bias:
            first, *_, last = total.result().split_with_sizes(ctx.sizes)
            of_biases = zip((first, last), ctx.of_biases, strict=True)
            dbiases = [None if dtype is None else part.to(dtype) for part, dtype in of_biases]
        dweights = dweight.split_with_sizes(ctx.sizes)
        return None, dbias_weight, dx, *dnorm, *dweights, *dbiases


def _joint_bias(
    weights: list[Tensor], gate_bias: Tensor | None, q_bias: Tensor | None, x: Tensor
) -> Tensor | None:
    if gate_bias is None and q_bias is None:
        return None

    lengths = [weight.shape[0] for weight in weights]

    def among_all(bias: Tensor, place: int) -> Tensor:
        return F.pad(bias.to(x.dtype), (sum(lengths[:place]), sum(lengths[place + 1 :])))

    def join() -> Tensor:
        biases = ((q_bias, 0), (gate_bias, 3))
        placed = [among_all(bias, place) for bias, place in biases if bias is not None]
        return placed[0] if len(placed) == 1 else placed[0] + placed[1]

    return once(join, q_bias, gate_bias, to=(x.dtype, *lengths))
