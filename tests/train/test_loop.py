"""A run as a whole: validation, stopping, stages, switches, files."""

import gc
import json
from collections import Counter
from itertools import groupby
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file

from bevatron.errors import ConfigError, MissingPackageError
from bevatron.train import describe
from bevatron.train.loop import Trainer, fit
from bevatron.train.run import WEIGHTS


def epochs(folder):
    return [record for record in tiny.records(folder) if record["kind"] == "epoch"]


def test_training_lowers_the_validation_error(tmp_path):
    result = fit(tiny.make_run(tmp_path, optim={"lr": 0.03, "ema": 0.9}, train={"epochs": 12}))
    errors = [record["valid"]["energy_mse"] for record in epochs(tmp_path)]
    assert errors[-1] < 0.2 * errors[0]
    assert result.finished == "epochs"
    assert result.epochs == 12
    assert result.best == min(record["valid"]["loss"] for record in epochs(tmp_path))


def test_every_sample_once_an_epoch_in_another_order(tmp_path):
    run = tiny.make_run(tmp_path)
    fit(run)
    half = len(run.task.seen) // 2
    first, second = run.task.seen[:half], run.task.seen[half:]
    for part in (first, second):
        assert Counter(i for batch in part for i in batch) == dict.fromkeys(range(30), 1)
    assert sorted(map(sorted, first)) != sorted(map(sorted, second))
    assert run.task.epochs == [0, 1]


def test_averaged_weights_are_validated_and_kept(tmp_path):
    run = tiny.make_run(tmp_path, checkpoint={"final": "last"})
    fit(run)
    weights = load_file(tmp_path / WEIGHTS)
    newest = max((tmp_path / "checkpoints").iterdir())
    ema, raw = load_file(newest / "ema.safetensors"), load_file(newest / "model.safetensors")
    for name, value in ema.items():
        assert torch.equal(weights[name], value)
        assert not torch.equal(weights[name], raw[name])
    assert torch.equal(weights["shift"], raw["shift"])
    for name, value in run.model.state_dict().items():
        assert torch.equal(value, weights[name])


def test_of_several_averages_the_first_is_validated_and_all_are_kept(tmp_path):
    for name, ema in (("both", (0.5, 0.9)), ("first", 0.5), ("second", 0.9)):
        fit(tiny.make_run(tmp_path / name, optim={"ema": ema}, checkpoint={"final": "last"}))
    assert tiny.losses(tmp_path / "both") == tiny.losses(tmp_path / "first")
    for found, expected in (("both", "first"), ("both/ema-0.9", "second")):
        weights, wanted = (load_file(tmp_path / name / WEIGHTS) for name in (found, expected))
        assert all(torch.equal(weights[name], wanted[name]) for name in wanted)
    assert not (tmp_path / "first" / "ema-0.5").exists()


def test_further_averages_are_of_the_last_step_with_its_buffers(tmp_path):
    """What is kept of the best epoch is no part of them."""
    run = tiny.make_run(tmp_path, optim={"ema": (0.5, 0.9)}, train={"epochs": 3})
    run.task.begin_epoch = lambda epoch: run.model.shift.fill_(0.5 + 10 * epoch)
    assert fit(run).best_epoch == 0
    assert load_file(tmp_path / WEIGHTS)["shift"] == 0.5
    assert load_file(tmp_path / "ema-0.9" / WEIGHTS)["shift"] == 20.5


def test_all_averages_go_on_from_a_checkpoint(tmp_path):
    groups = {"optim": {"ema": (0.5, 0.9)}, "checkpoint": {"final": "last"}}
    fit(tiny.make_run(tmp_path / "whole", **groups, train={"epochs": 4}))
    fit(tiny.make_run(tmp_path / "parts", **groups, train={"epochs": 2}))
    fit(tiny.make_run(tmp_path / "parts", **groups, train={"epochs": 4}, resume=True))
    whole, parts = (load_file(tmp_path / n / "ema-0.9" / WEIGHTS) for n in ("whole", "parts"))
    assert all(torch.equal(parts[name], whole[name]) for name in whole)


def test_without_averaging_the_weights_themselves_are_kept(tmp_path):
    fit(tiny.make_run(tmp_path, optim={"ema": None}, checkpoint={"final": "last"}))
    newest = max((tmp_path / "checkpoints").iterdir())
    assert not (newest / "ema.safetensors").exists()
    raw, weights = load_file(newest / "model.safetensors"), load_file(tmp_path / WEIGHTS)
    assert all(torch.equal(raw[name], weights[name]) for name in raw)


def worsening():
    """Validation errors that rise from the third epoch on."""
    return tiny.LossesTask(lambda epochs: abs(epochs - 3.0) + 1)


