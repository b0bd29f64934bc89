"""Attention with a shared bias in Triton: two custom operators and their launches.

Inside, all tensors are [B, S, H, N, D] views with whatever strides they have; the kernels take the
strides. Strides are passed in units of eight elements where all allow it, which tells the compiler
that rows are aligned to 16 bytes.
"""

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from bevatron.errors import KernelError
from bevatron.kernels.pair_attention import LARGEST_HEAD
from bevatron.kernels.pair_attention.tiles import Tiles, choose, has_joint, padded
from bevatron.kernels.pair_attention.triton_backward import (
    dbias_kernel,
    dkv_kernel,
    dq_kernel,
    sum_kernel,
)
from bevatron.kernels.pair_attention.triton_forward import forward_kernel
from bevatron.kernels.pair_attention.triton_joint import joint_kernel

LOG2E = 1.4426950408889634
WIDE = 8
"""Elements by which strides are counted where all allow it."""
LARGEST_STRIDE = 2**31 // 256
"""Offsets within a block are 32-bit."""
PROGRAMS_PER_PROCESSOR = 6
"""So many programs of the bias gradient fill a device evenly."""
MOST_PARTS = 16
FEWEST_ROWS = 8
"""Of a part: what bounds the memory for parts of the bias gradient."""
SUM_BLOCK = 1024
JOINT_PROGRAMS = 2
"""Per processor, at least: with fewer rows and heads the keys and queries are cut up as well."""
MOST_SLOTS = 4096
"""Programs of one launch for dq, dk and dv together: what bounds its float32 sums of dq."""


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
    """Compute what the reference computes; see `bevatron.kernels.pair_attention`."""
    head = q.shape[-1]
    if head % 8 or not 0 < head <= LARGEST_HEAD:
        raise KernelError(
            f"pair_attention: heads of {head} are not a multiple of 8 up to {LARGEST_HEAD}, which "
            "the Triton kernel needs; use('reference') takes any"
        )
    heads_first = layout == "BSHND"
    if not heads_first:
        q, k, v = (tensor.transpose(2, 3) for tensor in (q, k, v))
        gate = None if gate is None else gate.transpose(2, 3)
    out: Tensor = attention(q, k, v, bias, mask, gate, scale, heads_first)[0]
    return out if heads_first else out.transpose(2, 3)


@torch.library.custom_op("bevatron::pair_attention", mutates_args=())
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
    out = _new(q, Nq, heads_first)
    lse = q.new_empty((B, S, H, Nq), dtype=torch.float32)
    q, k, v, gate, bias, mask = _prepare(q, k, v, gate, bias, mask)
    tiles = choose("forward", padded(D), q.element_size(), Nq, Nk, _shared_by(bias, S))
    align = _alignment(q, k, v, gate, out)
    bias_align = _alignment(bias)
    _launch(
        forward_kernel,
        B * -(-S // tiles.rows) * H * -(-Nq // tiles.block_q),
        tiles,
        *(q, k, v, _or(bias, q), _or(mask, q), _or(gate, q), out, lse),
        *_strides(align, q, k, v),
        *_strides(bias_align, bias),
        *_mask_strides(mask),
        *_strides(align, gate, out),
        *(S, H, Nq, Nk, scale),
        ROWS=tiles.rows,
        HAS_BIAS=bias is not None,
        HAS_GATE=gate is not None,
        **_constants(q, tiles, align, bias_align, Nk, mask),
    )
    return out, lse


@attention.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    gate: Tensor | None,
    scale: float,
    heads_first: bool,
) -> tuple[Tensor, Tensor]:
    del k, v, bias, mask, gate, scale
    return _new(q, q.shape[3], heads_first), q.new_empty(q.shape[:4], dtype=torch.float32)


