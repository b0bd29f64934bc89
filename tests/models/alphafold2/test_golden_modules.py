"""Every module against OpenFold: values and all gradients in float64, on random weights."""

import pytest
import torch

from bevatron.maths import rigid
from bevatron.models.alphafold2 import embedders, features, heads, msa_attention, templates
from bevatron.models.alphafold2.config import (
    AlphaFold2Config,
    EvoformerConfig,
    StructureConfig,
    TemplateConfig,
    TriangleConfig,
)
from bevatron.models.alphafold2.drops import Drops
from bevatron.models.alphafold2.evoformer import Evoformer, EvoformerBlock
from bevatron.models.alphafold2.structure_module import (
    InvariantPointAttention,
    StructureModule,
    moved_frames,
)
from bevatron.models.common.folding import (
    Checkpointing,
    OuterProductMean,
    Transition,
    metrics,
)

NO_DROPOUT = Drops(None)


def test_row_attention(golden):
    module = msa_attention.MSARowAttention(24, 20, 3, 8)
    golden("msa_row_attention").check(
        module, lambda f, m, z, msa_mask: {"m": f(m, z, msa_mask > 0)}, "msa_att_row."
    )


def test_column_attention(golden):
    module = msa_attention.MSAColumnAttention(24, 3, 8)
    golden("msa_column_attention").check(
        module, lambda f, m, msa_mask: {"m": f(m, msa_mask > 0) - m}, "msa_att_col."
    )


def test_global_column_attention(golden):
    module = msa_attention.MSAColumnGlobalAttention(24, 3, 8)
    golden("msa_column_global_attention").check(
        module, lambda f, m, msa_mask: {"m": f(m, msa_mask > 0) - m}, "msa_att_col."
    )


def test_transition(golden):
    module = Transition(24, 3, gated=False)
    golden("msa_transition").check(module, lambda f, m: {"m": f(m) - m}, "msa_transition.")


def test_outer_product_mean(golden):
    module = OuterProductMean(24, 6, 20, bias=True)
    golden("outer_product_mean").check(
        module, lambda f, m, msa_mask: {"z": f(m, msa_mask > 0)}, "outer_product_mean."
    )


def run_block(block, m, z, msa_mask, pair_mask):
    return dict(zip("mz", block((m, z), msa_mask > 0, pair_mask > 0), strict=True))


def test_evoformer_block(golden):
    triangles = TriangleConfig(hidden=12, num_heads=2, head_width=7, transition_factor=3, dropout=0)
    config = EvoformerConfig(1, 3, 8, 3, outer_width=6, dropout=0, triangles=triangles)
    module = EvoformerBlock(24, 20, config, msa_attention.MSAColumnAttention, Checkpointing())
    golden("evoformer_block").check(module, run_block)


def test_extra_msa_block(golden):
    triangles = TriangleConfig(hidden=12, num_heads=2, head_width=7, transition_factor=3, dropout=0)
    config = EvoformerConfig(1, 4, 5, 3, outer_width=6, dropout=0, triangles=triangles)
    module = EvoformerBlock(16, 20, config, msa_attention.MSAColumnGlobalAttention, Checkpointing())

    def run(block, m, z, msa_mask, pair_mask):
        # In this file the transitions were masked, which the model's are not.
        transitions = {block.msa_transition: msa_mask, block.pair_stack.pair_transition: pair_mask}
        for transition, mask in transitions.items():
            transition.register_forward_hook(
                lambda _, given, found, mask=mask: torch.where(mask[..., None] > 0, found, given[0])
            )
        return run_block(block, m, z, msa_mask, pair_mask)

    golden("extra_msa_block").check(module, run)


@pytest.mark.parametrize("kind", ["none", "pair", "all", "segments", "paper"])
def test_evoformer_of_two_blocks(golden, kind):
    triangles = TriangleConfig(hidden=8, num_heads=2, head_width=5, transition_factor=2, dropout=0)
    config = EvoformerConfig(2, 3, 4, 2, outer_width=5, dropout=0, triangles=triangles)

    def run(module, m, z, msa_mask, pair_mask):
        found = module(m, z, msa_mask > 0, pair_mask > 0, NO_DROPOUT)
        return dict(zip("mzs", found, strict=True))

    golden("evoformer_stack2").check(Evoformer(24, 20, 18, config, Checkpointing(kind)), run)


