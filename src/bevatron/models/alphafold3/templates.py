"""The template embedder (AlphaFold3, algorithm 16), with its pair features computed on the device.

Legend: T templates, N tokens, P channels of the pair, C of a template's pair.
"""

from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from bevatron.data.proteins.tokens import NUM_CLASSES
from bevatron.kernels import layer_norm_linear
from bevatron.maths.rigid import apply_inverse, frame_of_points, select
from bevatron.models.alphafold3.config_trunk import TemplateConfig
from bevatron.models.alphafold3.pair import PairBlock, pair_drops
from bevatron.models.common.folding import (
    Checkpointing,
    LayerNorm,
    Linear,
    checkpointed,
    distance_bins,
    run_stack,
)
from bevatron.parallel.axial import own

DISTANCE_BINS = (3.25, 50.75, 39)
"""Lower ends of the first and the last bin of distances, Å, and how many."""
CHANNELS = (39, 1, NUM_CLASSES, NUM_CLASSES, 3, 1)
"""Distance, whether it exists, class of j, class of i, direction, whether it exists."""
EPS = 1e-7


class TemplatePairs(NamedTuple):
    """Geometry of own rows of the pairs of a template.

    Attributes
    ----------
    distance : [..., T, R, N, 39]
        One-hot distance of pseudo-beta atoms.
    distance_mask, frame_mask : [..., T, R, N]
        Whether both tokens have that atom, or a backbone frame.
    direction : [..., T, R, N, 3]
        Unit vector to the CA of j in the backbone frame of i.
    """

    distance: Float[Tensor, "*batch T R N 39"]
    distance_mask: Bool[Tensor, "*batch T R N"]
    direction: Float[Tensor, "*batch T R N 3"]
    frame_mask: Bool[Tensor, "*batch T R N"]


def template_pairs(
    pseudo_beta: Float[Tensor, "*batch T N 3"],
    pseudo_beta_mask: Bool[Tensor, "*batch T N"],
    backbone: Float[Tensor, "*batch T N 3 3"],
    backbone_mask: Bool[Tensor, "*batch T N"],
    dtype: torch.dtype,
) -> TemplatePairs:
    """Compute the geometry of templates, own rows of it (AlphaFold3, table 5).

    Parameters
    ----------
    pseudo_beta : position of CB (CA of glycine), Å
    backbone : positions of N, CA and C, Å
    pseudo_beta_mask, backbone_mask : whether these atoms exist
    dtype : type of the result; it is computed in that of the positions
    """
    distance_mask, frame_mask = _both(pseudo_beta_mask), _both(backbone_mask)
    bins = distance_bins(pseudo_beta, *DISTANCE_BINS) & distance_mask[..., None]
    n, ca, c = backbone.unbind(-2)
    frames = frame_of_points(own(ca, -2), own(c, -2), own(n, -2))
    frames = select(frames, (..., slice(None), None))
    seen = apply_inverse(frames, ca[..., None, :, :])
    direction = seen * torch.rsqrt(seen.square().sum(-1, keepdim=True) + 1e-12)
    direction = torch.where(frame_mask[..., None], direction, 0.0)
    return TemplatePairs(bins.to(dtype), distance_mask, direction.to(dtype), frame_mask)


class TemplateEmbedder(nn.Module):
    r"""Average of the templates' updates of the pair.

    .. math::

        v_t = \operatorname{LayerNorm}\big(\text{pair blocks}(W_z \operatorname{LayerNorm}(z)
        + W_a a_t)\big), \qquad y = W_u \operatorname{relu}\Big(\frac{\sum_t v_t}{10^{-7} + T}\Big)

    T counts empty templates too. Distances and directions between chains are hidden.

    Parameters
    ----------
    pair_width : P
    checkpointing : what the backward pass recomputes
    call : tells its dropout from that of other stacks
    """

    def __init__(
        self, pair_width: int, config: TemplateConfig, checkpointing: Checkpointing, call: int = 0
    ) -> None:
        super().__init__()
        self.checkpointing, self.call = checkpointing, call
        self.dropout = config.pair.dropout
        self.norm_in = LayerNorm(pair_width)
        self.pair = Linear(pair_width, config.width, bias=False)
        self.features = Linear(sum(CHANNELS), config.width, bias=False)
        self.blocks = nn.ModuleList(
            PairBlock(config.width, config.pair) for _ in range(config.num_blocks)
        )
        self.norm_out = LayerNorm(config.width)
        self.out = Linear(config.width, pair_width, bias=False, init="he")

    def forward(
        self,
        z: Float[Tensor, "*batch R N P"],
        restype: Int[Tensor, "*batch T N"],
        pairs: TemplatePairs,
        asym_id: Int[Tensor, "*batch N"],
        pair_mask: Bool[Tensor, "*batch N N"] | None = None,
        seed: Int[Tensor, ""] | None = None,
    ) -> Float[Tensor, "*batch R N P"]:
        """Compute the update of the pair's own rows.

        Parameters
        ----------
        z : pair representation
        restype : class of the residue that each template has for a token; the gap where it has none
        pairs : own rows of `template_pairs`
        asym_id : chain of each token
        pair_mask : true for pairs of tokens that exist; None = all
        seed : dropout seed; None = no dropout
        """
        whole = (*restype.shape, restype.shape[-1])
        mask = None if pair_mask is None else pair_mask.unsqueeze(-3).expand(whole)
        seen = asym_id[..., None, :, None] == asym_id[..., None, None, :]
        seen = seen if mask is None else seen & mask
        start = layer_norm_linear(z, *self.norm_in.parts, self.pair.weight)
        v = start.unsqueeze(-4) + self._embed(restype, pairs, own(seen, -2))
        drops = pair_drops(seed, self.call, v, len(self.blocks), self.dropout)
        blocks = [
            partial(checkpointed(self.checkpointing, "pair_block", block), mask=mask, drops=drop)
            for block, drop in zip(self.blocks, drops, strict=True)
        ]
        v = self.norm_out(run_stack(self.checkpointing, blocks, v))
        mean = v.sum(-4) / (EPS + restype.shape[-2])
        update: Tensor = self.out(mean.relu())
        return update

    def _embed(self, restype: Tensor, pairs: TemplatePairs, seen: Tensor) -> Tensor:
        """Compute ``W_a a``; classes are embedded per token, not per pair."""
        dtype = pairs.direction.dtype
        weights = self.features.weight.to(dtype).split(CHANNELS, 1)
        distance, distance_mask, of_j, of_i, direction, frame_mask = weights
        geometry = torch.cat(
            [
                pairs.distance,
                pairs.distance_mask.unsqueeze(-1).to(dtype),
                pairs.direction,
                pairs.frame_mask.unsqueeze(-1).to(dtype),
            ],
            -1,
        )
        joint = torch.cat([distance, distance_mask, direction, frame_mask], 1)
        classes = F.one_hot(restype.long(), NUM_CLASSES).to(dtype)
        columns, rows = F.linear(classes, of_j), F.linear(classes, of_i)
        shown = F.linear(geometry * seen.unsqueeze(-1), joint)
        return shown + columns.unsqueeze(-3) + own(rows, -2).unsqueeze(-2)


def _both(mask: Tensor) -> Tensor:
    return own(mask, -1)[..., :, None] & mask[..., None, :]
