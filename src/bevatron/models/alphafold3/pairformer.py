"""The Pairformer (AlphaFold3, algorithm 17) and the attention of its single track."""

from functools import partial

from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from bevatron.models.alphafold3.config_trunk import PairformerConfig
from bevatron.models.alphafold3.pair import PairBlock, pair_drops
from bevatron.models.common.folding import (
    Checkpointing,
    GatedAttention,
    PairBias,
    Transition,
    checkpointed,
    run_stack,
)
from bevatron.parallel.axial import all_of

State = tuple[Tensor, Tensor]
"""Single and pair representation."""


class AttentionPairBias(nn.Module):
    """Attention among tokens with a bias by the pair (AlphaFold3, algorithm 24, unconditioned).

    Parameters
    ----------
    width, pair_width : channels of the single and of the pair representation
    num_heads, head_width : those of the attention
    """

    def __init__(self, width: int, pair_width: int, num_heads: int, head_width: int) -> None:
        super().__init__()
        self.attention = GatedAttention(width, num_heads, head_width, q_bias=True)
        self.bias = PairBias(pair_width, num_heads)

    def forward(
        self,
        s: Float[Tensor, "*batch N C"],
        z: Float[Tensor, "*batch R N P"],
        mask: Bool[Tensor, "*batch N"] | None = None,
    ) -> Float[Tensor, "*batch N C"]:
        """Compute the update of the single representation; masked tokens are not attended to."""
        keys = None if mask is None else mask.unsqueeze(-2)
        own: Tensor = self.attention(s.unsqueeze(-3), self.bias(z), keys)
        return all_of(own.squeeze(-3), -2, s.shape[-2])


class PairformerBlock(nn.Module):
    """A pair block, then attention with pair bias and a transition of the single representation."""

    def __init__(
        self, width: int, pair_width: int, config: PairformerConfig, checkpointing: Checkpointing
    ) -> None:
        super().__init__()
        self.checkpointing = checkpointing
        self.pair = PairBlock(pair_width, config.pair)
        self.attention = AttentionPairBias(width, pair_width, config.num_heads, config.head_width)
        self.transition = Transition(width, config.transition)

    def forward(
        self,
        state: State,
        token_mask: Bool[Tensor, "*batch N"] | None = None,
        pair_mask: Bool[Tensor, "*batch N N"] | None = None,
        drops: Float[Tensor, "4 *batch N P"] | None = None,
    ) -> State:
        """Compute the new (s, z); arguments as in `Pairformer` and `PairBlock`."""
        s, z = state
        policy = self.checkpointing
        z = checkpointed(policy, "pair_block", self.pair)(z, pair_mask, drops)
        s = s + checkpointed(policy, "attention_pair_bias", self.attention)(s, z, token_mask)
        s = s + checkpointed(policy, "transition", self.transition)(s)
        return s, z


class Pairformer(nn.Module):
    """A stack of Pairformer blocks: of the trunk, or of the confidence head.

    Parameters
    ----------
    width, pair_width : channels of the single and of the pair representation
    checkpointing : what the backward pass computes again
    call : tells its dropout from that of other stacks
    """

    def __init__(
        self,
        width: int,
        pair_width: int,
        config: PairformerConfig,
        checkpointing: Checkpointing,
        call: int = 0,
    ) -> None:
        super().__init__()
        self.checkpointing, self.call = checkpointing, call
        self.dropout = config.pair.dropout
        self.blocks = nn.ModuleList(
            PairformerBlock(width, pair_width, config, checkpointing)
            for _ in range(config.num_blocks)
        )

    def forward(
        self,
        s: Float[Tensor, "*batch N C"],
        z: Float[Tensor, "*batch R N P"],
        token_mask: Bool[Tensor, "*batch N"] | None = None,
        pair_mask: Bool[Tensor, "*batch N N"] | None = None,
        seed: Int[Tensor, ""] | None = None,
    ) -> State:
        """Compute the new (s, z).

        Parameters
        ----------
        s, z
            Single and pair representation, of which R rows are own where processes share a sample.
        token_mask : true for tokens that exist; None = all
        pair_mask : likewise of pairs; None = pairs of such tokens
        seed : dropout seed; None = no dropout
        """
        if pair_mask is None:
            pair_mask = pairs_of(token_mask)
        drops = pair_drops(seed, self.call, z, len(self.blocks), self.dropout)
        blocks = [
            partial(block, token_mask=token_mask, pair_mask=pair_mask, drops=drop)
            for block, drop in zip(self.blocks, drops, strict=True)
        ]
        return run_stack(self.checkpointing, blocks, (s, z))


def pairs_of(mask: Bool[Tensor, "*batch N"] | None) -> Bool[Tensor, "*batch N N"] | None:
    """Return which pairs of tokens exist."""
    return None if mask is None else mask[..., :, None] & mask[..., None, :]
