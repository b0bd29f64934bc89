"""The trunk: padding, batches, cycles, dropout, features on the device, sizes, names of weights."""

from dataclasses import replace

import pytest
import torch
from random_complex import randomise
from random_tokens import inputs, token_fields

import folding_golden
from bevatron.data.readers.proteins.alphabet import GAP
from bevatron.errors import CheckpointError, ConfigError
from bevatron.models.alphafold3.config import TOKEN_FEATURES, AlphaFold3Config
from bevatron.models.alphafold3.config_diffusion import (
    AtomConfig,
    ConfidenceConfig,
    DiffusionConfig,
    TokenTransformerConfig,
    TrunkWidths,
)
from bevatron.models.alphafold3.config_trunk import (
    MsaConfig,
    PairConfig,
    PairformerConfig,
    TemplateConfig,
)
from bevatron.models.alphafold3.convert import (
    protenix_names,
    state_from_protenix,
    to_protenix,
)
from bevatron.models.alphafold3.model import AlphaFold3
from bevatron.models.alphafold3.msa import msa_features
from bevatron.models.alphafold3.pair import PairBlock
from bevatron.models.alphafold3.templates import template_pairs
from bevatron.models.alphafold3.trunk import Trunk, bonded
from bevatron.models.common.folding import Checkpointing, checkpointing, keep_masks
from bevatron.testing import assert_close

PAIR = PairConfig(hidden=6, num_heads=2, head_width=4, transition=2, dropout=0.25)
WIDTHS = TrunkWidths(inputs=TOKEN_FEATURES + 3, single=8, pair=8)
CONFIG = AlphaFold3Config(
    widths=WIDTHS,
    templates=TemplateConfig(1, 6, PAIR),
    msa=MsaConfig(2, 8, 3, 2, 4, 2, 0.15, PAIR),
    pairformer=PairformerConfig(2, 2, 4, 2, PAIR),
    checkpointing=Checkpointing(),
)
PAIRED = {"msa", "deletion", "msa_mask"}


def trunk(config=CONFIG):
    module = Trunk(config).double()
    randomise(module)
    return module


def test_padded_tokens_and_rows_change_no_valid_entry():
    module, real, padded = trunk(), 6, 9
    batch = token_fields(padded, real=real)
    alone = {
        name: x if name == "token_bonds" else x[:, :real] if x.ndim > 1 else x[:real]
        for name, x in batch.items()
    }
    batch["asym_id"][real:] = 1
    batch["template_backbone"][:, real:] = torch.nan
    batch["template_pseudo_beta"][:, real:] = 1e3
    for name in PAIRED:
        fill = torch.zeros(2, padded, dtype=batch[name].dtype)
        batch[name] = torch.cat([batch[name], fill])
    x = inputs(padded, WIDTHS.inputs)
    x[real:] = 1e2
    s, z = module(batch, x)
    s_alone, z_alone = module(alone, x[:real])
    assert_close(s[:real], s_alone)
    assert_close(z[:real, :real], z_alone)


def test_a_batch_is_its_samples():
    module = trunk()
    samples = [token_fields(seed=seed) for seed in range(2)]
    xs = [inputs(7, WIDTHS.inputs, seed) for seed in range(2)]
    batch = {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}
    s, z = module(batch, torch.stack(xs), cycles=2)
    for number, (sample, x) in enumerate(zip(samples, xs, strict=True)):
        s_one, z_one = module(sample, x, cycles=2)
        assert_close(s[number], s_one)
        assert_close(z[number], z_one)


def gradients(module, batch, x, **options):
    module.zero_grad()
    s, z = module(batch, x, **options)
    (s.square().mean() + z.square().mean()).backward()
    return [s.detach(), z.detach()] + [p.grad for p in module.parameters() if p.grad is not None]


