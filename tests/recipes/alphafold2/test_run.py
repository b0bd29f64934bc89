"""Runs of AlphaFold2: they learn, resume to the last bit and start from weights of others."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from bevatron.cli import main
from bevatron.errors import CheckpointError, ConfigError
from bevatron.models.alphafold2.config import AlphaFold2Config
from bevatron.models.alphafold2.convert import to_deepmind, to_openfold
from bevatron.models.alphafold2.losses import LossWeights
from bevatron.models.alphafold2.model import AlphaFold2
from bevatron.models.common.model_folder import load_model_folder
from bevatron.parallel.mesh import Mesh
from bevatron.recipes.alphafold2.data import MAX_RESOLUTION, MOST_OF_ONE
from bevatron.recipes.alphafold2.run import (
    CHANGES,
    CYCLES,
    AlphaFold2Run,
    ChainStage,
    build,
)
from bevatron.recipes.alphafold2.start import started_from, to_mlperf_file
from bevatron.recipes.proteins.staged_run import LARGEST_BATCH
from bevatron.recipes.training import start
from bevatron.train.checkpoint import list_checkpoints, read_checkpoint, read_tensors
from bevatron.train.loop import begin_state, fit
from bevatron.train.optim import optimizer_tensors
from bevatron.train.schedule import learning_rate
from bevatron.train.settings import OptimConfig, ScheduleConfig


@pytest.fixture
def config(store, tiny_model, tmp_path):
    values = {
        "output": str(tmp_path / "run"),
        "preset": "small",
        "model": tiny_model,
        "data": {"train": [str(store)], "valid_size": 0.34},
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


INITIAL = LossWeights(fape=1.0, supervised_chi=1.0, distogram=0.3, masked_msa=2.0, plddt=0.01)
TUNED = replace(INITIAL, experimentally_resolved=0.01, violation=1.0)
FROM_NOTHING = ScheduleConfig(kind="exponential", gamma=0.95, gamma_steps=50_000, warmup_steps=1000)
CONSTANT = ScheduleConfig(kind="constant")
PUBLISHED = OptimConfig(
    algorithm="adam", lr=1e-3, weight_decay=0.0, betas=(0.9, 0.999), eps=1e-6, clip=0.1,
    clip_norm="global", ema=0.999,
)  # fmt: skip


def initial(steps, samples, every=500, **more):
    return ChainStage(
        steps, samples, every, crop=256, rows=124, extra_rows=1024, loss=INITIAL, **more
    )


def tuning(tm):
    """Of table 4 of the supplement, 1.5 million samples at half the rate, without warm-up."""
    return ChainStage(
        11_719, 128, lr=5e-4, schedule=CONSTANT, crop=384, rows=508, extra_rows=5120,
        deleted_blocks=5, loss=replace(TUNED, tm=tm),
    )  # fmt: skip


SMALL = ChainStage(2000, 4, 200, crop=64, rows=16, extra_rows=32, loss=INITIAL)
PRESETS = {
    "alphafold2": (
        PUBLISHED,
        FROM_NOTHING,
        {"initial": initial(78_125, 128, deleted_blocks=5), "fine-tuning": tuning(0.0)},
    ),
    "alphafold2-ptm": (
        PUBLISHED,
        FROM_NOTHING,
        {"initial": initial(78_125, 128, deleted_blocks=5), "fine-tuning": tuning(0.1)},
    ),
    "scalefold": (
        replace(PUBLISHED, eps=1e-5),
        FROM_NOTHING,
        {
            "128": initial(5000, 128, target=0.8),
            "256": initial(55_000, 256, target=0.9, ends_at_target=True),
        },
    ),
    "mlperf": (
        replace(PUBLISHED, ema=0.9),
        replace(FROM_NOTHING, kind="constant", warmup_steps=0),
        {"initial": initial(2000, 256, 40, target=0.8, ends_at_target=True)},
    ),
    "small": (
        replace(PUBLISHED, clip=10.0, ema=0.99),
        replace(FROM_NOTHING, warmup_steps=100),
        {"initial": SMALL},
    ),
}  # fmt: skip


def test_every_preset_is_pinned():
    assert PRESETS.keys() == CHANGES.keys()


@pytest.mark.parametrize("name", [*PRESETS])
def test_presets_have_the_published_settings(name):
    config = AlphaFold2Run.from_values({"preset": name})
    optim, schedule, stages = PRESETS[name]
    assert config.optim == optim
    assert config.schedule == schedule
    assert config.stages == stages
    assert list(config.stages) == list(stages)
    of_model = {"scalefold": "alphafold2", "mlperf": "alphafold2"}
    assert config.model == AlphaFold2Config.preset(of_model.get(name, name))
    assert (CYCLES, LARGEST_BATCH) == (4, 256)
    assert (config.data.valid_longest, MAX_RESOLUTION, MOST_OF_ONE) == (700, 9.0, 0.8)


@pytest.mark.parametrize(
    ("steps", "rate"), [(0, 1e-6), (499, 5e-4), (49_999, 1e-3), (50_000, 9.5e-4), (78_124, 9.5e-4)]
)
def test_the_rate_rises_over_128_thousand_samples_and_falls_after_6_4_million(steps, rate):
    config = AlphaFold2Run.from_values({})
    found = learning_rate(
        config.schedule, config.optim.lr, step=steps, epoch=0, fraction=0.0, epochs=1
    )
    assert found == pytest.approx(rate)


def test_a_stage_changes_only_what_it_gives():
    config = AlphaFold2Run.from_values({"preset": "scalefold", "stages": {"128": {"steps": 7}}})
    assert config.stages["128"].steps == 7
    assert config.stages["128"].target == 0.8
    assert list(config.stages) == ["128"]


@pytest.mark.parametrize("stage", [None, 3, "a"])
def test_a_stage_without_keys_is_named(stage):
    with pytest.raises(ConfigError, match=r"stages\.initial: "):
        AlphaFold2Run.from_values({"preset": "small", "stages": {"initial": stage}})


def test_a_dry_run_needs_none_of_the_processes_that_validate(config, capsys):
    alone = replace(config, train=replace(config.train, evaluation_ranks=2))
    assert start(alone, dry_run=True) == 0
    assert re.search(r"ranks +1\n", capsys.readouterr().out)


def test_unknown_presets_and_batches_are_refused():
    with pytest.raises(ConfigError, match="there is no 'alphafold9'"):
        AlphaFold2Run.from_values({"preset": "alphafold9"})
    with pytest.raises(ConfigError, match="samples_per_step"):
        AlphaFold2Run.from_values({"batch": {"size": 2}})


@pytest.mark.parametrize(
    ("name", "instead"), [("epochs", "steps"), ("evaluate_every", "evaluate_every")]
)
def test_lengths_in_epochs_are_refused(name, instead):
    with pytest.raises(ConfigError, match=rf"train.{name}: .* no epochs; .*NAME.{instead}, in"):
        AlphaFold2Run.from_values({"train": {name: 3}})


def test_a_run_of_mlperf_goes_on_with_its_moments_and_ends_at_its_target(config, tmp_path):
    torch.manual_seed(3)
    model = AlphaFold2(config.model)
    state = to_openfold(model)
    moments = {
        number: {"step": 5, "exp_avg": torch.full_like(w, 0.25), "exp_avg_sq": w.square()}
        for number, w in enumerate(state.values())
    }
    path = tmp_path / "resumable.pt"
    torch.save(
        {"alphafold_state_dict": state, "optimizer_state_dict": {"state": moments}, "iteration": 5},
        path,
    )
    given = AlphaFold2Run.from_values({"preset": "mlperf"})
    small = replace(config.stages["initial"], target=0.0, ends_at_target=True)
    stages = {"initial": replace(small, loss=given.stages["initial"].loss)}
    config = replace(config, optim=given.optim, schedule=given.schedule, stages=stages)
    run = build(replace(config, start_from=path))
    found = optimizer_tensors(run.model, begin_state(run, Mesh(), None).optimizer)
    for name, value in model.named_parameters():
        assert torch.equal(found[f"{name}/exp_avg"], torch.full_like(value, 0.25))
        assert torch.equal(found[f"{name}/exp_avg_sq"], value.square())
        assert found[f"{name}/step"] == 5
    result = fit(run)
    assert result.steps == small.evaluate_every == 2

    # Its checkpoint goes back, the projections of attention in one layer each.
    to_mlperf_file(config.output, tmp_path / "back.pt", merged=True)
    back = torch.load(tmp_path / "back.pt", weights_only=True)
    assert back["iteration"] == 2
    assert any(name.endswith("linear_qkvg.weight") for name in back["alphafold_state_dict"])
    again = started_from(tmp_path / "back.pt", config.model)
    (last,) = list_checkpoints(config.output / "checkpoints")[-1:]
    weights = read_tensors(read_checkpoint(last), "model.safetensors")
    assert all(torch.equal(again.model.state_dict()[name], w) for name, w in weights.items())
    moments = read_tensors(read_checkpoint(last), "optimizer.safetensors")
    assert all(torch.equal(again.optimizer_tensors[name], value) for name, value in moments.items())
    with pytest.raises(CheckpointError, match="has no checkpoint"):
        to_mlperf_file(tmp_path, tmp_path / "none.pt", merged=False)


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
