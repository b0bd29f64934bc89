"""Attention in windows of atoms in Triton: two custom operators and their launches."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from bevatron.errors import KernelError
from bevatron.kernels.pair.window_attention.triton_kernels import (
    bias_kernel,
    forward_kernel,
    keys_kernel,
    queries_kernel,
)
from bevatron.kernels.shared.custom_op import custom_op, is_watched
from bevatron.kernels.shared.launch import num_sms
from bevatron.kernels.shared.layouts import per_layout
from bevatron.kernels.shared.rows import FARTHEST
from bevatron.kernels.shared.tiles import Tiles
from bevatron.kernels.shared.triton_launch import Launch
from bevatron.kernels.shared.triton_math import allows_tf32

LARGEST_HEAD, SMALLEST = 128, 16
"""Channels of a head; rows, columns and channels of a block for the tensor cores."""
PROGRAMS = 8
"""An SM; where windows and heads are fewer, they share copies."""
TILES: Mapping[str, Tiles] = {
    "forward": Tiles(32, 128, 2, 3),
    "queries": Tiles(32, 128, 2, 3),
    "keys": Tiles(32, 128, 2, 3),
    "bias": Tiles(32, 64, 2, 2, registers=168),
}
STAGED = 96 * 1024
"""Bytes of shared memory for the stages of a pipeline, so that two programs fit on an SM."""


def window_attention(
    q: Tensor, k: Tensor, v: Tensor, gate: Tensor, bias: Tensor, mask: Tensor
) -> Tensor:
    """Compute the same as the reference; see `bevatron.kernels.pair.window_attention`."""
    queries, keys, head = *bias.shape[-2:], q.shape[-1]
    if head > LARGEST_HEAD or not _is_power(queries) or not _is_power(keys // 2):
        raise KernelError(
            f"window_attention: heads of {head} and windows of {queries} queries and {keys} keys; "
            f"the Triton kernel takes heads up to {LARGEST_HEAD} and powers of two from {SMALLEST} "
            f"and {2 * SMALLEST} on; use('reference') takes any"
        )
    # Copied here for both passes, if at all.
    out: Tensor = attention(q, k, v, gate, bias.contiguous(), mask.contiguous())[0]
    return out


def _is_power(number: int) -> bool:
    return number >= SMALLEST and number & (number - 1) == 0


def _new_outputs(q: Tensor) -> tuple[Tensor, Tensor]:
    B, M, A, H, _ = q.shape
    return q.new_empty(q.shape), q.new_empty((B, M, H, A), dtype=torch.float32)


@custom_op("window_attention", outputs="out lse", fake=_new_outputs)
def attention(
    q: Tensor, k: Tensor, v: Tensor, gate: Tensor, bias: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the result and each query's logarithm (base 2) of the sum of exponentials."""
    out, lse = _new_outputs(q)
    q, k, v, gate = map(_readable, (q, k, v, gate))
    launch = _prepare_forward(q, k, v, gate, bias, allows_tf32())
    launch(q, k, v, gate, bias, mask.view(torch.uint8), out, lse)
    return out, lse


@custom_op("window_attention_backward", fake="q k v gate bias")
def attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    bias: Tensor,
    mask: Tensor,
    out: Tensor,
    lse: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v, gate and bias."""
    dq, dk, dv, dgate = (q.new_empty(q.shape) for _ in range(4))
    dbias = bias.new_empty(bias.shape)
    _write_gradients(dout, q, k, v, gate, bias, mask, out, lse, dq, dk, dv, dgate, dbias)
    return dq, dk, dv, dgate, dbias


def _gradients(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    bias: Tensor,
    mask: Tensor,
    out: Tensor,
    lse: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute the gradients, q beside gate and k beside v, so that nothing has to join them.

    What a custom operator returns must not lie in one piece of memory, so where torch watches they
    lie apart.
    """
    given = (dout, q, k, v, gate, bias, mask, out, lse)
    if torch.is_grad_enabled() or is_watched(given):
        found: tuple[Tensor, Tensor, Tensor, Tensor, Tensor] = attention_backward(*given)
        return found
    shape = *q.shape[:3], 2, *q.shape[3:]
    (dq, dgate), (dk, dv) = q.new_empty(shape).unbind(3), q.new_empty(shape).unbind(3)
    dbias = bias.new_empty(bias.shape)
    _write_gradients(*given, dq, dk, dv, dgate, dbias)
    return dq, dk, dv, dgate, dbias


