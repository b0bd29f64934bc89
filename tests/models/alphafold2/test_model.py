"""What a whole AlphaFold2 must do whatever its weights: masks, batches, dropout, precision."""

from dataclasses import replace

import pytest
import torch
from tiny_model import TINY, random_features, random_weights

from bevatron.config import from_dict, to_dict
from bevatron.errors import ConfigError, DataError
from bevatron.models.alphafold2 import AlphaFold2, AlphaFold2Config, EvoformerConfig, build, drops
from bevatron.models.common.folding import Checkpointing

RESULTS = ("positions", "final_atom_positions", "lddt_logits", "distogram_logits", "tm_logits")


def double(features):
    return {n: v.double() if v.is_floating_point() else v for n, v in features.items()}


@pytest.fixture(scope="module")
def model():
    return random_weights(AlphaFold2(TINY, torch.float64))


def agree(found, expected, names=RESULTS, tolerance=1e-10):
    for name in names:
        error = (found[name] - expected[name]).abs().max()
        assert error <= tolerance * expected[name].abs().max(), name


@torch.no_grad()
def test_samples_of_a_batch_do_not_see_each_other(model):
    one, other = (double(random_features(seed)) for seed in (1, 2))
    together = model([{name: torch.stack([one[name], other[name]]) for name in one}] * 2)
    for number, features in enumerate((one, other)):
        alone = model([features] * 2)
        for name in ("positions", "angles", "frames"):
            agree({name: together[name][:, number]}, alone, [name])
        for name in ("final_atom_positions", "lddt_logits", "tm_logits", "masked_msa_logits"):
            agree({name: together[name][number]}, alone, [name])


ROW_FEATURES = {
    "msa_feat": (0, 1),
    "msa_mask": (0, 1),
    "extra_msa": (0, 1),
    "extra_has_deletion": (0, 1),
    "extra_deletion_value": (0, 1),
    "extra_msa_mask": (0, 1),
}


def padded(features, residues, rows):
    """Random numbers where nothing is, masks that say so."""
    found = {}
    for name, value in features.items():
        shape = list(value.shape)
        if name != "template_mask":
            shape[1 if value.ndim > 1 and name != "target_feat" else 0] += residues
        if name in ROW_FEATURES:
            shape[0] += rows
        noise = torch.randint(0, 20, shape).to(value.dtype)
        if name.endswith("mask"):
            noise = torch.zeros_like(noise)
        noise[tuple(slice(0, n) for n in value.shape)] = value
        found[name] = noise
    return found


@torch.no_grad()
def test_padding_changes_nothing(model):
    features = double(random_features(3))
    alone = model([features] * 2)
    found = model([padded(features, 3, 2)] * 2)
    N, S = 9, 5
    cut = {
        "positions": found["positions"][:, :N],
        "final_atom_positions": found["final_atom_positions"][:N],
        "lddt_logits": found["lddt_logits"][:N],
        "distogram_logits": found["distogram_logits"][:N, :N],
        "tm_logits": found["tm_logits"][:N, :N],
        "masked_msa_logits": found["masked_msa_logits"][:S, :N],
    }
    assert found["positions"].isfinite().all()
    agree(cut, alone, cut)


@torch.no_grad()
def test_a_model_without_templates_is_one_that_is_shown_none(model):
    config = replace(TINY, templates=replace(TINY.templates, num_blocks=0))
    blind = AlphaFold2(config, torch.float64)
    blind.load_state_dict({n: v for n, v in model.state_dict().items() if "template" not in n})
    features = double(random_features(4))
    none = {**features, "template_mask": torch.zeros_like(features["template_mask"])}
    for name in ("template_torsion_angles_mask", "template_all_atom_mask"):
        none[name] = torch.zeros_like(features[name])
    agree(blind([features] * 2), model([none] * 2))


@torch.no_grad()
def test_a_sample_without_templates_is_not_changed_by_what_is_in_their_place(model):
    one, other = (double(random_features(4)) for _ in range(2))
    for features, seed in ((one, 5), (other, 6)):
        empty = double(random_features(seed))
        features |= {n: v for n, v in empty.items() if n.startswith("template")}
        features["template_mask"] *= 0
        features["template_torsion_angles_mask"] *= 0
    agree(model([one]), model([other]))


@torch.no_grad()
def test_a_cycle_goes_on_from_the_one_before(model):
    first, last = (double(random_features(seed)) for seed in (7, 8))
    found = model([first, last])
    other = model([double(random_features(9)), last])
    assert (found["positions"] - other["positions"]).abs().max() > 1e-3
    assert (found["positions"] - model([last])["positions"]).abs().max() > 1e-3


