"""Attention with a shared bias in Triton: two custom operators.

All tensors have the caller's layout, [B, S, H, N, D] or [B, S, N, H, D], and any strides.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from bevatron.errors import KernelError
from bevatron.kernels.pair.pair_attention import LARGEST_HEAD
from bevatron.kernels.pair.pair_attention.launch import (
    padding,
    rounds_to_tf32,
    rows_aligned,
    rows_contiguous,
)
from bevatron.kernels.pair.pair_attention.triton_launches import (
    backward_launches,
    forward_launches,
)
from bevatron.kernels.pair.pair_attention.triton_mask import keys_of
from bevatron.kernels.shared.autograd import empty_gradients
from bevatron.kernels.shared.custom_op import custom_op, is_watched
from bevatron.kernels.shared.launch import pointers
from bevatron.kernels.shared.parts import parts_of_one
from bevatron.kernels.shared.standing_weights import once


def pair_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    scale: float,
    gate: Tensor | None,
    layout: str,
) -> Tensor:
    """Compute the same as the reference; see `bevatron.kernels.pair.pair_attention`."""
    head = q.shape[-1]
    if head % 8 or not 0 < head <= LARGEST_HEAD:
        raise KernelError(
            f"pair_attention: heads of {head} are not a multiple of 8 up to {LARGEST_HEAD}, which "
            "the Triton kernel needs; use('reference') takes any"
        )
    if scale <= 0:  # minus infinity, which hides keys, is scaled with the logits
        q, scale = q * scale, 1.0
    # Copied here for both passes, if at all.
    if bias is not None and padding(bias) == (0, 0):
        bias = rows_aligned(bias)
    mask = None if mask is None else once(mask.contiguous, mask)
    out: Tensor = attention(q, k, v, bias, mask, gate, scale, layout == "BSHND")[0]
    return out


def _new_outputs(q: Tensor, heads_first: bool) -> tuple[Tensor, Tensor]:
    B, S, *axes, _ = q.shape
    H, N = axes if heads_first else axes[::-1]
    return q.new_empty(q.shape), q.new_empty((B, S, H, N), dtype=torch.float32)


@custom_op(
    "pair_attention",
    outputs="out lse",
    fake=_new_outputs,
)
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    gate: Tensor | None,
    scale: float,
    heads_first: bool,
) -> tuple[Tensor, Tensor]:
    """Return the result and each query's logarithm (base 2) of the sum of exponentials."""
    out, lse = _new_outputs(q, heads_first)
    q, k, v, bias, gate = _readable(q, k, v, bias, gate, heads_first)
    mask, _, ends = keys_of(mask, q, wants_copies=False)
    programs, first, careful = forward_launches(
        q, k, v, bias, mask, gate, out, scale, heads_first, rounds_to_tf32(q)
    )
    again = q.new_empty(programs, dtype=torch.int32)
    tensors = (q, k, v, *pointers(q, bias, mask, ends, gate), out, lse, again)
    first(*tensors)
    if careful is not None:
        careful(*tensors)
    return out, lse


class Given(NamedTuple):
    """Tensors that the gradients are computed from."""

    dout: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    mask: Tensor | None
    gate: Tensor | None
    out: Tensor
    lse: Tensor
    scale: float
    heads_first: bool
    wants_dbias: bool


def _new_gradients(
    q: Tensor, k: Tensor, bias: Tensor | None, gate: Tensor | None, wants_dbias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    dbias, dgate = empty_gradients(q, bias if wants_dbias else None, gate)
    return q.new_empty(q.shape), q.new_empty(k.shape), q.new_empty(k.shape), dbias, dgate


@custom_op("pair_attention_backward", fake=_new_gradients)
def attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    gate: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
    heads_first: bool,
    wants_dbias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return gradients of q, k, v, bias and gate; those not wanted have no elements."""
    found = _new_gradients(q, k, bias, gate, wants_dbias)
    given = Given(dout, q, k, v, bias, mask, gate, out, lse, scale, heads_first, wants_dbias)
    _write_gradients(given, *found)
    return found


def _gradients(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    gate: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
    heads_first: bool,
    wants_dbias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute the gradients; those of parts of one tensor are parts of one tensor.

    So that nothing has to join them: `qkvg` takes them as they lie. What a custom operator returns
    must not lie in one piece of memory, so where torch watches they lie apart.
    """
    given = Given(dout, q, k, v, bias, mask, gate, out, lse, scale, heads_first, wants_dbias)
    watched = torch.is_grad_enabled() or is_watched(given)
    parts = None if gate is None or watched else parts_of_one((q, k, v, gate))
    if parts is None:
        found: tuple[Tensor, Tensor, Tensor, Tensor, Tensor] = attention_backward(*given)
        return found
    joint = torch.empty_like(parts).view(*q.shape[:3], 4, *q.shape[3:])
    dq, dk, dv, dgate = joint.unbind(3)
    dbias = empty_gradients(q, bias if wants_dbias else None)[0]
    _write_gradients(given, dq, dk, dv, dbias, dgate)
    return dq, dk, dv, dbias, dgate


attention.gradients("q k v bias gate", _gradients, asks={"wants_dbias": "bias"})


def _write_gradients(
    given: Given, dq: Tensor, dk: Tensor, dv: Tensor, dbias: Tensor, dgate: Tensor
) -> None:
    heads_first, out, lse = given.heads_first, given.out, given.lse
    gated = None if given.gate is None else given.q.new_empty(given.q.shape)
    q, k, v, bias, gate = _readable(given.q, given.k, given.v, given.bias, given.gate, heads_first)
    mask, copies, ends = keys_of(given.mask, q, wants_copies=dbias.numel() > 0)
    dout = rows_contiguous(given.dout.to(q.dtype), heads_first)
    launches = backward_launches(
        *(q, k, v, bias, mask, copies, gate, out, dout, gated, dq, dk, dbias),
        *(given.scale, heads_first, given.wants_dbias, rounds_to_tf32(q)),
    )
    stats = q.new_empty((*lse.shape, launches.stats_width), dtype=torch.float32)
    read = (q, k, v, *pointers(q, bias, mask, ends, gate))
    launches.dq(*read, out, lse, dout, dq, dgate, *pointers(q, gated), stats)
    dout = dout if gated is None else gated
    turned = bias.mT.contiguous() if bias is not None and launches.is_turned else bias
    launches.dkv(q, k, v, *pointers(q, turned, mask, ends), stats, dout, dk, dv)
    if launches.dbias is not None and bias is not None:
        target = dbias
        if launches.sums is not None:
            target = q.new_empty((launches.parts, dbias.numel()), dtype=torch.float32)
        launches.dbias(q, k, v, bias, *pointers(q, copies), stats, dout, target)
        if launches.sums is not None:
            launches.sums(target, dbias)


def _readable(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, gate: Tensor | None, heads_first: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Copy tensors that the kernels cannot read in place, or would read slowly."""
    return (
        rows_contiguous(q, heads_first),
        rows_contiguous(k, heads_first),
        rows_contiguous(v, heads_first),
        None if bias is None else rows_aligned(bias),
        None if gate is None else rows_contiguous(gate, heads_first),
    )