attention.gradients("q k v gate bias", _gradients)


def _write_gradients(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    bias: Tensor,
    mask: Tensor,
    out: Tensor,
    lse: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    dgate: Tensor,
    dbias: Tensor,
) -> None:
    q, k, v, gate = map(_readable, (q, k, v, gate))
    dout, gated, delta = dout.contiguous(), torch.empty_like(out), torch.empty_like(lse)
    prepared = _prepare_backward(q, k, v, gate, bias, dq, dk, allows_tf32())
    of_queries, of_keys, of_bias = prepared
    mask = mask.view(torch.uint8)
    of_queries(q, k, v, gate, bias, mask, out, lse, dout, dq, dgate, gated, delta)
    of_keys(q, k, v, bias, mask, lse, delta, gated, dk, dv)
    of_bias(q, k, v, bias, mask, lse, delta, gated, dbias)


def _readable(x: Tensor) -> Tensor:
    """Return rows whose heads are contiguous, and whose atoms 32 bits tell apart."""
    _, _, step, *of_heads = x.stride()
    near = x.shape[2] * step < FARTHEST
    return x if near and of_heads == [x.shape[-1], 1] else x.contiguous()


@per_layout
def _prepare_forward(
    q: Tensor, k: Tensor, v: Tensor, gate: Tensor, bias: Tensor, rounds: bool
) -> Launch:
    copies, chunks = _shared_copies(q, bias)
    numbers = (*_strides(q, k, v, gate), *_sizes(q, bias), copies, q.shape[-1] ** -0.5)
    grid = (bias.shape[1] * bias.shape[2], chunks, q.shape[0])
    return Launch(forward_kernel, grid, numbers, **_constants("forward", q, bias, rounds))


@per_layout
def _prepare_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    bias: Tensor,
    dq: Tensor,
    dk: Tensor,
    rounds: bool,
) -> tuple[Launch, Launch, Launch]:
    (B, *_), (_, W, H, queries, keys), scale = q.shape, bias.shape, q.shape[-1] ** -0.5
    copies, chunks = _shared_copies(q, bias)
    of_queries = Launch(
        queries_kernel,
        (W * H, chunks, B),
        (*_strides(q, k, v, gate, dq), *_sizes(q, bias), copies, scale),
        **_constants("queries", q, bias, rounds),
    )
    blocks = W + keys // queries - 1 if W else 0
    of_keys = Launch(
        keys_kernel,
        (blocks * H, chunks, B),
        (*_strides(q, k, v, dk), *_sizes(q, bias), copies, scale),
        **_constants("keys", q, bias, rounds),
    )
    of_bias = Launch(
        bias_kernel,
        (W * H, 2, B),
        (*_strides(q, k, v), *_sizes(q, bias), scale),
        **_constants("bias", q, bias, rounds),
    )
    return of_queries, of_keys, of_bias


def _strides(*tensors: Tensor) -> list[int]:
    """List the strides of samples, copies and atoms."""
    return [step for tensor in tensors for step in tensor.stride()[:3]]


def _sizes(q: Tensor, bias: Tensor) -> tuple[int, int, int]:
    return q.shape[2], bias.shape[1], q.shape[1]


def _shared_copies(q: Tensor, bias: Tensor) -> tuple[int, int]:
    """Return how many copies a program goes through, and how many programs that makes."""
    windows, M = bias.shape[:3].numel(), q.shape[1]
    wanted = -(-PROGRAMS * num_sms(q.device) // max(windows, 1))
    copies = max(1, M // max(1, wanted))
    return copies, -(-M // copies)


def _constants(kernel: str, q: Tensor, bias: Tensor, rounds: bool) -> dict[str, Any]:
    tiles, D, (queries, keys) = TILES[kernel], q.shape[-1], bias.shape[-2:]
    bytes_of_stage = (2 * keys + 4 * queries) * max(D, SMALLEST) * q.element_size()
    return {
        "H": q.shape[3],
        "D": D,
        "D_PAD": max(SMALLEST, 1 << (D - 1).bit_length()),
        "NQ": queries,
        "NK": keys,
        "PRECISION": "tf32" if rounds or q.dtype != torch.float32 else "ieee",
        "num_warps": tiles.warps,
        "num_stages": max(1, min(tiles.stages, STAGED // bytes_of_stage)),
        **tiles.register_limit(q.device),
    }
