"""Invariant point attention in Triton: two custom operators and their launches.

Inputs may have any strides that keep channels and points together, so that slices of a projection
are read in place; gradients of keys and values are slices of one tensor, as those were.
"""

from math import sqrt
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from bevatron.kernels.pair.invariant_point_attention.triton_backward import (
    keys_kernel,
    pairs_backward_kernel,
    queries_kernel,
)
from bevatron.kernels.pair.invariant_point_attention.triton_forward import (
    attend_kernel,
    pairs_kernel,
)
from bevatron.kernels.shared.custom_op import custom_op
from bevatron.kernels.shared.layouts import per_layout
from bevatron.kernels.shared.triton_launch import Launch
from bevatron.kernels.shared.triton_math import precision

ATTEND = {"BLOCK_Q": 16, "BLOCK_K": 32, "num_warps": 4}
QUERIES = {"BLOCK_Q": 16, "BLOCK_K": 32, "num_warps": 2}
KEYS = {"BLOCK_Q": 32, "BLOCK_K": 16, "num_warps": 2}
"""Blocks of queries and keys of a head."""
PAIRS = {"num_warps": 4, "num_stages": 3}
PAIRS_BACKWARD = {"num_warps": 4, "num_stages": 2}
PAIR_ELEMENTS, MOST_KEYS = 4096, 64
"""Of a block of a query's row of the pair: its elements, and the most keys."""
LEAST_MATMUL = 16
"""Smallest side of a matmul of the tensor cores."""

Three = tuple[Tensor, Tensor, Tensor]
Six = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
Seven = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def invariant_point_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_points: Tensor,
    k_points: Tensor,
    v_points: Tensor,
    bias: Tensor,
    z: Tensor,
    head_weights: Tensor,
) -> Three:
    """Compute the same as the reference; see `bevatron.kernels.pair.invariant_point_attention`."""
    scalars, points, pairs, *_ = attend(
        q, k, v, q_points, k_points, v_points, bias, z, head_weights
    )
    return scalars, points, pairs


def _new_results(q: Tensor, v_points: Tensor, bias: Tensor, z: Tensor) -> Six:
    return (
        q.new_empty(q.shape),
        q.new_empty((*q.shape[:-2], *v_points.shape[-3:])),
        q.new_empty((*q.shape[:-1], z.shape[-1])),
        q.new_empty((*q.shape[:-2], *v_points.shape[-3:]), dtype=torch.float32),
        q.new_empty(bias.shape, dtype=torch.float32),
        q.new_empty((2, *bias.shape[:-1]), dtype=torch.float32),
    )


@custom_op(
    "invariant_point_attention",
    outputs="scalars points pairs relative logits statistics",
    fake=_new_results,
)
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_points: Tensor,
    k_points: Tensor,
    v_points: Tensor,
    bias: Tensor,
    z: Tensor,
    head_weights: Tensor,
) -> Six:
    """Return the results, the points relative to the first key's, and the logits.

    Last are the maxima of the logits and 1 / sums of their exponentials.
    """
    scalars, points, pairs, relative, logits, statistics = _new_results(q, v_points, bias, z)
    q, k, v = (_rows(each) for each in (q, k, v))
    q_points, k_points, v_points = (_rows(each, 3) for each in (q_points, k_points, v_points))
    bias, z = bias.contiguous(), z.contiguous()
    by_head, by_query = _prepare(q, k, v, q_points, k_points, v_points, bias, z, precision(q))
    by_head(
        *(q, k, v, q_points, k_points, v_points, bias, head_weights.contiguous()),
        *(logits, statistics, scalars, points, relative),
    )
    by_query(logits, statistics, z, pairs)
    return scalars, points, pairs, relative, logits, statistics


def _new_gradients(
    q: Tensor,
    k: Tensor,
    q_points: Tensor,
    k_points: Tensor,
    v_points: Tensor,
    bias: Tensor,
    z: Tensor,
    head_weights: Tensor,
) -> Seven:
    both = k_points.shape[-1] + v_points.shape[-1]
    return (
        q.new_empty(q.shape),
        q.new_empty((*k.shape[:-1], 2 * k.shape[-1])),
        q.new_empty(q_points.shape),
        q.new_empty((*k_points.shape[:-1], both)),
        bias.new_empty(bias.shape),
        z.new_empty(z.shape),
        head_weights.new_empty(head_weights.shape),
    )


def _split(
    dq: Tensor, dkv: Tensor, dq_points: Tensor, dkv_points: Tensor, *others: Tensor
) -> tuple[Tensor, ...]:
    D, P = dq.shape[-1], dq_points.shape[-1]
    dk_points, dv_points = dkv_points.split([P, dkv_points.shape[-1] - P], dim=-1)
    return dq, *dkv.split(D, dim=-1), dq_points, dk_points, dv_points, *others


