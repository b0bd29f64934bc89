"""Attention with a shared bias in Triton: two custom operators and their launches.

Inside, all tensors are [B, S, H, N, D] views with whatever strides they have.
"""

import torch
from torch import Tensor

from bevatron.errors import KernelError
from bevatron.kernels.pair.pair_attention import LARGEST_HEAD
from bevatron.kernels.pair.pair_attention.launch import (
    alignment,
    constants_of,
    in_copies,
    launch,
    mask_strides,
    one_stride,
    prepare,
    rows_contiguous,
    strides,
)
from bevatron.kernels.pair.pair_attention.tiles import LARGEST_BIAS_FIRST, choose, padded
from bevatron.kernels.pair.pair_attention.triton_backward import (
    dbias_kernel,
    dkv_kernel,
    dq_kernel,
    sum_kernel,
)
from bevatron.kernels.pair.pair_attention.triton_careful import MARKS, careful_kernel
from bevatron.kernels.pair.pair_attention.triton_forward import forward_kernel
from bevatron.kernels.shared.autograd import empty_gradients
from bevatron.kernels.shared.custom_op import custom_op
from bevatron.kernels.shared.launch import num_sms, pointers
from bevatron.kernels.shared.tiles import Tiles

LOG2E = 1.4426950408889634
PROGRAMS_PER_SM = 3
"""Programs of the bias gradient that run at once."""
ENDS = 4
"""Overhead of a program of the bias gradient, in units of the time of a row."""
MOST_PARTS = 16
FEWEST_ROWS = 8
"""Of a part: what bounds the memory for parts of the bias gradient."""
SUM_BLOCK = 1024


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
    heads_first = layout == "BSHND"
    if not heads_first:
        q, k, v = (tensor.transpose(2, 3) for tensor in (q, k, v))
        gate = None if gate is None else gate.transpose(2, 3)
    out: Tensor = attention(q, k, v, bias, mask, gate, scale, heads_first)[0]
    return out if heads_first else out.transpose(2, 3)