@torch.library.custom_op("bevatron::pair_attention_backward", mutates_args=())
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
    Nq, Nk = q.shape[3], k.shape[3]
    dq, dk, dv = _new(q, Nq, heads_first), _new(q, Nk, heads_first), _new(q, Nk, heads_first)
    dgate = _new(q, Nq, heads_first, gate.dtype) if gate is not None else q.new_empty(0)
    gated = _new(q, Nq, heads_first) if gate is not None else None
    delta = torch.empty_like(lse)
    dbias = _new_dbias(q, bias, wants_dbias)
    q, k, v, gate, bias, mask = _prepare(q, k, v, gate, bias, mask)
    dout = _rows_contiguous(dout.to(q.dtype))
    if _fills_device(q):
        _joint(q, k, v, bias, mask, gate, out, lse, dout, dq, dk, dv, dgate, gated, delta, scale)
    else:
        _dq(q, k, v, bias, mask, gate, out, lse, dout, dq, dgate, gated, delta, scale)
    if gated is not None:
        dout = gated
    if not _fills_device(q):
        _dkv(q, k, v, bias, mask, lse, delta, dout, dk, dv, scale)
    if bias is not None and wants_dbias:
        _dbias(q, k, v, bias, mask, lse, delta, dout, dbias, scale)
    return dq, dk, dv, dbias, dgate


