"""Hyper-parameters: published sizes to the last parameter, and refusals."""

import pytest
import torch

from bevatron.config import from_dict, to_dict
from bevatron.errors import ConfigError
from bevatron.models.gpspp import PRESETS, GPSPlusPlus, GPSPlusPlusConfig, Target, build


def count(config):
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in GPSPlusPlus(config).parameters())


@pytest.mark.parametrize(
    ("preset", "changes", "number"),
    [
        ("gpspp-16", {}, 44_291_413),
        ("gpspp-8", {}, 22_456_149),
        ("gpspp-4", {}, 11_538_517),
        ("gpspp-16-mpnn", {}, 40_048_661),
        ("gpspp-16-mpnn", {"unused_bias": True}, 40_072_533),
        ("gpspp-16", {"mpnn": False}, 13_388_949),
        ("gpspp-16", {"ffn": False}, 35_874_133),
        ("gpspp-16-mpnn", {"ffn": False, "unused_bias": True}, 31_655_253),
        ("gpspp-16", {"denoising": True}, 44_291_413 + 198_147),
    ],
)
def test_models_have_the_published_numbers_of_parameters(preset, changes, number):
    assert count(GPSPlusPlusConfig.preset(preset, **changes)) == number


OFFICIAL_TESTS = {
    "feature_set": "original",
    "num_layers": 1,
    "node_width": 128,
    "edge_width": 32,
    "global_width": 128,
    "num_heads": 4,
    "ffn_width": 128,
    "embedding_width": 100,
    "expansion": 2,
    "encoder_width": 128,
    "encoder_norm": False,
    "decoder_width": 256,
    "degree": False,
    "distance_bias": False,
    "distance_sum": False,
    "bond_lengths": False,
}
POSITIONS = {"num_laplacian": 3, "num_walks": 1}
NO_POSITIONS = {"laplacian": False, "random_walk": False}
NO_NOISE = {"noisy_nodes": False, "noisy_edges": False}
BOTH = {"decoder": "nodes_and_global"}
BARE = {**NO_POSITIONS, **NO_NOISE, "globals_": False}


@pytest.mark.parametrize(
    ("changes", "number"),
    [
        ({**BOTH, **POSITIONS, **NO_NOISE}, 740_381),
        ({**BOTH, **NO_POSITIONS, "noisy_edges": False}, 610_762),
        ({**BOTH, **NO_POSITIONS}, 611_191),
        ({**BARE, "edges": False}, 490_153),
        (BARE, 407_197),
        ({**BOTH, **POSITIONS, **NO_NOISE, "attention": False, "ffn": False}, 640_393),
        ({**BOTH, **POSITIONS, **NO_NOISE, "attention": False}, 673_673),
        ({**BARE, "edges": False, "mpnn": False, "ffn": False}, 193_577),
    ],
)
def test_switches_change_the_number_of_parameters_as_in_the_official_tests(changes, number):
    assert count(GPSPlusPlusConfig(**OFFICIAL_TESTS, **changes)) == number


def test_presets_are_named_by_layers_and_parts():
    published = [f"gpspp-{n}{s}" for s in ("", "-mpnn") for n in (16, 8, 4)]
    assert list(PRESETS) == [*published, "gpspp-small"]
    with torch.device("meta"):
        model = build("gpspp-8-mpnn", num_layers=3)
    assert (model.config.num_layers, model.config.attention) == (3, False)
    assert model.config.targets[0].mean == 5.380503871833475


def test_a_configuration_survives_yaml():
    config = GPSPlusPlusConfig(targets=(Target("a", "multiclass", num_classes=3), Target("b")))
    assert from_dict(GPSPlusPlusConfig, to_dict(config)) == config


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"mpnn": False, "attention": False}, "needs message passing or attention"),
        ({"num_heads": 7}, "7 heads do not divide node_width 256"),
        ({"feature_set": "set4"}, "feature_set: expected one of"),
        ({"decoder": "nodes_and_global", "globals_": False}, "needs globals_"),
        ({"edges": False}, "noisy_edges: needs edges"),
        ({"targets": ()}, "targets: expected different names"),
        ({"max_path": 300}, "max_path: expected 1 to 254"),
        ({"decoder_width": -1}, "decoder_width: expected 1 to 65536"),
        ({"decoder_width": 0}, "decoder_width: expected 1 to 65536"),
        (
            {
                "denoising": True,
                "distance_bias": False,
                "distance_sum": False,
                "bond_lengths": False,
            },
            "denoising: needs distance_bias",
        ),
    ],
)
def test_contradictions_are_refused(changes, sentence):
    with pytest.raises(ConfigError, match=sentence):
        GPSPlusPlusConfig(**changes)


def test_unknown_presets_and_entries_are_refused():
    with pytest.raises(ConfigError, match="there is no 'gpspp-5'"):
        build("gpspp-5")
    with pytest.raises(ConfigError, match=r"num_layer: unknown key \(did you mean 'num_layers'"):
        build("gpspp-4", num_layer=1)
