"""AlphaFold2: a structure from an alignment and templates, in several cycles; algorithm 2.

Jumper et al., Nature 596 (2021), with the supplement's algorithms. Axes: samples in front where
there are any, S rows of the clustered alignment, T templates, N residues. Channels: M alignment, Z
pair, C single. Features have OpenFold's names and shapes (`FEATURES`), results those of its
outputs.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from bevatron.data.proteins.atoms14 import atom14_to_atom37, of_residues, pseudo_beta
from bevatron.errors import DataError
from bevatron.kernels.shared.dtypes import wide
from bevatron.kernels.shared.standing_weights import standing_weights
from bevatron.models.alphafold2.config import AlphaFold2Config
from bevatron.models.alphafold2.drops import Drops
from bevatron.models.alphafold2.embedders import (
    EXTRA_MSA_FEATURES,
    InputEmbedder,
    Projection,
    RecyclingEmbedder,
)
from bevatron.models.alphafold2.evoformer import Evoformer, ExtraMSAStack
from bevatron.models.alphafold2.features import extra_msa_features
from bevatron.models.alphafold2.heads import Heads
from bevatron.models.alphafold2.structure_module import StructureModule
from bevatron.models.alphafold2.templates import TemplateEmbedder
from bevatron.parallel.axial import own_rows

FEATURES = (
    "aatype", "residue_index", "seq_mask", "target_feat", "msa_feat", "msa_mask", "extra_msa",
    "extra_has_deletion", "extra_deletion_value", "extra_msa_mask", "template_mask",
    "template_aatype", "template_pseudo_beta", "template_pseudo_beta_mask",
    "template_all_atom_positions", "template_all_atom_mask", "template_torsion_angles_sin_cos",
    "template_alt_torsion_angles_sin_cos", "template_torsion_angles_mask",
)  # fmt: skip
"""The features that the model reads."""


class Recycled(NamedTuple):
    """Outputs of a cycle that the next one recycles.

    Attributes
    ----------
    m, z : first row of the alignment and own rows of the pair
    x : positions of CB in Å
    """

    m: Float[Tensor, "*batch N M"]
    z: Float[Tensor, "*batch R N Z"]
    x: Float[Tensor, "*batch N 3"]


class AlphaFold2(nn.Module):
    """Positions of all atoms, confidence and the logits that training needs.

    Parameters
    ----------
    config : sizes
    dtype : floating-point type of the weights

    Examples
    --------
    >>> model = AlphaFold2(AlphaFold2Config.preset("small"))
    >>> sum(p.numel() for p in model.parameters())
    490618
    """

    def __init__(self, config: AlphaFold2Config, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.config = config
        c_m, c_z, c_s = config.c_m, config.c_z, config.c_s
        self.input_embedder = InputEmbedder(c_m, c_z, config.max_offset)
        self.recycling_embedder = RecyclingEmbedder(c_m, c_z)
        again = config.checkpointing
        templates = config.templates
        self.template_embedder = (
            TemplateEmbedder(c_m, c_z, config.c_t, templates, again)
            if templates.num_blocks
            else None
        )
        self.extra_msa_embedder = Projection(EXTRA_MSA_FEATURES, config.c_e)
        self.extra_msa_stack = ExtraMSAStack(config.c_e, c_z, config.extra_msa, again)
        self.evoformer = Evoformer(c_m, c_z, c_s, config.evoformer, again)
        self.structure_module = StructureModule(c_s, c_z, config.structure)
        self.aux_heads = Heads(config)
        self.to(dtype or torch.get_default_dtype())

    def forward(
        self, cycles: Sequence[Mapping[str, Tensor]], seed: Int[Tensor, ""] | None = None
    ) -> dict[str, Tensor]:
        """Run all cycles, of which only the last has a gradient.

        Raises DataError if a feature is missing.

        Parameters
        ----------
        cycles : the features of each cycle
        seed : seed of dropout, int64 on the device of the model; None = no dropout

        Returns
        -------
        dict
            ``msa``, ``pair`` and ``single``, what `StructureModule` and `Heads` return, and
            ``final_atom_positions`` [..., N, 37, 3] in Å. The pair and its logits are own rows
            where processes share a sample.
        """
        for features in cycles:
            _check(features)
        *first, last = cycles
        previous, drops = None, Drops(seed)
        with torch.no_grad(), standing_weights():
            for features in first:
                previous = _recycled(features, self.cycle(features, drops, previous))
        found = self.cycle(last, drops, previous)
        representations = (found["states"][-1], found["single"], found["pair"], found["msa"])
        with _full_precision(found["pair"]):
            return {**found, **self.aux_heads(*map(wide, representations))}

    def cycle(
        self, features: Mapping[str, Tensor], drops: Drops, previous: Recycled | None
    ) -> dict[str, Tensor]:
        """Compute representations and structure once; lines 3 to 23 of algorithm 2."""
        seq_mask, msa_mask = features["seq_mask"] > 0, features["msa_mask"] > 0
        pair_mask = seq_mask[..., :, None] & seq_mask[..., None, :]
        m, z = self.input_embedder(
            features["target_feat"], features["residue_index"], features["msa_feat"]
        )
        rows = m.shape[-3]
        m, z = self._recycle(m, z, previous)
        if self.template_embedder is not None:
            t, template_mask, update = self.template_embedder(features, z, pair_mask, drops)
            z = z + update
            m = torch.cat([m, t], dim=-3)
            msa_mask = torch.cat([msa_mask, template_mask], dim=-2)
        extra = extra_msa_features(
            features["extra_msa"], features["extra_has_deletion"], features["extra_deletion_value"]
        )
        e = self.extra_msa_embedder(own_rows(extra))
        z = self.extra_msa_stack(e, z, features["extra_msa_mask"] > 0, pair_mask, drops)
        m, z, s = self.evoformer(own_rows(m), z, msa_mask, pair_mask, drops)
        with _full_precision(z):
            structure = self.structure_module(wide(s), wide(z), features["aatype"], seq_mask, drops)
        final = atom14_to_atom37(structure["positions"][-1], features["aatype"])
        found = {"msa": m[..., :rows, :, :], "pair": z, "single": s}
        return {**found, **structure, "final_atom_positions": final}

    def _recycle(
        self, m: Tensor, z: Tensor, previous: Recycled | None
    ) -> tuple[Float[Tensor, "*batch S N M"], Float[Tensor, "*batch R N Z"]]:
        if previous is None:
            first = m[..., 0, :, :]
            previous = Recycled(
                torch.zeros_like(first), torch.zeros_like(z), torch.zeros_like(first[..., :3])
            )
        row, pair = self.recycling_embedder(*previous)
        m = torch.cat([m[..., :1, :, :] + row[..., None, :, :], m[..., 1:, :, :]], dim=-3)
        return m, z + pair


def _full_precision(like: Tensor) -> AbstractContextManager[None]:
    """Keep autocast away from coordinates and logits."""
    return torch.autocast(like.device.type, enabled=False)


def cycles_of(batch: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Take apart features as OpenFold has them, with the cycles as their last axis."""
    _check(batch)
    count = batch["aatype"].shape[-1]
    return [{name: batch[name][..., cycle] for name in FEATURES} for cycle in range(count)]


def _check(features: Mapping[str, Tensor]) -> None:
    for name in FEATURES:
        if name not in features:
            raise DataError(f"{name}: this feature is missing from the batch")


def _recycled(features: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> Recycled:
    positions = found["final_atom_positions"]
    exists = of_residues("ATOM37_MASK", features["aatype"]).to(positions.dtype)
    x, _ = pseudo_beta(positions, exists, features["aatype"])
    return Recycled(found["msa"][..., 0, :, :], found["pair"], x)
