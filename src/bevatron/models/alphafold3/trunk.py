"""AlphaFold3's trunk: from the input embedding to single and pair representation.

Algorithm 1, lines 2 to 13: first embeddings, then cycles of templates, alignment and Pairformer.
Where several processes share a sample, each has R rows of the pair.
"""

from collections.abc import Mapping

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from bevatron.kernels import layer_norm_linear
from bevatron.models.alphafold3.config import AlphaFold3Config
from bevatron.models.alphafold3.msa import MsaModule, msa_features
from bevatron.models.alphafold3.pairformer import Pairformer, pairs_of
from bevatron.models.alphafold3.relative_position import RelativePositionEncoding
from bevatron.models.alphafold3.templates import TemplateEmbedder, TemplatePairs, template_pairs
from bevatron.models.common.folding import LayerNorm, Linear
from bevatron.parallel.axial import own, own_rows

CALLS = {"templates": 0, "msa": 1, "pairformer": 3}
"""Call numbers that separate the dropout of the stacks; the alignment uses two."""

CYCLE = 2**40
"""Offset between the seeds of two cycles, in the upper half of a seed."""


class Recycling(nn.Module):
    """Add the result of the last cycle, ``x_0 + W LayerNorm(x)``; W starts at zero.

    Rows that are all the same may be given once: x is broadcast.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = LayerNorm(width)
        self.linear = Linear(width, width, bias=False, init="final")

    def forward(
        self, first: Float[Tensor, "*rows C"], last: Float[Tensor, "*#rows C"]
    ) -> Float[Tensor, "*rows C"]:
        """Compute the start of a cycle."""
        return first + layer_norm_linear(last, *self.norm.parts, self.linear.weight)


class Embedding(nn.Module):
    """First single and pair representation: algorithm 1, lines 2 to 5.

    ``s_i = W_s x_i`` and ``z_ij = W_r s_i + W_c s_j + W_p p_ij + w b_ij`` of the input embedding x,
    relative positions p and bonds b.
    """

    def __init__(self, config: AlphaFold3Config) -> None:
        super().__init__()
        widths = config.widths
        self.single = Linear(widths.inputs, widths.single, bias=False)
        self.row = Linear(widths.single, widths.pair, bias=False)
        self.column = Linear(widths.single, widths.pair, bias=False)
        self.relative_position = RelativePositionEncoding(widths.pair)
        self.bond = Linear(1, widths.pair, bias=False)

    def forward(
        self, batch: Mapping[str, Tensor], s_inputs: Float[Tensor, "*batch N I"]
    ) -> tuple[Float[Tensor, "*batch N C"], Float[Tensor, "*batch _ N P"]]:
        """Compute s and own rows of z of a batch's tokens."""
        s = self.single(s_inputs)
        z = own(self.row(s), -2).unsqueeze(-2) + self.column(s).unsqueeze(-3)
        z = z + self.relative_position(batch).to(z.dtype)
        bonds = own_rows(bonded(batch["token_bonds"], s.shape[-2]).unsqueeze(-1)).to(z.dtype)
        return s, torch.addcmul(z, bonds, self.bond.weight[:, 0].to(z.dtype))


class Trunk(nn.Module):
    """Embeddings and cycles of templates, alignment and Pairformer."""

    def __init__(self, config: AlphaFold3Config) -> None:
        super().__init__()
        widths, policy = config.widths, config.checkpointing
        self.embedding = Embedding(config)
        self.recycled_single = Recycling(widths.single)
        self.recycled_pair = Recycling(widths.pair)
        self.templates = (
            TemplateEmbedder(widths.pair, config.templates, policy, CALLS["templates"])
            if config.templates.num_blocks
            else None
        )
        self.msa = (
            MsaModule(widths.inputs, widths.pair, config.msa, policy, CALLS["msa"])
            if config.msa.num_blocks
            else None
        )
        self.pairformer = Pairformer(
            widths.single, widths.pair, config.pairformer, policy, CALLS["pairformer"]
        )

    def forward(
        self,
        batch: Mapping[str, Tensor],
        s_inputs: Float[Tensor, "*batch N I"],
        cycles: int = 1,
        seed: Int[Tensor, ""] | None = None,
    ) -> tuple[Float[Tensor, "*batch N C"], Float[Tensor, "*batch R N P"]]:
        """Compute single and pair representation; gradients go through the last cycle alone.

        Parameters
        ----------
        batch : fields of `bevatron.data.proteins.complex_batch.ComplexBatch`
        s_inputs : input embedding; its type is that of all activations
        cycles : passes, 1 or more
        seed : dropout seed; None = no dropout
        """
        s_first, z_first = self.embedding(batch, s_inputs)
        s, z = (x.new_zeros(1, x.shape[-1]) for x in (s_first, z_first))  # of every row
        with torch.no_grad():
            templates = self._template_pairs(batch, z.dtype)
            rows = msa_features(own(batch["msa"], -2), own(batch["deletion"], -2), z.dtype)
        trained = torch.is_grad_enabled()
        for cycle in range(cycles):
            drawn = None if seed is None else seed + cycle * CYCLE
            with torch.set_grad_enabled(trained and cycle == cycles - 1):
                z = self.recycled_pair(z_first, z)
                z = self._evidence(batch, s_inputs, z, templates, rows, drawn)
                s = self.recycled_single(s_first, s)
                s, z = self.pairformer(s, z, batch["token_mask"], seed=drawn)
        return s, z

    def _evidence(
        self,
        batch: Mapping[str, Tensor],
        s_inputs: Tensor,
        z: Tensor,
        templates: TemplatePairs | None,
        rows: Tensor,
        seed: Tensor | None,
    ) -> Tensor:
        """Update the pair by templates and alignment."""
        tokens = batch["token_mask"]
        pairs = pairs_of(tokens)
        if self.templates is not None and templates is not None:
            restype, chain = batch["template_restype"], batch["asym_id"]
            z = z + self.templates(z, restype, templates, chain, pairs, seed)
        if self.msa is not None:
            z = self.msa(rows, z, s_inputs, batch["msa_mask"], tokens, pairs, seed)
        return z

    def _template_pairs(
        self, batch: Mapping[str, Tensor], dtype: torch.dtype
    ) -> TemplatePairs | None:
        if self.templates is None:
            return None
        return template_pairs(
            batch["template_pseudo_beta"],
            batch["template_pseudo_beta_mask"],
            batch["template_backbone"],
            batch["template_backbone_mask"],
            dtype,
        )


def bonded(pairs: Int[Tensor, "*batch E 2"], num_tokens: int) -> Tensor:
    """Return whether two tokens are bonded, [..., N, N] bool, from pairs in either order.

    A negative token pads.
    """
    i, j = pairs.unbind(-1)
    real = (i >= 0) & (j >= 0)
    places = torch.cat([i * num_tokens + j, j * num_tokens + i], -1)
    places = torch.where(torch.cat([real, real], -1), places, num_tokens**2)
    found = torch.zeros(*pairs.shape[:-2], num_tokens**2 + 1, dtype=torch.bool, device=pairs.device)
    found.scatter_(-1, places, True)
    dense: Tensor = found[..., :-1].unflatten(-1, (num_tokens, num_tokens))
    return dense
