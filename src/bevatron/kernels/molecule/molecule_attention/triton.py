"""Attention within molecules in Triton: two custom operators and their launches."""

from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from bevatron.kernels.molecule.molecule_attention.reference import threshold
from bevatron.kernels.molecule.molecule_attention.triton_backward import molecule_attention_backward
from bevatron.kernels.molecule.molecule_attention.triton_forward import molecule_attention_forward
from bevatron.kernels.shared.custom_op import custom_op
from bevatron.kernels.shared.dtypes import wide_type
from bevatron.kernels.shared.launch import pointers
from bevatron.kernels.shared.triton_math import accumulator, allows_tf32

LAUNCHES: tuple[dict[str, int], ...] = (
    {"HEADS": 8, "LEAST": 0, "WHOLE": 16, "BLOCK": 0, "num_warps": 8},
    {"HEADS": 4, "LEAST": 16, "WHOLE": 32, "BLOCK": 16, "num_warps": 4},
)
"""Molecules of up to 16 atoms, and all others. One kernel for both would need the registers of the
larger, which costs occupancy. Programs check whether a molecule is theirs, so the host never waits
for sizes."""
WIDEST = 128
"""Longest row of a head, in bytes, for which a program has all its heads. With longer rows it has
fewer, because the blocks would exceed shared memory (99 KiB on the smallest GPUs)."""


