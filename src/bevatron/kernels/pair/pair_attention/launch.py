"""Shared by all launches: inputs as kernels can read them, their strides, constants, registers.

The kernels take [B, S, H, N, D] views with whatever strides they have. Strides are passed in units
of eight elements where all allow it, which tells the compiler that rows are aligned to 16 bytes.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bevatron.kernels.pair.pair_attention.tiles import padded
from bevatron.kernels.pair.pair_attention.triton_forward import MASK_COLUMNS, MASK_WIDTH
from bevatron.kernels.shared.tiles import Tiles
from bevatron.kernels.shared.triton_math import allows_tf32

WIDE = 8
"""Elements by which strides are counted where all allow it."""
LARGEST_STRIDE = 2**31 // 256
"""Offsets within a block are 32-bit."""
BIAS_UNIT = 64
"""A bias that rows share is filled up to multiples of this, so that no load of it needs a mask."""


def prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor | None,
    bias: Tensor | None,
    mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Copy tensors that the kernels cannot read in place, or would read slowly."""
    return (
        rows_contiguous(q),
        rows_contiguous(k),
        rows_contiguous(v),
        None if gate is None else rows_contiguous(gate),
        None if bias is None else _rows_aligned(bias),
        None if mask is None else in_columns(mask, q),
    )


def rows_contiguous(tensor: Tensor) -> Tensor:
    """Copy a tensor whose last axis is not contiguous, or whose rows lie too far apart."""
    good = tensor.stride(-1) == 1 and tensor.stride(-2) < LARGEST_STRIDE
    return tensor if good else tensor.contiguous()


def in_columns(mask: Tensor, q: Tensor) -> Tensor:
    """Write the mask, 0 or minus infinity, as columns that a matmul adds to the logits.

    All but the first are 0. In float32 there are no matrix units, and copies serve.
    """
    if q.element_size() > 2:
        return in_copies(mask)
    columns = q.new_zeros((*mask.shape, MASK_COLUMNS.value))
    torch.log2(mask, out=columns[..., 0])
    return columns


def in_copies(mask: Tensor) -> Tensor:
    """Write what is added to logits, as often for each key as `load_pairs` wants it."""
    copies = mask[..., None].expand(*mask.shape, MASK_WIDTH.value)
    return torch.where(copies, 0.0, float("-inf")).contiguous()


def _rows_aligned(bias: Tensor) -> Tensor:
    """Have rows of the bias begin and end where blocks do: it is read for every pair of rows.

    Where a copy is needed there is minus infinity around it. A bias of each row is read but once
    and copied only to have its rows aligned.
    """
    Nq, Nk = bias.shape[-2:]
    unit = WIDE if bias.shape[1] > 1 else BIAS_UNIT
    rows, columns = (-Nq % unit if unit > WIDE else 0), -Nk % unit
    if bias.stride(-1) == 1 and alignment(bias) == WIDE and not (rows or columns):
        return bias
    aligned = bias.new_full((*bias.shape[:-2], Nq + rows, Nk + columns), float("-inf"))
    aligned[..., :Nq, :Nk] = bias
    return aligned


def alignment(*tensors: Tensor | None) -> int:
    """Return the unit in which the strides of all these tensors may be counted."""
    given = [tensor for tensor in tensors if tensor is not None]
    wide = all(stride % WIDE == 0 for tensor in given for stride in tensor.stride()[:4])
    return WIDE if wide else 1


def strides(align: int, *tensors: Tensor | None) -> list[int]:
    """List strides of B, S, H and N; of a bias shared by rows that of S is zero."""
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


def one_stride(*tensors: Tensor) -> bool:
    """Whether rows of all these lie equally far apart: kernels then need fewer registers."""
    return len({tensor.stride(3) for tensor in tensors}) == 1


def mask_strides(mask: Tensor | None) -> Sequence[int]:
    """List strides of B and S, counted in keys."""
    return (0, 0) if mask is None else [stride // mask.shape[-1] for stride in mask.stride()[:2]]


def constants_of(
    q: Tensor, tiles: Tiles, align: int, bias: Tensor | None, num_keys: int, mask: Tensor | None
) -> dict[str, Any]:
    """Collect the compile-time constants of a kernel."""
    tf32 = q.dtype == torch.float32 and allows_tf32()
    return {
        "D": q.shape[4],
        "D_PAD": padded(q.shape[4]),
        "BLOCK_Q": tiles.rows,
        "BLOCK_K": tiles.columns,
        "ALIGN": align,
        "BIAS_ALIGN": alignment(bias),
        "FULL_Q": q.shape[3] % tiles.rows == 0,
        # The forward kernel looks at the first keys without asking: there need not be any.
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


def launch(kernel: Any, programs: int, tiles: Tiles, *arguments: Any, **constants: Any) -> None:
    """Launch a kernel; where addresses are simple it does well with few registers."""
    if programs == 0:
        return
    simple = constants.get("BIAS_FULL") and constants["ALIGN"] == WIDE
    kernel[(programs,)](
        *arguments,
        **constants,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        **(tiles.register_limit(arguments[0].device) if simple else {}),
    )
