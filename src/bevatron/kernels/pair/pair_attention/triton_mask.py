"""The mask as the kernels of attention add it to logits: 0, or minus infinity."""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from bevatron.kernels.pair.pair_attention.triton_forward import MASK_COLUMNS, MASK_WIDTH
from bevatron.kernels.shared.triton_launch import launch

BLOCK = 256


def columns_and_copies(
    mask: Tensor | None, q: Tensor, *, wants_copies: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Write the mask [B, S, Nk] as columns that a matmul adds to logits, and as copies.

    All columns but the first are 0. There are as many copies for each key as `load_pairs` wants. In
    float32 there are no matrix units, and copies serve as columns.
    """
    if mask is None:
        return None, None
    is_single = q.element_size() > 2
    columns = copies = q.new_empty(0)
    if not is_single:
        columns = q.new_empty((*mask.shape, MASK_COLUMNS.value))
    if is_single or wants_copies:
        copies = q.new_empty((*mask.shape, MASK_WIDTH.value), dtype=torch.float32)
    launch(
        mask_kernel,
        (-(-mask.numel() // BLOCK),),
        (mask.contiguous(), columns, copies),
        (mask.numel(),),
        HAS_COLUMNS=not is_single,
        HAS_COPIES=is_single or wants_copies,
        BLOCK=BLOCK,
    )
    return copies if is_single else columns, copies if wants_copies else None


@triton.jit(do_not_specialize=["keys"])
def mask_kernel(
    Mask, Columns, Copies, keys,
    HAS_COLUMNS: tl.constexpr, HAS_COPIES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write BLOCK keys."""
    key = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = key < keys
    mask = tl.load(Mask + key, mask=inside, other=0)  # [BLOCK]
    added = tl.where(mask != 0, 0.0, float("-inf"))[:, None]
    if HAS_COLUMNS:
        column = tl.arange(0, MASK_COLUMNS)[None, :]
        at = Columns + key[:, None] * MASK_COLUMNS + column
        block = tl.where(column == 0, added, 0.0)  # [BLOCK, MASK_COLUMNS]
        tl.store(at, block.to(Columns.dtype.element_ty), mask=inside[:, None])
    if HAS_COPIES:
        at = Copies + key[:, None] * MASK_WIDTH + tl.arange(0, MASK_WIDTH)[None, :]
        tl.store(at, tl.broadcast_to(added, [BLOCK, MASK_WIDTH]), mask=inside[:, None])
