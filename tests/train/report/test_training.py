"""The part of all reports about training: what its horizontal axes count."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bevatron.recipes.compare import ComparedRun, Comparison
from bevatron.train.report.page import Report
from bevatron.train.report.training import (
    History,
    _events,
    show_timing,
    summary,
    training_loss,
)
from bevatron.train.run import FitResult


def _validated(epoch: int, step: int, **more: Any) -> dict[str, Any]:
    return {"kind": "epoch", "epoch": epoch, "step": step, **more}


def _history(records: list[dict[str, Any]]) -> History:
    return History({}, records, [r for r in records if r["kind"] == "epoch"])


def test_a_run_of_stages_goes_by_steps_and_marks_where_a_stage_begins(tmp_path):
    history = _history([
        _validated(0, 500, stage="initial", best=True),
        _validated(1, 800, stage="initial", best=True),
        _validated(2, 1300, stage="finetune"),
    ])  # fmt: skip
    assert [history.place(record) for record in history.epochs] == [500, 800, 1300]
    assert list(_events(history)) == [(801, "finetune")]  # as the log: "from step 801 on"
    resumed = _history([*history.records, {"kind": "resume", "epoch": 2, "step": 1300}])
    assert list(_events(resumed)) == [(801, "finetune"), (1301, "resumed")]
    result = FitResult(tmp_path, "steps", None, 3, 1300, {}, 0.5, 1, 60.0)
    shown = summary(history, result, torch.nn.Linear(2, 1))
    assert (shown["steps"], shown["best step"]) == (1300, 800)
    unvalidated = summary(_history([_validated(0, 500)]), result, torch.nn.Linear(2, 1))
    assert not any("best" in name for name in unvalidated)


def test_where_a_run_was_resumed_is_told_in_what_it_counts():
    resumed = {"kind": "resume", "epoch": 1, "step": 7, "changes": {"a": ["1", "2"]}}
    said = "with other settings: a was 1, is 2"
    staged = _history([_validated(0, 7, stage="initial"), resumed])
    assert staged.changes() == [f"resumed after step 7, {said}"]
    plain = _history([_validated(0, 7), resumed])
    assert plain.changes() == [f"resumed in epoch 2, after step 7, {said}"]


def test_other_runs_go_by_epochs(tmp_path):
    history = _history([_validated(0, 7), _validated(1, 14, best=True)])
    assert [history.place(record) for record in history.epochs] == [1, 2]
    result = FitResult(tmp_path, "epochs", None, 2, 14, {}, 0.5, 1, 60.0)
    shown = summary(history, result, torch.nn.Linear(2, 1))
    assert (shown["epochs"], shown["best epoch"]) == (2, 2)


def test_the_loss_of_logged_steps_is_averaged_in_at_most_200_intervals():
    losses = np.linspace(3.0, 1.0, 1001)
    steps = [
        {"kind": "step", "epoch": 0, "step": 10 * i, "loss": float(x)} for i, x in enumerate(losses)
    ]
    curve = training_loss(_history([*steps, _validated(0, 10_000, stage="initial")]), "training")
    assert len(curve.x) == 167  # intervals of 6, the last of 5
    assert curve.x[-1] == 10_000
    np.testing.assert_allclose(curve.y[0], losses[:6].mean())
    np.testing.assert_allclose(curve.y[-1], losses[-5:].mean())


@pytest.mark.filterwarnings("error")
def test_a_run_whose_numbers_are_all_unknown_is_reported_without_a_warning(tmp_path):
    steps = [{"kind": "step", "epoch": 0, "step": i, "loss": None} for i in range(1, 9)]
    time = {"seconds": 1.0, "wait_share": 0.0, "validation_seconds": 1.0, "samples_per_s": None}
    history = _history([*steps, _validated(0, 8, stage="initial", loss=None, lr=0.1, time=time)])
    assert np.isnan(training_loss(history, "training").y).all()
    report = Report("Run", "", tmp_path)
    show_timing(report, history)
    page = report.write(tmp_path / "page.html").read_text()
    assert "8 steps" in page
    assert "median" not in page


def test_compared_runs_are_drawn_by_what_they_are_judged_by_and_not_by_terms_of_the_loss():
    def run(name: str, lddt: float) -> ComparedRun:
        steps = [{"kind": "step", "epoch": 0, "step": i, "loss": 9.0 / i} for i in range(1, 41)]
        terms = {"loss_plddt": 0.0, **{f"loss_{i}": 1.0 for i in range(9)}}
        valid = {"loss": 2.0, **terms, "lddt_ca": lddt, "tm_score": 0.1}
        time = {"seconds": 1.0, "validation_seconds": 0.0}
        end = _validated(0, 40, stage="initial", best=True, loss=0.4, valid=valid, time=time)
        return ComparedRun(name, Path(name), _history([*steps, end]))

    compared = Comparison([run("a", 0.2), run("b", 0.3)])
    names = [name.removeprefix("validation ") for name in compared.measures()]
    assert names.index("TM-score") < names.index("loss pLDDT")
    panels = compared._panels()
    titles = [panel.title.removeprefix("validation ") for panel in panels]
    assert titles[:4] == ["training loss", "loss", "lDDT of CA atoms", "TM-score"]
    assert len(titles) == 9
    assert "loss pLDDT" not in titles  # 0 in both
    assert [len(curve.x) for curve in panels[0].curves] == [40, 40]
    assert [panel.logarithmic for panel in panels[:4]] == [True, True, False, False]


def test_of_runs_of_different_systems_only_what_several_have_is_shown(tmp_path, capsys):
    def run(name: str, system: str, valid: dict[str, float], **settings: int) -> ComparedRun:
        time = {"seconds": 1.0, "validation_seconds": 0.0}
        end = _validated(0, 4, stage="initial", best=True, loss=0.4, valid=valid, time=time)
        config = {"recipe": system, "stages": {"initial": settings}}
        return ComparedRun(name, Path(name), History(config, [end], [end]))

    first = run("a", "alphafold2", {"lddt": 0.2, "tm_score": 0.1}, steps=4, cycles=3)
    other = run("b", "alphafold3", {"lddt": 0.3, "dockq": 0.1}, steps=5, atoms=7)
    mixed = Comparison([first, other])
    mixed.show()
    mixed.write(tmp_path / "page.html")
    said, page = capsys.readouterr(), (tmp_path / "page.html").read_text()
    for text in (said.out, page):
        assert "stages.initial.steps" in text
        assert "lDDT" in text
        assert not any(own in text for own in ("cycles", "atoms", "TM-score", "DockQ"))
    assert "runs of alphafold2 and alphafold3: --json has the settings" in said.err
    assert mixed.values()["a"]["settings"]["stages.initial.cycles"] == "3"
    third = run("c", "alphafold2", {"lddt": 0.2, "tm_score": 0.2}, steps=4, cycles=1)
    Comparison([first, other, third]).show()
    said = capsys.readouterr().out
    assert "cycles" in said
    assert "TM-score" in said
    assert "atoms" not in said


def test_a_compared_run_without_validation_has_no_best_step():
    time = {"seconds": 1.0, "validation_seconds": 0.0}
    ends = [
        _validated(0, 4, stage="initial", best=bool(valid), loss=0.4, valid=valid, time=time)
        for valid in ({}, {"lddt": 0.5})
    ]
    runs = [
        ComparedRun(name, Path(name), _history([end])) for name, end in zip("ab", ends, strict=True)
    ]
    assert "best step" not in runs[0].measures
    assert Comparison(runs).measures()["best step"] == ["-", "4"]


def test_a_compared_run_that_was_not_validated_yet_is_drawn_and_named(tmp_path, capsys):
    steps = [{"kind": "step", "epoch": 0, "step": i, "loss": 9.0 / i} for i in range(1, 6)]
    history = History({"stages": {"initial": {}}}, steps, [])
    compared = Comparison([ComparedRun(name, Path(name), history) for name in "ab"])
    compared.show()
    assert capsys.readouterr() == (
        "",
        "".join(f"note: {x}: no step is validated yet\n" for x in "ab"),
    )
    (panel,) = compared._panels()
    assert [curve.label for curve in panel.curves] == ["a", "b"]
    assert panel.curves[0].x == [1, 2, 3, 4, 5]
    compared.write(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "Curves" in page
    assert "Settings that differ" not in page
