"""A run of AlphaFold3 whose processes share complexes: losses and measures of one process."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from shutil import copytree

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "distributed"))
from graph_ranks import run_ranks

from bevatron.errors import ConfigError
from bevatron.parallel.traffic import count_traffic
from bevatron.recipes.alphafold3.run import AlphaFold3Run, build
from bevatron.recipes.proteins.staged_run import ParallelConfig
from bevatron.train.capture import step as captured_step
from bevatron.train.logger import read_journal
from bevatron.train.loop import fit


@pytest.fixture
def config(complexes, components, tiny_model, tmp_path):
    step = {"copies": 3, "confidence_every": 1}
    return AlphaFold3Run.from_values({
        "output": str(tmp_path / "one"),
        "preset": "small",
        "model": json.loads((tiny_model / "model.json").read_text())["config"],
        "data": {
            "train": [str(complexes)], "valid": [str(complexes)], "components": components,
        },
        "stages": {"initial": {
            "steps": 2, "samples_per_step": 1, "evaluate_every": 2, "crop": 13, "atoms": 300,
            "rows": 3, "step": step,
        }},
        "train": {"device": "cpu", "threads": 1, "timeout_minutes": 2.0},
        "validation_steps": 2,
        "report": False,
    })  # fmt: skip


def test_captured_steps_of_two_processes_per_complex_have_the_losses_and_measures_of_one(
    config, tmp_path, monkeypatch
):
    """On a CPU a captured step is launched, all else is the same."""
    fit(build(config))
    monkeypatch.setattr(captured_step, "obstacle", lambda *_: None)
    together = replace(config, output=tmp_path / "two", parallel=ParallelConfig(2))

    def work(_):
        with count_traffic() as traffic:
            fit(build(together))
        return traffic.total

    assert all(run_ranks(2, work, tmp_path)), "complexes were shared"
    one, two = ([r for r in read_journal(tmp_path / name / "metrics.jsonl")
                 if r["kind"] in {"step", "epoch"}] for name in ("one", "two"))  # fmt: skip
    assert len(one) == len(two) == 3
    for expected, found in zip(one, two, strict=True):
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-4)
        assert found["sizes"] == expected["sizes"]
    assert two[-1]["valid"] == pytest.approx(one[-1]["valid"], rel=1e-3, abs=1e-4)


def test_fewer_copies_than_processes_are_refused():
    with pytest.raises(ConfigError, match=r"stages\.initial\.step\.copies: 8 noisy copies cannot"):
        AlphaFold3Run.from_values({"preset": "small", "parallel": {"axial": 9}})


def test_validation_beside_training_changes_nothing(config, tmp_path):
    """Training recycles without gradients while a thread samples with weights that stand still."""
    stage = replace(config.stages["initial"], steps=3, evaluate_every=1)
    config = replace(config, stages={"initial": stage})
    fit(build(config))
    train = replace(config.train, evaluate_beside=True)
    fit(build(replace(config, output=tmp_path / "two", train=train)))
    one, two = (
        sorted(
            (record["kind"], record["step"], record["loss"], str(record.get("valid")))
            for record in read_journal(tmp_path / name / "metrics.jsonl")
            if record["kind"] in {"step", "epoch"}
        )
        for name in ("one", "two")
    )
    assert len(one) == 6
    assert two == one


def test_a_run_of_two_processes_per_complex_goes_on_with_one_and_with_three(config, tmp_path):
    fit(build(config))
    half = {"initial": replace(config.stages["initial"], steps=1)}
    begun = replace(config, stages=half, output=tmp_path / "begun", parallel=ParallelConfig(2))
    run_ranks(2, lambda _: fit(build(begun)).steps, tmp_path)
    expected = [r for r in read_journal(config.output / "metrics.jsonl") if "loss" in r]
    for size in (1, 3):
        output = copytree(begun.output, tmp_path / f"on_{size}")
        on = replace(config, output=output, parallel=ParallelConfig(size))
        run_ranks(size, lambda _, on=on: fit(build(on, resume=True)).steps, tmp_path)
        found = [r for r in read_journal(output / "metrics.jsonl") if "loss" in r]
        losses = [[r["loss"] for r in run if r["kind"] == "step"] for run in (found, expected)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-4)
        assert found[-1]["valid"] == pytest.approx(expected[-1]["valid"], rel=1e-3, abs=1e-4)
