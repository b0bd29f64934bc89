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
    folded,
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
from bevatron.parallel.axial import Coming, gathered

BlockCondition = tuple[Condition, Condition]
"""Of a block's attention and of its transition, computed beforehand."""


class ConditionedBias(nn.Module):
    """Weights of a bias per head from the pair, ``W LayerNorm(z)``, the norm without a bias."""

    def __init__(self, pair_width: int, num_heads: int) -> None:
        super().__init__()
        self.norm = LayerNorm(pair_width, bias=False)
        self.linear = Linear(pair_width, num_heads, bias=False)


def biases_of(
    z: Float[Tensor, "*pairs Q K P"], layers: Iterable[nn.Module]
) -> list[Float[Tensor, "*pairs H Q K"]]:
    """Compute the biases of all blocks of a stack, reading the pair once.

    A norm's weight is folded into the layer behind it, so blocks differ only in the matmul.

    Parameters
    ----------
    layers : each block's `ConditionedBias`, all with the same number of heads
    """
    every = [cast("ConditionedBias", layer) for layer in layers]
    joint = torch.cat([layer.linear.weight for layer in every])
    weight = folded(joint, [layer.norm.weight for layer in every])
    biases = layer_norm_linear(z, None, None, weight).chunk(len(every), -1)
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
        bias: Float[Tensor, "*batch H R N"] | Coming,
        mask: Bool[Tensor, "*batch N"],
    ) -> Float[Tensor, "*batch M N C"]:
        """Return the update, to be added to a; masked tokens are not attended to.

        ``bias`` is b(z) of `biases_of`; own rows of it are gathered here, so that all rows exist
        for one block at a time, unless it is `Coming`.
        """
        given = Condition((self.norm.adapted(s),), self.output_gate(s).sigmoid())
        return given.gate * self.ungated(self.norm.given(a, given.norms[0]), given, bias, mask)

    def ungated(self, n: Tensor, given: Condition, bias: Tensor | Coming, mask: Tensor) -> Tensor:
        """Return the values that the gate multiplies, of normalised rows."""
        del given
        keys = mask[..., None, :].expand(n.shape[:-1])
        # Not by the number of rows, which differs: one process may own all of a single token.
        whole = gathered(bias, -2, n.shape[-2]) if isinstance(bias, Tensor) else bias
        update: Tensor = self.attention(n, whole, keys)
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

    def forward(self, a: Tensor, s: Tensor, bias: Tensor | Coming, mask: Tensor) -> Tensor:
        """Update rows."""
        policy = self.checkpointing
        a = a + checkpointed(policy, "attention_pair_bias", self.attention)(a, s, bias, mask)
        update = checkpointed(policy, "transition", self.transition)(a, s)
        updated: Tensor = a + update
        return updated


def run_conditioned(
    blocks: Iterable[nn.Module],
    conditions: Iterable[BlockCondition],
    biases: Iterable[Tensor | Coming],
    mask: Tensor,
    a: Tensor,
) -> Tensor:
    """Update rows by `DiffusionBlock` with the result of `block_conditions`.

    Each update is added by the kernel that normalises the sum for the next layer.
    """
    before: tuple[Tensor, Tensor] | None = None  # gate and update that are not added yet

    def normalised(norm: AdaptiveNorm, adapted: Tensor) -> Tensor:
        nonlocal a
        if before is None:
            return norm.given(a, adapted)
        a, n = norm.after(a, *before, adapted)
        return n

    for block, given, bias in zip(blocks, conditions, biases, strict=True):
        (of_attention, of_transition), each = given, cast("Any", block)
        n = normalised(each.attention.norm, of_attention.norms[0])
        before = of_attention.gate, each.attention.ungated(n, of_attention, bias, mask)
        n = normalised(each.transition.norm, of_transition.norms[0])
        before = of_transition.gate, each.transition.ungated(n)
    return a if before is None else torch.addcmul(a, *before)


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
        biases: Sequence[Float[Tensor, "*batch H R N"] | Coming],
        mask: Bool[Tensor, "*batch N"],
    ) -> Float[Tensor, "*batch M N C"]:
        """Update tokens of all copies with the result of `biases`; padded tokens are masked.

        ``s`` may be the result of `block_conditions`.
        """
        if not isinstance(s, Tensor):
            return run_conditioned(self.blocks, s, biases, mask, a)
        blocks = [
            partial(block, s=s, bias=bias, mask=mask)
            for block, bias in zip(self.blocks, biases, strict=True)
        ]
        return run_stack(self.checkpointing, blocks, a)
