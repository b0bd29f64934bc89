"""The mask as the kernels of attention add it to logits: 0, or minus infinity."""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from bevatron.kernels.pair.pair_attention.triton_forward import MASK_COLUMNS, MASK_WIDTH
from bevatron.kernels.shared.standing_weights import once
from bevatron.kernels.shared.triton_launch import launch

BLOCK = 256
MOST_KEPT = 2**16
"""Keys of a mask that `once` keeps, as 2 MB of columns; of a larger one a launch is no loss."""


class Keys(NamedTuple):
    """The mask of keys as the kernels read it; empty if there is none.

    Attributes
    ----------
    columns
        The mask as columns that a matmul adds to logits: all but the first are 0. In float32 there
        are no matrix units, and copies serve as columns.
    copies : copies of the mask of each key, as many as `load_pairs` wants, if they are asked for
    ends : [B, S], where the keys of each row end: all behind are masked
    """

    columns: Tensor | None
    copies: Tensor | None
    ends: Tensor | None


def keys_of(mask: Tensor | None, q: Tensor, *, wants_copies: bool) -> Keys:
    """Write 0 or minus infinity for each key of the mask [B, S, Nk], of a small one only `once`."""
    if mask is None:
        return Keys(None, None, None)
    if mask.numel() > MOST_KEPT:
        return _written(mask, q, wants_copies)
    return once(lambda: _written(mask, q, wants_copies), mask, to=(q.dtype, wants_copies))


def _written(mask: Tensor, q: Tensor, wants_copies: bool) -> Keys:
    is_single = q.element_size() > 2
    columns = copies = q.new_empty(0)
    if not is_single:
        columns = q.new_empty((*mask.shape, MASK_COLUMNS.value))
    if is_single or wants_copies:
        copies = q.new_empty((*mask.shape, MASK_WIDTH.value), dtype=torch.float32)
    ends = q.new_empty(mask.shape[:2], dtype=torch.int32)
    launch(
        mask_kernel,
        (ends.numel(),),
        (mask.contiguous(), columns, copies, ends),
        (mask.shape[2],),
        HAS_COLUMNS=not is_single,
        HAS_COPIES=is_single or wants_copies,
        BLOCK=BLOCK,
    )
    return Keys(copies if is_single else columns, copies if wants_copies else None, ends)


@triton.jit(do_not_specialize=["Nk"])
def mask_kernel(
    Mask, Columns, Copies, Ends, Nk,
    HAS_COLUMNS: tl.constexpr, HAS_COPIES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the keys of one row, BLOCK at a time, and where they end."""
    row = tl.program_id(0).to(tl.int64)
    last = tl.zeros([BLOCK], tl.int32)
    for first in tl.range(0, Nk, BLOCK):
        keys = tl.arange(0, BLOCK) + first
        inside, key = keys < Nk, row * Nk + keys
        kept = tl.load(Mask + key, mask=inside, other=0) != 0  # [BLOCK]
        last = tl.where(kept, keys + 1, last)
        added = tl.where(kept, 0.0, float("-inf"))[:, None]
        if HAS_COLUMNS:
            column = tl.arange(0, MASK_COLUMNS)[None, :]
            at = Columns + key[:, None] * MASK_COLUMNS + column
            block = tl.where(column == 0, added, 0.0)  # [BLOCK, MASK_COLUMNS]
            tl.store(at, block.to(Columns.dtype.element_ty), mask=inside[:, None])
        if HAS_COPIES:
            at = Copies + key[:, None] * MASK_WIDTH + tl.arange(0, MASK_WIDTH)[None, :]
            tl.store(at, tl.broadcast_to(added, [BLOCK, MASK_WIDTH]), mask=inside[:, None])
    tl.store(Ends + row, tl.max(last, 0))
