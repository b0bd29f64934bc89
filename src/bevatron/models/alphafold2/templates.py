"""Template embedding, added to the pair and to the alignment; algorithms 16 and 17.

Pairs are own rows, R of them, where several processes share a sample; masks are whole.
"""

from collections.abc import Mapping
from functools import partial
from math import sqrt

from jaxtyping import Bool, Float
from torch import Tensor, nn

from bevatron.kernels.shared.dtypes import wide
from bevatron.models.alphafold2.config import TemplateConfig
from bevatron.models.alphafold2.drops import Drops
from bevatron.models.alphafold2.embedders import Projection
from bevatron.models.alphafold2.evoformer import NO_DROPOUT, PAIR_UPDATES, Masks, PairStack
from bevatron.models.alphafold2.features import template_angle_features, template_pair_features
from bevatron.models.common.folding import Checkpointing, LayerNorm, Linear, run_stack

ANGLE_FEATURES, PAIR_FEATURES = 57, 88
PAIR_INPUTS = (
    "aatype", "pseudo_beta", "pseudo_beta_mask", "all_atom_positions", "all_atom_mask"
)  # fmt: skip
ROW_INPUTS = (
    "aatype", "torsion_angles_sin_cos", "alt_torsion_angles_sin_cos", "torsion_angles_mask"
)  # fmt: skip
"""Features of templates that pairs and rows are made of, in the order of the arguments."""
PSI = 2
"""Torsion whose presence keeps a template's residue in the alignment."""
MASKED = 1e5
"""Minus the logit of a template that is not there; finite, for samples that have none."""


class TemplateAngleEmbedder(nn.Module):
    """Rows of the alignment from the torsions of templates; algorithm 2, line 7."""

    def __init__(self, c_m: int) -> None:
        super().__init__()
        self.linear_1 = Linear(ANGLE_FEATURES, c_m, init="he")
        self.linear_2 = Linear(c_m, c_m, init="he")

    def forward(self, x: Float[Tensor, "*batch T N 57"]) -> Float[Tensor, "*batch T N M"]:
        """Embed the features."""
        rows: Tensor = self.linear_2(self.linear_1(x).relu())
        return rows


class TemplatePairBlock(PairStack):
    """One block of the pair stack; lines 2 to 6 of algorithm 16, attention before products."""

    def forward(
        self,
        z: Float[Tensor, "*batch R N C"],
        mask: Bool[Tensor, "*batch N N"],
        drops: Masks = NO_DROPOUT,
    ) -> Float[Tensor, "*batch R N C"]:
        """Return the new pair representation of each template."""
        z = self.tri_att_start(z, mask, drops[0])
        z = self.tri_att_end(z, mask, drops[1])
        z = self.tri_mul_out(z, mask, drops[2])
        z = self.tri_mul_in(z, mask, drops[3])
        updated: Tensor = self.pair_transition(z)
        return updated


class TemplatePairStack(nn.Module):
    """Blocks that update each template by itself; algorithm 16."""

    def __init__(self, c_t: int, config: TemplateConfig, checkpointing: Checkpointing) -> None:
        super().__init__()
        self.checkpointing, self.rate = checkpointing, config.triangles.dropout
        self.blocks = nn.ModuleList(
            TemplatePairBlock(c_t, config.triangles) for _ in range(config.num_blocks)
        )
        self.norm = LayerNorm(c_t)

    def forward(
        self, t: Float[Tensor, "*batch T R N C"], mask: Bool[Tensor, "*batch N N"], drops: Drops
    ) -> Float[Tensor, "*batch T R N C"]:
        """Return the normalised pair representation of each template."""
        masks = drops.draw(t, PAIR_UPDATES * len(self.blocks), self.rate)
        mask = mask[..., None, :, :].expand(*t.shape[:-3], *mask.shape[-2:])
        bound = [
            partial(block, mask=mask, drops=masks[PAIR_UPDATES * i :][:PAIR_UPDATES])
            for i, block in enumerate(self.blocks)
        ]
        normalised: Tensor = self.norm(run_stack(self.checkpointing, bound, t))
        return normalised


class TemplatePointwiseAttention(nn.Module):
    """Attention of every pair of residues over the templates; algorithm 17."""

    def __init__(self, c_t: int, c_z: int, num_heads: int, head_width: int) -> None:
        super().__init__()
        inner = num_heads * head_width
        self.heads = (num_heads, head_width)
        self.q = Linear(c_z, inner, bias=False, init="glorot")
        self.k = Linear(c_t, inner, bias=False, init="glorot")
        self.v = Linear(c_t, inner, bias=False, init="glorot")
        self.out = Linear(inner, c_z, init="final")

    def forward(
        self,
        t: Float[Tensor, "*batch T R N C"],
        z: Float[Tensor, "*batch R N Z"],
        present: Bool[Tensor, "*batch T"],
    ) -> Float[Tensor, "*batch R N Z"]:
        """Return the update of z."""
        q = self.q(z).unflatten(-1, self.heads)[..., None, :, :, :, :]
        k = self.k(t).unflatten(-1, self.heads)
        v = self.v(t).unflatten(-1, self.heads)
        # A handful of templates: sums are cheaper than matmuls of so few columns.
        logits = wide((q * k).sum(-1)) / sqrt(self.heads[1])
        logits = logits.masked_fill(~present[..., None, None, None], -MASKED)
        weights = logits.softmax(-4).to(v.dtype)
        found = (weights[..., None] * v).sum(-5)
        update: Tensor = self.out(found.flatten(-2))
        return update


class TemplateEmbedder(nn.Module):
    """Template embedding; algorithm 2, lines 7 to 13."""

    def __init__(
        self, c_m: int, c_z: int, c_t: int, config: TemplateConfig, checkpointing: Checkpointing
    ) -> None:
        super().__init__()
        self.unit_vectors = config.unit_vectors
        self.template_single_embedder = TemplateAngleEmbedder(c_m)
        self.template_pair_embedder = Projection(PAIR_FEATURES, c_t, "he")
        self.template_pair_stack = TemplatePairStack(c_t, config, checkpointing)
        self.template_pointwise_att = TemplatePointwiseAttention(
            c_t, c_z, config.num_heads, config.head_width
        )

    def forward(
        self,
        features: Mapping[str, Tensor],
        z: Float[Tensor, "*batch R N Z"],
        pair_mask: Bool[Tensor, "*batch N N"],
        drops: Drops,
    ) -> tuple[
        Float[Tensor, "*batch T N M"], Bool[Tensor, "*batch T N"], Float[Tensor, "*batch R N Z"]
    ]:
        """Return rows for the alignment, their mask, and the update of the pair.

        The update is 0 if a sample has no template.
        """
        present = features["template_mask"] > 0
        of_pairs = [features[f"template_{name}"] for name in PAIR_INPUTS]
        pairs = template_pair_features(*of_pairs, unit_vectors=self.unit_vectors)
        t = self.template_pair_embedder(pairs)
        t = self.template_pair_stack(t, pair_mask, drops)
        update = self.template_pointwise_att(t, z, present)
        update = update * present.any(-1)[..., None, None, None]
        of_rows = [features[f"template_{name}"] for name in ROW_INPUTS]
        rows = self.template_single_embedder(template_angle_features(*of_rows))
        return rows, features["template_torsion_angles_mask"][..., PSI] > 0, update
