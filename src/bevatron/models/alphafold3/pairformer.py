"""The Pairformer (AlphaFold3, algorithm 17) and the attention of its single track."""

from functools import partial
from typing import Any

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
    recomputing,
    run_stack,
)
from bevatron.parallel.axial import Coming, all_of, gathered, sample_group, turned

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
        return all_of(self.of_own(s, z, mask), -2, s.shape[-2])

    def of_own(
        self,
        s: Float[Tensor, "*batch N C"],
        z: Float[Tensor, "*batch R N P"],
        mask: Bool[Tensor, "*batch N"] | None = None,
    ) -> Float[Tensor, "*batch R C"]:
        """Compute the update of own tokens."""
        keys = None if mask is None else mask.unsqueeze(-2)
        update: Tensor = self.attention(s.unsqueeze(-3), self.bias(z), keys)
        return update.squeeze(-3)


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
        return checkpointed(policy, "transition", self.transition)(s), z


class Pairformer(nn.Module):
    """A stack of Pairformer blocks: of the trunk, or of the confidence head.

    Parameters
    ----------
    width, pair_width : channels of the single and of the pair representation
    checkpointing : what the backward pass recomputes
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
        masks: dict[str, Any] = {"token_mask": token_mask, "pair_mask": pair_mask}
        if sample_group().size == 1:
            blocks = [
                partial(block, **masks, drops=drop)
                for block, drop in zip(self.blocks, drops, strict=True)
            ]
            return run_stack(self.checkpointing, blocks, (s, z))
        every: list[Any] = [*self.blocks]
        none: list[Any] = [None]
        lagging = none + every + none, 2 * none + every
        stages = zip(every + 2 * none, *lagging, drops + 2 * none, strict=True)
        bound = [
            partial(self._pipelined, **masks, parts=stage[:3], drops=stage[3]) for stage in stages
        ]
        s, _, z = run_stack(self.checkpointing, bound, (s, s.new_empty(0), z))
        return s, z

    def _pipelined(
        self,
        state: tuple[Tensor, Tensor, Tensor],
        token_mask: Tensor | None,
        pair_mask: Tensor | None,
        parts: tuple["PairformerBlock | None", ...],
        drops: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Update the pair by a block and s by those before it.

        The single representation waits for the pair, but the pair never for it. ``parts``: a block
        updates the pair, the one before attends while the pair is turned back, and the one before
        that has its transition. ``state``: s, the update of own tokens that attention has left and
        that is gathered beside the pair's block, and z.
        """
        s, update, z = state
        of_pair, attending, changing = parts
        policy, coming, whole = self.checkpointing, Coming(z), Coming(s)
        if changing is not None:
            whole = gathered(update, -2, s.shape[-2])
        if of_pair is not None:
            new_columns = checkpointed(policy, "pair_block", of_pair.pair.columns)
            columns = new_columns(z, pair_mask, drops)
            coming = Coming(columns) if recomputing() else turned(columns)
        if changing is not None:
            s = s + whole.wait()
            s = checkpointed(policy, "transition", changing.transition)(s)
        if attending is not None:
            attend = checkpointed(policy, "attention_pair_bias", attending.attention.of_own)
            update = attend(s, z, token_mask)
        return s, update, coming.wait()


def pairs_of(mask: Bool[Tensor, "*batch N"] | None) -> Bool[Tensor, "*batch N N"] | None:
    """Return which pairs of tokens exist."""
    return None if mask is None else mask[..., :, None] & mask[..., None, :]
