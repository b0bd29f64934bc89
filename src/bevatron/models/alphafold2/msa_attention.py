"""Attention along the rows and down the columns of an alignment; algorithms 7, 8 and 19.

Alignment and pair are own rows where several processes share a sample; masks are whole.
"""

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from bevatron.kernels import global_attention
from bevatron.models.common.folding import GatedAttention, LayerNorm, Linear, PairBias, add_dropped
from bevatron.parallel.axial import Coming, gathered, own, sample_group

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
        """Return the update of m; z is own columns, laid out as rows, where processes share it."""
        # Nothing that is valid reads a row that is masked as a whole, such as that of a template
        # which is not there: it sees all keys, where the operator would search it for any.
        mask = mask | ~mask.any(-1, keepdim=True)
        bias, N = self.bias(z), z.shape[-2]
        several = sample_group().size > 1
        whole = gathered(bias.mT, -1, N) if several else Coming(bias)
        update: Tensor = self.attention(m, whole, own(mask, -2))
        return update


class MSAColumnAttention(nn.Module):
    """Attention over the rows of every column; algorithm 8."""

    def __init__(self, c_m: int, num_heads: int, head_width: int) -> None:
        super().__init__()
        self.attention = GatedAttention(c_m, num_heads, head_width, bias=True)

    def forward(
        self, m: Float[Tensor, "*batch S N M"], mask: Bool[Tensor, "*batch S N"]
    ) -> Float[Tensor, "*batch S N M"]:
        """Return m with its update added, on one process."""
        m, columns = _WithColumns.apply(m)
        update: Tensor = self.attention(columns, mask=mask.mT)
        return add_dropped(m, update.transpose(-2, -3), None)

    def of_columns(
        self, columns: Float[Tensor, "*batch K S M"], mask: Bool[Tensor, "*batch S N"]
    ) -> Float[Tensor, "*batch K S M"]:
        """Return own columns, as rows, with their update added."""
        return add_dropped(columns, self.attention(columns, mask=own(mask.mT, -2)), None)


class _WithColumns(torch.autograd.Function):
    """An alignment and its columns as rows, copied once instead of by every operator.

    One of the gradients is transposed; autograd would add them slowly.
    """

    @staticmethod
    def forward(ctx: Any, m: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG004
        return m, m.transpose(-2, -3).contiguous()

    @staticmethod
    def backward(ctx: Any, dm: Tensor, dcolumns: Tensor) -> Tensor:  # noqa: ARG004
        return add_dropped(dm, dcolumns.transpose(-2, -3), None)


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
        self, m: Float[Tensor, "*batch S N E"], mask: Bool[Tensor, "*batch S N"]
    ) -> Float[Tensor, "*batch S N E"]:
        """Return m with its update added, on one process."""
        return m + self._update(m, mask)

    def of_columns(
        self, columns: Float[Tensor, "*batch K S E"], mask: Bool[Tensor, "*batch S N"]
    ) -> Float[Tensor, "*batch K S E"]:
        """Return own columns, as rows, with their update added."""
        update = self._update(columns.transpose(-2, -3), own(mask, -1))
        return columns + update.transpose(-2, -3)

    def _update(self, m: Tensor, mask: Tensor) -> Tensor:
        return global_attention(
            m,
            mask,
            *self.norm.parts,  # type: ignore[arg-type]  # it has a bias
            *(self.q.weight, self.k.weight, self.v.weight),
            *(self.gate.weight, self.gate.bias, self.out.weight, self.out.bias),
            mask_eps=COUNT_EPS,
        )
