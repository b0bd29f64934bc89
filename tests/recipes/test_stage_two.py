"""Stage two of training: loss, learning rate and best epoch, on the command line and resumed."""

import gzip
import json
from importlib.resources import files
from itertools import islice

import pytest
import torch
from safetensors.torch import load_file

from bevatron.cli import main
from bevatron.config import from_dict
from bevatron.errors import ConfigError
from bevatron.models.mace import LossConfig, StageTwo
from bevatron.recipes.mace.run import MaceRun, build
from bevatron.train.loop import fit

DATA = files("bevatron.recipes") / "demo_data" / "structures.extxyz.gz"
TINY = (
    *("--preset", "small", "--model.num-channels", "4", "--model.l-max", "1"),
    *("--model.max-L", "0", "--model.correlation", "1", "--model.r-max", "3.0"),
    *("--train.device", "cpu", "--no-report", "--data.prepare-workers", "1"),
)


@pytest.fixture
def structures(tmp_path):
    """A file of structures that fit into one batch."""
    path = tmp_path / "structures.xyz"
    with gzip.open(str(DATA), "rt") as file:
        path.write_text("".join(islice(file, 14 * 8)))
    return path


@pytest.fixture
def train(structures, tmp_path):
    """Trains a tiny model; returns the exit code."""

    def run(*options, output="run"):
        given = ["--data", str(structures), "--output", str(tmp_path / output), *TINY]
        return main(["train", "mace", *given, *map(str, options)])

    return run


def steps(folder):
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if record["kind"] == "step"]


STANDING = ("--optim.lr", "1e-9", "--schedule.stage-two-lr", "1e-10", "--train.epochs", "3")
"""So slow that the errors stay and only weights change the terms of the loss."""


def test_its_epoch_alone_changes_loss_and_rate(train, tmp_path, capsys):
    assert train(*STANDING, "--schedule.stage-two-start", 2) == 0
    _, before, after = steps(tmp_path / "run")
    assert after["terms"]["energy"] == pytest.approx(1000 * before["terms"]["energy"], rel=1e-5)
    assert after["terms"]["forces"] == pytest.approx(before["terms"]["forces"], rel=1e-5)
    assert (before["lr"], after["lr"]) == (1e-9, 1e-10)
    printed = capsys.readouterr().out
    assert "begins with epoch 3: loss weights energy 1000, forces 100" in printed
    model = json.loads((tmp_path / "run" / "best" / "best.json").read_text())
    assert model["value"] == model["metrics"]["energy_per_atom_rmse"]


def test_its_weights_are_given_on_the_command_line(train, tmp_path):
    weights = ("--loss.stage-two.energy-weight", 7, "--loss.stage-two.forces-weight", 50)
    assert train(*STANDING, "--loss.stage-two.start-epoch", 1, *weights) == 0
    before, after, _ = steps(tmp_path / "run")
    assert after["terms"]["energy"] == pytest.approx(7 * before["terms"]["energy"], rel=1e-5)
    assert after["terms"]["forces"] == pytest.approx(before["terms"]["forces"] / 2, rel=1e-5)
    assert after["lr"] == 1e-10


def test_it_is_resumed_to_the_last_bit(train, tmp_path):
    options = ("--schedule.stage-two-start", 2, "--optim.ema", 0.9, "--checkpoint.every-epochs", 1)
    assert train(*options, "--train.epochs", 6) == 0
    assert train(*options, "--train.epochs", 4, output="stopped") == 0
    again = ("--train.epochs", 6, "--resume", "must")
    assert train(*options, *again, output="stopped") == 0
    whole, stopped = tmp_path / "run", tmp_path / "stopped"
    assert [step["loss"] for step in steps(whole)] == [step["loss"] for step in steps(stopped)]
    assert [step["lr"] for step in steps(whole)] == [step["lr"] for step in steps(stopped)]
    for tensors in ("model", "optimizer", "ema"):
        part = f"checkpoints/step-00000006/{tensors}.safetensors"
        first, second = load_file(whole / part), load_file(stopped / part)
        assert first.keys() == second.keys()
        assert all(torch.equal(first[name], second[name]) for name in first)
    best = [json.loads((f / "best" / "best.json").read_text()) for f in (whole, stopped)]
    assert best[0] == best[1]


def test_another_epoch_for_the_loss_than_for_the_schedule_is_refused(train, capsys):
    options = ("--schedule.stage-two-start", 2, "--loss.stage-two.start-epoch", 1)
    assert train(*options) == 2
    assert "loss.stage_two.start_epoch is 1 but schedule.stage_two_start is 2" in (
        capsys.readouterr().err
    )


def test_one_that_is_never_reached_or_faster_than_the_first_is_told_of(train, capsys):
    assert train("--train.epochs", 1, "--schedule.stage-two-start", 5) == 0
    assert "epoch 6, but train.epochs is 1: it is never reached" in capsys.readouterr().out
    options = ("--train.epochs", 1, "--schedule.stage-two-start", 0, "--optim.lr", "1e-5")
    assert train(*options, output="fast") == 0
    assert "stage_two_lr is 0.001, above optim.lr (1e-05)" in capsys.readouterr().out


def test_forces_that_no_structure_has_are_missed_in_both_stages(structures, tmp_path):
    energies = {"energy_weight": 1.0, "forces_weight": 0.0}
    config = MaceRun.from_values(
        {
            "output": str(tmp_path / "run"),
            "data": {"train": [str(structures)], "labels": {"forces_key": ""}},
            "loss": energies,
            "schedule": {"stage_two_start": 1},
        }
    )
    with pytest.raises(Exception, match=r"loss.stage_two.forces_weight is 100; set it to 0"):
        build(config)


def test_stress_is_weighted_as_before_unless_given():
    loss = LossConfig(stress_weight=10.0, stage_two=StageTwo(1))
    assert loss.weights(1) == {"energy": 1000.0, "forces": 100.0, "stress": 10.0, "virials": 0.0}
    loss = LossConfig(stress_weight=10.0, stage_two=StageTwo(1, stress_weight=0.0))
    assert loss.weights(1)["stress"] == 0.0


def test_configurations_of_before_have_none():
    loss = from_dict(LossConfig, {"stage_two": None})
    assert loss == LossConfig()
    assert loss.weights(10**6) == loss.weights(0)
    assert loss.stage_two_start is None


@pytest.mark.parametrize("field", ["energy_weight", "stress_weight"])
def test_weights_below_zero_are_refused(field):
    with pytest.raises(ConfigError, match=f"stage_two.{field}: expected 0 or more"):
        LossConfig(stage_two=StageTwo(1, **{field: -1.0}))


def test_fit_says_which_error_decided(structures, tmp_path):
    config = MaceRun.from_values(
        {
            "output": str(tmp_path / "run"),
            "preset": "small",
            "data": {"train": [str(structures)], "prepare_workers": 1},
            "model": {"num_channels": 4, "l_max": 1, "max_L": 0, "r_max": 3.0, "correlation": 1},
            "schedule": {"stage_two_start": 1},
            "train": {"epochs": 1, "device": "cpu"},
            "report": False,
        }
    )
    run = build(config)
    assert (run.monitor, run.stage_two_monitor) == ("forces_rmse", "energy_per_atom_rmse")
    first = fit(run)
    assert first.best == pytest.approx(first.metrics["forces_rmse"])
