"""Runs of AlphaFold2: they learn, resume to the last bit and start from weights of others."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from bevatron.cli import main
from bevatron.errors import CheckpointError, ConfigError
from bevatron.models.alphafold2.config import AlphaFold2Config
from bevatron.models.alphafold2.convert import to_deepmind, to_openfold
from bevatron.models.alphafold2.model import AlphaFold2
from bevatron.models.common.model_folder import load_model_folder
from bevatron.recipes.alphafold2.run import CHANGES, AlphaFold2Run, build
from bevatron.recipes.alphafold2.start import started_from
from bevatron.train.loop import fit


@pytest.fixture
def config(store, tiny_model, tmp_path):
    values = {
        "output": str(tmp_path / "run"),
        "preset": "small",
        "model": tiny_model,
        "data": {"train": [str(store)], "valid_fraction": 0.34},
        "stages": {
            "initial": {
                "steps": 4, "samples_per_step": 2, "evaluate_every": 2, "crop": 16, "rows": 4,
                "extra_rows": 4,
            }
        },
        "checkpoint": {"every_steps": 2, "keep": 9},
        "train": {"device": "cpu", "threads": 1},
        "report": False,
    }  # fmt: skip
    return AlphaFold2Run.from_values(values)


def weights(folder):
    return load_model_folder(folder).state


def test_a_resumed_run_is_the_whole_run_to_the_last_bit(config, tmp_path):
    fit(build(config))
    other = replace(config, output=tmp_path / "other")
    half = {"initial": replace(config.stages["initial"], steps=2)}
    fit(build(replace(other, stages=half)))
    result = fit(build(other, resume=True))
    assert result.steps == 4
    whole, resumed = weights(tmp_path / "run"), weights(tmp_path / "other")
    for name, value in whole.items():
        assert torch.equal(resumed[name], value), name


def test_a_run_monitors_the_lddt(config):
    result = fit(build(config))
    assert {"lddt_ca", "loss", "loss_fape", "distogram"} <= set(result.metrics)
    assert result.best == pytest.approx(-result.metrics["lddt_ca"], abs=0.2)


def test_a_missed_target_ends_the_run_before_the_next_stage(config):
    stage = replace(config.stages["initial"], steps=2, target=0.99)
    result = fit(build(replace(config, stages={"first": stage, "second": stage})))
    assert result.finished == "target missed"
    assert result.steps == 2


def test_folders_train_as_they_lie_from_the_command_line(folder, tiny_model, tmp_path, capsys):
    file = tmp_path / "run.json"
    stages = {"initial": {"steps": 1, "samples_per_step": 1, "crop": 16, "rows": 2}}
    values = {
        "recipe": "alphafold2", "preset": "small", "model": tiny_model, "report": False,
        "data": {"train": [str(folder)]}, "stages": stages, "output": str(tmp_path / "run"),
        "train": {"device": "cpu", "threads": 1},
    }  # fmt: skip
    file = file.with_suffix(".yaml")
    file.write_text(json.dumps(values))
    assert main(["train", str(file)]) == 0
    assert json.loads((tmp_path / "run/model.json").read_text())["kind"] == "alphafold2"
    assert (tmp_path / "run/prepared-rejects.csv").is_file()


@pytest.mark.parametrize("name", [*CHANGES])
def test_presets_have_the_published_settings(name):
    config = AlphaFold2Run.from_values({"preset": name})
    assert config.optim.algorithm == "adam"
    assert config.optim.lr == 1e-3
    assert config.model == AlphaFold2Config.preset(
        {"scalefold": "alphafold2", "mlperf": "alphafold2"}.get(name, name)
    )
    first = next(iter(config.stages.values()))
    if name != "small":
        assert config.optim.clip == 0.1
        assert (first.crop, first.rows, first.extra_rows) == (256, 124, 1024)
    expected = {
        "alphafold2": [128, 128], "alphafold2-ptm": [128, 128], "scalefold": [128, 256],
        "mlperf": [256], "small": [4],
    }  # fmt: skip
    assert [stage.samples_per_step for stage in config.stages.values()] == expected[name]


def test_a_stage_changes_only_what_it_gives():
    config = AlphaFold2Run.from_values({"preset": "scalefold", "stages": {"128": {"steps": 7}}})
    assert config.stages["128"].steps == 7
    assert config.stages["128"].target == 0.8
    assert list(config.stages) == ["128"]


def test_unknown_presets_and_batches_are_refused():
    with pytest.raises(ConfigError, match="there is no 'alphafold9'"):
        AlphaFold2Run.from_values({"preset": "alphafold9"})
    with pytest.raises(ConfigError, match="samples_per_step"):
        AlphaFold2Run.from_values({"batch": {"size": 2}})


@pytest.mark.parametrize("kind", ["openfold", "ema", "mlperf", "deepmind", "run"])
def test_a_run_starts_from_weights_of_others(config, tmp_path, kind):
    torch.manual_seed(3)
    model = AlphaFold2(config.model)
    path = tmp_path / f"weights{'.npz' if kind == 'deepmind' else '.pt'}"
    state = to_openfold(model)
    if kind == "deepmind":
        np.savez(path, **to_deepmind(model))
    elif kind == "run":
        path = tmp_path / "model"
        build(config).save_model(path, model.state_dict())
    else:
        files = {
            "openfold": state, "ema": {"ema": {"params": state}},
            "mlperf": {"alphafold_state_dict": state, "iteration": 0},
        }  # fmt: skip
        torch.save(files[kind], path)
    started = build(replace(config, start_from=path)).model.state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(started[name], value), name


def test_a_file_without_weights_is_named(config, tmp_path):
    path = tmp_path / "weights.pt"
    path.write_text("nothing")
    with pytest.raises(CheckpointError, match=r"start_from: .*weights\.pt: cannot be read"):
        started_from(path, config.model)
    torch.save({"a": torch.zeros(2)}, path)
    with pytest.raises(CheckpointError, match=r"weights\.pt: .*is missing"):
        started_from(path, config.model)
