"""What bevatron 0.1.0 wrote is read by this code, and its runs go on to the same last bit.

``tests/fixtures/0.1.0`` holds, for each case, a prepared store and its file, ``run.yaml``, a run
that SIGTERM ``stopped``, the same run ``finished`` without an interruption, and what it
``predicted``. They are never written again: if a test here is red, the code must read what users
have on their disks.
"""

import csv
import json
import math
import shutil
from pathlib import Path

import ase.io
import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file

from bevatron.cli import main

OLD = Path(__file__).parent / "fixtures/0.1.0"
TOLERANCE = 1e-9
"""The numbers of a resumed run may differ by this share of the largest in a tensor: CPUs differ in
their last digits. ``tests/train/test_resume.py`` asks for the last bit, on one CPU."""

START_TOLERANCE = 1e-5
"""The same from the first step on: initial weights are drawn in float32, by other instructions."""

# An old key may be read with a warning.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture
def case(request, tmp_path, monkeypatch):
    """Go into a copy of the case that a test is parametrised with, and return the original."""
    shutil.copytree(OLD / request.param, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return OLD / request.param


def cases(*names):
    return pytest.mark.parametrize("case", names, indirect=True)


def call(*arguments):
    """Run a command of ``bevatron``, which must succeed."""
    assert main([str(argument) for argument in arguments]) == 0


def records(folder):
    """Read metrics.jsonl but for what depends on the clock."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "time"} for line in lines]


def close(found, expected, tolerance=TOLERANCE):
    """Whether two values, or trees of values, agree as closely as they can on this machine."""
    if isinstance(expected, dict):
        same = isinstance(found, dict) and found.keys() == expected.keys()
        return same and all(close(found[key], value, tolerance) for key, value in expected.items())
    if isinstance(expected, float) and isinstance(found, float):
        return math.isclose(found, expected, rel_tol=tolerance, abs_tol=tolerance / 1000)
    return found == expected


def assert_same_records(found, expected, tolerance=TOLERANCE):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert close(one, other, tolerance), f"found {one}, expected {other}"


def assert_same_weights(found, expected, tolerance=TOLERANCE):
    """Compare two model folders."""
    one, other = (load_file(folder / "weights.safetensors") for folder in (found, expected))
    assert one.keys() == other.keys()
    for name, value in other.items():
        largest = max([1.0, *value.abs().flatten().tolist()])
        torch.testing.assert_close(one[name], value, rtol=0, atol=tolerance * largest)
    kinds = [
        json.loads((folder / "model.json").read_text())["kind"] for folder in (found, expected)
    ]
    assert kinds[0] == kinds[1]


def costs(path):
    """Return the numbers that a configuration has under ``batch``, whatever their keys."""

    def numbers(values):
        for value in values.values():
            if isinstance(value, dict):
                yield from numbers(value)
            elif isinstance(value, float):
                yield value

    return set(numbers(yaml.safe_load(Path(path).read_text())["batch"]))


# Training.


@cases("mace", "gpspp", "graph", "graphs")
def test_a_stopped_run_is_resumed_to_the_same_end(case):
    before = (case / "stopped/metrics.jsonl").read_bytes()
    call("train", "stopped/config.yaml", "--resume", "must")
    resumed = Path("stopped")
    assert (resumed / "metrics.jsonl").read_bytes().startswith(before)
    # A record of the kind "resume" would tell of a setting that is another now.
    assert_same_records(records(resumed), records(case / "finished"))
    assert_same_weights(resumed, case / "finished")


@cases("mace-moved")
def test_a_run_of_two_ranks_with_batches_overtaken_is_resumed_on_one(case):
    before = (case / "stopped/metrics.jsonl").read_bytes()
    moved = ("--loader.workers", "0", "--loader.window", "1", "--batch.capacity", "15")
    call("train", "stopped/config.yaml", "--resume", "must", *moved)
    resumed = Path("stopped")
    assert (resumed / "metrics.jsonl").read_bytes().startswith(before)
    found, expected = (
        [record for record in records(folder) if record["kind"] != "resume"]
        for folder in (resumed, case / "finished")
    )
    assert_same_records(found, expected)
    assert_same_weights(resumed, case / "finished")


@cases("mace", "gpspp", "graph", "graphs")
def test_a_configuration_trains_to_the_same_end(case):
    call("train", "run.yaml")
    assert costs("run.yaml") <= costs("run/config.yaml")
    assert_same_records(records(Path("run")), records(case / "finished"), START_TOLERANCE)
    assert_same_weights(Path("run"), case / "finished", START_TOLERANCE)


@cases("mace", "gpspp", "graphs")
def test_costs_are_accepted_as_options_of_the_command_line(case):
    options = ("--batch.cost-nodes", "2.5", "--batch.cost-edges=0.75", "--batch.cost-constant", "9")
    call("train", "run.yaml", *options, "--train.epochs", "0")
    assert {2.5, 0.75, 9.0} <= costs("run/config.yaml")


# Stores and models.


@cases("mace", "gpspp")
def test_a_store_is_recognised_as_that_of_its_file(case, capsys):
    """Preparing the file again finds the store complete; other settings would be refused."""
    source, *options = {
        "mace": ("structures.extxyz", "--cutoff", "3.0"),
        "gpspp": ("molecules.csv",),
    }[case.name]
    call("prepare", source, "--out", "store", *options, "--workers", "1")
    shards = sorted(path.name for path in (case / "store").iterdir())
    assert sorted(path.name for path in Path("store").iterdir()) == shards
    for name in shards:
        assert (Path("store") / name).read_bytes() == (case / "store" / name).read_bytes()


def predictions(path):
    """Read what `predict` wrote: columns of numbers by name."""
    if path.suffix == ".npz":
        return dict(np.load(path))
    if path.suffix == ".csv":
        rows = list(csv.DictReader(path.open()))
        return {"predicted_gap": np.array([float(row["predicted_gap"]) for row in rows])}
    structures = ase.io.read(path, ":")
    arrays = ("predicted_forces", "predicted_energies")
    found = {name: np.concatenate([s.arrays[name] for s in structures]) for name in arrays}
    return found | {"energy": np.array([s.info["predicted_energy"] for s in structures])}


PREDICT = {
    "mace": ("structures.extxyz", "out.extxyz", "--dtype", "float64"),
    "mace-moved": ("two.extxyz", "out.extxyz", "--dtype", "float64", "--head", "two"),
    "gpspp": ("store", "out.csv", "--dtype", "float32"),
    "graph": ("graph.npz", "out.npz", "--dtype", "float64"),
    "graphs": ("graph-5.npz", "out.npz", "--dtype", "float64"),
}


@cases(*PREDICT)
def test_a_model_folder_predicts_the_same(case):
    call("predict", "finished", *PREDICT[case.name])
    (expected,) = case.glob("predicted.*")
    # Text has eight decimals, or as many digits as float32.
    tolerance = {".extxyz": 2e-8, ".csv": 1e-5, ".npz": TOLERANCE}[expected.suffix]
    found, expected = predictions(Path(f"out{expected.suffix}")), predictions(expected)
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(
            found[name], values, rtol=tolerance, atol=tolerance, err_msg=name
        )


@cases("mace", "gpspp", "graph", "graphs")
def test_a_run_under_way_predicts_with_its_best_model(case):
    call("predict", "stopped", *PREDICT[case.name])