@attention_backward.register_fake
def _(
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
    del dout, v, mask, out, lse, scale
    Nq, Nk = q.shape[3], k.shape[3]
    dgate = _new(q, Nq, heads_first, gate.dtype) if gate is not None else q.new_empty(0)
    dq, dk, dv = _new(q, Nq, heads_first), _new(q, Nk, heads_first), _new(q, Nk, heads_first)
    return dq, dk, dv, _new_dbias(q, bias, wants_dbias), dgate


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, bias, mask, gate, ctx.scale, ctx.heads_first = inputs
    ctx.save_for_backward(q, k, v, bias, mask, gate, *output)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    del dlse  # nobody outside sees the logarithm
    if dout is None:
        return (None,) * 8
    q, k, v, bias, mask, gate, out, lse = ctx.saved_tensors
    dq, dk, dv, dbias, dgate = attention_backward(
        *(dout, q, k, v, bias, mask, gate, out, lse),
        *(ctx.scale, ctx.heads_first, bias is not None and ctx.needs_input_grad[3]),
    )
    return (
        *(dq, dk, dv),
        dbias if bias is not None and ctx.needs_input_grad[3] else None,
        None,
        dgate if gate is not None else None,
        None,
        None,
    )


attention.register_autograd(_backward, setup_context=_save)


def _fills_device(q: Tensor) -> bool:
    """Tell whether one program per row and head, for dq, dk and dv together, keeps it busy."""
    if not has_joint(padded(q.shape[4]), q.element_size()):
        return False
    return q.shape[0] * q.shape[1] * q.shape[2] >= JOINT_PROGRAMS * _processors(q.device)


def _joint(
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
    dk: Tensor,
    dv: Tensor,
    dgate: Tensor,
    gated: Tensor | None,
    delta: Tensor,
    scale: float,
) -> None:
    B, S, H, Nq, D = q.shape
    Nk = k.shape[3]
    tiles = choose("joint", padded(D), q.element_size(), Nq, Nk, _shared_by(bias, S))
    align, bias_align = _alignment(q, k, v, gate, out, dout, dk), _alignment(bias)
    items = B * S * H
    slots = min(items, MOST_SLOTS)
    sums = q.new_empty((slots, -(-Nq // tiles.block_q), tiles.block_q, padded(D)), dtype=lse.dtype)
    for first in range(0, items, max(slots, 1)):
        _launch(
            joint_kernel,
            min(slots, items - first),
            tiles,
            *(q, k, v, _or(bias, q), _or(mask, q), _or(gate, q), out, lse, dout),
            *(dq, dk, dv, dgate, _or(gated, q), delta, sums),
            *_strides(align, q, k, v),
            *_strides(bias_align, bias),
            *_mask_strides(mask),
            *_strides(align, gate, out, dout, dk),
            *(S, H, Nq, Nk, scale * LOG2E, scale, first),
            HAS_BIAS=bias is not None,
            HAS_GATE=gate is not None,
            STAGES=tiles.stages,
            **_constants(q, tiles, align, bias_align, Nk, mask),
        )


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
    delta: Tensor,
    scale: float,
) -> None:
    B, S, H, Nq, D = q.shape
    Nk = k.shape[3]
    tiles = choose("dq", padded(D), q.element_size(), Nq, Nk, _shared_by(bias, S))
    align, bias_align = _alignment(q, k, v, gate, out, dout), _alignment(bias)
    _launch(
        dq_kernel,
        B * -(-S // tiles.rows) * H * -(-Nq // tiles.block_q),
        tiles,
        *(q, k, v, _or(bias, q), _or(mask, q), _or(gate, q), out, lse, dout),
        *(dq, dgate, _or(gated, q), delta),
        *_strides(align, q, k, v),
        *_strides(bias_align, bias),
        *_mask_strides(mask),
        *_strides(align, gate, out, dout),
        *(S, H, Nq, Nk, scale * LOG2E, scale),
        ROWS=tiles.rows,
        HAS_BIAS=bias is not None,
        HAS_GATE=gate is not None,
        **_constants(q, tiles, align, bias_align, Nk, mask),
    )


def _dkv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    lse: Tensor,
    delta: Tensor,
    dout: Tensor,
    dk: Tensor,
    dv: Tensor,
    scale: float,
) -> None:
    B, S, H, Nq, D = q.shape
    Nk = k.shape[3]
    tiles = choose("dkv", padded(D), q.element_size(), Nq, Nk, _shared_by(bias, S))
    align, bias_align = _alignment(q, k, v, dout, dk), _alignment(bias)
    _launch(
        dkv_kernel,
        B * -(-S // tiles.rows) * H * -(-Nk // tiles.block_k),
        tiles,
        *(q, k, v, _or(bias, q), _or(mask, q), lse, delta, dout, dk, dv),
        *_strides(align, q, k, v),
        *_strides(bias_align, bias),
        *_mask_strides(mask),
        *_strides(align, dout, dk),
        *(S, H, Nq, Nk, scale * LOG2E, scale),
        ROWS=tiles.rows,
        HAS_BIAS=bias is not None,
        **_constants(q, tiles, align, bias_align, Nk, mask),
    )


def _dbias(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    mask: Tensor | None,
    lse: Tensor,
    delta: Tensor,
    dout: Tensor,
    dbias: Tensor,
    scale: float,
) -> None:
    B, S, H, Nq, D = q.shape
    Nk = k.shape[3]
    shared_by = _shared_by(bias, S)
    tiles = choose("dbias", padded(D), q.element_size(), Nq, Nk, shared_by)
    blocks = B * bias.shape[1] * H * -(-Nq // tiles.block_q) * -(-Nk // tiles.block_k)
    rows = _rows_of_a_part(blocks, shared_by, q.device)
    parts = -(-shared_by // rows) if shared_by else 0
    target = dbias
    if parts != 1:
        target = q.new_empty((parts, dbias.numel()), dtype=torch.float32)
    align, bias_align = _alignment(q, k, v, dout), _alignment(bias)
    _launch(
        dbias_kernel,
        blocks * parts,
        tiles,
        *(q, k, v, bias, _or(mask, q), lse, delta, dout, target),
        *_strides(align, q, k, v),
        *_strides(bias_align, bias),
        *_mask_strides(mask),
        *_strides(align, dout),
        *(S, H, Nq, Nk, scale * LOG2E, bias.shape[1], rows, dbias.numel()),
        STAGES=tiles.stages,
        **_constants(q, tiles, align, bias_align, Nk, mask),
    )
    if parts != 1:
        grid = -(-dbias.numel() // SUM_BLOCK)
        one = Tiles(0, 0)
        _launch(sum_kernel, grid, one, target, dbias, dbias.numel(), parts, BLOCK=SUM_BLOCK)


def _rows_of_a_part(blocks: int, shared_by: int, device: torch.device) -> int:
    """Deal the rows that share a bias to programs, so that they fill the device."""
    wanted = -(-_processors(device) * PROGRAMS_PER_PROCESSOR // max(blocks, 1))
    parts = max(1, min(wanted, MOST_PARTS, shared_by // FEWEST_ROWS))
    return max(1, -(-shared_by // parts))


def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def _shared_by(bias: Tensor | None, rows: int) -> int:
    return 1 if bias is None or bias.shape[1] == rows else rows


def _new(q: Tensor, count: int, heads_first: bool, dtype: torch.dtype | None = None) -> Tensor:
    """Allocate a [B, S, H, count, D] tensor, in memory as the caller's layout."""
    B, S, H, _, D = q.shape
    dtype = q.dtype if dtype is None else dtype
    if heads_first:
        return q.new_empty((B, S, H, count, D), dtype=dtype)
    return q.new_empty((B, S, count, H, D), dtype=dtype).transpose(2, 3)


def _new_dbias(q: Tensor, bias: Tensor | None, wanted: bool) -> Tensor:
    if bias is None or not wanted:
        return q.new_empty(0)
    return q.new_empty(bias.shape, dtype=bias.dtype)


def _prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor | None,
    bias: Tensor | None,
    mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Copy what the kernels cannot read as it lies, or would read slowly."""
    # Added to logits: a few bytes per key instead of a comparison per logit.
    keep = None if mask is None else torch.where(mask, 0.0, float("-inf")).contiguous()
    return (
        _rows_contiguous(q),
        _rows_contiguous(k),
        _rows_contiguous(v),
        None if gate is None else _rows_contiguous(gate),
        None if bias is None else _rows_aligned(bias),
        keep,
    )


def _rows_contiguous(tensor: Tensor) -> Tensor:
    good = tensor.stride(-1) == 1 and tensor.stride(-2) < LARGEST_STRIDE
    return tensor if good else tensor.contiguous()


def _rows_aligned(bias: Tensor) -> Tensor:
    """Have rows of the bias begin at aligned places: it is read for every pair of rows."""
    if bias.stride(-1) == 1 and _alignment(bias) == WIDE:
        return bias
    padding = -bias.shape[-1] % WIDE
    aligned = bias.new_empty((*bias.shape[:-1], bias.shape[-1] + padding))[..., : bias.shape[-1]]
    return aligned.copy_(bias)


def _alignment(*tensors: Tensor | None) -> int:
    given = [tensor for tensor in tensors if tensor is not None]
    wide = all(stride % WIDE == 0 for tensor in given for stride in tensor.stride()[:4])
    return WIDE if wide else 1


def _strides(align: int, *tensors: Tensor | None) -> list[int]:
    """List strides of B, S, H and N; of a bias shared by rows that of S is zero."""
    found: list[int] = []
    for tensor in tensors:
        if tensor is None:
            found += [0] * 4
            continue
        strides = [stride // align for stride in tensor.stride()[:4]]
        found += [
            0 if size == 1 else stride for size, stride in zip(tensor.shape, strides, strict=False)
        ]
    return found


def _mask_strides(mask: Tensor | None) -> Sequence[int]:
    return (0, 0) if mask is None else mask.stride()[:2]


def _or(tensor: Tensor | None, stand_in: Tensor) -> Tensor:
    """Give a pointer to something for an argument that the kernel will not read."""
    return stand_in if tensor is None else tensor


def _constants(
    q: Tensor, tiles: Tiles, align: int, bias_align: int, num_keys: int, mask: Tensor | None
) -> dict[str, Any]:
    tf32 = q.dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32
    return {
        "D": q.shape[4],
        "D_PAD": padded(q.shape[4]),
        "BLOCK_Q": tiles.block_q,
        "BLOCK_K": tiles.block_k,
        "ALIGN": align,
        "BIAS_ALIGN": bias_align,
        "FULL_Q": q.shape[3] % tiles.block_q == 0,
        "FULL_K": num_keys % tiles.block_k == 0,
        "HAS_MASK": mask is not None,
        "PRECISION": "tf32" if tf32 else "ieee",
    }


def _launch(kernel: Any, programs: int, tiles: Tiles, *arguments: Any, **constants: Any) -> None:
    if programs == 0:
        return
    device = arguments[0].device
    on_device = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
    with on_device:
        kernel[(programs,)](
            *arguments,
            **constants,
            num_warps=tiles.warps,
            num_stages=tiles.stages,
            **_registers(tiles, device, constants),
        )


def _registers(tiles: Tiles, device: torch.device, constants: Mapping[str, Any]) -> dict[str, int]:
    """Limit registers: only NVIDIA's compiler can, and where addresses are simple it does well."""
    cuda = device.type == "cuda" and torch.version.hip is None
    simple = all(constants.get(name) for name in ("FULL_Q", "FULL_K"))
    simple = simple and all(constants.get(name) == WIDE for name in ("ALIGN", "BIAS_ALIGN"))
    return {"maxnreg": tiles.registers} if cuda and simple and tiles.registers else {}
