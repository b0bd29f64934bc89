"""The configuration of the whole reference model and random features for it."""

import torch

from bevatron.models.alphafold2.config import (
    AlphaFold2Config,
    EvoformerConfig,
    StructureConfig,
    TemplateConfig,
    TriangleConfig,
)

TRIANGLES = TriangleConfig(hidden=10, num_heads=2, head_width=6, transition_factor=2)
OF_TEMPLATES = TriangleConfig(hidden=8, num_heads=2, head_width=5, transition_factor=2)
TINY = AlphaFold2Config(
    c_m=24,
    c_z=20,
    c_s=28,
    c_t=12,
    c_e=10,
    max_offset=8,
    evoformer=EvoformerConfig(2, 4, 6, 2, outer_width=5, triangles=TRIANGLES),
    extra_msa=EvoformerConfig(1, 2, 4, 2, outer_width=5, triangles=TRIANGLES),
    templates=TemplateConfig(num_blocks=1, num_heads=2, head_width=5, triangles=OF_TEMPLATES),
    structure=StructureConfig(
        num_blocks=3,
        num_heads=4,
        head_width=6,
        num_query_points=3,
        num_value_points=4,
        angle_width=16,
    ),
    lddt_width=16,
    aligned_error=True,
)


def random_weights(model, seed=0):
    """Fill a model, whose updates are zero when it is new, with small random numbers."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator).to(parameter)
            parameter.add_(noise, alpha=0.15)
    return model


def random_features(seed=0, length=9, rows=5, extra=7, templates=2):
    """Features of one cycle."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    def integers(high, *shape):
        return torch.randint(0, high, shape, generator=generator)

    def some(*shape):
        return (torch.rand(shape, generator=generator) > 0.2).float()

    T, N = templates, length
    return {
        "aatype": integers(21, N),
        "residue_index": torch.arange(N),
        "seq_mask": torch.ones(N),
        "target_feat": normal(N, 22),
        "msa_feat": normal(rows, N, 49),
        "msa_mask": torch.ones(rows, N),
        "extra_msa": integers(23, extra, N),
        "extra_has_deletion": some(extra, N),
        "extra_deletion_value": some(extra, N),
        "extra_msa_mask": torch.ones(extra, N),
        "template_mask": torch.ones(T),
        "template_aatype": integers(22, T, N),
        "template_pseudo_beta": 10 * normal(T, N, 3),
        "template_pseudo_beta_mask": some(T, N),
        "template_all_atom_positions": 10 * normal(T, N, 37, 3),
        "template_all_atom_mask": some(T, N, 37),
        "template_torsion_angles_sin_cos": normal(T, N, 7, 2),
        "template_alt_torsion_angles_sin_cos": normal(T, N, 7, 2),
        "template_torsion_angles_mask": some(T, N, 7),
    }
