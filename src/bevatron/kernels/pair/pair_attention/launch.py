"""Shared by all launches: inputs in a layout that kernels read, strides, constants, registers.

The kernels take [B, S, H, N, D] views of any strides. If all strides allow it, they are passed in
units of eight elements, which tells the compiler that rows are aligned to 16 bytes.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bevatron.kernels.pair.pair_attention.tiles import padded
from bevatron.kernels.shared.tiles import Tiles
from bevatron.kernels.shared.triton_launch import Launch
from bevatron.kernels.shared.triton_math import allows_tf32

WIDE = 8
"""Unit of strides in elements, if all strides are multiples of it."""
LARGEST_STRIDE = 2**31 // 256
"""Offsets within a block are 32-bit."""
BIAS_UNIT = 64
"""A bias that rows share is padded to multiples of this, so that its loads need no mask."""


def rows_contiguous(tensor: Tensor, heads_first: bool) -> Tensor:
    """Copy a tensor whose last axis is not contiguous, or whose rows are too far apart."""
    *_, outer, inner, channels = tensor.stride()
    good = channels == 1 and (inner if heads_first else outer) < LARGEST_STRIDE
    return tensor if good else tensor.contiguous()


def padding(bias: Tensor) -> tuple[int, int]:
    """Return how many rows and columns complete the blocks of a bias."""
    Nq, Nk = bias.shape[-2:]
    unit = WIDE if bias.shape[1] > 1 else BIAS_UNIT
    return -Nq % unit if unit > WIDE else 0, -Nk % unit


def rows_aligned(bias: Tensor) -> Tensor:
    """Pad a bias that rows share to whole blocks, because every row reads it again.

    If it must be copied, the padding is minus infinity. A bias of each row is read only once, and
    is copied only to align its rows.
    """
    Nq, Nk = bias.shape[-2:]
    rows, columns = padding(bias)
    if not (rows or columns):
        good = bias.stride(-1) == 1 and alignment(bias) == WIDE
        return bias if good else bias.clone(memory_format=torch.contiguous_format)
    aligned = bias.new_full((*bias.shape[:-2], Nq + rows, Nk + columns), float("-inf"))
    aligned[..., :Nq, :Nk] = bias
    return aligned


def alignment(*tensors: Tensor | None) -> int:
    """Return `WIDE` if it divides the strides of all these tensors, else 1."""
    given = [tensor for tensor in tensors if tensor is not None]
    wide = all(stride % WIDE == 0 for tensor in given for stride in tensor.stride()[:4])
    return WIDE if wide else 1


def strides(align: int, *tensors: Tensor | None) -> list[int]:
    """List the strides of B, S, H and N; a bias that rows share has stride 0 along S."""
    found: list[int] = []
    for tensor in tensors:
        if tensor is None:
            found += [0] * 4
            continue
        counted = [stride // align for stride in tensor.stride()[:4]]
        found += [
            0 if size == 1 else stride for size, stride in zip(tensor.shape, counted, strict=False)
        ]
    return found


def strides_alike(q: Tensor, k: Tensor, v: Tensor, dout: Tensor | None = None) -> dict[str, Any]:
    """Return which tensors share strides along S and N, so that kernels need fewer registers.

    0: none; 1: q, k and v; 2: the gradient of the result too.
    """

    def alike(axis: int) -> int:
        steps = [
            0 if tensor is None or tensor.shape[axis] == 1 else tensor.stride(axis)
            for tensor in (q, k, v, dout)
        ]
        if not steps[0] == steps[1] == steps[2]:
            return 0
        return 2 if dout is not None and steps[3] == steps[0] else 1

    return {"S_ALIKE": alike(1), "N_ALIKE": alike(3)}


def mask_strides(mask: Tensor | None) -> Sequence[int]:
    """List the strides of B and S, in units of keys."""
    return (0, 0) if mask is None else [stride // mask.shape[-1] for stride in mask.stride()[:2]]


def constants_of(
    q: Tensor,
    tiles: Tiles,
    align: int,
    bias: Tensor | None,
    num_keys: int,
    mask: Tensor | None,
    tf32: bool,
) -> dict[str, Any]:
    """Collect the compile-time constants of a kernel."""
    return {
        "D": q.shape[4],
        "D_PAD": padded(q.shape[4]),
        "BLOCK_Q": tiles.rows,
        "BLOCK_K": tiles.columns,
        "ALIGN": align,
        "BIAS_ALIGN": alignment(bias),
        "FULL_Q": q.shape[3] % tiles.rows == 0,
        # The forward kernel always reads the first keys, even if there are none.
        "FULL_K": num_keys > 0 and num_keys % tiles.columns == 0,
        "BIAS_FULL": bias is None
        or (
            num_keys > 0
            and bias.shape[-2] % tiles.rows == 0
            and bias.shape[-1] % tiles.columns == 0
        ),
        "MASK": 0 if mask is None else mask.shape[-1],
        "PRECISION": "tf32" if tf32 else "ieee",
    }


def rounds_to_tf32(q: Tensor) -> bool:
    """Whether float32 matmuls currently use TF32."""
    return q.dtype == torch.float32 and allows_tf32()


def prepared(
    kernel: Any,
    programs: int,
    tiles: Tiles,
    device: torch.device,
    numbers: Sequence[float],
    **constants: Any,
) -> Launch:
    """Prepare a launch; kernels with simple addresses get a cap on registers."""
    simple = constants.get("BIAS_FULL") and constants["ALIGN"] == WIDE
    options = tiles.register_limit(device) if simple else {}
    options |= {"num_warps": tiles.warps, "num_stages": tiles.stages}
    return Launch(kernel, (programs,), numbers, **constants, **options)
