"""Damaged checkpoints and best weights are noticed; the run continues from what is intact."""

import json
import random
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest
import tiny

from bevatron.errors import CheckpointError, DamagedError
from bevatron.parallel.mesh import Mesh
from bevatron.recipes.training import start
from bevatron.train.checkpoint import list_checkpoints, read_intact
from bevatron.train.loop import fit
from bevatron.train.run_folder import RunFolder
from bevatron.train.schedule import Decisions

GROUPS = {"checkpoint": {"every_steps": 3}, "optim": {"ema": 0.9, "accumulate": 2}}
FILES = (
    "ema.safetensors",
    "model.safetensors",
    "optimizer.safetensors",
    "rng-rank0.safetensors",
    "state.json",
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A finished run with two checkpoints."""
    folder = tmp_path_factory.mktemp("whole")
    fit(tiny.make_run(folder, **GROUPS))
    return folder


@pytest.fixture
def copy(whole, tmp_path):
    """Another copy of it, which may be damaged."""
    return Path(shutil.copytree(whole, tmp_path / "run"))


def flip(path: Path, place: float = 0.5, bit: int = 0) -> None:
    """Flip one bit of a file."""
    data = bytearray(path.read_bytes())
    data[int(place * len(data))] ^= 1 << bit
    path.write_bytes(data)


def cut(path: Path) -> None:
    """Leave the first half of a file."""
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


@pytest.mark.parametrize("damage", [flip, cut, Path.unlink])
@pytest.mark.parametrize("name", FILES)
def test_a_run_goes_on_from_the_newest_intact_checkpoint_and_says_why(whole, copy, name, damage):
    older, newest = list_checkpoints(copy / "checkpoints")
    damage(newest / name)
    result = fit(tiny.make_run(copy, resume=True, **GROUPS))
    assert result.finished == "epochs"
    assert tiny.records(copy) == tiny.records(whole)
    for file in ("weights.safetensors", "best/weights.safetensors"):
        assert (copy / file).read_bytes() == (whole / file).read_bytes()
    told = [line for line in (copy / "log.txt").read_text().splitlines() if "intact" in line]
    assert len(told) == 1
    assert f"{newest.name}" in told[0]
    assert name in told[0]
    assert f"going on from {older.name}" in told[0]
    assert read_intact(list_checkpoints(copy / "checkpoints")[-1]).progress.finished == "epochs"


@pytest.mark.parametrize("damage", [flip, cut, Path.unlink])
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_checkpoint_that_was_chosen_is_refused(copy, name, damage):
    _, newest = list_checkpoints(copy / "checkpoints")
    damage(newest / name)
    with pytest.raises(DamagedError, match=rf"{newest.name}.*{name}"):
        fit(tiny.make_run(copy, checkpoint_path=newest, **GROUPS))

    @dataclass
    class Config:
        output: Path
        recipe: ClassVar[str] = "mace"

    with pytest.raises(DamagedError, match=rf"{newest.name}.*{name}.*`resume=\"auto\"`"):
        start(Config(copy), resume="must")
    assert list_checkpoints(copy / "checkpoints")[-1] == newest


@pytest.mark.parametrize("name", FILES)
def test_any_flipped_bit_of_a_checkpoint_is_noticed(copy, name):
    newest = list_checkpoints(copy / "checkpoints")[-1]
    whole, draw = (newest / name).read_bytes(), random.Random(name)
    read_intact(newest)
    for _ in range(60):
        flip(newest / name, draw.random(), draw.randrange(8))
        with pytest.raises(DamagedError, match=newest.name):
            read_intact(newest)
        (newest / name).write_bytes(whole)


def test_a_run_without_an_intact_checkpoint_is_refused_and_kept(copy):
    paths = list_checkpoints(copy / "checkpoints")
    for path in paths:
        flip(path / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=rf"none of its checkpoints is intact \(.*{paths[-1].name}"
    ):
        fit(tiny.make_run(copy, resume=True, **GROUPS))
    assert list_checkpoints(copy / "checkpoints") == paths


def test_a_checkpoint_of_a_newer_version_is_not_taken_for_a_damaged_one(copy):
    paths = list_checkpoints(copy / "checkpoints")
    state = json.loads((paths[-1] / "state.json").read_text())
    del state["checksum"]
    (paths[-1] / "state.json").write_text(json.dumps({**state, "format": 99}))
    with pytest.raises(CheckpointError, match="format 99"):
        fit(tiny.make_run(copy, resume=True, **GROUPS))
    assert list_checkpoints(copy / "checkpoints") == paths


def test_damaged_best_weights_are_not_the_final_ones(copy):
    worse = tiny.LossesTask(lambda _epochs: 1e9)  # from now on
    flip(copy / "best" / "weights.safetensors", 0.9)
    damaged = (copy / "best" / "weights.safetensors").read_bytes()
    fit(tiny.make_run(copy, resume=True, task=worse, train={"epochs": 3}, **GROUPS))
    final = (copy / "weights.safetensors").read_bytes()
    assert final != damaged
    assert final == (copy / "best" / "weights.safetensors").read_bytes()
    assert json.loads((copy / "best" / "best.json").read_text())["epoch"] == 2


def test_best_weights_are_those_of_the_recorded_step_and_value(copy):
    folder = RunFolder(copy)
    note = json.loads((folder.best / "best.json").read_text())
    recorded = Decisions(best=note["value"], best_step=note["step"])
    assert folder.best_weights(recorded) is not None
    assert folder.best_weights(replace(recorded, best=note["value"] + 1)) is None
    assert folder.best_weights(replace(recorded, best_step=note["step"] + 1)) is None


def test_a_run_that_goes_on_from_a_checkpoint_removes_all_that_are_newer(copy):
    folder = RunFolder(copy)
    older = read_intact(list_checkpoints(folder.checkpoints)[0])
    shutil.copytree(older.path, older.path.with_name(f"step-{older.progress.step + 1:08d}"))
    folder.settle(older, Decisions(), Mesh())
    assert list_checkpoints(folder.checkpoints) == [older.path]
