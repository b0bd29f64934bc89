"""Modules of AlphaFold3's trunk against reference values: results and all gradients."""

import pytest
import torch

import folding_golden as golden
from bevatron.models.alphafold3.config_trunk import (
    MsaConfig,
    PairConfig,
    PairformerConfig,
    TemplateConfig,
)
from bevatron.models.alphafold3.convert import protenix_names
from bevatron.models.alphafold3.distogram import DistogramHead
from bevatron.models.alphafold3.msa import MsaBlock, MsaModule, PairWeightedAveraging, msa_features
from bevatron.models.alphafold3.pairformer import AttentionPairBias, Pairformer, PairformerBlock
from bevatron.models.alphafold3.relative_position import RelativePositionEncoding
from bevatron.models.alphafold3.templates import TemplateEmbedder, TemplatePairs
from bevatron.models.common.folding import Checkpointing

POLICIES = [Checkpointing(kind, 2) for kind in ("none", "pair", "all", "segments", "paper")]
SHIFT_OF_LOGITS = ("attention.bias.norm.bias", "averaging.bias.norm.bias", "bias.norm.bias")
"""The same for all keys of a query: in exact arithmetic it has no gradient."""


def check(module, file, shared, run, **options):
    data = golden.read(shared, file if "/" in file else f"alphafold3/{file}")
    golden.check(module, data, protenix_names(module), run, zero=SHIFT_OF_LOGITS, **options)


@pytest.mark.parametrize(
    ("file", "sizes"),
    [
        ("attention_pair_bias_single", (24, 16, 4, 6)),
        ("pair/attention_pair_bias", (128, 64, 8, 16)),
    ],
)
def test_attention_pair_bias(shared, file, sizes):
    module = AttentionPairBias(*sizes)
    check(module, file, shared, lambda m, x: {"y": m(x["a"], x["z"])})


@pytest.mark.parametrize("policy", POLICIES)
def test_pairformer_block(policy, shared):
    pair = PairConfig(hidden=12, num_heads=2, head_width=6, transition=2)
    module = PairformerBlock(24, 16, PairformerConfig(1, 3, 8, 4, pair), policy)

    def run(module, x):
        s, z = module((x["s"], x["z"]), pair_mask=x["pair_mask"].bool())
        return {"s": s, "z": z}

    check(module, "pairformer_block", shared, run)


@pytest.mark.parametrize("policy", POLICIES)
def test_pairformer(policy, shared):
    module = Pairformer(24, 16, PairformerConfig(num_blocks=2, num_heads=3, head_width=8), policy)
    check(
        module,
        "pairformer_stack2_nomask",
        shared,
        lambda module, x: dict(zip("sz", module(x["s"], x["z"]), strict=True)),
    )


def test_pair_weighted_averaging(shared):
    module = PairWeightedAveraging(18, 16, 3, 5)
    check(
        module,
        "msa_pair_weighted_averaging",
        shared,
        lambda module, x: {"m": module(x["m"], x["z"])},
    )


@pytest.mark.parametrize("policy", POLICIES)
def test_msa_block(policy, shared):
    module = MsaBlock(16, MsaConfig(width=18, outer_width=5), policy, last=False)

    def run(module, x):
        m, z = module((x["m"], x["z"]), pair_mask=x["pair_mask"].bool())
        return {"m": m, "z": z}

    check(module, "msa_block", shared, run)


@pytest.mark.parametrize("policy", POLICIES)
def test_msa_module(policy, shared):
    module = MsaModule(21, 16, MsaConfig(num_blocks=2, width=18), policy)

    def run(module, x):
        features = msa_features(x["msa"].to(torch.int8), torch.zeros_like(x["msa"]), torch.float64)
        # In the file these are numbers of no alignment.
        features[..., 32], features[..., 33] = x["has_deletion"], x["deletion_value"]
        return {"z": module(features, x["z"], x["s_inputs"], pair_mask=x["pair_mask"].bool())}

    check(module, "msa_module", shared, run)


@pytest.mark.parametrize("policy", POLICIES)
def test_template_embedder(policy, shared):
    config = TemplateConfig(num_blocks=2, width=14, pair=PairConfig(transition=2))
    module = TemplateEmbedder(16, config, policy)

    def run(module, x):
        pairs = TemplatePairs(
            x["template_distogram"],
            x["template_pseudo_beta_mask"].bool(),
            x["template_unit_vector"],
            x["template_backbone_frame_mask"].bool(),
        )
        mask = x["pair_mask"].bool()
        return {"z": module(x["z"], x["template_aatype"], pairs, x["asym_id"], mask)}

    check(module, "template_embedder", shared, run)


def test_relative_position_encoding(shared):
    data = golden.read(shared, "alphafold3/relative_position_encoding")
    del data.arrays["out__relp"]
    module = RelativePositionEncoding(16)
    golden.check(module, data, protenix_names(module), lambda module, x: {"z": module(x)})


def test_distogram_head(shared):
    check(DistogramHead(16, 64), "distogram_head", shared, lambda m, x: {"logits": m(x["z"])})
