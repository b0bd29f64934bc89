"""Runs at Weights & Biases: a random id, kept in the run's folder. The package is a stand-in."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import tiny

from bevatron.train import fit
from bevatron.train.logger import WANDB_ID


@pytest.fixture
def begun(monkeypatch):
    """Arguments of every `wandb.init`."""
    calls = []

    def init(**arguments):
        calls.append(arguments)
        return SimpleNamespace(log=lambda *a, **k: None, finish=lambda: None)

    package = ModuleType("wandb")
    package.init = init
    monkeypatch.setitem(sys.modules, "wandb", package)
    return calls


def train(folder, epochs=1, resume=False):
    run = tiny.make_run(folder, train={"epochs": epochs, "wandb": True})
    run.resume = resume
    return fit(run)


def test_folders_of_one_name_are_different_runs_there(tmp_path, begun):
    train(tmp_path / "a" / "water")
    train(tmp_path / "b" / "water")
    assert [call["name"] for call in begun] == ["water", "water"]
    assert begun[0]["id"] != begun[1]["id"]
    assert "water" not in begun[0]["id"]
    assert (tmp_path / "a" / "water" / WANDB_ID).read_text().strip() == begun[0]["id"]


def test_a_resumed_run_goes_on_with_the_run_there(tmp_path, begun):
    train(tmp_path / "water")
    train(tmp_path / "water", epochs=2, resume=True)
    assert begun[0]["id"] == begun[1]["id"]


def test_a_run_of_an_earlier_version_keeps_the_name_of_its_folder_as_id(tmp_path, begun):
    train(tmp_path / "water")
    (tmp_path / "water" / WANDB_ID).unlink()
    train(tmp_path / "water", epochs=2, resume=True)
    assert begun[1]["id"] == "water"
