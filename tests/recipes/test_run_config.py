"""What the configurations of all systems share: defaults, presets, the order of their keys."""

import dataclasses
from pathlib import Path

import pytest

from bevatron.config import to_dict
from bevatron.errors import ConfigError
from bevatron.recipes import SYSTEMS, recipe
from bevatron.recipes.graph import GraphRun
from bevatron.recipes.run_config import RunConfig, SaveModel, WriteReport
from bevatron.recipes.training import _described_memory
from bevatron.train.memory_plan import MemoryPlan
from bevatron.train.run import FitResult

PRESETS = {
    "mace": "paper", "gpspp": "gpspp-16", "graph": "agnn-cora", "alphafold2": "small",
    "alphafold3": "small",
}  # fmt: skip
SHARED = [each.name for each in dataclasses.fields(RunConfig)]


@pytest.fixture(params=list(SYSTEMS))
def config(request):
    """The configuration class of a system."""
    return recipe(request.param)[0]


def test_nothing_given_is_the_default(config):
    assert config.from_values({}) == config()


def test_keys_that_all_systems_share_come_first_and_in_one_order(config):
    names = [each.name for each in dataclasses.fields(config)]
    assert names[: len(SHARED)] == SHARED
    assert names[:4] == ["output", "preset", "data", "model"]


def test_one_key_of_a_group_leaves_the_others_at_the_defaults_of_the_system(config):
    plain = config()
    changed = {"batch": {"order": "fullest"}, "optim": {"lr": 0.5}, "train": {"seed": 7}}
    found = config.from_values(changed)
    assert found.batch == dataclasses.replace(plain.batch, order="fullest")
    assert found.optim == dataclasses.replace(plain.optim, lr=0.5)
    assert found.train == dataclasses.replace(plain.train, seed=7)


def test_values_override_the_preset_and_the_preset_the_defaults(config):
    preset = PRESETS[config.recipe]
    of_preset = config.from_values({"preset": preset})
    assert of_preset.model != config().model
    name = next(iter(to_dict(of_preset.model)))
    same = {name: to_dict(of_preset.model)[name]}
    assert config.from_values({"preset": preset, "model": same}).model == of_preset.model
    with pytest.raises(ConfigError, match="there is no 'nothing'"):
        config.from_values({"preset": "nothing"})


def test_plain_values_give_the_configuration_back(config):
    found = config.from_values({"preset": PRESETS[config.recipe], "optim": {"lr": 0.5}})
    assert config.from_values(to_dict(found)) == found


def test_numbers_that_are_not_finite_are_refused_by_every_system(config):
    with pytest.raises(ConfigError, match=r"^optim\.clip: expected a finite number, got inf$"):
        config.from_values({"optim": {"clip": float("inf")}})


def test_the_trainer_gets_the_settings_of_the_run():
    found = GraphRun.from_values({"optim": {"lr": 0.5}, "data": {"train": ["a.npz", "b.npz"]}})
    assert found.settings.optim.lr == 0.5
    assert found.settings.batch.capacity == {"nodes": 16384}


def test_a_model_is_saved_by_its_kind_and_a_report_gets_its_values(tmp_path, monkeypatch):
    SaveModel("graph_attention", GraphRun().model)(tmp_path, {})
    assert '"graph_attention"' in (tmp_path / "model.json").read_text()
    called = []
    monkeypatch.setattr(
        "bevatron.recipes.graph.report.report_of_run", lambda *args: called.append(args)
    )
    result = FitResult(tmp_path, None, None, 0, 0, {}, None, 0, 0.0)
    WriteReport("bevatron.recipes.graph.report", 1, 2)(result, Path("run"))
    assert called == [(Path("run"), 1, 2, result)]


def test_the_parts_of_the_planned_memory_are_its_peak():
    plan = MemoryPlan(
        weights=2 * 2**20, optimizer=4 * 2**20, batch=2**19, workspaces=0, peak=9 * 2**20
    )
    said = "9 MiB: weights 2, optimiser 4, the largest batch 3"
    assert _described_memory("", plan) == ("peak memory of a step", said)
