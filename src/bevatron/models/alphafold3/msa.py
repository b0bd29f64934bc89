"""The MSA module (AlphaFold3, algorithm 8): updates pairs of tokens from an alignment.

Legend: S rows, N tokens, M channels of a row, P of the pair, H heads, D channels of a head. R rows
are a process's own where several share a sample; masks are whole.
"""

from functools import partial
from math import pi

import torch
from jaxtyping import Bool, Float, Int, Integer
from torch import Tensor, nn

from bevatron.data.proteins.tokens import NUM_CLASSES
from bevatron.kernels import layer_norm_linear, pair_weighted_averaging
from bevatron.kernels.shared.parts import split
from bevatron.models.alphafold3.config_trunk import MsaConfig
from bevatron.models.alphafold3.pair import PairBlock, pair_drops
from bevatron.models.alphafold3.pairformer import pairs_of
from bevatron.models.common.folding import (
    Checkpointing,
    LayerNorm,
    Linear,
    OuterProductMean,
    PairBias,
    Transition,
    add_dropped,
    checkpointed,
    keep_masks,
    run_stack,
)
from bevatron.parallel.axial import gathered

State = tuple[Tensor, Tensor]
"""Alignment and pair representation."""


def msa_features(
    msa: Integer[Tensor, "*batch R N"], deletion: Integer[Tensor, "*batch R N"], dtype: torch.dtype
) -> Float[Tensor, "*batch R N 34"]:
    """Return the channels of an alignment: one-hot class, whether and how much is deleted.

    Deletions d in front of an entry become ``2 / pi arctan(d / 3)``: AlphaFold3, table 5.

    Parameters
    ----------
    msa : classes; one byte each is enough
    deletion : deleted entries, saturated at 255 in a byte
    """
    classes = torch.arange(NUM_CLASSES, dtype=msa.dtype, device=msa.device)
    value = torch.atan(deletion.float() / 3) * (2 / pi)
    parts = [msa[..., None] == classes, (deletion > 0)[..., None], value[..., None]]
    return torch.cat([part.to(dtype) for part in parts], -1)


class PairWeightedAveraging(nn.Module):
    r"""Average the tokens of every row with weights that the pair gives all rows.

    .. math::

        w_{ij}^h = \operatorname{softmax}_j(b_{ij}^h), \qquad
        y_{si} = W_o \operatorname{concat}_h\big(\sigma(g_{si}^h) \odot \sum_j w_{ij}^h v_{sj}^h
        \big)

    AlphaFold3, algorithm 10.

    Parameters
    ----------
    width, pair_width : M and P
    num_heads, head_width : H and D
    """

    def __init__(self, width: int, pair_width: int, num_heads: int, head_width: int) -> None:
        super().__init__()
        inner = num_heads * head_width
        self.norm = LayerNorm(width)
        self.v = Linear(width, inner, bias=False)
        self.gate = Linear(width, inner, bias=False, init="gating")
        self.bias = PairBias(pair_width, num_heads)
        self.out = Linear(inner, width, bias=False, init="final")

    def forward(
        self,
        m: Float[Tensor, "*batch R N M"],
        z: Float[Tensor, "*batch _ N P"],
        mask: Bool[Tensor, "*batch N"] | None = None,
    ) -> Float[Tensor, "*batch R N M"]:
        """Compute the update of the rows; masked tokens have no weight."""
        bias = gathered(self.bias(z), -2, z.shape[-2])
        joint = torch.cat([self.v.weight, self.gate.weight])
        both = layer_norm_linear(m, *self.norm.parts, joint)
        v, gate = split(both, [self.v.out_features] * 2)
        logits = bias.wait()
        if mask is not None:
            logits = logits.masked_fill(~mask[..., None, None, :], float("-inf"))
        update: Tensor = self.out(pair_weighted_averaging(v, gate, logits.softmax(-1)))
        return update