def molecule_attention(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    bias: Tensor | None,
    graph_ptr: Tensor,
    pair_ptr: Tensor,
    scale: float,
    dropout: float,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Compute the same as the reference; see `bevatron.kernels.molecule.molecule_attention`."""
    pointers = graph_ptr.contiguous(), pair_ptr.contiguous()
    found: tuple[Tensor, Tensor | None] = _Attention.apply(
        q, k, v, bias, *pointers, seed, scale, dropout
    )
    return found


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor | None]:
        *tensors, ctx.scale, ctx.dropout = inputs
        out, lse = attend(*inputs)
        ctx.save_for_backward(*tensors, lse)
        ctx.set_materialize_grads(False)
        return out, tensors[3]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None, more: Tensor | None) -> tuple[Tensor | None, ...]:
        if dout is None:
            return (None, None, None, more, *(None,) * 5)
        _, k, v, bias, *_ = saved = ctx.saved_tensors
        dq, dk, dv, dbias = attend_backward(dout, *saved, more, ctx.scale, ctx.dropout)
        return (
            dq,
            None if k is None else dk,
            None if v is None else dv,
            None if bias is None else dbias,
            *(None,) * 5,
        )


def _new_outputs(q: Tensor) -> tuple[Tensor, Tensor]:
    shape = (q.shape[0], *q.shape[-2:])
    return q.new_empty(shape), q.new_empty(shape[:2], dtype=wide_type(q))


@custom_op("molecule_attention", fake=_new_outputs)
def attend(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    bias: Tensor | None,
    graph_ptr: Tensor,
    pair_ptr: Tensor,
    seed: Tensor | None,
    scale: float,
    dropout: float,
) -> tuple[Tensor, Tensor]:
    """Return the result and, for every atom and head, the base-2 logarithm of the softmax's sum."""
    queries, keys, values = _three(q, k, v)
    num_atoms, num_heads, size = queries.shape
    out, lse = _new_outputs(q)
    if out.numel() == 0:
        return out, lse
    constants = _constants(q, size, bias, dropout)
    for launch in _launches(num_heads, constants["D_PAD"] * q.element_size()):
        molecule_attention_forward[(len(graph_ptr), -(-num_heads // launch["HEADS"]))](
            *(queries, keys, values, *pointers(q, bias), graph_ptr, pair_ptr),
            *(*pointers(graph_ptr, seed), out, lse),
            *(*_strides(queries, keys, values), *_pair_strides(bias)),
            *(num_atoms, len(graph_ptr) - 1, num_heads, scale, *_dropout(dropout)),
            **constants, **launch,
        )  # fmt: skip
    return out, lse


def _new_gradients(
    q: Tensor, k: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if bias is None:
        dbias = q.new_empty((0, 1))
    elif bias.stride(0) == 1:
        dbias = bias.new_empty(bias.shape[::-1]).t()
    else:
        dbias = bias.new_empty(bias.shape)
    nothing = q.new_empty(0)
    if k is None:
        return q.new_empty(q.shape), nothing, q.new_empty(0), dbias
    return q.new_empty(q.shape), q.new_empty(q.shape), q.new_empty(q.shape), dbias


@custom_op("molecule_attention_backward", fake=_new_gradients)
def attend_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    bias: Tensor | None,
    graph_ptr: Tensor,
    pair_ptr: Tensor,
    seed: Tensor | None,
    lse: Tensor,
    more: Tensor | None,
    scale: float,
    dropout: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return gradients of q, k, v and bias; empty for what is not given.

    ``more`` has the shape of the bias and is added to its gradient.
    """
    queries, keys, values = _three(q, k, v)
    num_atoms, num_heads, size = queries.shape
    grads = _new_gradients(q, k, bias)
    parts = grads[:3] if k is not None else grads[0].unbind(1)
    dout = dout.contiguous()
    if dout.numel() == 0:
        grads[3].zero_() if more is None else grads[3].copy_(more)
        return grads
    num_pairs = 0 if bias is None else len(bias)
    constants, delta = _constants(q, size, bias, dropout), torch.empty_like(lse)
    for launch in _launches(num_heads, constants["D_PAD"] * q.element_size()):
        molecule_attention_backward[(len(graph_ptr), -(-num_heads // launch["HEADS"]))](
            *(queries, keys, values, *pointers(q, bias), graph_ptr, pair_ptr),
            *(*pointers(graph_ptr, seed), lse, dout, *pointers(q, more), delta, *parts, grads[3]),
            *(*_strides(queries, keys, values), parts[0].stride(0)),
            *(*_pair_strides(bias), *_pair_strides(grads[3]), *_pair_strides(more)),
            *(num_atoms, num_pairs, len(graph_ptr) - 1, num_heads, scale, *_dropout(dropout)),
            ADD=more is not None,
            **constants,
            **launch,
        )
    return grads


def _three(q: Tensor, k: Tensor | None, v: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values, each with a contiguous last axis."""
    queries, keys, values = q.unbind(1) if k is None or v is None else (q, k, v)
    queries, keys, values = (
        t if t.stride(-1) == 1 else t.contiguous() for t in (queries, keys, values)
    )
    return queries, keys, values


def _strides(*tensors: Tensor) -> list[int]:
    return [step for tensor in tensors for step in tensor.stride()[:2]]


def _pair_strides(bias: Tensor | None) -> tuple[int, int]:
    return (0, 0) if bias is None else (bias.stride(0), bias.stride(1))


def _dropout(dropout: float) -> tuple[int, float]:
    return threshold(dropout), 1.0 / (1.0 - dropout)


def _launches(num_heads: int, row_bytes: int) -> list[dict[str, int]]:
    """Reduce the heads of launches to those that exist and fit."""
    most, share = triton.next_power_of_2(num_heads), -(-row_bytes // WIDEST)
    return [launch | {"HEADS": min(max(1, launch["HEADS"] // share), most)} for launch in LAUNCHES]


def _constants(q: Tensor, size: int, bias: Tensor | None, dropout: float) -> dict[str, Any]:
    tf32 = allows_tf32()
    return {
        "D": size,
        "D_PAD": max(16, triton.next_power_of_2(size)),
        "HAS_BIAS": bias is not None,
        "DROPOUT": dropout > 0.0,
        "PRECISION": "tf32" if tf32 and q.dtype == torch.float32 else "ieee",
        "WIDE": accumulator(q),
    }
