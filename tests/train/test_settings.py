"""Settings out of range are refused in one form: the key, what was expected, what was found."""

from dataclasses import replace

import pytest

from bevatron.arguments import parse
from bevatron.config import from_dict, to_dict
from bevatron.errors import ConfigError
from bevatron.train.settings import BatchConfig, Settings

WRONG = [
    ("optim.lr", 0.0, "a number above 0"),
    ("optim.weight_decay", -1.0, "0 or more"),
    ("optim.betas", (0.9, 1.0), "two in [0, 1)"),
    ("optim.eps", 0.0, "a number above 0"),
    ("optim.clip", 0.0, "a number above 0"),
    ("optim.accumulate", 0, "1 or more"),
    ("optim.ema", 1.0, "numbers in (0, 1)"),
    ("optim.ema", (0.9, 0.0), "numbers in (0, 1)"),
    ("optim.ema", (0.9, 0.9), "different numbers"),
    ("schedule.gamma", 0.0, "a number in (0, 1]"),
    ("schedule.factor", 1.0, "a number in (0, 1)"),
    ("schedule.patience", -1, "0 or more"),
    ("schedule.threshold", -0.1, "0 or more"),
    ("schedule.lr_min", -0.1, "0 or more"),
    ("schedule.warmup_steps", -1, "0 or more"),
    ("schedule.warmup_epochs", -0.5, "0 or more"),
    ("schedule.stage_two_lr", 0.0, "a number above 0"),
    ("schedule.stage_two_start", -1, "an epoch from 0"),
    ("batch.capacity", 0, "more than 0"),
    ("batch.capacity", {"atoms": 0}, "more than 0"),
    ("batch.capacity", {}, "a number"),
    ("batch.size", 0, "1 or more"),
    ("loader.workers", -1, "0 or more"),
    ("loader.window", 0, "1 or more"),
    ("loader.prefetch", 0, "1 or more"),
    ("loader.sample_timeout", 0.0, "more than 0 seconds"),
    ("checkpoint.every_steps", 0, "more than 0"),
    ("checkpoint.every_minutes", 0.0, "more than 0"),
    ("checkpoint.keep", 0, "1 or more"),
    ("checkpoint.best_seconds", -1.0, "0 or more"),
    ("train.epochs", -1, "0 or more"),
    ("train.seed", -1, "a whole number from 0 to 2^63 - 1"),
    ("train.evaluate_every", 0, "1 or more"),
    ("train.patience", 0, "1 or more"),
    ("train.threads", 0, "1 to 1024"),
    ("train.threads", 10**11, "1 to 1024"),
    ("train.collect_every", 0, "1 or more"),
    ("train.explode_factor", 1.0, "more than 1"),
    ("train.timeout_minutes", 0.0, "more than 0"),
]


@pytest.mark.parametrize(("key", "value", "expected"), WRONG, ids=[key for key, *_ in WRONG])
def test_a_value_out_of_range_is_named_with_what_was_expected(key, value, expected):
    group, name = key.split(".")
    with pytest.raises(ConfigError) as caught:
        from_dict(Settings, {group: {name: value}})
    assert str(caught.value) == f"{key}: expected {expected}, got {value}"


def test_a_negative_cost_is_named():
    with pytest.raises(ConfigError, match=r"^batch.cost.edges: expected 0 or more, got -0.5$"):
        from_dict(Settings, {"batch": {"cost": {"edges": -0.5}}})


def test_old_keys_of_the_cost_are_converted_with_a_word(caplog):
    old = {"cost_nodes": 0.338, "cost_edges": 0.0967, "cost_constant": 0.0}
    found = from_dict(Settings, {"batch": old}).batch
    assert found == BatchConfig(**old)
    assert found.cost == {"nodes": 0.338, "edges": 0.0967}
    assert found.costs(["atoms", "edges"]) == {"atoms": 0.338, "edges": 0.0967}
    assert found.costs(["edges", "nodes"]) == {"nodes": 0.338, "edges": 0.0967}
    assert BatchConfig(cost={"atoms": 1.0, "constant": 0.0}).costs(["atoms"]) == {"atoms": 1.0}
    assert BatchConfig().costs(["atoms", "edges"]) == {"atoms": 1.0}
    assert "batch.cost: {'nodes': 0.338, 'edges': 0.0967}" in caplog.text
    assert to_dict(found)["cost"] == found.cost
    assert not any(name.startswith("cost_") for name in to_dict(found))


def test_old_keys_of_the_cost_are_options_too(caplog):
    found = parse(BatchConfig, ["--cost-nodes", "0.5", "--cost-edges", "0.1"], "bevatron train")
    assert found.cost == {"nodes": 0.5, "edges": 0.1}
    assert "batch.cost: {" in caplog.text
    found = parse(BatchConfig, ["--cost", "atoms", "0.5", "edges", "0.1"], "bevatron train")
    assert found.cost == {"atoms": 0.5, "edges": 0.1}


def test_old_keys_change_what_they_are_given_for(caplog):
    config = BatchConfig(cost={"atoms": 1.0, "edges": 0.5}, cost_edges=0.25)
    assert config.cost == {"atoms": 1.0, "edges": 0.25}
    caplog.clear()
    assert replace(config, size=3).cost == config.cost
    assert BatchConfig(cost_nodes=1.0, cost_edges=0.0, cost_constant=0.0) == BatchConfig()
    assert not caplog.text


def test_no_number_at_all_is_out_of_every_range():
    with pytest.raises(ConfigError, match=r"^optim.lr: expected a number above 0, got nan$"):
        from_dict(Settings, {"optim": {"lr": float("nan")}})
