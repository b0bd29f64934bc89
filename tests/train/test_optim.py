"""Optimiser groups, averaged weights, learning rates and decisions."""

import math
import subprocess
import sys

import pytest
import tiny
import torch

from bevatron.errors import CheckpointError, ConfigError
from bevatron.train.loop import fit
from bevatron.train.optim import (
    AveragedWeights,
    averaged,
    load_optimizer_tensors,
    make_optimizer,
    optimizer_tensors,
    set_lr,
)
from bevatron.train.schedule import Decisions, learning_rate
from bevatron.train.settings import (
    BatchConfig,
    CheckpointConfig,
    LoaderConfig,
    OptimConfig,
    ScheduleConfig,
    TrainConfig,
)


class Grouped(tiny.TinyModel):
    def parameter_groups(self, weight_decay):
        return [
            {"params": list(self.first.parameters()), "weight_decay": weight_decay},
            {"params": list(self.second.parameters()), "weight_decay": 0.0, "lr_scale": 0.1},
        ]


def test_the_model_says_which_parameters_decay():
    groups = make_optimizer(Grouped(), OptimConfig(weight_decay=0.3)).param_groups
    assert [group["weight_decay"] for group in groups] == [0.3, 0.0]
    (group,) = make_optimizer(tiny.TinyModel(), OptimConfig(weight_decay=0.3)).param_groups
    assert group["weight_decay"] == 0.3


def test_a_group_may_scale_the_learning_rate():
    optimizer = make_optimizer(Grouped(), OptimConfig())
    set_lr(optimizer, 0.5)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.05]


def test_frozen_parameters_are_left_alone_and_all_frozen_is_refused():
    model = tiny.TinyModel()
    model.first.requires_grad_(requires_grad=False)
    optimizer = make_optimizer(model, OptimConfig())
    assert sum(len(group["params"]) for group in optimizer.param_groups) == 2
    assert set(AveragedWeights(model, 0.9).averages) == {"second.weight", "second.bias"}
    model.second.requires_grad_(requires_grad=False)
    with pytest.raises(ConfigError, match="all parameters are frozen"):
        make_optimizer(model, OptimConfig())


def test_parameters_left_out_of_all_groups_are_a_mistake():
    model = Grouped()
    model.extra = torch.nn.Linear(1, 1)
    with pytest.raises(ValueError, match=r"extra\.weight"):
        make_optimizer(model, OptimConfig())


@pytest.mark.parametrize(
    ("algorithm", "kind", "amsgrad"),
    [
        ("adam", torch.optim.Adam, False),
        ("amsgrad", torch.optim.Adam, True),
        ("adamw", torch.optim.AdamW, False),
    ],
)
def test_the_state_goes_by_name_through_a_checkpoint(algorithm, kind, amsgrad):
    def stepped(model, optimizer, count):
        for _ in range(count):
            model.second(torch.tanh(model.first(torch.ones(3)))).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    config = OptimConfig(algorithm=algorithm, lr=0.1)
    model = Grouped()
    optimizer = make_optimizer(model, config)
    assert isinstance(optimizer, kind)
    stepped(model, optimizer, 3)
    tensors = optimizer_tensors(model, optimizer)
    assert ("first.weight/max_exp_avg_sq" in tensors) == amsgrad
    again = Grouped()
    again.load_state_dict(model.state_dict())
    other = make_optimizer(again, config)
    load_optimizer_tensors(again, other, {k: v.clone() for k, v in tensors.items()})
    stepped(model, optimizer, 2)
    stepped(again, other, 2)
    for one, two in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, two)
    with pytest.raises(CheckpointError, match=r"'third\.weight'"):
        load_optimizer_tensors(again, other, {"third.weight/step": torch.tensor(1.0)})


@pytest.mark.parametrize("before", [False, True])
def test_a_run_goes_on_with_the_fused_optimiser(tmp_path, before):
    """After torch's within rounding, after its own to the last bit; averages included."""
    optim = {"weight_decay": 0.01, "ema": 0.9, "clip": 1.0}
    whole = tiny.make_run(tmp_path / "whole", optim={**optim, "fused": True}, train={"epochs": 4})
    fit(whole)
    fit(tiny.make_run(tmp_path / "cut", optim={**optim, "fused": before}))
    run = tiny.make_run(
        tmp_path / "cut", optim={**optim, "fused": True}, train={"epochs": 4}, resume=True
    )
    fit(run)
    found, expected = tiny.losses(tmp_path / "cut"), tiny.losses(tmp_path / "whole")
    assert found == (expected if before else pytest.approx(expected, rel=1e-9))
    weights = zip(run.model.parameters(), whole.model.parameters(), strict=True)
    assert all(torch.allclose(a, b, rtol=0.0 if before else 1e-9, atol=0.0) for a, b in weights)


def test_averages_of_nearly_equal_decays_have_names_of_their_own():
    ema = AveragedWeights(torch.nn.Linear(2, 2), 0.99, 0.9999999, 0.99999995, 0.9999)
    assert [*ema.further()] == ["0.9999999", "0.99999995", "0.9999"]
    assert len(ema.tensors()) == 4 * 2