def test_only_the_last_cycle_has_a_gradient(model):
    first, last = (double(random_features(seed)) for seed in (7, 8))
    for features in (first, last):
        features["msa_feat"].requires_grad_()
    model([first, last])["final_atom_positions"].sum().backward()
    assert first["msa_feat"].grad is None
    assert last["msa_feat"].grad.abs().sum() > 0
    model.zero_grad()


@torch.no_grad()
def test_dropout_is_a_function_of_its_seed(model):
    features = double(random_features(10))
    without = model([features])["positions"]
    seeds = (torch.tensor(seed) for seed in (1, 1, 2))
    first, again, other = (model([features], seed)["positions"] for seed in seeds)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not torch.equal(first, without)


@torch.no_grad()
def test_every_cycle_has_dropout_of_its_own_at_the_published_rates(model, monkeypatch):
    calls, rates = [], set()

    def draw(seed, call, x, count, rate, draw=drops.keep_masks):
        calls.append(call)
        rates.add((x.shape[-1], rate))
        return draw(seed, call, x, count, rate)

    monkeypatch.setattr(drops, "keep_masks", draw)
    features = double(random_features(10))
    model([features] * 3, torch.tensor(1))
    assert len(calls) == len(set(calls))
    assert len(calls) % 3 == 0
    rows, pairs = (TINY.c_m, TINY.c_e), (TINY.c_z, TINY.c_t)
    published = {(c, 0.15) for c in rows} | {(c, 0.25) for c in pairs} | {(TINY.c_s, 0.1)}
    assert rates == published


def test_blocks_that_are_computed_again_give_the_same_gradients_with_dropout(model):
    features, seed = double(random_features(11)), torch.tensor(3)
    gradients = {}
    for kind in ("none", "pair", "all", "segments", "paper"):
        config = replace(TINY, checkpointing=Checkpointing(kind, 2))
        other = AlphaFold2(config, torch.float64)
        other.load_state_dict(model.state_dict())
        found = other([features], seed)
        sum(found[name].square().mean() for name in RESULTS).backward()
        gradients[kind] = [parameter.grad for parameter in other.parameters()]
    for kind, found in gradients.items():
        pairs = zip(found, gradients["none"], strict=True)
        assert all(torch.equal(a, b) for a, b in pairs if a is not None), kind


@pytest.mark.parametrize("kind", ["none", "all"])
def test_autocast_keeps_coordinates_and_logits_wide_and_reaches_every_weight(kind):
    config = replace(TINY, checkpointing=Checkpointing(kind))
    model = random_weights(AlphaFold2(config, torch.float32))
    features = random_features(12)
    exact = model([features] * 2)
    with torch.autocast("cpu", torch.bfloat16):
        found = model([features] * 2)
    assert found["msa"].dtype == found["pair"].dtype == torch.bfloat16
    for name in (*RESULTS, "frames", "angles", "masked_msa_logits"):
        assert found[name].dtype == torch.float32, name
    agree(found, exact, ["distogram_logits"], 0.2)
    names = ("positions", "angles", "sidechain_frames")
    logits = [name for name in found if name.endswith("logits")]
    sum(found[name].square().mean() for name in (*names, *logits)).backward()
    unused = {n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()}
    # Offsets in front of a softmax have no gradient; nor have updates of the extra alignment that
    # come after its last outer product.
    assert all(name.endswith(("bias.norm.bias", "ipa.bias.bias")) for name in unused), unused


def test_every_head_of_point_attention_starts_with_a_weight_of_one():
    weights = AlphaFold2(TINY, torch.float64).structure_module.ipa.head_weights
    assert torch.nn.functional.softplus(weights).detach() == pytest.approx(torch.ones(4))


def test_a_missing_feature_is_named(model):
    features = double(random_features(13))
    del features["extra_msa"]
    with pytest.raises(DataError, match="extra_msa: this feature is missing"):
        model([features])


def test_a_configuration_survives_its_file():
    for preset in ("alphafold2", "alphafold2-ptm", "small"):
        config = AlphaFold2Config.preset(preset)
        assert from_dict(AlphaFold2Config, to_dict(config), "config") == config


def test_sizes_that_make_no_sense_are_refused():
    with pytest.raises(ConfigError, match="num_heads"):
        EvoformerConfig(num_heads=0)
    with pytest.raises(ConfigError, match="there is no 'large'"):
        build("large")
    with pytest.raises(ConfigError, match="width: unknown key"):
        build("small", width=3)
