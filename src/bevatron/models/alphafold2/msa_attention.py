"""Attention along the rows and down the columns of an alignment; algorithms 7, 8 and 19.

Alignment and pair are own rows where several processes share a sample; masks are whole.
"""

from jaxtyping import Bool, Float
from torch import Tensor, nn

from bevatron.kernels import global_attention
from bevatron.models.common.folding import GatedAttention, LayerNorm, Linear, PairBias
from bevatron.parallel.axial import gathered, own, transposed

COUNT_EPS = 1e-8
"""Added to the number of rows of a column's mean."""


class MSARowAttention(nn.Module):
    """Attention over the residues of every row, biased by the pair; algorithm 7."""

    def __init__(self, c_m: int, c_z: int, num_heads: int, head_width: int) -> None:
        super().__init__()
        self.bias = PairBias(c_z, num_heads)
        self.attention = GatedAttention(c_m, num_heads, head_width, bias=True)

    def forward(
        self,
        m: Float[Tensor, "*batch R N M"],
        z: Float[Tensor, "*batch _ N Z"],
        mask: Bool[Tensor, "*batch S N"],
    ) -> Float[Tensor, "*batch R N M"]:
        """Return the update of m."""
        # Nothing that is valid reads a row that is masked as a whole, such as that of a template
        # which is not there: it sees all keys, where the operator would search it for any.
        mask = mask | ~mask.any(-1, keepdim=True)
        bias = gathered(self.bias(z), -2, z.shape[-2])
        update: Tensor = self.attention(m, bias, own(mask, -2))
        return update


class MSAColumnAttention(nn.Module):
    """Attention over the rows of every column; algorithm 8."""

    def __init__(self, c_m: int, num_heads: int, head_width: int) -> None:
        super().__init__()
        self.attention = GatedAttention(c_m, num_heads, head_width, bias=True)

    def forward(
        self, m: Float[Tensor, "*batch R N M"], mask: Bool[Tensor, "*batch S N"]
    ) -> Float[Tensor, "*batch R N M"]:
        """Return the update of m."""
        S, N = mask.shape[-2:]
        # Copied once, not by every operator that reads it.
        columns = transposed(m, S).contiguous()
        update: Tensor = self.attention(columns, mask=own(mask.mT, -2))
        return transposed(update, N)


class MSAColumnGlobalAttention(nn.Module):
    """Attention over the rows of every column, with their mean as the query; algorithm 19.

    Keys and values have one head.
    """

    def __init__(self, c_e: int, num_heads: int, head_width: int) -> None:
        super().__init__()
        inner = num_heads * head_width
        self.norm = LayerNorm(c_e)
        self.q = Linear(c_e, inner, bias=False, init="glorot")
        self.k = Linear(c_e, head_width, bias=False, init="glorot")
        self.v = Linear(c_e, head_width, bias=False, init="glorot")
        self.gate = Linear(c_e, inner, init="gating")
        self.out = Linear(inner, c_e, init="final")

    def forward(
        self, m: Float[Tensor, "*batch R N E"], mask: Bool[Tensor, "*batch S N"]
    ) -> Float[Tensor, "*batch R N E"]:
        """Return the update of m."""
        S, N = mask.shape[-2:]
        update = global_attention(
            transposed(m, S).transpose(-2, -3),
            own(mask, -1),
            *self.norm.parts,  # type: ignore[arg-type]  # it has a bias
            *(self.q.weight, self.k.weight, self.v.weight),
            *(self.gate.weight, self.gate.bias, self.out.weight, self.out.bias),
            mask_eps=COUNT_EPS,
        )
        return transposed(update.transpose(-2, -3), N)