def test_gradients_go_through_the_last_cycle_alone():
    module, batch, x = trunk(), token_fields(), inputs(7, WIDTHS.inputs)
    with torch.no_grad():
        first = module(batch, x)
    twice = gradients(module, batch, x, cycles=2)
    assert not torch.allclose(first[1], twice[1])
    # The second cycle alone, on the first one's result as it is.
    for recycled, last in zip((module.recycled_single, module.recycled_pair), first, strict=True):
        recycled.forward = lambda start, _, run=recycled.forward, last=last: run(start, last)
    for got, want in zip(gradients(module, batch, x), twice, strict=True):
        assert_close(got, want)


@pytest.mark.parametrize("kind", ["pair", "all", "segments", "paper"])
def test_dropout_is_the_same_when_activations_are_computed_again(kind):
    batch, x, seed = token_fields(), inputs(7, WIDTHS.inputs), torch.tensor(2**50 + 3)
    kept = gradients(trunk(), batch, x, cycles=2, seed=seed)
    policy = Checkpointing(kind, 2)
    again = gradients(trunk(replace(CONFIG, checkpointing=policy)), batch, x, cycles=2, seed=seed)
    for got, want in zip(again, kept, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("kind", ["none", "all", "segments"])
@pytest.mark.parametrize("layer", ["multiply_outgoing", "multiply_incoming", "attend_starting"])
def test_layers_of_a_large_pair_run_again_with_the_same_gradients(layer, kind, monkeypatch):
    batch, x, seed = token_fields(), inputs(7, WIDTHS.inputs), torch.tensor(2**50 + 3)
    module = trunk(replace(CONFIG, checkpointing=Checkpointing(kind, 2)))
    calls = []
    update = getattr(module.pairformer.blocks[1].pair, layer)
    update.register_forward_pre_hook(lambda *_: calls.append(0))
    kept = gradients(module, batch, x, cycles=2, seed=seed)
    few = len(calls)
    monkeypatch.setattr(checkpointing, "LARGE_PAIR", 0)
    for got, want in zip(gradients(module, batch, x, cycles=2, seed=seed), kept, strict=True):
        assert torch.equal(got, want)
    assert len(calls) == 2 * few + 1


def test_dropout_depends_on_the_seed_and_each_stack_has_it():
    batch, x = token_fields(), inputs(7, WIDTHS.inputs)
    with torch.no_grad():
        for part in ("templates", "msa", "pairformer"):
            parts = {"templates", "msa", "pairformer"} - {part}
            calm = {name: without_dropout(getattr(CONFIG, name)) for name in parts}
            module = trunk(replace(CONFIG, **calm))
            plain = module(batch, x)[1]
            one, same, other = (module(batch, x, seed=torch.tensor(n))[1] for n in (5, 5, 6))
            assert torch.equal(one, same)
            assert not torch.allclose(one, plain)
            assert not torch.allclose(one, other)


def test_every_cycle_has_dropout_of_its_own():
    module, seeds = trunk(), []
    module.pairformer.register_forward_pre_hook(
        lambda _, args, given: seeds.append(given["seed"]), with_kwargs=True
    )
    module(token_fields(), inputs(7, WIDTHS.inputs), cycles=3, seed=torch.tensor(2**62 + 3))
    z = torch.zeros(7, 7, 8)
    one, two, three = (keep_masks(seed, 0, z, 1, 0.5) for seed in seeds)
    assert not torch.equal(one, two)
    assert not torch.equal(two, three)
    assert not torch.equal(one, three)


def test_the_ending_node_drops_along_columns_and_the_others_along_rows():
    names = ["multiply_outgoing", "multiply_incoming", "attend_starting", "attend_ending"]
    z = torch.randn(5, 5, 8, dtype=torch.float64)
    for number, name in enumerate(names):
        block = PairBlock(8, PAIR).double()
        randomise(block)
        for other in {*names, "transition"} - {name}:
            silence(getattr(block, other))
        drops = torch.ones(4, 5, 8, dtype=torch.float64)
        drops[number, 2, 3] = 0.0
        changed = (block(z, drops=drops) - block(z)) != 0
        expected = torch.zeros_like(changed)
        expected[(2, slice(None), 3) if name == "attend_ending" else (slice(None), 2, 3)] = True
        assert torch.equal(changed, expected)


def silence(layer):
    with torch.no_grad():
        for weight in layer.parameters():
            weight.zero_()


def without_dropout(config):
    calm = replace(config, pair=replace(config.pair, dropout=0.0))
    return replace(calm, dropout=0.0) if hasattr(calm, "dropout") else calm


def test_templates_and_alignment_may_be_left_out():
    config = replace(CONFIG, templates=TemplateConfig(0), msa=MsaConfig(0))
    module = trunk(config)
    s, z = module(token_fields(), inputs(7, WIDTHS.inputs))
    assert s.isfinite().all()
    assert z.isfinite().all()
    assert not [name for name, _ in module.named_parameters() if "msa" in name]


def test_without_any_template_the_pair_is_as_if_there_were_no_embedder():
    module, x = trunk(), inputs(7, WIDTHS.inputs)
    none = module(token_fields(templates=0), x)
    module.templates = None
    for got, want in zip(none, module(token_fields(), x), strict=True):
        assert_close(got, want)


def test_one_empty_template_stands_for_all_four():
    module, x = trunk(), inputs(7, WIDTHS.inputs)
    batch = token_fields(templates=4)
    batch |= {"template_restype": torch.full_like(batch["template_restype"], GAP)}
    for name in ("template_pseudo_beta_mask", "template_backbone_mask"):
        batch[name] = torch.zeros_like(batch[name])
    single = {n: t[:1] if n.startswith("template") else t for n, t in batch.items()}
    for one, four in zip(module(single, x), module(batch, x), strict=True):
        torch.testing.assert_close(one, four, rtol=0, atol=1e-6)


def test_bonds_are_symmetric_and_padding_is_none():
    pairs = torch.tensor([[[0, 2], [2, 0], [1, 3]], [[3, 3], [-1, -1], [-1, 0]]])
    found = bonded(pairs, 4)
    assert [sample.nonzero().tolist() for sample in found] == [
        [[0, 2], [1, 3], [2, 0], [3, 1]],
        [[3, 3]],
    ]


def test_features_of_an_alignment():
    msa = torch.tensor([[0, 31], [5, 5]], dtype=torch.int8)
    deletion = torch.tensor([[0, 3], [255, 1]], dtype=torch.uint8)
    found = msa_features(msa, deletion, torch.float64)
    assert found.shape == (2, 2, 34)
    assert torch.equal(found[..., :32].argmax(-1), msa.long())
    assert torch.equal(found[..., :32].sum(-1), torch.ones(2, 2).double())
    assert torch.equal(found[..., 32], (deletion > 0).double())
    # 2 / pi arctan(d / 3)
    expected = torch.tensor([[0.0, 0.5], [0.9925107, 0.2048328]]).double()
    assert_close(found[..., 33], expected, 1e-6)


def test_geometry_of_templates_is_that_of_the_public_code(shared):
    data = folding_golden.read(shared, "alphafold2/template_and_geometry")
    x, out = data.of("in"), data.of("out")
    atoms = x["template_all_atom_positions"][..., :3, :]
    exists = x["template_all_atom_mask"][..., :3].bool().all(-1)
    pairs = template_pairs(
        x["template_pseudo_beta"],
        x["template_pseudo_beta_mask"].bool(),
        atoms,
        exists,
        torch.float64,
    )
    both = pairs.frame_mask
    # AlphaFold2 hides all channels without a backbone; only a part of them is compared.
    channels = out["template_pair_feat88"].double()
    assert torch.equal(channels[..., -1].bool(), both)
    assert both.any()
    assert not both.all()
    assert torch.equal(pairs.distance[both], channels[..., :39][both])
    assert torch.equal(pairs.distance_mask[both].double(), channels[..., 39][both])
    expected = out["template_unit_vector"] * both[..., None]
    assert_close(pairs.direction, expected, 1e-6)


def test_sizes_are_those_of_the_published_models():
    def millions(module):
        return round(sum(p.numel() for p in module.parameters()) / 1e6, 1)

    with torch.device("meta"):
        published = Trunk(AlphaFold3Config())
        megafold = AlphaFold3(AlphaFold3Config.preset("megafold"))
        small = Trunk(AlphaFold3Config.preset("small"))
    assert millions(published.pairformer) == 147.4
    assert millions(megafold.trunk.pairformer) == 159.2
    assert megafold.config.msa.head_width == 32
    assert millions(megafold.confidence.pairformer) == 13.3
    assert sum(p.numel() for p in published.parameters()) == 151_275_456
    assert millions(small) < 0.5


def test_rates_of_dropout_are_the_published_ones():
    config = AlphaFold3Config()
    assert config.msa.dropout == 0.15
    stacks = (config.templates, config.msa, config.pairformer, config.confidence.pairformer)
    assert [stack.pair.dropout for stack in stacks] == [0.25, 0.25, 0.25, 0.0]


def test_the_whole_model_has_the_weights_that_protenix_states():
    with torch.device("meta"):
        model = AlphaFold3(AlphaFold3Config())
    assert round(sum(p.numel() for p in model.parameters()) / 1e6, 2) == 368.48
    names = protenix_names(model)
    assert len(set(names.values())) == len(names)
    parts = {name.partition(".")[0] for name in names.values()}
    assert {"input_embedder", "pairformer_stack", "diffusion_module", "confidence_head"} < parts
    assert not parts & {"trunk", "embedding", "recycled_pair"}


def test_weights_go_to_protenix_and_back():
    module = trunk()
    theirs = to_protenix(module)
    assert len(theirs) == len(module.state_dict())
    assert theirs["pairformer_stack.blocks.1.tri_att_end.mha.linear_q.weight"].shape == (8, 8)
    assert "template_embedder.pairformer_stack.blocks.0.pair_transition.layernorm1.bias" in theirs
    back = state_from_protenix(module, theirs)
    for name, value in module.state_dict().items():
        assert torch.equal(back[name], value)
    without = {k: v for k, v in theirs.items() if k != "linear_no_bias_s.weight"}
    with pytest.raises(CheckpointError, match=r"linear_no_bias_s\.weight: this tensor is missing"):
        state_from_protenix(module, without)
    with pytest.raises(CheckpointError, match="other: the model has no such tensor"):
        state_from_protenix(module, theirs | {"other": torch.ones(1)})
    wrong = theirs | {"layernorm_s.bias": torch.ones(5)}
    with pytest.raises(
        CheckpointError, match=r"layernorm_s\.bias: the weights have shape \(5,\), .* \(8,\)"
    ):
        state_from_protenix(module, wrong)
    assert set(protenix_names(module)) == set(module.state_dict())


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: AlphaFold3Config(cycles=0), "cycles: expected 1 or more, got 0"),
        (lambda: AlphaFold3Config(distogram_bins=32), "distogram_bins: the loss has 64, got 32"),
        (lambda: AlphaFold3Config(widths=TrunkWidths(inputs=65)), "inputs: expected more than"),
        (lambda: PairConfig(dropout=1.0), r"dropout: expected one in \[0, 1\), got 1.0"),
        (lambda: MsaConfig(num_heads=0), "num_heads: expected 1 to 65536, got 0"),
        (lambda: TrunkWidths(pair=0), "pair: expected 1 or more, got 0"),
        (lambda: AtomConfig(num_heads=5), "num_heads: 128 channels are no multiple of 5 heads"),
        (lambda: AtomConfig(num_blocks=0), "num_blocks: expected 1 or more, got 0"),
        (lambda: TokenTransformerConfig(num_heads=0), "768 channels are no multiple of 0 heads"),
        (lambda: DiffusionConfig(noise_width=0), "noise_width: expected 1 or more, got 0"),
        (lambda: ConfidenceConfig(plddt_bins=0), "plddt_bins: expected 2 or more, got 0"),
        (lambda: AlphaFold3Config.preset("large"), "there is no 'large'"),
    ],
)
def test_impossible_sizes_are_refused(make, sentence):
    with pytest.raises(ConfigError, match=sentence):
        make()