@attend.backward(fake=_new_gradients, unpack=_split)
def attend_backward(
    d_scalars: Tensor | None,
    d_points: Tensor | None,
    d_pairs: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_points: Tensor,
    k_points: Tensor,
    v_points: Tensor,
    bias: Tensor,
    z: Tensor,
    head_weights: Tensor,
    scalars: Tensor,
    pairs: Tensor,
    relative: Tensor,
    logits: Tensor,
    statistics: Tensor,
) -> Seven:
    """Return the gradients, those of keys and values and of their points each as one tensor."""
    dq, dkv, dq_points, dkv_points, d_logits, dz, _ = _new_gradients(
        q, k, q_points, k_points, v_points, logits, z, head_weights
    )
    given = ((scalars, d_scalars), (relative, d_points), (pairs, d_pairs))
    d_scalars, d_points, d_pairs = (torch.zeros_like(x) if d is None else d for x, d in given)
    q, k, v, d_scalars, d_pairs = (_rows(each) for each in (q, k, v, d_scalars, d_pairs))
    q_points, k_points, v_points, d_points = (
        _rows(each, 3) for each in (q_points, k_points, v_points, d_points)
    )
    z, head_weights = z.contiguous(), head_weights.contiguous()
    over_pair, over_keys, over_queries, parts = _prepare_backward(
        *(q, k, v, q_points, k_points, v_points, logits, z, d_scalars, d_points, d_pairs),
        precision(q),
    )
    d_weights, delta = torch.empty_like(logits), torch.empty_like(statistics[0])
    over_pair(
        *(logits, statistics, z, scalars, relative, pairs, d_scalars, d_points, d_pairs),
        *(d_weights, dz, delta),
    )
    d_heads = logits.new_empty(parts)
    over_keys(
        *(k, v, q_points, k_points, v_points, head_weights, logits, statistics, delta),
        *(d_weights, d_scalars, d_points, d_logits, dq, dq_points, d_heads),
    )
    over_queries(
        *(q, q_points, k_points, head_weights, logits, statistics, d_logits),
        *(d_scalars, d_points, dkv, dkv_points),
    )
    d_heads = d_heads.sum((0, 2)).to(head_weights.dtype)
    return dq, dkv, dq_points, dkv_points, d_logits.to(bias.dtype), dz, d_heads


def _rows(tensor: Tensor, axes: int = 2) -> Tensor:
    """View [*batch, N, ...] as [batch N, ...] of some more axes; a copy where strides need one."""
    if tensor.stride(-1) != 1:
        tensor = tensor.contiguous()
    return tensor if tensor.ndim == axes + 1 else tensor.flatten(0, -axes - 1)


def _strides(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(stride for each in tensors for stride in each.stride()[:-1])


class _Plan(NamedTuple):
    """Sizes of a layout, scales of logits and distances, and the constants of kernels."""

    B: int
    H: int
    Nq: int
    Nk: int
    scales: tuple[float, float]
    of_values: dict[str, Any]
    by_head: dict[str, Any]
    by_query: dict[str, Any]

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.B, self.Nq, self.Nk


def _plan(
    q: Tensor, q_points: Tensor, v_points: Tensor, logits: Tensor, z: Tensor, exactly: str
) -> _Plan:
    (*batch, H, Nq, Nk), D, Z = logits.shape, q.shape[-1], z.shape[-1]
    P, V = q_points.shape[-1], v_points.shape[-1]
    shared = {"PRECISION": exactly, "H": H}
    of_values = {"D": D, "V_POINTS": V, "D_PAD": _pad(D), "V_PAD": _pad(3 * V)}
    keys = min(MOST_KEYS, max(LEAST_MATMUL, PAIR_ELEMENTS // _pad(Z)))
    of_pair = {"H_PAD": _pad(H), "Z": Z, "Z_PAD": _pad(Z), "BLOCK_K": keys}
    return _Plan(
        *(torch.Size(batch).numel(), H, Nq, Nk),
        (sqrt(1 / (3 * D)), 0.5 * sqrt(2 / (27 * P))),
        of_values,
        {**shared, **of_values, "P": P, "P_PAD": _pad(3 * P)},
        {**shared, **of_pair},
    )


def _pad(size: int) -> int:
    return max(LEAST_MATMUL, 1 << (size - 1).bit_length())


@per_layout
def _prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_points: Tensor,
    k_points: Tensor,
    v_points: Tensor,
    bias: Tensor,
    z: Tensor,
    exactly: str,
) -> tuple[Launch, Launch]:
    """Prepare the launch by head and the one by query."""
    plan = _plan(q, q_points, v_points, bias, z, exactly)
    numbers = (*plan.sizes, *plan.scales, *_strides(q, k, v, q_points, k_points, v_points))
    grid = (triton.cdiv(plan.Nq, ATTEND["BLOCK_Q"]), plan.B * plan.H)
    return (
        Launch(attend_kernel, grid, numbers, **plan.by_head, **ATTEND),
        Launch(pairs_kernel, (plan.Nq, plan.B), plan.sizes, **plan.by_query, **PAIRS),
    )


@per_layout
def _prepare_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_points: Tensor,
    k_points: Tensor,
    v_points: Tensor,
    logits: Tensor,
    z: Tensor,
    d_scalars: Tensor,
    d_points: Tensor,
    d_pairs: Tensor,
    exactly: str,
) -> tuple[Launch, Launch, Launch, tuple[int, int, int]]:
    """Prepare the launches over the pair, keys and queries; and the parts of heads' gradients."""
    plan = _plan(q, q_points, v_points, logits, z, exactly)
    numbers, results = (*plan.sizes, *plan.scales), _strides(d_scalars, d_points)
    over_pair = (*plan.sizes, *results, *_strides(d_pairs))
    over_keys = (*numbers, *_strides(k, v, q_points, k_points, v_points), *results)
    over_queries = (*numbers, *_strides(q, q_points, k_points), *results)
    heads = plan.B * plan.H
    blocks = triton.cdiv(plan.Nq, QUERIES["BLOCK_Q"])
    keys = (triton.cdiv(plan.Nk, KEYS["BLOCK_K"]), heads)
    by_query = plan.by_query | plan.of_values | PAIRS_BACKWARD
    return (
        Launch(pairs_backward_kernel, (plan.Nq, plan.B), over_pair, **by_query),
        Launch(queries_kernel, (blocks, heads), over_keys, **plan.by_head, **QUERIES),
        Launch(keys_kernel, keys, over_queries, **plan.by_head, **KEYS),
        (plan.B, plan.H, blocks),
    )