def test_patience_ends_the_run_and_the_best_weights_are_its_result(tmp_path):
    result = fit(tiny.make_run(tmp_path, task=worsening(), train={"epochs": 20, "patience": 2}))
    assert result.finished == "patience"
    assert result.epochs == 5
    assert (result.best, result.best_epoch) == (1.0, 2)
    best = load_file(tmp_path / "best" / WEIGHTS)
    final = load_file(tmp_path / WEIGHTS)
    assert all(torch.equal(final[name], best[name]) for name in best)
    note = json.loads((tmp_path / "best" / "best.json").read_text())
    assert (note["epoch"], note["value"]) == (2, 1.0)
    assert [record["best"] for record in epochs(tmp_path)] == [True, True, True, False, False]


def test_best_weights_that_are_damaged_are_not_taken(tmp_path, capsys):
    run = tiny.make_run(tmp_path, task=worsening(), train={"epochs": 4})
    fit(run)
    weights = tmp_path / "best" / WEIGHTS
    weights.write_bytes(weights.read_bytes()[:40])
    again = tiny.make_run(tmp_path, task=worsening(), train={"epochs": 5}, resume=True)
    assert fit(again).finished == "epochs"
    assert (tmp_path / WEIGHTS).stat().st_size > 40


def test_the_plateau_schedule_follows_the_validation(tmp_path):
    fit(
        tiny.make_run(
            tmp_path,
            task=worsening(),
            train={"epochs": 7},
            schedule={"kind": "plateau", "patience": 1, "factor": 0.5},
        )
    )
    rates = {r["epoch"]: r["lr"] for r in tiny.records(tmp_path) if r["kind"] == "step"}
    assert [rates[epoch] / rates[0] for epoch in range(7)] == [1, 1, 1, 1, 1, 0.5, 0.5]


def test_the_second_stage_begins_anew_and_outlives_patience(tmp_path):
    result = fit(
        tiny.make_run(
            tmp_path,
            task=worsening(),
            train={"epochs": 8, "patience": 1},
            schedule={"stage_two_start": 6, "stage_two_lr": 0.001},
        )
    )
    rates = {r["epoch"]: r["lr"] for r in tiny.records(tmp_path) if r["kind"] == "step"}
    assert rates[5] == 0.01
    assert rates[6] == 0.001
    assert result.epochs == 8
    assert result.best_epoch == 6


def test_a_monitored_metric_that_does_not_exist_is_refused_before_the_first_step(tmp_path):
    run = tiny.make_run(tmp_path, train={"monitor": "-forces_mae"})
    with pytest.raises(
        ConfigError, match=r"'forces_mae' is not a metric.*energy_mse, graphs, loss"
    ):
        fit(run)
    assert run.task.seen == []
    with pytest.raises(ConfigError, match="'forces_mae' is not a metric"):
        describe(run)
    fit(tiny.make_run(tmp_path, train={"monitor": "energy_mse"}))  # the folder can be used again


class Unlabelled(tiny.TinyTask):
    """Validation on data without forces."""

    def metrics(self):
        class Metrics(tiny.TinyMetrics):
            names = (*tiny.TinyMetrics.names, "forces_mse")

        return Metrics()


def test_a_monitored_metric_without_data_is_refused_at_the_first_validation(tmp_path):
    task = Unlabelled()
    with pytest.raises(ConfigError, match="'forces_mse' is not a metric of this validation set"):
        fit(tiny.make_run(tmp_path, task=task, train={"monitor": "forces_mse"}))
    assert task.seen


def test_weights_whose_validation_is_no_number_are_told_of_and_never_the_best(tmp_path):
    task = tiny.LossesTask(lambda epochs: 1.0 if epochs < 2 else float("nan"))
    result = fit(tiny.make_run(tmp_path, task=task, train={"epochs": 2}))
    assert (result.best, result.best_epoch) == (1.0, 0)
    told = [line for line in (tmp_path / "log.txt").read_text().splitlines() if "is nan" in line]
    assert len(told) == 1
    assert "epoch 2: loss is nan in validation" in told[0]


def test_without_a_validation_set_the_last_weights_are_kept(tmp_path):
    run = tiny.make_run(tmp_path)
    run.valid = run.valid_sizes = None
    result = fit(run)
    assert result.best is None
    assert (tmp_path / WEIGHTS).exists()
    assert not (tmp_path / "best").exists()


def test_validation_every_few_epochs_and_at_the_end(tmp_path):
    fit(tiny.make_run(tmp_path, train={"epochs": 5, "evaluate_every": 2}))
    assert [bool(record["valid"]) for record in epochs(tmp_path)] == [
        False,
        True,
        False,
        True,
        True,
    ]


