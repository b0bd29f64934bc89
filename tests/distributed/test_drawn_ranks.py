"""Drawn samples on two gloo processes: the draws of one process, exact resume, other ranks."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
from drawn_system import FIRST, KilledError, RecycledTask, draws_by_step, make_run
from graph_ranks import run_ranks

from bevatron.train import fit

EVERY_STEP = {"checkpoint": {"every_steps": 1, "keep": 99}}


def trained(folder: Path, killed_in_step=None, **more) -> list:
    """Train in this process; return what its task has seen."""
    task = RecycledTask(killed_in_step)
    try:
        fit(make_run(folder, task=task, **EVERY_STEP, **more))
    except KilledError:
        assert killed_in_step is not None
    return task.seen


def on_two(folder: Path, **more) -> dict[int, list[int]]:
    """Train on two processes; return the draws of each step."""
    folder.mkdir(exist_ok=True)
    found = run_ranks(2, lambda mesh: trained(folder / "run", **more), folder)
    for rank in (0, 1):
        (folder / f"found{rank}").unlink()
    return draws_by_step([tuple(one) for seen in found for one in seen])


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Runs that nothing has interrupted, on one process and on two."""
    folder = tmp_path_factory.mktemp("whole")
    draws = draws_by_step(trained(folder / "one" / "run"))
    assert on_two(folder / "two") == draws
    return folder, draws


def test_two_processes_have_the_draws_numbers_and_losses_of_one(whole):
    folder, _ = whole
    one, two = (tiny.records(folder / name / "run") for name in ("one", "two"))
    assert [r.get("numbers") for r in one] == [r.get("numbers") for r in two]
    assert tiny.losses(folder / "two" / "run") == pytest.approx(
        tiny.losses(folder / "one" / "run"), rel=1e-12
    )


@pytest.mark.parametrize("killed_in_step", [2, 7, 10])
def test_killed_on_two_processes_it_goes_on_to_the_last_bit(whole, tmp_path, killed_in_step):
    folder, draws = whole
    on_two(tmp_path, killed_in_step=killed_in_step)
    rest = on_two(tmp_path, resume=True)
    assert rest == {step: draws[step] for step in range(killed_in_step, 12)}
    assert tiny.records(tmp_path / "run") == tiny.records(folder / "two" / "run")
    name = "weights.safetensors"
    assert (tmp_path / "run" / name).read_bytes() == (folder / "two" / "run" / name).read_bytes()


@pytest.mark.parametrize("grows", [True, False])
def test_on_another_number_of_processes_it_draws_exactly_the_rest(whole, tmp_path, grows):
    """From one to two in the middle of the first stage, and back in that of the second."""
    folder, draws = whole
    if grows:
        trained(tmp_path / "run", killed_in_step=4)
        rest, begin = on_two(tmp_path, resume=True), 4
    else:
        on_two(tmp_path, killed_in_step=8)
        rest, begin = draws_by_step(trained(tmp_path / "run", resume=True)), 8
    assert rest == {step: draws[step] for step in range(begin, 12)}
    assert tiny.losses(tmp_path / "run") == pytest.approx(
        tiny.losses(folder / "one" / "run"), rel=1e-12
    )
    changes = json.dumps(tiny.records(tmp_path / "run"))
    assert '"ranks": ["1", "2"]' in changes or '"ranks": ["2", "1"]' in changes


def test_processes_that_would_have_no_samples_are_warned_of(whole, tmp_path):
    on_two(tmp_path, first=replace(FIRST, samples_per_step=1))
    said = "warning: stages.short.samples_per_step is 1; fewer than 2 leave processes without"
    assert said in (tmp_path / "run" / "log.txt").read_text()
    assert "without a sample" not in (whole[0] / "two" / "run" / "log.txt").read_text()


def test_samples_that_another_process_cannot_read_are_named(tmp_path):
    def work(mesh):
        run = make_run(tmp_path / "run", loader={"leave_out": 99})
        for stage in run.stages:
            texts = stage.train.sources[0].dataset.texts
            texts[4] = texts[4][:3]
        return fit(run).steps

    assert run_ranks(2, work, tmp_path) == [12, 12]
    lacking = [r for r in tiny.records(tmp_path / "run") if r["kind"] == "left out"]
    names = [one["name"] for record in lacking for one in record["samples"]]
    assert len(names) > 2
    log = (tmp_path / "run" / "log.txt").read_text()
    assert all(f"left out: {name}: ValueError" in log for name in names)
