"""The transformer over tokens of the diffusion module (AlphaFold3, algorithms 23 and 24).

Noisy copies of one structure share the pair z: a bias is computed once per block and the copies are
the rows of the attention operator, which sums the bias's gradient over them.

Legend: M copies, N tokens, C channels of a token, D of its condition, P of a pair, H heads.
"""

from functools import partial

from jaxtyping import Bool, Float
from torch import Tensor, nn

from bevatron.kernels import layer_norm_linear
from bevatron.models.alphafold3.adaptive import AdaptiveNorm, ConditionedTransition, output_gate
from bevatron.models.common.folding import (
    Checkpointing,
    GatedAttention,
    LayerNorm,
    Linear,
    checkpointed,
    run_stack,
)


class ConditionedBias(nn.Module):
    """A bias per head from the pair, ``W LayerNorm(z)``, the norm without a bias."""

    def __init__(self, pair_width: int, num_heads: int) -> None:
        super().__init__()
        self.norm = LayerNorm(pair_width, bias=False)
        self.linear = Linear(pair_width, num_heads, bias=False)

    def forward(self, z: Float[Tensor, "*pairs Q K P"]) -> Float[Tensor, "*pairs H Q K"]:
        """Map pairs of queries and keys to one number per head."""
        per_head: Tensor = layer_norm_linear(z, *self.norm.parts, self.linear.weight)
        return per_head.movedim(-1, -3)


class ConditionedAttention(nn.Module):
    r"""Attention with pair bias among tokens, conditioned: algorithm 24.

    .. math:: y = \sigma(W_l s + b_l) \odot W_o \big( \sigma(g) \odot
        \operatorname{softmax}(q k^\top / \sqrt{C / H} + b(z)) v \big)

    of queries, keys, values and gate of the adaptive norm of a.

    Parameters
    ----------
    width, condition_width, pair_width
        C, D and P.
    num_heads
        H, a divisor of C.
    """

    def __init__(self, width: int, condition_width: int, pair_width: int, num_heads: int) -> None:
        super().__init__()
        self.norm = AdaptiveNorm(width, condition_width)
        self.attention = GatedAttention(
            width, num_heads, width // num_heads, norm=False, q_bias=True
        )
        # Not zero: the gate below is almost closed at first.
        self.attention.out = Linear(width, width, bias=False)
        self.bias = ConditionedBias(pair_width, num_heads)
        self.output_gate = output_gate(condition_width, width)

    def forward(
        self,
        a: Float[Tensor, "*batch M N C"],
        s: Float[Tensor, "*batch M N D"],
        z: Float[Tensor, "*batch N N P"],
        mask: Bool[Tensor, "*batch N"],
    ) -> Float[Tensor, "*batch M N C"]:
        """Return the update, to be added to a; masked tokens are no keys."""
        keys = mask[..., None, :].expand(a.shape[:-1])
        update: Tensor = self.attention(self.norm(a, s), self.bias(z), keys)
        gate: Tensor = self.output_gate(s).sigmoid()
        return gate * update


class DiffusionBlock(nn.Module):
    """``a += attention(a, s, z)``, then ``a += transition(a, s)``: of tokens or of atoms."""

    def __init__(
        self, attention: nn.Module, transition: ConditionedTransition, checkpointing: Checkpointing
    ) -> None:
        super().__init__()
        self.attention = attention
        self.transition = transition
        self.checkpointing = checkpointing

    def forward(self, a: Tensor, s: Tensor, z: Tensor, mask: Tensor) -> Tensor:
        """Update rows."""
        policy = self.checkpointing
        a = a + checkpointed(policy, "attention_pair_bias", self.attention)(a, s, z, mask)
        update: Tensor = checkpointed(policy, "transition", self.transition)(a, s)
        return a + update


class DiffusionTransformer(nn.Module):
    """Blocks of attention and transition, each added to its input: algorithm 23.

    The supplement prints no residual around the attention and feeds the transition with the block's
    input; published models have the residual, and the transition behind the attention.

    Parameters
    ----------
    width, condition_width, pair_width
        C, D and P.
    num_heads, num_blocks
        H, and how many.
    checkpointing
        What the backward pass computes again.
    """

    def __init__(
        self,
        width: int,
        condition_width: int,
        pair_width: int,
        num_heads: int,
        num_blocks: int,
        checkpointing: Checkpointing,
    ) -> None:
        super().__init__()
        self.checkpointing = checkpointing
        self.blocks = nn.ModuleList(
            DiffusionBlock(
                ConditionedAttention(width, condition_width, pair_width, num_heads),
                ConditionedTransition(width, condition_width),
                checkpointing,
            )
            for _ in range(num_blocks)
        )

    def forward(
        self,
        a: Float[Tensor, "*batch M N C"],
        s: Float[Tensor, "*batch M N D"],
        z: Float[Tensor, "*batch N N P"],
        mask: Bool[Tensor, "*batch N"],
    ) -> Float[Tensor, "*batch M N C"]:
        """Update tokens of all copies."""
        blocks = [partial(block, s=s, z=z, mask=mask) for block in self.blocks]
        return run_stack(self.checkpointing, blocks, a)