def test_the_records_tell_what_a_user_looks_for(tmp_path):
    fit(tiny.make_run(tmp_path))
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    step = lines[0]
    assert {"kind", "step", "epoch", "loss", "terms", "lr", "grad_norm", "sizes", "time"} == set(
        step
    )
    assert {"seconds", "graphs_per_s", "atoms_per_s", "wait_share"} == set(step["time"])
    epoch = [line for line in lines if line["kind"] == "epoch"][-1]
    assert epoch["samples"] == 60
    assert epoch["sizes"]["graphs"] == 30
    log = (tmp_path / "log.txt").read_text()
    for word in ("loss", "atoms/s", "wait", "energy_mse", "(best)"):
        assert word in log
    assert "epochs: 2" in (tmp_path / "config.yaml").read_text()


def test_every_switch_can_be_thrown(tmp_path):
    before = gc.isenabled()
    fit(tiny.make_run(tmp_path / "plain", optim={"fused": False}))
    fit(
        tiny.make_run(
            tmp_path / "switched",
            train={"collect_every": 2, "deterministic": True, "tf32": True, "log_every": 3},
            optim={"fused": True},
        )
    )
    assert gc.isenabled() == before
    assert not torch.are_deterministic_algorithms_enabled()
    plain, switched = tiny.losses(tmp_path / "plain"), tiny.losses(tmp_path / "switched")
    assert switched == pytest.approx(plain[2::3], rel=1e-12)


def test_worker_processes_do_not_change_a_number(tmp_path):
    fit(tiny.make_run(tmp_path / "plain"))
    fit(tiny.make_run(tmp_path / "workers", loader={"workers": 1}))
    assert tiny.records(tmp_path / "workers") == tiny.records(tmp_path / "plain")


def test_single_precision_trains_too(tmp_path):
    run = tiny.make_run(tmp_path, train={"dtype": "float32"})
    fit(run)
    assert {value.dtype for value in run.model.state_dict().values()} == {torch.float32}


def test_the_end_is_told_once_the_weights_are_written(tmp_path):
    found = []

    def on_end(result, folder):
        found.append((result.finished, (Path(folder) / WEIGHTS).exists()))

    fit(tiny.make_run(tmp_path, on_end=on_end))
    assert found == [("epochs", True)]


def test_tensorboard_gets_the_same_figures(tmp_path):
    pytest.importorskip("tensorboard")
    fit(tiny.make_run(tmp_path, train={"tensorboard": True, "epochs": 1}))
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    written = [event.value for event in events.Scalars("step/loss")]
    assert written == pytest.approx(tiny.losses(tmp_path), rel=1e-6)
    assert "epoch/valid/energy_mse" in events.Tags()["scalars"]


def test_a_writer_that_is_not_installed_names_the_extra(tmp_path):
    with pytest.raises(MissingPackageError, match=r"bevatron\[wandb\]"):
        fit(tiny.make_run(tmp_path, train={"wandb": True}))


def test_a_description_counts_without_training(tmp_path):
    run = tiny.make_run(tmp_path / "run", optim={"accumulate": 2})
    found = describe(run, num_ranks=2)
    assert found["parameters"] == found["trained_parameters"] == 3 * 8 + 8 + 8 + 1
    plan = found["memory"][""]
    assert plan.weights == 4 * 512 + 512  # each in a block of its own; the last is a buffer
    moments_and_averages = 4 * (3 + 1 + 1) * 512  # gradients come and go
    assert moments_and_averages <= plan.optimizer <= moments_and_averages + 2048
    assert plan.activations > 0
    assert found["steps"] == 2 * found["steps_per_epoch"]
    assert found["steps_per_epoch"] == -(-found["batches_per_epoch"] // 2)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("size", [1, 2])
def test_an_epoch_of_few_steps_is_warned_of_once(tmp_path, capsys, size):
    batch = {"algorithm": "fixed_count", "size": size}
    run = tiny.make_run(tmp_path, count=30, batch=batch, train={"epochs": 2})
    fit(run)
    warned = [line for line in capsys.readouterr().out.splitlines() if "steps per epoch" in line]
    if size == 1:
        assert not warned
    else:
        (warning,) = warned
        assert warning == (
            "warning: only 15 steps per epoch, 30 in all; lower batch.size (now 2 samples) or "
            "train for more epochs"
        )


def test_the_next_epoch_is_loaded_while_this_one_is_validated(tmp_path):
    order = []

    class Watching(tiny.TinyTask):
        def predict(self, model, batch):
            order.append("validated")
            return super().predict(model, batch)

    run = tiny.make_run(tmp_path, task=Watching(), train={"epochs": 3})

    class Noting(Trainer):
        def __init__(self, *given):
            super().__init__(*given)
            inner = self.loader.set_batches
            self.loader.set_batches = lambda batches: (order.append("set"), inner(batches))

    fit(run, Noting)
    # Epoch 1, then 2 before the first validation, then 3 before the second.
    assert [name for name, _ in groupby(order)] == ["set", "validated", "set", "validated"]
    assert order[:2] == ["set", "set"]