def _new_outputs(q: Tensor, heads_first: bool) -> tuple[Tensor, Tensor]:
    return _new(q, q.shape[3], heads_first), q.new_empty(q.shape[:4], dtype=torch.float32)


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
    B, S, H, Nq, D = q.shape
    Nk = k.shape[3]
    out, lse = _new_outputs(q, heads_first)
    q, k, v, gate, bias, mask = prepare(q, k, v, gate, bias, mask)
    tiles = choose("forward", padded(D), q.element_size(), Nq, Nk)
    align = alignment(q, k, v, gate, out)
    bias_align = alignment(bias)
    programs = B * S * H * -(-Nq // tiles.rows)
    again = q.new_empty(programs, dtype=torch.int32)
    tensors = (
        q,
        k,
        v,
        *pointers(q, bias, mask, gate),
        out,
        lse,
        again,
    )
    numbers = (
        *strides(align, q, k, v),
        *strides(bias_align, bias),
        *mask_strides(mask),
        *strides(align, gate, out),
        *(S, H, Nq, Nk, scale),
    )
    constants = {
        "HAS_BIAS": bias is not None,
        "HAS_GATE": gate is not None,
        "ONE_STRIDE": one_stride(q, k, v),
        **constants_of(q, tiles, align, bias, Nk, mask),
    }
    launch(forward_kernel, programs, tiles, *tensors, *numbers, **constants)
    groups = -(-programs // MARKS.value)
    launch(careful_kernel, groups, tiles, *tensors, *numbers, programs, **constants)
    return out, lse


def _new_gradients(
    q: Tensor,
    k: Tensor,
    bias: Tensor | None,
    gate: Tensor | None,
    heads_first: bool,
    wants_dbias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    Nq, Nk = q.shape[3], k.shape[3]
    dq, dk, dv = _new(q, Nq, heads_first), _new(q, Nk, heads_first), _new(q, Nk, heads_first)
    (dbias,) = empty_gradients(q, bias if wants_dbias else None)
    dgate = q.new_empty(0) if gate is None else _new(q, Nq, heads_first, gate.dtype)
    return dq, dk, dv, dbias, dgate


@attention.backward(
    "q k v bias gate",
    fake=_new_gradients,
    asks={"wants_dbias": "bias"},
)
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
    dq, dk, dv, dbias, dgate = _new_gradients(q, k, bias, gate, heads_first, wants_dbias)
    gated = _new(q, q.shape[3], heads_first) if gate is not None else None
    width = 2 if _dkv_tiles(q, bias, k.shape[3]).rows >= 64 else 4
    stats = q.new_empty((*lse.shape, width), dtype=torch.float32)
    copies = in_copies(mask) if mask is not None and dbias.numel() else None
    q, k, v, gate, bias, mask = prepare(q, k, v, gate, bias, mask)
    dout = rows_contiguous(dout.to(q.dtype))
    _dq(q, k, v, bias, mask, gate, out, lse, dout, dq, dgate, gated, stats, scale)
    if gated is not None:
        dout = gated
    _dkv(q, k, v, bias, mask, stats, dout, dk, dv, scale)
    if bias is not None and wants_dbias:
        _dbias(q, k, v, bias, copies, stats, dout, dbias, scale)
    return dq, dk, dv, dbias, dgate


def _dq(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    gate: Tensor | None,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dq: Tensor,
    dgate: Tensor,
    gated: Tensor | None,
    stats: Tensor,
    scale: float,
) -> None:
    B, S, H, Nq, D = q.shape
    Nk = k.shape[3]
    tiles = choose("dq", padded(D), q.element_size(), Nq, Nk)
    align, bias_align = alignment(q, k, v, gate, out, dout), alignment(bias)
    launch(
        dq_kernel,
        B * S * H * -(-Nq // tiles.rows),
        tiles,
        *(
            q,
            k,
            v,
            *pointers(q, bias, mask, gate),
            out,
            lse,
            dout,
        ),
        *(dq, dgate, *pointers(q, gated), stats),
        *strides(align, q, k, v),
        *strides(bias_align, bias),
        *mask_strides(mask),
        *strides(align, gate, out, dout),
        *(S, H, Nq, Nk, scale * LOG2E, scale),
        HAS_BIAS=bias is not None,
        HAS_GATE=gate is not None,
        STATS_WIDTH=stats.shape[-1],
        ONE_STRIDE=one_stride(q, k, v, dout),
        **constants_of(q, tiles, align, bias, Nk, mask),
    )


def _dkv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    stats: Tensor,
    dout: Tensor,
    dk: Tensor,
    dv: Tensor,
    scale: float,
) -> None:
    B, S, H, Nq, _ = q.shape
    Nk = k.shape[3]
    tiles = _dkv_tiles(q, bias, Nk)
    align, bias_align = alignment(q, k, v, dout, dk), alignment(bias)
    turned = _is_turned(bias, S)
    read = bias.transpose(-1, -2).contiguous() if bias is not None and turned else bias
    launch(
        dkv_kernel,
        B * S * H * -(-Nk // tiles.columns),
        tiles,
        *(q, k, v, *pointers(q, read, mask), stats, dout, dk, dv),
        *strides(align, q, k, v),
        *strides(bias_align, read),
        *mask_strides(mask),
        *strides(align, dout, dk),
        *(S, H, Nq, Nk, scale * LOG2E, scale),
        HAS_BIAS=bias is not None,
        BIAS_TURNED=turned,
        BIAS_FIRST=_is_first(q, bias),
        STATS_WIDTH=stats.shape[-1],
        ONE_STRIDE=one_stride(q, k, v, dout),
        **constants_of(q, tiles, align, bias, Nk, mask),
    )


def _dkv_tiles(q: Tensor, bias: Tensor | None, num_keys: int) -> Tiles:
    kernel = "dkv_bias_first" if _is_first(q, bias) else "dkv"
    return choose(kernel, padded(q.shape[4]), q.element_size(), q.shape[3], num_keys)


def _is_turned(bias: Tensor | None, rows: int) -> bool:
    """Whether dk and dv read a transposed copy of the bias: rows enough share it."""
    return bias is not None and _shared_by(bias, rows) >= FEWEST_ROWS


def _is_first(q: Tensor, bias: Tensor | None) -> bool:
    """Whether dk and dv read the bias before their first product, as their tiles are cut."""
    small = q.element_size() == 2 and padded(q.shape[4]) <= LARGEST_BIAS_FIRST
    return small and _is_turned(bias, q.shape[1])


def _dbias(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    mask: Tensor | None,
    stats: Tensor,
    dout: Tensor,
    dbias: Tensor,
    scale: float,
) -> None:
    B, S, H, Nq, D = q.shape
    Nk = k.shape[3]
    shared_by = _shared_by(bias, S)
    tiles = choose("dbias", padded(D), q.element_size(), Nq, Nk)
    blocks = B * bias.shape[1] * H * -(-Nq // tiles.rows) * -(-Nk // tiles.columns)
    rows = _rows_of_a_part(blocks, shared_by, num_sms(q.device) * PROGRAMS_PER_SM)
    parts = -(-shared_by // rows) if shared_by else 0
    target = dbias
    if parts != 1:
        target = q.new_empty((parts, dbias.numel()), dtype=torch.float32)
    align, bias_align = alignment(q, k, v, dout), alignment(bias)
    launch(
        dbias_kernel,
        blocks * parts,
        tiles,
        *(q, k, v, bias, *pointers(q, mask), stats, dout, target),
        *strides(align, q, k, v),
        *strides(bias_align, bias),
        *mask_strides(mask),
        *strides(align, dout),
        *(S, H, Nq, Nk, scale * LOG2E, bias.shape[1], rows, dbias.numel()),
        STAGES=tiles.stages,
        STATS_WIDTH=stats.shape[-1],
        ONE_STRIDE=one_stride(q, k, v, dout),
        **constants_of(q, tiles, align, bias, Nk, mask),
    )
    if parts != 1:
        grid = -(-dbias.numel() // SUM_BLOCK)
        one = Tiles(0, 0)
        launch(sum_kernel, grid, one, target, dbias, dbias.numel(), parts, BLOCK=SUM_BLOCK)


def _rows_of_a_part(blocks: int, shared_by: int, at_once: int) -> int:
    """Deal the rows that share a bias to programs, so that they fill the device evenly.

    Programs run ``at_once`` at a time, each for as long as its rows and its ends take.
    """

    def duration(parts: int) -> int:
        rows = max(1, -(-shared_by // parts))
        return -(-blocks * -(-shared_by // rows) // at_once) * (rows + ENDS)

    most = max(1, min(MOST_PARTS, shared_by // FEWEST_ROWS))
    return max(1, -(-shared_by // min(range(1, most + 1), key=duration)))


def _shared_by(bias: Tensor | None, rows: int) -> int:
    return 1 if bias is None or bias.shape[1] == rows else rows


def _new(q: Tensor, count: int, heads_first: bool, dtype: torch.dtype | None = None) -> Tensor:
    """Allocate a [B, S, H, count, D] tensor, in memory as the caller's layout."""
    B, S, H, _, D = q.shape
    dtype = q.dtype if dtype is None else dtype
    if heads_first:
        return q.new_empty((B, S, H, count, D), dtype=dtype)
    return q.new_empty((B, S, count, H, D), dtype=dtype).transpose(2, 3)
