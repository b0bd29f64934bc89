"""Queries, keys, values and gate as one matmul, after the LayerNorm kernel."""

import torch
import torch.nn.functional as F
from torch import Tensor

from bevatron.kernels.pair.layer_norm_linear.triton import layer_norm_linear
from bevatron.kernels.shared.parts import split
from bevatron.kernels.shared.rows import indexable_by_32_bits
from bevatron.kernels.shared.standing_weights import once


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
    eps: float,
) -> tuple[Tensor, ...]:
    """Compute the same as the reference; see `bevatron.kernels.pair.qkvg`."""
    weights = (q_weight, k_weight, v_weight, gate_weight)
    # `layer_norm_linear` rounds weights itself and returns their gradients in their own type.
    dtype = q_weight.dtype if has_norm else x.dtype
    joint = once(lambda: torch.cat(weights).to(dtype), *weights, to=dtype)
    bias = _joint_bias(weights, gate_bias, q_bias, dtype)
    if has_norm:
        made = layer_norm_linear(x, norm_weight, norm_bias, joint, bias, eps)
    else:
        made = F.linear(indexable_by_32_bits(x), joint, bias)
    return split(made, [weight.shape[0] for weight in weights])


def _joint_bias(
    weights: tuple[Tensor, ...],
    gate_bias: Tensor | None,
    q_bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor | None:
    if gate_bias is None and q_bias is None:
        return None

    lengths = [len(weight) for weight in weights]

    def among_all(bias: Tensor, place: int) -> Tensor:
        return F.pad(bias.to(dtype), (sum(lengths[:place]), sum(lengths[place + 1 :])))

    def join() -> Tensor:
        biases = ((q_bias, 0), (gate_bias, 3))
        placed = [among_all(bias, place) for bias, place in biases if bias is not None]
        return placed[0] if len(placed) == 1 else placed[0] + placed[1]

    return once(join, q_bias, gate_bias, to=(dtype, *lengths))
