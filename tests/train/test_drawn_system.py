"""A system whose samples are drawn trains in stages of steps through the same loop, and resumes."""

import json
import os
import signal
from dataclasses import replace

import numpy as np
import pytest
import tiny
from drawn_system import (
    FIRST,
    SECOND,
    KilledError,
    Reader,
    RecycledTask,
    draws_by_step,
    make_run,
)

from bevatron.data.packing import Draws
from bevatron.data.packing.draws import SUBSTITUTES
from bevatron.data.padding.shape import Axis, PaddingRule
from bevatron.errors import ConfigError, DataError, DivergenceError, LoaderError
from bevatron.task import StepNumbers
from bevatron.train import describe, description, fit
from bevatron.train.capture import step as captured_module
from bevatron.train.checkpoint import list_checkpoints
from bevatron.train.memory_plan import NotPlannableError
from bevatron.train.profiling.steps import profile_steps
from bevatron.train.settings import ScheduleConfig, StageConfig

EVERY_STEP = {"checkpoint": {"every_steps": 1, "keep": 99}}


def steps_of(folder):
    return [record for record in tiny.records(folder) if record["kind"] == "step"]


def same_end(one, other):
    assert tiny.records(one) == tiny.records(other)
    for name in ("weights.safetensors", "best/weights.safetensors"):
        assert (one / name).read_bytes() == (other / name).read_bytes()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nothing has interrupted, and its draws by step."""
    folder = tmp_path_factory.mktemp("whole")
    task = RecycledTask()
    result = fit(make_run(folder, task=task))
    assert (result.finished, result.steps) == ("steps", 12)
    return folder, draws_by_step(task.seen)


def test_it_trains_validates_by_steps_and_goes_through_its_stages(whole):
    folder, draws = whole
    expected = [list(range(4 * step, 4 * step + 4)) for step in range(7)]
    expected += [list(range(28 + 8 * step, 36 + 8 * step)) for step in range(5)]
    assert [draws[step] for step in range(12)] == expected
    epochs = [record for record in tiny.records(folder) if record["kind"] == "epoch"]
    assert [(r["step"], r["stage"]) for r in epochs] == [
        *[(3, "short"), (6, "short"), (7, "short")],
        *[(9, "long"), (11, "long"), (12, "long")],
    ]
    assert all(record["valid"]["loss"] > 0 for record in epochs)
    sizes = [record["sizes"] for record in steps_of(folder)]
    assert [s["letters"] for s in sizes] == [32] * 7 + [96] * 5
    assert [record["lr"] for record in steps_of(folder)] == [0.02] * 7 + [0.005] * 5
    log = (folder / "log.txt").read_text()
    assert "stage short: 7 steps of 4 samples from step 1 on" in log
    assert "stage long: 5 steps of 8 samples from step 8 on" in log
    assert "step 3/12  loss" in log
    assert "warning: stages.long.samples_per_step is 8; training of this kind is known" in log
    assert "stages.short.samples_per_step" not in log


def test_it_learns(tmp_path):
    long = replace(FIRST, steps=150, evaluate_every=50)
    fit(make_run(tmp_path, first=long))
    losses = [r["valid"]["loss"] for r in tiny.records(tmp_path) if r["kind"] == "epoch"]
    assert losses[-1] < 0.5 * losses[0]


def test_the_numbers_of_a_step_are_in_the_journal_and_depend_on_seed_and_step_alone(
    whole, tmp_path
):
    numbers = [record["numbers"] for record in steps_of(whole[0])]
    assert [one["stage"] for one in numbers] == [0] * 7 + [1] * 5
    assert len({one["seed"] for one in numbers}) == 12
    assert len({one["recycles"] for one in numbers}) > 1
    for step, one in enumerate(numbers):
        again = StepNumbers(step, int(one["seed"]), one["stage"])
        assert again.draw("recycles", below=4) == one["recycles"]
    fit(make_run(tmp_path, seed=1, first=replace(FIRST, steps=3), second=replace(SECOND, steps=1)))
    assert steps_of(tmp_path)[0]["numbers"]["seed"] != numbers[0]["seed"]


@pytest.mark.parametrize("killed_in_step", range(1, 12))
def test_killed_at_any_step_it_goes_on_to_the_last_bit(whole, tmp_path, killed_in_step):
    folder, draws = whole
    with pytest.raises(KilledError):
        fit(make_run(tmp_path, task=RecycledTask(killed_in_step), **EVERY_STEP))
    task = RecycledTask()
    fit(make_run(tmp_path, task=task, resume=True, **EVERY_STEP))
    assert min(draws_by_step(task.seen)) == killed_in_step
    assert draws_by_step(task.seen).items() <= draws.items()
    same_end(folder, tmp_path)


def test_workers_and_captured_steps_give_the_same_run(whole, tmp_path, monkeypatch):
    fit(make_run(tmp_path / "workers", loader={"workers": 2}))
    same_end(whole[0], tmp_path / "workers")
    monkeypatch.setattr(captured_module, "obstacle", lambda *_: None)
    monkeypatch.setattr(
        captured_module.CapturedStep, "_key_of", lambda self, batch: tuple(batch.letters.shape)
    )
    keys = []
    begin = captured_module.StepGraphs._capture

    def capture(self, key, choice):
        keys.append((key, choice))
        begin(self, key, choice)

    monkeypatch.setattr(captured_module.StepGraphs, "_capture", capture)
    monkeypatch.setattr(captured_module.StepGraphs, "feed", feed_anew)
    fit(make_run(tmp_path / "captured"))
    found, expected = tiny.losses(tmp_path / "captured"), tiny.losses(whole[0])
    assert found == pytest.approx(expected, rel=1e-12)
    recycles = {(r["numbers"]["stage"], r["numbers"]["recycles"]) for r in steps_of(whole[0])}
    assert len(keys) == len(set(keys)) == len(recycles)


def feed_anew(self, batch, key, choice):
    """Hand over a batch that cannot be padded: a graph for each choice, a batch for each step."""
    if (key, choice) not in self._graphs:
        self._make(key, choice, batch)
        self._capture(key, choice)
    self._inputs[key].batch = batch.to("cpu")


def test_batches_of_several_samples_are_the_same_draws(whole, tmp_path):
    task = RecycledTask()
    fit(make_run(tmp_path, task=task, size=3))
    assert draws_by_step(task.seen) == whole[1]
    assert {len(numbers) for _, numbers in task.seen} <= {1, 2, 3}
    assert tiny.losses(tmp_path) == pytest.approx(tiny.losses(whole[0]), rel=1e-12)


def test_every_draw_is_used_once_although_batches_overtake_and_the_run_is_stopped(tmp_path):
    class Stopped(RecycledTask):
        def begin_step(self, numbers):
            if numbers.step == 4:
                os.kill(os.getpid(), signal.SIGTERM)
            return super().begin_step(numbers)

    def overtaking(task, **more):
        run = make_run(tmp_path, task=task, loader={"workers": 2, "window": 4}, **more)
        for stage in run.stages:
            for source in stage.train.sources:
                source.dataset.slow_seconds = 0.05
        return fit(run)

    first, second = Stopped(), RecycledTask()
    assert overtaking(first).stopped_by == "SIGTERM"
    assert overtaking(second, resume=True).finished == "steps"
    drawn = [number for _, numbers in first.seen + second.seen for number in numbers]
    assert sorted(drawn) == list(range(68))
    assert drawn != sorted(drawn)


def test_a_checkpoint_holds_the_position_and_the_mixture(whole):
    newest = list_checkpoints(whole[0] / "checkpoints")[-1]
    state = json.loads((newest / "state.json").read_text())
    assert state["progress"]["draw"] == 28 + 40
    assert state["progress"]["stage"] == 1
    assert state["settings"]["draws.short.books.share"] == 3.0
    assert state["settings"]["draws.long.letters.samples"] == 5
    assert state["identity"]["train.seed"] == 0


def test_another_mixture_is_reported_on_resume(tmp_path):
    with pytest.raises(KilledError):
        fit(make_run(tmp_path, task=RecycledTask(2), **EVERY_STEP))
    run = make_run(tmp_path, resume=True)
    stage = run.stages[0]
    books = Draws(stage.train.sources[:1], seed=0)
    sizes = {"letters": books.lengths("letters")}
    run.stages = [replace(stage, train=books, sizes=sizes), run.stages[1]]
    fit(run)
    assert (
        "changed: draws.short.letters.share was 1.0, is absent"
        in (tmp_path / "log.txt").read_text()
    )


# ---- targets ----


def test_a_stage_that_misses_its_target_ends_the_run(tmp_path):
    first = replace(FIRST, target=1e-9)
    result = fit(make_run(tmp_path, first=first))
    assert (result.finished, result.steps) == ("target missed", 7)
    assert (tmp_path / "weights.safetensors").exists()
    result = fit(make_run(tmp_path, first=replace(first, target=9.0), resume=True))
    assert (result.finished, result.steps) == ("target missed", 7)


@pytest.mark.parametrize(("monitor", "target"), [("loss", 9.0), ("-closeness", -9.0)])
def test_a_stage_that_reaches_its_target_is_followed_by_the_next(tmp_path, monitor, target):
    first = replace(FIRST, target=target)
    result = fit(make_run(tmp_path / "on", first=first, train={"monitor": monitor}))
    assert (result.finished, result.steps) == ("steps", 12)
    early = replace(first, ends_at_target=True)
    result = fit(make_run(tmp_path / "early", first=early, train={"monitor": monitor}))
    assert (result.finished, result.steps) == ("steps", 8)
    second = replace(SECOND, target=target, ends_at_target=True)
    groups = {"train": {"monitor": monitor}}
    result = fit(make_run(tmp_path / "last", first=early, second=second, **groups))
    assert (result.finished, result.steps) == ("target", 5)


def test_a_target_reached_before_a_kill_counts(tmp_path):
    first = replace(FIRST, target=9.0)
    groups = {"checkpoint": {"every_steps": 1, "best": False}}
    with pytest.raises(KilledError):
        fit(make_run(tmp_path, first=first, task=RecycledTask(4), **groups))
    result = fit(make_run(tmp_path, first=first, resume=True, **groups))
    assert result.finished == "steps"


# ---- schedules, limits, messages ----


def test_learning_rates_follow_the_run_or_the_stage(tmp_path):
    schedule = {"kind": "exponential", "gamma": 0.5, "gamma_steps": 5, "warmup_steps": 2}
    own = ScheduleConfig(kind="linear", lr_min=0.0)
    second = replace(SECOND, lr=1.0, schedule=own)
    fit(make_run(tmp_path, second=second, schedule=schedule, optim={"lr": 0.4}))
    rates = [record["lr"] for record in steps_of(tmp_path)]
    assert rates[:7] == pytest.approx([0.2, 0.4, 0.4, 0.4, 0.4, 0.2, 0.2])
    assert rates[7:] == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])


def test_more_samples_a_step_after_a_resume_draw_exactly_the_rest(tmp_path):
    with pytest.raises(KilledError):
        fit(make_run(tmp_path, task=RecycledTask(2), **EVERY_STEP))
    task = RecycledTask()
    fit(make_run(tmp_path, task=task, resume=True, first=replace(FIRST, samples_per_step=2)))
    drawn = [number for numbers in draws_by_step(task.seen).values() for number in numbers]
    assert sorted(drawn) == list(range(8, 8 + len(drawn)))
    assert draws_by_step(task.seen)[2] == [8, 9]


@pytest.mark.parametrize("window", [1, 3])
def test_a_stage_shortened_before_a_resume_ends_where_it_says(tmp_path, window):
    loader = {"loader": {"window": window}}
    first = replace(FIRST, evaluate_every=7)
    with pytest.raises(KilledError):
        fit(make_run(tmp_path, task=RecycledTask(2), first=first, **EVERY_STEP, **loader))
    shorter = replace(first, steps=5)
    task = RecycledTask()
    result = fit(make_run(tmp_path, task=task, resume=True, first=shorter, **loader))
    assert (result.finished, result.steps) == ("steps", 5 + SECOND.steps)
    drawn = [number for numbers in draws_by_step(task.seen).values() for number in numbers]
    assert sorted(drawn) == list(range(8, 20 + 8 * SECOND.steps))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optim": {"accumulate": 2}}, "optim.accumulate: follows from samples_per_step"),
        ({"schedule": {"kind": "exponential"}}, "schedule.gamma_steps: is needed, this run has"),
        ({"schedule": {"warmup_epochs": 1.0}}, "schedule: this run has no epochs; give"),
        (
            {"second": replace(SECOND, schedule=ScheduleConfig(per_epoch=True))},
            "stages.long.schedule: this run has no epochs",
        ),
    ],
)
def test_settings_that_need_epochs_are_refused(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        fit(make_run(tmp_path, **changes))


def test_a_loss_that_explodes_names_step_stage_and_samples(tmp_path):
    run = make_run(tmp_path, first=replace(FIRST, lr=1e300))
    with pytest.raises(DivergenceError, match=r"in step \d+ \(stage short\), .*seed \d+"):
        fit(run)


def test_a_target_needs_validation_data(tmp_path):
    run = make_run(tmp_path, first=replace(FIRST, target=1.0))
    run.valid = run.valid_sizes = None
    with pytest.raises(ConfigError, match=r"stages.short.target: needs validation data"):
        fit(run)


def test_draws_of_another_seed_than_the_run_are_a_mistake_of_the_recipe(tmp_path):
    run = make_run(tmp_path)
    run.stages = make_run(tmp_path, seed=1).stages
    with pytest.raises(ValueError, match="stage short draws with seed 1, the run has 0"):
        fit(run)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"steps": 0}, "steps: expected 1 or more, got 0"),
        ({"lr": 0.0}, "lr: expected a number above 0, got 0.0"),
        ({"ends_at_target": True}, "ends_at_target: needs a target"),
    ],
)
def test_a_stage_out_of_range_is_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        StageConfig(**{"steps": 1, "samples_per_step": 1, **values})


def test_a_bad_sample_is_named_with_its_seed(tmp_path):
    run = make_run(tmp_path)
    run.stages[0].train.sources[0].dataset.texts[4][:] = 25
    torch_nan = float("nan")

    class Poisoned(Reader):
        def forward(self, batch, *args):
            found = super().forward(batch, *args)
            bad = (batch.letters == 25).all(1)
            return {"score": found["score"].masked_fill(bad, torch_nan)}

    run.model = Poisoned()
    with pytest.raises(DivergenceError, match=r"text of 1, number 4 \(seed \d+\)"):
        fit(run)


def test_a_run_in_stages_is_described(tmp_path):
    found = describe(make_run(tmp_path), num_ranks=2)
    assert (found["batches_per_step"], found["steps"]) == (2, 12)
    assert len(found["memory"]) == 2
    assert all(plan.activations > 0 for plan in found["memory"].values())
    assert np.isnan(found["fill"])


class DeepBatch:
    """Hardly longer than others, with as many rows as it is told."""

    padding = PaddingRule((Axis("letters"), Axis("rows"), Axis("crops")), samples="crops")
    ragged = padding_rows = over = to = pin_memory = staticmethod(lambda *_: None)
    sample_indices = weight = np.zeros(1)

    def __init__(self, rows):
        self.sizes = {"letters": 8 + rows % 2, "rows": rows, "crops": 1}


@pytest.mark.parametrize("captured", [True, False])
def test_the_step_that_is_planned_holds_the_deepest_of_the_longest(captured, tmp_path, monkeypatch):
    depths, planned = iter([3, 40, None, 6, *[5] * 99]), []

    def collated(run, data, draws, weights):
        depth = next(depths)
        if depth is None:
            raise DataError("damaged")
        return DeepBatch(depth)

    def plan(run, batch, shape, *_):
        planned.append((batch, shape))
        return NotPlannableError()

    monkeypatch.setattr(description, "would_be_captured", lambda _: captured)
    monkeypatch.setattr(description, "_collated", collated)
    monkeypatch.setattr(description, "_planned", plan)
    description.memory_of_stage(make_run(tmp_path), 0, gpu=True)
    ((batch, shape),) = planned
    assert batch.sizes["rows"] == 40
    if captured:
        assert DeepBatch.padding.holds(shape, (9, 40, 1))
    else:
        assert shape is None


def test_a_stage_none_of_whose_samples_can_be_read_has_no_plan(tmp_path, monkeypatch):
    def collated(*_):
        raise DataError("damaged")

    monkeypatch.setattr(description, "_collated", collated)
    with pytest.raises(DataError, match="damaged"):
        description.memory_of_stage(make_run(tmp_path), 0, gpu=False)


def test_a_run_in_stages_is_profiled(tmp_path):
    found = profile_steps(make_run(tmp_path), steps=2, warm=1)
    assert found.sizes["crops"] == 4


# ---- samples that cannot be read ----


def damaged(run, number=4):
    """A run one of whose texts is too short for a crop, wherever it is drawn."""
    for stage in run.stages:
        stage.train.sources[0].dataset.texts[number] = np.zeros(3, dtype=np.int64)
    return run


@pytest.mark.parametrize("workers", [0, 2])
def test_samples_that_cannot_be_read_are_replaced_counted_and_named(whole, tmp_path, workers):
    task, loader = RecycledTask(), {"leave_out": 99, "workers": workers}
    result = fit(damaged(make_run(tmp_path, task=task, loader=loader)))
    assert result.steps == 12
    found = draws_by_step(task.seen)
    drawn = [number for numbers in found.values() for number in numbers]
    lacking = [r for r in tiny.records(tmp_path) if r["kind"] == "left out"]
    left_out = [one["sample"] for record in lacking for one in record["samples"]]
    assert left_out
    assert len(drawn) == 68
    assert set(range(68)) - set(drawn) == {number for number in left_out if number < 68}
    for record in lacking:
        numbers = {one["sample"] % SUBSTITUTES for one in record["samples"]}
        assert numbers <= {number % SUBSTITUTES for number in found[record["step"] - 1]}
    log = (tmp_path / "log.txt").read_text()
    assert log.count("left out: text of 1, number 4 (seed ") == len(left_out)
    newest = list_checkpoints(tmp_path / "checkpoints")[-1]
    state = json.loads((newest / "state.json").read_text())
    assert state["progress"]["left_out"] == len(left_out)


def test_more_samples_than_allowed_end_the_run(tmp_path):
    message = r"2 samples could not be read, of which loader.leave_out allows 1; the last is text"
    with pytest.raises(LoaderError, match=message):
        fit(damaged(make_run(tmp_path, loader={"leave_out": 1})))


def test_without_leave_a_sample_that_cannot_be_read_ends_the_run(tmp_path):
    with pytest.raises(LoaderError, match=r"text of 1, number 4 \(seed \d+\): ValueError"):
        fit(damaged(make_run(tmp_path)))
