"""The Evoformer and the stack of the extra alignment; algorithms 6 and 18.

If several processes share a sample, alignment and pair hold R own rows; masks are whole.
"""

from collections.abc import Sequence
from functools import partial

from jaxtyping import Bool, Float
from torch import Tensor, nn

from bevatron.models.alphafold2.config import EvoformerConfig, TriangleConfig
from bevatron.models.alphafold2.drops import Drops
from bevatron.models.alphafold2.msa_attention import (
    MSAColumnAttention,
    MSAColumnGlobalAttention,
    MSARowAttention,
)
from bevatron.models.common.folding import (
    Checkpointing,
    Linear,
    OuterProductMean,
    Transition,
    TriangleAttention,
    TriangleMultiplication,
    add_dropped,
    checkpointed,
    recomputing,
    run_stack,
)
from bevatron.parallel.axial import Coming, all_rows, sample_group, transposed, turned

Masks = Sequence[Tensor | None] | Tensor
"""Dropout masks, or None for each."""

Representations = tuple[Float[Tensor, "*batch R N M"], Float[Tensor, "*batch _ N Z"]]
"""Alignment and pair."""

NO_DROPOUT = (None,) * 4
PAIR_UPDATES = 4
"""Updates of the pair that have dropout."""


class PairStack(nn.Module):
    """Updates of the pair from itself; lines 6 to 10 of algorithm 6."""

    def __init__(self, c_z: int, config: TriangleConfig) -> None:
        super().__init__()
        heads = (config.num_heads, config.head_width)
        self.tri_mul_out = TriangleMultiplication(c_z, config.hidden, outgoing=True, bias=True)
        self.tri_mul_in = TriangleMultiplication(c_z, config.hidden, outgoing=False, bias=True)
        self.tri_att_start = TriangleAttention(c_z, *heads, starting=True, bias=True)
        self.tri_att_end = TriangleAttention(c_z, *heads, starting=False, bias=True)
        self.pair_transition = Transition(c_z, config.transition_factor, gated=False)

    def forward(
        self,
        z: Float[Tensor, "*batch R N Z"],
        mask: Bool[Tensor, "*batch N N"],
        drops: Masks = NO_DROPOUT,
    ) -> Float[Tensor, "*batch R N Z"]:
        """Return the new pair; own columns of it, laid out as rows, where processes share it."""
        z = self.tri_mul_out(z, mask, drops[0])
        z = self.tri_mul_in(z, mask, drops[1])
        z = self.tri_att_start(z, mask, drops[2])
        ending = self.tri_att_end
        attend = ending if sample_group().size == 1 else ending.by_columns
        updated: Tensor = self.pair_transition(attend(z, mask, drops[3]))
        return updated


class EvoformerBlock(nn.Module):
    """One block; algorithm 6, and 18 with another column attention.

    Parameters
    ----------
    c_m, c_z : channels of the alignment and the pair
    column : attention over the rows of a column
    checkpointing : which parts the backward pass recomputes
    """

    def __init__(
        self,
        c_m: int,
        c_z: int,
        config: EvoformerConfig,
        column: type[MSAColumnAttention | MSAColumnGlobalAttention],
        checkpointing: Checkpointing,
    ) -> None:
        super().__init__()
        heads = (config.num_heads, config.head_width)
        self.checkpointing = checkpointing
        self.msa_att_row = MSARowAttention(c_m, c_z, *heads)
        self.msa_att_col = column(c_m, *heads)
        self.msa_transition = Transition(c_m, config.transition_factor, gated=False)
        self.outer_product_mean = OuterProductMean(c_m, config.outer_width, c_z, bias=True)
        self.pair_stack = PairStack(c_z, config.triangles)

    def forward(
        self,
        state: Representations,
        msa_mask: Bool[Tensor, "*batch S N"],
        pair_mask: Bool[Tensor, "*batch N N"],
        row_drop: Float[Tensor, "*batch N M"] | None = None,
        pair_drops: Masks = NO_DROPOUT,
    ) -> Representations:
        """Return the new alignment and pair.

        If processes share them, the pair enters and leaves as own columns, laid out as rows. Its
        transposition overlaps with the column attention of the alignment, and that of the
        alignment with the update of the pair.
        """
        m, z = state
        policy, several = self.checkpointing, sample_group().size > 1
        column, outer = self.msa_att_col, self.outer_product_mean
        attend = column.of_columns if several else column
        multiply = outer.of_columns if several else outer
        row = checkpointed(policy, "msa_row_attention", self.msa_att_row)
        m = add_dropped(m, row(m, z, msa_mask), row_drop)
        rows = Coming(z)
        if several:
            m = transposed(m, msa_mask.shape[-2]).contiguous()
            rows = turned(z)
        m = checkpointed(policy, "msa_column_attention", attend)(m, msa_mask)
        m = checkpointed(policy, "transition", self.msa_transition)(m)
        update = checkpointed(policy, "outer_product_mean", multiply)(m, msa_mask)
        read_next = several and not recomputing()
        new_m = turned(m, msa_mask.shape[-1]) if read_next else Coming(m)
        z = rows.wait() + update
        z = checkpointed(policy, "pair_block", self.pair_stack)(z, pair_mask, pair_drops)
        return new_m.wait(), z


