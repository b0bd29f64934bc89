"""Validation beside training: the same figures, and training that neither waits nor changes."""

import json
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import drawn_system
import pytest
import tiny
from graph_ranks import fork_ranks, run_ranks

from bevatron.errors import ConfigError
from bevatron.parallel import failures
from bevatron.parallel.mesh import Mesh
from bevatron.train import fit
from bevatron.train.evaluators import InThread

EPOCHS = 3
THREAD = "thread"
"""In place of a number of validating ranks."""


@pytest.fixture(scope="module", autouse=True)
def _warm(tmp_path_factory):
    """Let torch import here what every forked process would import again."""
    fit(tiny.make_run(tmp_path_factory.mktemp("warm"), count=4, train={"epochs": 1}))


def beside(evaluating: int | str) -> dict:
    if evaluating == THREAD:
        return {"evaluate_beside": True}
    return {"evaluation_ranks": evaluating}


def train(folder: Path, world: int, evaluating: int | str, task=None, **more) -> list:
    """Train on so many processes, the last of which validate; return what `fit` says on each."""
    train = {"epochs": EPOCHS, **beside(evaluating), **more.pop("train", {})}

    def work(mesh):
        run = tiny.make_run(folder / "run", task=task, optim={"ema": 0.9}, train=train, **more)
        result = fit(run)
        return [result.finished, result.steps, result.best, result.stopped_by]

    folder.mkdir(exist_ok=True)
    return run_ranks(world, work, folder)


def epochs_of(folder: Path) -> list[dict]:
    found = [record for record in tiny.records(folder / "run") if record["kind"] == "epoch"]
    return sorted(found, key=lambda record: record["epoch"])


def same_training(one: Path, other: Path, rel=1e-12) -> None:
    """Steps and weights equal to the last bit, metrics but for the order of their sums."""
    assert tiny.losses(one / "run") == tiny.losses(other / "run")
    for name in ("weights.safetensors", "best/weights.safetensors"):
        assert (one / "run" / name).read_bytes() == (other / "run" / name).read_bytes()
    for mine, its in zip(epochs_of(one), epochs_of(other), strict=True):
        assert mine["valid"] == pytest.approx(its["valid"], rel=rel)
        assert {**mine, "valid": 0} == {**its, "valid": 0}


class BestInTheMiddle(tiny.TinyTask):
    """Weights of the second epoch, which training has changed when their validation is over."""

    def __init__(self) -> None:
        super().__init__()
        self.validations = []

    def metrics(self):
        self.validations.append(1)
        offset = 0.0 if len(self.validations) == 2 else 1e6

        class Metrics(tiny.TinyMetrics):
            def compute(self):
                found = super().compute()
                return {**found, "loss": found["loss"] + offset}

        return Metrics()


@pytest.mark.parametrize(("training", "evaluating"), [(1, 1), (2, 2), (1, THREAD)])
def test_it_equals_validation_in_line(tmp_path, training, evaluating):
    expected = train(tmp_path / "in_line", training, 0, task=BestInTheMiddle())
    in_thread, task = evaluating == THREAD, BestInTheMiddle()
    world = training if in_thread else training + evaluating
    found = train(tmp_path / "beside", world, evaluating, task=task)
    assert [epoch["best"] for epoch in epochs_of(tmp_path / "beside")] == [True, True, False]
    # A thread takes the batches in the same order: then not even sums differ.
    same_training(tmp_path / "beside", tmp_path / "in_line", rel=0 if in_thread else 1e-12)
    assert all(one[:2] == expected[0][:2] for one in found)
    assert all(one[2] == pytest.approx(expected[0][2], rel=1e-12) for one in found)


def test_a_second_run_of_the_same_processes_reads_nothing_of_the_first(tmp_path):
    def values(world, evaluating):
        def work(mesh):
            train = {"epochs": 1, "evaluation_ranks": evaluating}
            return [
                fit(tiny.make_run(folder / f"{lr}", optim={"lr": lr}, train=train)).metrics["loss"]
                for lr in (0.01, 0.001)
            ]

        folder = tmp_path / f"{world}"
        folder.mkdir()
        return run_ranks(world, work, folder, timeout=20.0)

    expected = values(1, 0)[0]
    assert expected[0] != pytest.approx(expected[1])
    assert values(2, 1) == [pytest.approx(expected, rel=1e-12)] * 2


class Waiting(tiny.TinyTask):
    """A validation that is over only when training has taken three more steps."""

    def __init__(self, mark: Path) -> None:
        super().__init__()
        self.mark = mark

    def loss(self, *args):
        (self.mark / str(len(self.seen))).touch()
        return super().loss(*args)

    def predict(self, *args):
        deadline = time.monotonic() + 20
        while not (self.mark / "9").exists() and time.monotonic() < deadline:
            time.sleep(0.002)
        return super().predict(*args)


