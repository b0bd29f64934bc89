"""The transformer over windows of atoms (AlphaFold3, algorithm 7).

The bias of a window is computed once for all copies; its gradient is summed over them by the
attention operator, which reads the keys that windows share in place.

Legend: M copies, A atoms, W windows of Q = 32 queries and K = 128 keys, C channels of an atom, P of
a pair, H heads.
"""

import math
from functools import partial
from typing import NamedTuple

from jaxtyping import Bool, Float
from torch import Tensor, nn

from bevatron.kernels import window_attention
from bevatron.kernels.shared.parts import split
from bevatron.models.alphafold3.adaptive import (
    AdaptiveNorm,
    Condition,
    ConditionedTransition,
    joined,
    output_gate,
)
from bevatron.models.alphafold3.diffusion_transformer import (
    BlockCondition,
    ConditionedBias,
    DiffusionBlock,
    biases_of,
    block_conditions,
    run_conditioned,
)
from bevatron.models.common.folding import Checkpointing, Linear, run_stack


class WindowAttention(nn.Module):
    """Attention with pair bias of 32 atoms to the 128 around them, conditioned: algorithm 24.

    Keys and values are read through a second adaptive norm, applied to the result of the first, as
    in Protenix. Other published models apply it to the block's input.

    Parameters
    ----------
    width, pair_width : C and P; atoms are conditioned by rows of the same width
    num_heads : H, a divisor of C
    """

    def __init__(self, width: int, pair_width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm = AdaptiveNorm(width, width)
        self.key_norm = AdaptiveNorm(width, width)
        self.q = Linear(width, width, init="glorot")
        self.k = Linear(width, width, bias=False, init="glorot")
        self.v = Linear(width, width, bias=False, init="glorot")
        self.gate = Linear(width, width, bias=False, init="gating")
        self.out = Linear(width, width, bias=False)
        self.bias = ConditionedBias(pair_width, num_heads)
        self.output_gate = output_gate(width, width)

    @property
    def norms(self) -> tuple[AdaptiveNorm, ...]:
        """Result of `conditions_of`."""
        return self.norm, self.key_norm

    def forward(
        self,
        a: Float[Tensor, "*batch M A C"],
        c: Float[Tensor, "*batch _ A C"],
        bias: Float[Tensor, "*batch W H Q K"],
        mask: Bool[Tensor, "*batch A"],
    ) -> Float[Tensor, "*batch M A C"]:
        """Return the update, to be added to a; masked atoms are not attended to.

        ``bias`` is that of every window's pairs, of `biases_of`.
        """
        norms = tuple(norm.adapted(c) for norm in self.norms)
        given = Condition(norms, self.output_gate(c).sigmoid())
        return given.gate * self.ungated(self.norm.given(a, norms[0]), given, bias, mask)

    def ungated(self, n: Tensor, given: Condition, bias: Tensor, mask: Tensor) -> Tensor:
        """Return what the gate is multiplied with, of normalised rows."""
        halves = [n.shape[-1]] * 2
        D = n.shape[-1] // self.num_heads
        rows = joined(n, self.q.weight, self.gate.weight, bias=self.q.bias)
        keys = self.key_norm.given(n, given.norms[1])
        around = joined(keys, self.k.weight, self.v.weight)
        parts = (*split(rows, halves, D), *split(around, halves, D))
        samples = math.prod(mask.shape[:-1])  # written out, as a process may have no copies
        q, gate, k, v = (x.reshape(samples, *x.shape[-4:]) for x in parts)
        windows = bias.reshape(samples, *bias.shape[-4:])
        attended = window_attention(q, k, v, gate, windows, mask.reshape(samples, mask.shape[-1]))
        update: Tensor = self.out(attended.reshape(n.shape))
        return update


class Prepared(NamedTuple):
    """Values that all passes of an `AtomTransformer` over the same atoms share.

    Attributes
    ----------
    conditions, biases : one for each block
    """

    conditions: list[BlockCondition]
    biases: list[Float[Tensor, "*batch W H Q K"]]


class AtomTransformer(nn.Module):
    """Blocks of window attention and conditioned transition: algorithm 7.

    Parameters
    ----------
    width, pair_width : C and P
    num_heads, num_blocks : H, and how many
    checkpointing : what the backward pass recomputes
    """

    def __init__(
        self,
        width: int,
        pair_width: int,
        num_heads: int,
        num_blocks: int,
        checkpointing: Checkpointing,
    ) -> None:
        super().__init__()
        self.checkpointing = checkpointing
        self.blocks = nn.ModuleList(
            DiffusionBlock(
                WindowAttention(width, pair_width, num_heads),
                ConditionedTransition(width, width),
                checkpointing,
            )
            for _ in range(num_blocks)
        )

    def prepare(
        self, c: Float[Tensor, "*batch _ A C"], p: Float[Tensor, "*batch W Q K P"]
    ) -> Prepared:
        """Compute the values that many passes share, without gradients."""
        biases = [bias.contiguous() for bias in self._biases(p)]
        return Prepared(block_conditions(c, self.blocks), biases)

    def forward(
        self,
        q: Float[Tensor, "*batch M A C"],
        c: Float[Tensor, "*batch _ A C"],
        p: Float[Tensor, "*batch W Q K P"],
        mask: Bool[Tensor, "*batch A"],
        prepared: Prepared | None = None,
    ) -> Float[Tensor, "*batch M A C"]:
        """Update atoms; c may have one copy for all. ``prepared`` is of `prepare`."""
        if prepared is not None:
            return run_conditioned(self.blocks, *prepared, mask, q)
        blocks = [
            partial(block, s=c, bias=bias, mask=mask)
            for block, bias in zip(self.blocks, self._biases(p), strict=True)
        ]
        return run_stack(self.checkpointing, blocks, q)

    def _biases(self, p: Tensor) -> list[Tensor]:
        return biases_of(p, [block.get_submodule("attention.bias") for block in self.blocks])
