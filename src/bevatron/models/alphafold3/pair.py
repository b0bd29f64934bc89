"""The block that updates a pair by its triangles, which all stacks of the trunk share."""

from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from bevatron.models.alphafold3.config_trunk import PairConfig
from bevatron.models.common.folding import (
    Transition,
    TriangleAttention,
    TriangleMultiplication,
    keep_masks,
    recomputed_if_large,
)

DROPOUTS = 4
"""Of a pair block."""


class PairBlock(nn.Module):
    """Triangle multiplications, triangle attentions and a transition, which add to the pair.

    AlphaFold3, algorithm 17, lines 2 to 6. Updates share dropout along rows, that of attention
    around the ending node along columns.
    """

    def __init__(self, width: int, config: PairConfig) -> None:
        super().__init__()
        heads = (config.num_heads, config.head_width)
        self.multiply_outgoing = TriangleMultiplication(width, config.hidden, outgoing=True)
        self.multiply_incoming = TriangleMultiplication(width, config.hidden, outgoing=False)
        self.attend_starting = TriangleAttention(width, *heads, starting=True)
        self.attend_ending = TriangleAttention(width, *heads, starting=False)
        self.transition = Transition(width, config.transition)

    def forward(
        self,
        z: Float[Tensor, "*batch R N P"],
        mask: Bool[Tensor, "*batch N N"] | None = None,
        drops: Float[Tensor, "4 *batch N P"] | None = None,
    ) -> Float[Tensor, "*batch R N P"]:
        """Compute the new pair.

        Parameters
        ----------
        z : pair representation, or own rows of it
        mask : true for pairs of tokens that exist
        drops : one item of `pair_drops`; None = no dropout
        """
        z, drop = self._by_rows(z, mask, drops)
        updated: Tensor = self.transition(self.attend_ending(z, mask, drop))
        return updated

    def columns(
        self,
        z: Float[Tensor, "*batch R N P"],
        mask: Bool[Tensor, "*batch N N"] | None = None,
        drops: Float[Tensor, "4 *batch N P"] | None = None,
    ) -> Float[Tensor, "*batch K N P"]:
        """Compute own columns of the new pair, laid out as rows; arguments as of `forward`."""
        z, drop = self._by_rows(z, mask, drops)
        updated: Tensor = self.transition(self.attend_ending.by_columns(z, mask, drop))
        return updated

    def _by_rows(
        self, z: Tensor, mask: Tensor | None, drops: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Update the pair by rows; return the dropout mask of the attention by columns, too."""
        by_rows = self.multiply_outgoing, self.multiply_incoming, self.attend_starting
        *drop, last = [None] * DROPOUTS if drops is None else drops.unbind()
        for update, of_update in zip(by_rows, drop, strict=True):
            z = recomputed_if_large(z, update)(z, mask, of_update)
        return z, last


def pair_drops(
    seed: Int[Tensor, ""] | None,
    call: int,
    z: Float[Tensor, "*batch R N P"],
    num_blocks: int,
    rate: float,
) -> list[Tensor | None]:
    """Draw the dropout masks of all pair blocks of a stack at once.

    Parameters
    ----------
    seed, call : see `keep_masks`; without a seed there is no dropout
    num_blocks : blocks of the stack
    rate : dropout rate
    """
    if seed is None or rate == 0 or num_blocks == 0:
        return [None] * num_blocks
    masks = keep_masks(seed, call, z, DROPOUTS * num_blocks, rate)
    return list(masks.unflatten(0, (num_blocks, DROPOUTS)).unbind())