@pytest.mark.parametrize(("world", "evaluating"), [(2, 1), (1, THREAD)])
def test_training_goes_on_meanwhile(tmp_path, world, evaluating):
    """An epoch has 7 steps; in line, the first validation would wait in vain."""
    (tmp_path / "marks").mkdir()
    begin = time.monotonic()
    train(tmp_path / "run", world, evaluating, task=Waiting(tmp_path / "marks"))
    assert time.monotonic() - begin < 20
    assert len(epochs_of(tmp_path / "run")) == EPOCHS


class Stopped(tiny.TinyTask):
    """Stops the run in a step of the second epoch, before its validation could be over."""

    def loss(self, *args):
        if len(self.seen) == 8:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().loss(*args)

    def predict(self, *args):
        time.sleep(0.3)
        return super().predict(*args)


@pytest.mark.parametrize(
    ("begins", "goes_on"), [((2, 1), (2, 1)), ((2, 1), (1, 0)), ((1, THREAD), (1, THREAD))]
)
def test_a_checkpoint_keeps_the_weights_that_are_being_validated(tmp_path, begins, goes_on):
    """Resumed with or without ranks for it, the run ends as one that was not stopped."""
    train(tmp_path / "whole", 2, 1)
    stopped = train(tmp_path / "cut", *begins, task=Stopped())
    assert {one[3] for one in stopped} == {"SIGTERM"}
    checkpoint = max((tmp_path / "cut" / "run" / "checkpoints").iterdir())
    assert json.loads((checkpoint / "state.json").read_text())["progress"]["pending"]["epoch"] == 0
    train(tmp_path / "cut", *goes_on, resume=True)
    same_training(tmp_path / "cut", tmp_path / "whole")


def drawn(folder: Path, world: int, evaluating: int | str, **first) -> list:
    """Train a run in stages."""

    def work(mesh):
        stage = replace(drawn_system.FIRST, evaluate_every=2, **first)
        train = {"seed": 0, **beside(evaluating)}
        result = fit(drawn_system.make_run(folder / "run", first=stage, train=train))
        return [result.finished, result.steps]

    folder.mkdir(exist_ok=True)
    return run_ranks(world, work, folder)


@pytest.mark.parametrize(("world", "evaluating"), [(3, 1), (1, THREAD)])
@pytest.mark.parametrize(
    ("first", "end"),
    [
        ({"target": 9.0}, ["steps", 12]),
        ({"target": 1e-9}, ["target missed", 7]),
        # Reached by the validation of step 2, which decides where the next one is due.
        ({"target": 9.0, "ends_at_target": True}, ["steps", 4 + 5]),
    ],
)
def test_targets_end_stages_at_the_same_step_on_all_ranks(tmp_path, world, evaluating, first, end):
    assert drawn(tmp_path, world, evaluating, **first) == [end] * world
    stages = [record["stage"] for record in epochs_of(tmp_path)]
    assert stages == sorted(stages, reverse=True)  # short, then long


class Failing(tiny.TinyTask):
    def predict(self, *args):
        raise ConfigError("no room to predict")


def test_an_error_in_the_thread_ends_the_run_after_the_next_epoch(tmp_path):
    run = tiny.make_run(tmp_path, task=Failing(), train={"epochs": 5, "evaluate_beside": True})
    with pytest.raises(ConfigError, match="no room to predict"):
        fit(run)
    assert len(run.task.epochs) == 2
    assert "validation" not in {thread.name for thread in threading.enumerate()}


def test_no_thread_outlives_an_error_of_training(tmp_path):
    class Breaks(Stopped):
        def loss(self, *args):
            if len(self.seen) == 8:
                raise ZeroDivisionError
            return super().loss(*args)

    with pytest.raises(ZeroDivisionError):
        fit(tiny.make_run(tmp_path, task=Breaks(), train={"evaluate_beside": True}))
    assert "validation" not in {thread.name for thread in threading.enumerate()}


def test_an_error_of_a_validating_rank_ends_all(tmp_path, monkeypatch):
    monkeypatch.setattr(failures, "GRACE_SECONDS", 1.0)

    def work(mesh):
        return fit(
            tiny.make_run(tmp_path / "run", task=Failing(), train={"evaluation_ranks": 1})
        ).steps

    codes, said = fork_ranks(2, work, tmp_path)
    assert 0 not in codes
    assert "no room to predict" in said


def test_what_cannot_be_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="1 of 1 process would validate and none would train"):
        fit(tiny.make_run(tmp_path, train={"evaluation_ranks": 1}))
    with pytest.raises(ConfigError, match="evaluate_beside: is for one process; leave it out"):
        tiny.make_run(tmp_path, train={"evaluation_ranks": 1, "evaluate_beside": True})
    run = tiny.make_run(tmp_path, train={"evaluate_beside": True})
    with pytest.raises(ConfigError, match="evaluate_beside: needs validation data"):
        fit(replace(run, valid=None))
    with pytest.raises(ConfigError, match="is for one process, there are 2"):
        InThread(run, run.model, Mesh(world=2))
