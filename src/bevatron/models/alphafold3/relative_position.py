"""Relative positions of tokens (AlphaFold3, algorithm 3)."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from bevatron.models.common.folding import Linear
from bevatron.parallel.axial import own

FARTHEST, FARTHEST_COPY = 32, 2
OFFSETS, COPIES = 2 * FARTHEST + 2, 2 * FARTHEST_COPY + 2
"""Classes of offsets, in residues as in tokens, and in copies of an entity."""
PAIRS = 2**16
"""Pairs whose classes become one-hot vectors at a time."""


class RelativePositionEncoding(nn.Module):
    """Linear map of classes of offsets in residues, tokens and copies, and of equal entities.

    ``W_r[c_r] + W_t[c_t] + (W_e + W_c)[c_c]``, the rows of W that a one-hot vector of N x N x 139
    would select; W_e counts where entities are equal, in all classes of copies but the last.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = Linear(2 * OFFSETS + 1 + COPIES, width, bias=False)

    def forward(self, batch: Mapping[str, Tensor]) -> Float[Tensor, "*batch R N P"]:
        """Encode every pair of tokens; own rows where processes share a sample."""
        chain, entity = _same(batch["asym_id"]), _same(batch["entity_id"])
        residue = chain & _same(batch["residue_index"])
        classes = torch.stack(
            [
                _classes(batch["residue_index"], FARTHEST, chain),
                _classes(batch["token_index"], FARTHEST, residue) + OFFSETS,
                _classes(batch["sym_id"], FARTHEST_COPY, entity) + 2 * OFFSETS,
            ],
            -1,
        )
        offsets, same_entity, copies = self.linear.weight.T.split([2 * OFFSETS, 1, COPIES])
        table = torch.cat([offsets, copies[:-1] + same_entity, copies[-1:]])
        rows: Tensor = _SumOfRows.apply(classes.flatten(0, -2), table)
        encoded: Tensor = rows.unflatten(0, classes.shape[:-1])
        return encoded


class _SumOfRows(torch.autograd.Function):
    """Sums of rows of a table, whose gradient is a product by the classes as vectors.

    Hundreds of thousands of pairs have the same few classes, so adding them row by row takes much
    longer than a matmul.
    """

    @staticmethod
    def forward(ctx: Any, classes: Int[Tensor, "n k"], table: Float[Tensor, "V C"]) -> Tensor:
        ctx.save_for_backward(classes)
        ctx.length = len(table)
        return F.embedding_bag(classes, table, mode="sum")

    @staticmethod
    def backward(ctx: Any, grad: Float[Tensor, "n C"]) -> tuple[None, Float[Tensor, "V C"]]:
        (classes,) = ctx.saved_tensors
        total = grad.new_zeros(ctx.length, grad.shape[1])
        for some, grads in zip(classes.split(PAIRS), grad.split(PAIRS), strict=True):
            chosen = grad.new_zeros(len(some), ctx.length).scatter_(1, some, 1.0)
            total = torch.addmm(total, chosen.T, grads)
        return None, total


def _same(x: Int[Tensor, "*batch N"]) -> Tensor:
    return own(x, -1)[..., :, None] == x[..., None, :]


def _classes(x: Int[Tensor, "*batch N"], farthest: int, where: Tensor) -> Tensor:
    """Class of the offset i - j, with an extra class for pairs without a meaningful one."""
    offset = (own(x, -1)[..., :, None] - x[..., None, :] + farthest).clamp(0, 2 * farthest)
    return offset.masked_fill(~where, 2 * farthest + 1)
