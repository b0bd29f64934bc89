"""Adds the partial sums of the parts of a cut row, in order.

A program owns one cut row and BLOCK_W columns; it reads the row's partial sums E slots at a time
and writes the row once.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import triton
import triton.language as tl
from torch import Tensor

MERGED_AT_ONCE = 16
WIDTH = 128


@triton.jit
def add_shares_kernel(
    cut_row, cut_ptr, partial, out, W: tl.constexpr, BLOCK_W: tl.constexpr, E: tl.constexpr
):  # fmt: skip
    """Sum rows of ``partial`` [slots, W] into rows of ``out`` [rows, W]."""
    w = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    row = tl.load(cut_row + tl.program_id(0)).to(tl.int64)  # []
    first = tl.load(cut_ptr + tl.program_id(0))  # []
    last = tl.load(cut_ptr + tl.program_id(0) + 1)  # []
    total = tl.zeros([BLOCK_W], partial.dtype.element_ty)
    for begin in range(first, last, E):
        slot = (begin + tl.arange(0, E)).to(tl.int64)
        mask = (slot < last)[:, None] & (w < W)[None, :]
        rows = partial + slot[:, None] * W + w[None, :]
        total += tl.sum(tl.load(rows, mask=mask, other=0.0), 0)  # [E, BLOCK_W] -> [BLOCK_W]
    tl.store(out + row * W + w, total.to(out.dtype.element_ty), mask=w < W)


def add_shares(cut_row: Tensor, cut_ptr: Tensor, share: Tensor, out: Tensor) -> None:
    """Write the sum of every cut row's partial results into its row of ``out``."""
    width = share[:1].numel()
    if not width:
        return
    block = min(WIDTH, 1 << (width - 1).bit_length())
    add_shares_kernel[(len(cut_row), -(-width // block))](
        *(cut_row, cut_ptr, share, out),
        W=width, BLOCK_W=block, E=MERGED_AT_ONCE,
        num_warps=1,
    )  # fmt: skip
