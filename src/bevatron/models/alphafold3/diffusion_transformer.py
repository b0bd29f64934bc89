"""The transformer over tokens of the diffusion module (AlphaFold3, algorithms 23 and 24).

Noisy copies of one structure share the pair z: biases are computed once for all of them and the
copies are the rows of the attention operator, which sums a bias's gradient over them.

Legend: M copies, N tokens, C channels of a token, D of its condition, P of a pair, H heads.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, cast

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from bevatron.kernels import layer_norm_linear
from bevatron.models.alphafold3.adaptive import (
    AdaptiveNorm,
    Condition,
    ConditionedTransition,
    conditions_of,
    output_gate,
)
from bevatron.models.common.folding import (
    Checkpointing,
    GatedAttention,
    LayerNorm,
    Linear,
    checkpointed,
    run_stack,
)
from bevatron.parallel.axial import gathered

BlockCondition = tuple[Condition, Condition]
"""Of a block's attention and of its transition, computed beforehand."""


class ConditionedBias(nn.Module):
    """Weights of a bias per head from the pair, ``W LayerNorm(z)``, the norm without a bias."""

    def __init__(self, pair_width: int, num_heads: int) -> None:
        super().__init__()
        self.norm = LayerNorm(pair_width, bias=False)
        self.linear = Linear(pair_width, num_heads, bias=False)

    @property
    def weight(self) -> Float[Tensor, "H P"]:
        """Of the layer for rows that are normalised but not scaled."""
        return self.linear.weight * self.norm.weight


def biases_of(
    z: Float[Tensor, "*pairs Q K P"], layers: Iterable[nn.Module]
) -> list[Float[Tensor, "*pairs H Q K"]]:
    """Compute the biases of all blocks of a stack, reading the pair once.

    A norm's weight is folded into the layer behind it, so blocks differ only in the matmul.

    Parameters
    ----------
    layers : each block's `ConditionedBias`, all with the same number of heads
    """
    weights = [cast("ConditionedBias", layer).weight for layer in layers]
    biases = layer_norm_linear(z, None, None, torch.cat(weights)).chunk(len(weights), -1)
    return [bias.movedim(-1, -3) for bias in biases]


class ConditionedAttention(nn.Module):
    r"""Attention with pair bias among tokens, conditioned: algorithm 24.

    .. math:: y = \sigma(W_l s + b_l) \odot W_o \big( \sigma(g) \odot
        \operatorname{softmax}(q k^\top / \sqrt{C / H} + b(z)) v \big)

    of queries, keys, values and gate of the adaptive norm of a.

    Parameters
    ----------
    width, condition_width, pair_width : C, D and P
    num_heads : H, a divisor of C
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

    @property
    def norms(self) -> tuple[AdaptiveNorm, ...]:
        """Result of `conditions_of`."""
        return (self.norm,)

    def forward(
        self,
        a: Float[Tensor, "*batch M N C"],
        s: Float[Tensor, "*batch M N D"],
        bias: Float[Tensor, "*batch H R N"],
        mask: Bool[Tensor, "*batch N"],
    ) -> Float[Tensor, "*batch M N C"]:
        """Return the update, to be added to a; masked tokens are not attended to.

        ``bias`` is b(z) of `biases_of`; own rows of it are gathered here, so that all rows exist
        for one block at a time.
        """
        given = Condition((self.norm.adapted(s),), self.output_gate(s).sigmoid())
        return given.gate * self.ungated(a, given, bias, mask)

    def ungated(self, a: Tensor, given: Condition, bias: Tensor, mask: Tensor) -> Tensor:
        """Return the values that the gate multiplies."""
        keys = mask[..., None, :].expand(a.shape[:-1])
        N = a.shape[-2]
        whole = gathered(bias, -2, N) if bias.shape[-2] < N else bias
        update: Tensor = self.attention(self.norm.given(a, given.norms[0]), whole, keys)
        return update


class DiffusionBlock(nn.Module):
    """``a += attention(a, s, bias)``, then ``a += transition(a, s)``: of tokens or of atoms."""

    def __init__(
        self, attention: nn.Module, transition: ConditionedTransition, checkpointing: Checkpointing
    ) -> None:
        super().__init__()
        self.attention = attention
        self.transition = transition
        self.checkpointing = checkpointing

    def forward(self, a: Tensor, s: Tensor | BlockCondition, bias: Tensor, mask: Tensor) -> Tensor:
        """Update rows."""
        attention, transition = cast("Any", self.attention), self.transition
        if not isinstance(s, Tensor):
            of_attention, of_transition = s
            update = attention.ungated(a, of_attention, bias, mask)
            a = torch.addcmul(a, of_attention.gate, update)
            return torch.addcmul(a, of_transition.gate, transition.ungated(a, of_transition))
        policy = self.checkpointing
        a = a + checkpointed(policy, "attention_pair_bias", attention)(a, s, bias, mask)
        update = checkpointed(policy, "transition", transition)(a, s)
        updated: Tensor = a + update
        return updated


def block_conditions(
    s: Float[Tensor, "*condition D"], blocks: Iterable[nn.Module]
) -> list[BlockCondition]:
    """Compute the conditions of all `DiffusionBlock` of a stack, without gradients."""
    layers = [layer for block in blocks for layer in (block.attention, block.transition)]
    found = conditions_of(s, cast("list[nn.Module]", layers))
    return list(zip(found[::2], found[1::2], strict=True))


class DiffusionTransformer(nn.Module):
    """Blocks of attention and transition, each added to its input: algorithm 23.

    The supplement prints no residual around the attention and feeds the transition the block's
    input; published models have the residual, and the transition after the attention.

    Parameters
    ----------
    width, condition_width, pair_width : C, D and P
    num_heads, num_blocks : H, and how many
    checkpointing : what the backward pass recomputes
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

    def biases(self, z: Float[Tensor, "*batch R N P"]) -> list[Float[Tensor, "*batch H R N"]]:
        """Compute the biases of all blocks, which all copies and noise levels share."""
        return biases_of(z, [block.get_submodule("attention.bias") for block in self.blocks])

    def forward(
        self,
        a: Float[Tensor, "*batch M N C"],
        s: Float[Tensor, "*batch M N D"] | Sequence[BlockCondition],
        biases: Sequence[Float[Tensor, "*batch H R N"]],
        mask: Bool[Tensor, "*batch N"],
    ) -> Float[Tensor, "*batch M N C"]:
        """Update tokens of all copies with the result of `biases`; padded tokens are masked.

        ``s`` may be the result of `block_conditions`.
        """
        conditions = [s] * len(self.blocks) if isinstance(s, Tensor) else s
        blocks = [
            partial(block, s=condition, bias=bias, mask=mask)
            for block, condition, bias in zip(self.blocks, conditions, biases, strict=True)
        ]
        return run_stack(self.checkpointing, blocks, a)