class _Stack(nn.Module):
    """Blocks one after another, with their dropout masks drawn at once."""

    column: type[MSAColumnAttention | MSAColumnGlobalAttention] = MSAColumnAttention

    def __init__(
        self, c_m: int, c_z: int, config: EvoformerConfig, checkpointing: Checkpointing
    ) -> None:
        super().__init__()
        self.checkpointing = checkpointing
        self.rates = (config.dropout, config.triangles.dropout)
        self.blocks = nn.ModuleList(
            EvoformerBlock(c_m, c_z, config, self.column, checkpointing)
            for _ in range(config.num_blocks)
        )

    def run(
        self, m: Tensor, z: Tensor, msa_mask: Tensor, pair_mask: Tensor, drops: Drops
    ) -> Representations:
        """Return the alignment and the pair after all blocks."""
        count = len(self.blocks)
        rows = drops.draw(m, count, self.rates[0])
        pairs = drops.draw(z, PAIR_UPDATES * count, self.rates[1])
        bound = [
            partial(
                block,
                msa_mask=msa_mask,
                pair_mask=pair_mask,
                row_drop=row,
                pair_drops=pairs[PAIR_UPDATES * i :][:PAIR_UPDATES],
            )
            for i, (block, row) in enumerate(zip(self.blocks, rows, strict=True))
        ]
        if sample_group().size == 1:
            return run_stack(self.checkpointing, bound, (m, z))
        m, columns = run_stack(self.checkpointing, bound, (m, transposed(z)))
        return m, transposed(columns)


class Evoformer(_Stack):
    """The stack of blocks and the single representation, a projection of the first row."""

    def __init__(
        self, c_m: int, c_z: int, c_s: int, config: EvoformerConfig, checkpointing: Checkpointing
    ) -> None:
        super().__init__(c_m, c_z, config, checkpointing)
        self.linear = Linear(c_m, c_s)

    def forward(
        self,
        m: Float[Tensor, "*batch R N M"],
        z: Float[Tensor, "*batch _ N Z"],
        msa_mask: Bool[Tensor, "*batch S N"],
        pair_mask: Bool[Tensor, "*batch N N"],
        drops: Drops,
    ) -> tuple[
        Float[Tensor, "*batch S N M"], Float[Tensor, "*batch _ N Z"], Float[Tensor, "*batch N C"]
    ]:
        """Return the whole alignment, own rows of the pair and the single representation."""
        m, z = self.run(m, z, msa_mask, pair_mask, drops)
        m = all_rows(m, msa_mask.shape[-2])
        return m, z, self.linear(m[..., 0, :, :])


class ExtraMSAStack(_Stack):
    """Blocks over the extra alignment, of which only the pair is kept; algorithm 18."""

    column = MSAColumnGlobalAttention

    def forward(
        self,
        e: Float[Tensor, "*batch R N E"],
        z: Float[Tensor, "*batch _ N Z"],
        msa_mask: Bool[Tensor, "*batch S N"],
        pair_mask: Bool[Tensor, "*batch N N"],
        drops: Drops,
    ) -> Float[Tensor, "*batch _ N Z"]:
        """Return the new pair."""
        return self.run(e, z, msa_mask, pair_mask, drops)[1]