class MsaBlock(nn.Module):
    """The pair learns from the rows, the rows from the pair, then a pair block.

    AlphaFold3, algorithm 8, lines 6 to 13. The rows that the last block would give nobody reads, so
    it does not compute them.
    """

    def __init__(
        self, pair_width: int, config: MsaConfig, checkpointing: Checkpointing, *, last: bool
    ) -> None:
        super().__init__()
        self.checkpointing = checkpointing
        self.last = last
        self.outer_product_mean = OuterProductMean(config.width, config.outer_width, pair_width)
        if not last:
            self.averaging = PairWeightedAveraging(
                config.width, pair_width, config.num_heads, config.head_width
            )
            self.transition = Transition(config.width, config.transition)
        self.pair = PairBlock(pair_width, config.pair)

    def forward(
        self,
        state: State,
        msa_mask: Bool[Tensor, "*batch S N"] | None = None,
        token_mask: Bool[Tensor, "*batch N"] | None = None,
        pair_mask: Bool[Tensor, "*batch N N"] | None = None,
        row_drop: Float[Tensor, "*batch N M"] | None = None,
        drops: Float[Tensor, "4 *batch N P"] | None = None,
    ) -> State:
        """Compute the new (m, z); ``row_drop`` is the dropout mask that all rows share."""
        m, z = state
        policy = self.checkpointing
        z = z + checkpointed(policy, "outer_product_mean", self.outer_product_mean)(m, msa_mask)
        if not self.last:
            average = checkpointed(policy, "pair_weighted_averaging", self.averaging)
            m = add_dropped(m, average(m, z, token_mask), row_drop)
            m = checkpointed(policy, "transition", self.transition)(m)
        z = checkpointed(policy, "pair_block", self.pair)(z, pair_mask, drops)
        return m, z


class MsaModule(nn.Module):
    """Embed an alignment and let it update the pair (AlphaFold3, algorithm 8).

    Parameters
    ----------
    input_width, pair_width : channels of the input embedding and of the pair
    checkpointing : what the backward pass recomputes
    call : tells its dropout from that of other stacks: this number and the next
    """

    def __init__(
        self,
        input_width: int,
        pair_width: int,
        config: MsaConfig,
        checkpointing: Checkpointing,
        call: int = 0,
    ) -> None:
        super().__init__()
        self.checkpointing, self.call = checkpointing, call
        self.dropout, self.pair_dropout = config.dropout, config.pair.dropout
        self.row = Linear(NUM_CLASSES + 2, config.width, bias=False)
        self.inputs = Linear(input_width, config.width, bias=False)
        self.blocks = nn.ModuleList(
            MsaBlock(pair_width, config, checkpointing, last=number == config.num_blocks - 1)
            for number in range(config.num_blocks)
        )

    def forward(
        self,
        features: Float[Tensor, "*batch _ N 34"],
        z: Float[Tensor, "*batch R N P"],
        s_inputs: Float[Tensor, "*batch N I"],
        msa_mask: Bool[Tensor, "*batch S N"] | None = None,
        token_mask: Bool[Tensor, "*batch N"] | None = None,
        pair_mask: Bool[Tensor, "*batch N N"] | None = None,
        seed: Int[Tensor, ""] | None = None,
    ) -> Float[Tensor, "*batch R N P"]:
        """Compute the new pair.

        Parameters
        ----------
        features : what `msa_features` returns, own rows
        z, s_inputs : pair representation and input embedding
        msa_mask, token_mask, pair_mask
            True for what exists; None = all (of one process), or pairs of such tokens.
        seed : dropout seed; None = no dropout
        """
        if pair_mask is None:
            pair_mask = pairs_of(token_mask)
        if msa_mask is None:
            msa_mask = torch.ones(features.shape[:-1], dtype=torch.bool, device=features.device)
        count = len(self.blocks)
        m = self.row(features) + self.inputs(s_inputs).unsqueeze(-3)
        row_drops: list[Tensor | None] = [None] * count
        if seed is not None and self.dropout > 0 and count > 0:
            row_drops = list(keep_masks(seed, self.call, m, count, self.dropout).unbind())
        drops = pair_drops(seed, self.call + 1, z, count, self.pair_dropout)
        blocks = [
            partial(
                block,
                msa_mask=msa_mask,
                token_mask=token_mask,
                pair_mask=pair_mask,
                row_drop=row_drop,
                drops=drop,
            )
            for block, row_drop, drop in zip(self.blocks, row_drops, drops, strict=True)
        ]
        return run_stack(self.checkpointing, blocks, (m, z))[1]