def test_averages_follow_the_formula_and_are_lent_to_the_model():
    model = tiny.TinyModel()
    ema = AveragedWeights(model, 0.5)
    values = [model.second.bias.item()]
    expected = values[0]
    for update in (1, 2, 3, 4, 5, 6, 7, 8, 9):
        with torch.no_grad():
            model.second.bias += 1
        ema.update(model)
        decay = min(0.5, (1 + update) / (10 + update))
        expected = decay * expected + (1 - decay) * model.second.bias.item()
    assert float(ema.averages["second.bias"]) == pytest.approx(expected)
    raw = model.second.bias.item()
    with averaged(model, ema):
        assert model.second.bias.item() == float(ema.averages["second.bias"])
    assert model.second.bias.item() == raw
    with averaged(model, None):
        assert model.second.bias.item() == raw


def rate(config, **place):
    place = {"step": 1000, "epoch": 0, "fraction": 0.0, "epochs": 10, **place}
    return learning_rate(config, 1.0, **place)


def test_learning_rates():
    assert rate(ScheduleConfig(kind="constant")) == 1
    assert rate(ScheduleConfig(kind="exponential", gamma=0.5), epoch=3, fraction=0.9) == 0.125
    cosine = ScheduleConfig(kind="cosine", lr_min=0.1)
    assert rate(cosine) == 1
    assert rate(cosine, epoch=5) == pytest.approx(0.55)
    assert rate(cosine, epoch=10) == pytest.approx(0.1)
    assert rate(ScheduleConfig(kind="plateau"), plateau_scale=0.25) == 0.25
    assert rate(ScheduleConfig(kind="plateau", lr_min=0.3), plateau_scale=0.25) == 0.3


def test_warm_up_by_steps_and_by_epochs():
    steps = ScheduleConfig(kind="constant", warmup_steps=4)
    assert [rate(steps, step=s) for s in range(5)] == [0.25, 0.5, 0.75, 1, 1]
    epochs = ScheduleConfig(kind="cosine", warmup_epochs=2.0)
    assert 0 < rate(epochs, step=0) < 0.01
    assert rate(epochs, epoch=1) == pytest.approx(0.5)
    assert rate(epochs, epoch=2) == pytest.approx(1.0)
    assert rate(epochs, epoch=6) == pytest.approx(0.5)


def test_a_linear_rate_rises_and_falls_per_epoch_as_gps_plus_plus_has_it():
    smooth = ScheduleConfig(kind="linear", warmup_epochs=2.0)
    assert rate(smooth, epoch=2) == pytest.approx(1.0)
    assert rate(smooth, epoch=6) == pytest.approx(0.5)
    assert rate(smooth, epoch=6, fraction=0.5) == pytest.approx(0.4375)
    published = ScheduleConfig(kind="linear", warmup_epochs=10.0, per_epoch=True)
    found = [rate(published, epoch=e, fraction=0.7, epochs=450) for e in (0, 3, 10, 230, 449)]
    assert found == pytest.approx([0.0, 0.3, 1.0, 0.5, 1 / 440])


def test_the_second_stage_has_a_rate_of_its_own():
    config = ScheduleConfig(kind="cosine", stage_two_start=6, stage_two_lr=0.01)
    assert rate(config, epoch=6) == 0.01
    assert rate(config, epoch=3) == pytest.approx(0.5)


def test_plateau_and_best():
    config = ScheduleConfig(kind="plateau", factor=0.5, patience=1, threshold=0.0)
    decisions = Decisions()
    values = [3.0, 2.0, 2.5, 2.5, 1.0, math.nan, 5.0]
    improved = [decisions.take(v, i, 10 * i, config) for i, v in enumerate(values)]
    assert improved == [True, True, False, False, True, False, False]
    assert decisions.plateau_scale == 0.25
    assert (decisions.best, decisions.best_epoch, decisions.best_step) == (1.0, 4, 40)
    assert decisions.without_improvement == 2
    decisions.begin_stage()
    assert decisions.take(9.0, 7, 70, config)


@pytest.mark.parametrize(
    ("config", "arguments", "key"),
    [
        (OptimConfig, {"lr": 0.0}, "optim.lr"),
        (OptimConfig, {"ema": 1.0}, "optim.ema"),
        (OptimConfig, {"accumulate": 0}, "optim.accumulate"),
        (OptimConfig, {"clip": -1.0}, "optim.clip"),
        (ScheduleConfig, {"factor": 1.5}, "schedule.factor"),
        (BatchConfig, {"capacity": 0}, "batch.capacity"),
        (BatchConfig, {"capacity": {}}, "batch.capacity"),
        (LoaderConfig, {"window": 0}, "loader.window"),
        (CheckpointConfig, {"keep": 0}, "checkpoint.keep"),
        (CheckpointConfig, {"every_steps": 0}, "checkpoint.every_steps"),
        (TrainConfig, {"explode_factor": 0.5}, "train.explode_factor"),
        (TrainConfig, {"seed": -1}, "train.seed"),
    ],
)
def test_values_out_of_range_are_refused_by_key(config, arguments, key):
    with pytest.raises(ConfigError, match=f"^{key}: "):
        config(**arguments)


def test_steps_do_not_import_what_compiles_them():
    """Torch's own optimisers import torch._dynamo, which takes as long as torch itself."""
    code = """
import sys, torch
from bevatron.train.optim import Adam, AdamW, FusedAdamEMA
from bevatron.train.precision import arithmetic
from bevatron.train.settings import TrainConfig
with arithmetic(TrainConfig(), None):
    for kind in (Adam, AdamW, FusedAdamEMA):
        weight = torch.nn.Parameter(torch.ones(3))
        optimizer = kind([weight])
        weight.sum().backward()
        optimizer.step()
        assert (weight < 1).all()
        optimizer.zero_grad()
        optimizer.load_state_dict(optimizer.state_dict())
print("torch._dynamo" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["False"], done.stderr
