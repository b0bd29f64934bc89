"""Relative positions of tokens (AlphaFold3, algorithm 3)."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from bevatron.models.common.folding import Linear
from bevatron.parallel.axial import own

FARTHEST, FARTHEST_COPY = 32, 2


class RelativePositionEncoding(nn.Module):
    """Linear map of classes of offsets in residues, tokens and copies, and of equal entities."""

    def __init__(self, width: int) -> None:
        super().__init__()
        classes = 2 * (2 * FARTHEST + 2) + 1 + (2 * FARTHEST_COPY + 2)
        self.linear = Linear(classes, width, bias=False)

    def forward(self, batch: Mapping[str, Tensor]) -> Float[Tensor, "*batch R N P"]:
        """Encode every pair of tokens; own rows where processes share a sample."""
        chain, entity = _same(batch["asym_id"]), _same(batch["entity_id"])
        residue = chain & _same(batch["residue_index"])
        features = [
            _classes(batch["residue_index"], FARTHEST, chain),
            _classes(batch["token_index"], FARTHEST, residue),
            entity[..., None],
            _classes(batch["sym_id"], FARTHEST_COPY, entity),
        ]
        encoded: Tensor = self.linear(torch.cat(features, -1).to(self.linear.weight.dtype))
        return encoded


def _same(x: Int[Tensor, "*batch N"]) -> Tensor:
    return own(x, -1)[..., :, None] == x[..., None, :]


def _classes(x: Int[Tensor, "*batch N"], farthest: int, where: Tensor) -> Tensor:
    """Class of the offset i - j; one more class for pairs where it means nothing."""
    offset = (own(x, -1)[..., :, None] - x[..., None, :] + farthest).clamp(0, 2 * farthest)
    return F.one_hot(offset.masked_fill(~where, 2 * farthest + 1), 2 * farthest + 2)