def test_template_pair_stack(golden):
    triangles = TriangleConfig(hidden=9, num_heads=2, head_width=5, transition_factor=2, dropout=0)
    config = TemplateConfig(triangles=triangles)
    module = templates.TemplatePairStack(16, config, Checkpointing("all"))
    golden("template_pair_stack").check(
        module, lambda f, t, pair_mask: {"t": f(t, pair_mask > 0, NO_DROPOUT)}
    )


def test_template_pointwise_attention(golden):
    module = templates.TemplatePointwiseAttention(16, 20, 2, 6)
    file = golden("template_pointwise_attention")
    file.check(
        module,
        lambda f, t, z, template_mask: {"z": f(t, z, template_mask > 0)},
        "template_pointwise_att.",
    )


def test_input_embedder(golden):
    def run(module, target_feat, msa_feat, residue_index):
        return dict(zip("mz", module(target_feat, residue_index, msa_feat), strict=True))

    golden("input_embedder").check(embedders.InputEmbedder(24, 20, 6), run)


def test_recycling_embedder(golden):
    def run(module, m, z, x):
        return dict(zip("mz", module(m, z, x), strict=True))

    golden("recycling_embedder").check(embedders.RecyclingEmbedder(24, 20), run)


STRUCTURE = StructureConfig(
    num_blocks=3,
    num_heads=3,
    head_width=5,
    num_query_points=3,
    num_value_points=4,
    angle_width=10,
    dropout=0,
)


def test_invariant_point_attention(golden):
    def run(module, s, z, quat, trans, mask):
        frames = rigid.rigid_of_quaternion(torch.cat([quat, trans], -1))
        return {"s": module(s, z, module.prepare(z, mask > 0), frames)}

    golden("ipa").check(InvariantPointAttention(18, 20, STRUCTURE), run, "ipa.")


def test_backbone_update(golden):
    def run(_, quat, trans, update6):
        frames, rotation = torch.cat([quat, trans], -1), rigid.rotation_of_quaternion(quat)
        quaternion, moved = moved_frames(frames, rotation, update6).split([4, 3], -1)
        rotation = rigid.rotation_of_quaternion(quaternion)
        return {"quat": quaternion, "rot": rotation, "trans": moved}

    golden("backbone_update").check(None, run)


def test_structure_module(golden):
    def run(module, single, pair, aatype, mask):
        found = module(single, pair, aatype, mask > 0, NO_DROPOUT)
        return found | {"single": found["states"][-1]}

    golden("structure_module").check(StructureModule(18, 20, STRUCTURE), run)


def test_heads(golden):
    def run(module, single_sm, single, pair, msa):
        found = module(single_sm, single, pair, msa)
        errors, all_residues = found["tm_logits"], torch.ones(21, dtype=torch.bool)
        return found | {
            "plddt": metrics.expected_lddt(found["lddt_logits"]),
            "pae": metrics.expected_error(errors),
            "max_pae": metrics.expected_error(1e4 * torch.eye(64).double()[-1]),
            "ptm": metrics.ptm(errors, all_residues, all_residues),
        }

    config = AlphaFold2Config(c_s=18, c_z=20, c_m=24, lddt_width=11, aligned_error=True)
    golden("heads").check(heads.Heads(config), run)


def test_template_features(golden):
    file = golden("template_and_geometry")
    of = file.part("in__template_")
    pair = (of["aatype"], of["pseudo_beta"], of["pseudo_beta_mask"])
    atoms = (of["all_atom_positions"], of["all_atom_mask"])
    found = features.template_pair_features(*pair, *atoms, unit_vectors=False)
    assert torch.equal(found, file["out__template_pair_feat88"].double())
    both = found[..., -1:]
    found = features.template_pair_features(*pair, *atoms, unit_vectors=True)[..., 84:87]
    reference = file["out__template_unit_vector"]
    # The reference has its rotations in float32.
    torch.testing.assert_close(found, reference * both, rtol=0, atol=1e-7)
    assert both.any()

    angles = features.template_angle_features(
        of["aatype"],
        of["torsion_angles_sin_cos"],
        of["alt_torsion_angles_sin_cos"],
        of["torsion_angles_mask"],
    )
    assert torch.equal(angles, file["out__template_angle_feat57"])


def test_extra_msa_features(golden):
    file = golden("template_and_geometry")
    inputs = (file[f"in__extra_{name}"] for name in ("msa", "has_deletion", "deletion_value"))
    assert torch.equal(features.extra_msa_features(*inputs), file["out__extra_msa_feat25"])
