"""The transformer over tokens of the diffusion module (AlphaFold3, algorithms 23 and 24).

Noisy copies of one structure share the pair z: a bias is computed once per block and the copies are
the rows of the attention operator, which sums the bias's gradient over them.

Legend: M copies, N tokens, C channels of a token, D of its condition, P of a pair, H heads.
"""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bevatron.kernels import layer_norm_linear, pair_attention, qkvg
from bevatron.models.alphafold3.adaptive import GATE_BIAS, AdaptiveNorm, ConditionedTransition
from bevatron.models.alphafold3.projection import Projection


class AttentionProjections(nn.Module):
    """Queries (with a bias), keys, values, gate and output of an attention of full width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query = Projection(width, width, bias=True)
        self.key = Projection(width, width)
        self.value = Projection(width, width)
        self.gate = Projection(width, width, start="zeros")
        self.output = Projection(width, width)


class PairBias(nn.Module):
    """A bias per head from the pair: ``W LayerNorm(z)``, the norm without a bias."""

    def __init__(self, pair_width: int, num_heads: int) -> None:
        super().__init__()
        self.norm = nn.Parameter(torch.ones(pair_width))
        self.projection = Projection(pair_width, num_heads)

    def forward(self, z: Float[Tensor, "*pairs Q K P"]) -> Float[Tensor, "*pairs H Q K"]:
        """Map pairs of queries and keys to one number per head."""
        per_head: Tensor = layer_norm_linear(z, self.norm, None, self.projection.weight)
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
        self.num_heads = num_heads
        self.norm = AdaptiveNorm(width, condition_width)
        self.attention = AttentionProjections(width)
        self.bias = PairBias(pair_width, num_heads)
        self.output_gate = Projection(
            condition_width, width, bias=True, start="zeros", start_bias=GATE_BIAS
        )

    def forward(
        self,
        a: Float[Tensor, "*batch M N C"],
        s: Float[Tensor, "*batch M N D"],
        z: Float[Tensor, "*batch N N P"],
        mask: Bool[Tensor, "*batch N"],
    ) -> Float[Tensor, "*batch M N C"]:
        """Return the update, to be added to a; masked tokens are no keys."""
        M, N, C = a.shape[-3:]
        layers = self.attention
        rows = qkvg(
            self.norm(a, s),
            layers.query.weight,
            layers.key.weight,
            layers.value.weight,
            layers.gate.weight,
            q_bias=layers.query.bias,
        )
        heads = (self.num_heads, C // self.num_heads)
        q, k, v, gate = (x.reshape(-1, M, N, C).unflatten(-1, heads) for x in rows)
        bias = self.bias(z).reshape(-1, 1, self.num_heads, N, N)
        keep = mask.reshape(-1, 1, N).expand(-1, M, N)
        attended = pair_attention(q, k, v, bias, keep, gate=gate, layout="BSNHD")
        update: Tensor = layers.output(attended.reshape(a.shape))
        output_gate: Tensor = self.output_gate(s).sigmoid()
        return output_gate * update


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
    checkpointed
        Whether the backward pass recomputes the inside of each block.
    """

    def __init__(
        self,
        width: int,
        condition_width: int,
        pair_width: int,
        num_heads: int,
        num_blocks: int,
        *,
        checkpointed: bool = False,
    ) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.blocks = nn.ModuleList(
            DiffusionBlock(
                ConditionedAttention(width, condition_width, pair_width, num_heads),
                ConditionedTransition(width, condition_width),
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
        for block in self.blocks:
            a = run_block(block, a, s, z, mask, checkpointed=self.checkpointed)
        return a


class DiffusionBlock(nn.Module):
    """``a += attention(a, s, z)``, then ``a += transition(a, s)``: of tokens or of atoms."""

    def __init__(self, attention: nn.Module, transition: ConditionedTransition) -> None:
        super().__init__()
        self.attention = attention
        self.transition = transition

    def forward(self, a: Tensor, s: Tensor, z: Tensor, mask: Tensor) -> Tensor:
        """Update rows."""
        a = a + self.attention(a, s, z, mask)
        update: Tensor = self.transition(a, s)
        return a + update


def run_block(block: Callable[..., Tensor], *inputs: Tensor, checkpointed: bool) -> Tensor:
    """Run a block; with ``checkpointed`` its inside is computed again in the backward pass."""
    if checkpointed and torch.is_grad_enabled():
        found: Tensor = checkpoint(block, *inputs, use_reentrant=False, preserve_rng_state=False)
        return found
    return block(*inputs)
