"""The transformer over windows of atoms (AlphaFold3, algorithm 7).

Windows are the samples of the attention operator and copies its rows: the bias of a window is
computed once for all copies, its gradient is summed over them by the operator, and the keys that
windows share are read in place.

Legend: M copies, A atoms, W windows of Q = 32 queries and K = 128 keys, C channels of an atom, P of
a pair, H heads.
"""

from jaxtyping import Bool, Float
from torch import Tensor, nn

from bevatron.kernels import pair_attention
from bevatron.models.alphafold3.adaptive import GATE_BIAS, AdaptiveNorm, ConditionedTransition
from bevatron.models.alphafold3.atom_windows import keys_of, queries_of, rows_of
from bevatron.models.alphafold3.diffusion_transformer import (
    AttentionProjections,
    DiffusionBlock,
    PairBias,
    run_block,
)
from bevatron.models.alphafold3.projection import Projection, joined


class WindowAttention(nn.Module):
    """Attention with pair bias of 32 atoms to the 128 around them, conditioned: algorithm 24.

    Keys and values are read through a second adaptive norm, applied to the result of the first, as
    in Protenix. Other published models apply it to the block's input.

    Parameters
    ----------
    width, pair_width
        C and P; atoms are conditioned by rows of the same width.
    num_heads
        H, a divisor of C.
    """

    def __init__(self, width: int, pair_width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm = AdaptiveNorm(width, width)
        self.key_norm = AdaptiveNorm(width, width)
        self.attention = AttentionProjections(width)
        self.bias = PairBias(pair_width, num_heads)
        self.output_gate = Projection(width, width, bias=True, start="zeros", start_bias=GATE_BIAS)

    def forward(
        self,
        a: Float[Tensor, "*batch M A C"],
        c: Float[Tensor, "*batch _ A C"],
        p: Float[Tensor, "*batch W Q K P"],
        mask: Bool[Tensor, "*batch A"],
    ) -> Float[Tensor, "*batch M A C"]:
        """Return the update, to be added to a; masked atoms are no keys."""
        layers, (M, A) = self.attention, a.shape[-3:-1]
        a = self.norm(a, c)
        rows = queries_of(joined(a, layers.query, layers.gate))
        around = keys_of(joined(self.key_norm(a, c), layers.key, layers.value))
        parts = (*rows.chunk(2, -1), *around.chunk(2, -1))
        q, gate, k, v = (self._in_windows(x) for x in parts)
        bias = self.bias(p)
        keep = keys_of(mask[..., None])[..., 0].reshape(-1, 1, k.shape[2]).expand(-1, M, -1)
        attended = pair_attention(
            q, k, v, bias.reshape(-1, 1, *bias.shape[-3:]), keep, gate=gate, layout="BSNHD"
        )
        windows = attended.reshape(*p.shape[:-3], *attended.shape[1:]).movedim(-5, -4)
        update: Tensor = layers.output(rows_of(windows.flatten(-2), A))
        output_gate: Tensor = self.output_gate(c).sigmoid()
        return output_gate * update

    def _in_windows(self, x: Float[Tensor, "*batch M W n C"]) -> Float[Tensor, "_ M n H D"]:
        """Put windows first and split heads: a view, if there is one sample."""
        heads: Tensor = x.unflatten(-1, (self.num_heads, -1)).movedim(-4, -5)
        return heads.reshape(-1, *heads.shape[-4:])


class AtomTransformer(nn.Module):
    """Blocks of window attention and conditioned transition: algorithm 7.

    Parameters
    ----------
    width, pair_width
        C and P.
    num_heads, num_blocks
        H, and how many.
    checkpointed
        Whether the backward pass recomputes the inside of each block.
    """

    def __init__(
        self,
        width: int,
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
                WindowAttention(width, pair_width, num_heads), ConditionedTransition(width, width)
            )
            for _ in range(num_blocks)
        )

    def forward(
        self,
        q: Float[Tensor, "*batch M A C"],
        c: Float[Tensor, "*batch _ A C"],
        p: Float[Tensor, "*batch W Q K P"],
        mask: Bool[Tensor, "*batch A"],
    ) -> Float[Tensor, "*batch M A C"]:
        """Update atoms; c may have one copy for all."""
        for block in self.blocks:
            q = run_block(block, q, c, p, mask, checkpointed=self.checkpointed)
        return q
